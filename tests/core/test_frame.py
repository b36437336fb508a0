"""What a command says of its own bugs."""

from __future__ import annotations

import asyncio

import pytest

from runfold.frame import report_bug


async def fails() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(0))
        group.create_task(stumbles())


async def stumbles() -> None:
    assert 1 == 2


def test_a_bug_in_a_task_group_is_named_with_its_place(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(fails())
    assert report_bug(caught.value, json=False) == 1
    said = capsys.readouterr().err
    assert "internal error: AssertionError: " in said and " at test_frame.py:" in said
    assert said.count("\n") == 1

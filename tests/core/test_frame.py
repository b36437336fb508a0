"""What a command says of its own bugs."""

from __future__ import annotations

import asyncio
import sys

import pytest
import typer

from runfold.frame import execute, report_bug


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


def loop_of_a_command(*, fast: bool = True) -> str:
    """The module of the event loop that a command runs on."""
    found: list[str] = []

    async def body() -> int:
        found.append(type(asyncio.get_running_loop()).__module__)
        return 3

    with pytest.raises(typer.Exit) as done:
        execute(False, body(), fast=fast)
    assert done.value.exit_code == 3
    return found[0].partition(".")[0]


def test_a_command_runs_on_uvloop_where_it_is_there_and_wanted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RUNFOLD_UVLOOP", raising=False)
    assert loop_of_a_command() == "uvloop"
    assert loop_of_a_command(fast=False) == "asyncio"
    with monkeypatch.context() as patch:
        patch.setenv("RUNFOLD_UVLOOP", "0")
        assert loop_of_a_command() == "asyncio"
    monkeypatch.setitem(sys.modules, "uvloop", None)  # not installed
    assert loop_of_a_command() == "asyncio"

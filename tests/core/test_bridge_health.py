"""What is said of health: a problem once, by its source, and once that it is over."""

from __future__ import annotations

import pytest

from bridge.pulse import SAID_MAX, HealthLog


def looks(caplog: pytest.LogCaptureFixture, *found: dict[str, str]) -> list[str]:
    """What is said after these looks, one after another."""
    rest = iter(found)
    told = HealthLog(lambda: next(rest))
    for _ in found:
        told.look()
    return [record.getMessage() for record in caplog.records]


def test_a_problem_is_said_once_and_once_that_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    bad, well = {"signals": "denied", "journal": ""}, {"signals": "", "journal": ""}
    assert looks(caplog, bad, bad, bad, well, well, bad, bad) == [
        "health: denied",
        "health: it is over: denied",
        "health: denied",
    ]


def test_what_is_over_at_the_next_look_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    assert looks(caplog, {"a": "starting"}, {"a": ""}, {"a": ""}) == []


def test_how_long_it_lasts_is_nothing_new_but_another_reason_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = [{"a": "no pull for 60 s"}, {"a": "no pull for 61 s"}, {"a": "denied"}, {}]
    assert looks(caplog, *found) == [
        "health: no pull for 61 s",
        "health: denied",
        "health: it is over: denied",
    ]


def test_a_source_that_always_says_something_else_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    words = [{"a": f"run {'x' * number} can't be read"} for number in range(100)]
    assert len(looks(caplog, *words)) == SAID_MAX


def test_nothing_unseen_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert looks(caplog, {"a": "\x1b[2J"}, {"a": "\x1b[2J"}) == ["health: \\x1b[2J"]

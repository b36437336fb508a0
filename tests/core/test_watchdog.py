"""Watchdog (R50): a blocked event loop is told of once, with the place that blocks it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest
from kit.waiting import eventually

from worker.watchdog import Watchdog

LIMIT_S = 0.3  # above what a busy machine keeps a process waiting


class Told:
    """What `on_blocked` was told; the loop can block until it was."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.news = threading.Event()
        self.then: Callable[[], object] = lambda: None

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        try:
            self.then()
        finally:
            self.news.set()


def block_until(news: threading.Event) -> None:
    assert news.wait(20)
    news.clear()


async def test_what_blocks_the_loop_is_named(caplog: pytest.LogCaptureFixture):
    told = Told()
    async with Watchdog(LIMIT_S, told):
        await asyncio.create_task(blocks(told))
        await eventually(lambda: len(caplog.records) == 2)
    (text,) = told.texts
    assert text.startswith("the event loop is blocked for 0.")
    assert " s or more, at " in text
    places = text.split(" at ", 1)[1].split(" < ")
    assert places[0].endswith("in Condition.wait")  # the innermost
    assert any(f"{__file__}:" in place and "in block_until" in place for place in places)
    assert places[-1].endswith("in blocks")  # what the loop called, without the loop's own frames
    first, second = caplog.records
    assert (first.name, first.levelno, first.getMessage()) == ("runfold", logging.WARNING, text)
    assert second.getMessage().startswith("the event loop goes on after ")


async def blocks(told: Told) -> None:
    block_until(told.news)


async def test_each_blockage_is_told_once(caplog: pytest.LogCaptureFixture):
    told = Told()
    async with Watchdog(LIMIT_S, told):
        for n in (1, 2):
            block_until(told.news)
            assert not threading.Event().wait(2.5 * LIMIT_S)  # it goes on for a while
            await eventually(lambda n=n: len(caplog.records) == 2 * n)
    assert len(told.texts) == 2


async def test_health_sees_how_long_it_is_blocked_and_that_it_no_longer_is():
    told = Told()
    seen: list[float] = []
    async with Watchdog(LIMIT_S, told) as watchdog:
        assert watchdog.blocked_s == 0.0
        told.then = lambda: seen.append(watchdog.blocked_s)
        block_until(told.news)
        await eventually(lambda: watchdog.blocked_s == 0.0)
    assert seen[0] >= LIMIT_S
    assert watchdog.blocked_s == 0.0


async def test_a_loop_that_comes_round_is_never_told_of(caplog: pytest.LogCaptureFixture):
    told = Told()
    async with Watchdog(5.0, told) as watchdog:
        for _ in range(100):
            await asyncio.sleep(0)
    assert (told.texts, caplog.records, watchdog.blocked_s) == ([], [], 0.0)


async def test_it_ends_at_once_and_can_be_entered_again():
    watchdog = Watchdog(60.0)
    for _ in range(2):
        started = asyncio.get_running_loop().time()
        async with watchdog:
            assert thread() is not None
        assert asyncio.get_running_loop().time() - started < 0.9
        assert thread() is None


async def test_it_ends_while_the_loop_is_counted_as_blocked():
    told = Told()
    async with Watchdog(LIMIT_S, told):
        block_until(told.news)
    assert thread() is None


async def test_an_on_blocked_that_fails_is_logged_and_the_watch_goes_on(
    caplog: pytest.LogCaptureFixture,
):
    told = Told()
    told.then = lambda: [][0]
    async with Watchdog(LIMIT_S, told):
        for n in (1, 2):
            block_until(told.news)
            await eventually(lambda n=n: len(told.texts) == n)
            await eventually(lambda n=n: len(caplog.records) == 3 * n)
    assert "on_blocked of the watchdog failed" in caplog.text


async def test_an_on_blocked_that_hangs_does_not_hold_up_the_end():
    told, never = Told(), threading.Event()
    told.then = lambda: (told.news.set(), never.wait(20))
    async with Watchdog(LIMIT_S, told):
        block_until(told.news)
    assert thread() is not None
    never.set()
    await eventually(lambda: thread() is None)


def test_its_thread_ends_with_a_loop_that_was_closed_under_it():
    async def left() -> None:
        await Watchdog(LIMIT_S).__aenter__()

    asyncio.run(left())
    running = thread()
    if running is not None:
        running.join(10)
    assert thread() is None


@pytest.mark.parametrize("limit_s", [0, -1, float("inf"), float("nan")])
def test_a_limit_is_a_time(limit_s: float):
    with pytest.raises(ValueError, match="limit_s"):
        Watchdog(limit_s)


def thread() -> threading.Thread | None:
    return next((t for t in threading.enumerate() if t.name == "runfold-watchdog"), None)

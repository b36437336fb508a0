"""A request on a connection ends by its answer or by its time, with one timer for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from simulation.loop import Deadlock, VirtualLoop

from journal.stores.nats_waiting import SWEEP_S, Denied, NoReply, Reply, Waiting, Waitings


def played(main: Coroutine[Any, Any, None]) -> VirtualLoop:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(main)
        return loop
    finally:
        loop.close()


def now() -> float:
    return asyncio.get_running_loop().time()


async def ended(waiting: Waiting) -> float:
    """When; by its time."""
    outcome = await waiting.future
    assert outcome == NoReply(f"no answer within {waiting._idle_s:g} s")
    return now()


def test_each_ends_at_its_own_time_and_none_before() -> None:
    times = [3.0, 0.2, 30.0, 0.2, 1.0, 0.201, 5.0]

    async def main() -> None:
        waitings = Waitings()
        start = now()
        made = [waitings.add("s", None, first_s=time_s, idle_s=time_s) for time_s in times]
        for time_s, at in zip(
            times, await asyncio.gather(*(ended(w) for _, w in made)), strict=True
        ):
            assert time_s <= at - start <= time_s + SWEEP_S + 0.001
        for reply, _ in made:
            waitings.remove(reply)
        assert len(waitings) == 0

    played(main())


def test_what_came_in_time_is_the_answer_and_what_comes_late_is_nobodys() -> None:
    async def main() -> None:
        waitings = Waitings()
        waitings.answers_to("_INBOX.me.")
        reply, waiting = waitings.add("s", None, first_s=1.0, idle_s=1.0)
        assert reply.startswith(b"_INBOX.me.")
        waitings.answer(reply, b"", b"yes", b"NATS/1.0\r\nA: b\r\n\r\n")
        waitings.answer(reply, b"", b"twice", b"")
        outcome = await waiting.future
        assert isinstance(outcome, Reply)
        assert (outcome.data, outcome.headers) == (b"yes", {"A": "b"})
        waitings.remove(reply)
        waitings.answer(reply, b"", b"late", b"")

    played(main())


def test_a_thousand_that_are_answered_set_no_thousand_timers() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        waitings = Waitings()
        made, real = [], loop.call_at
        loop.call_at = lambda *args, **more: made.append(args) or real(*args, **more)  # type: ignore[method-assign]
        for _ in range(1000):
            reply, waiting = waitings.add("s", None, first_s=3.0, idle_s=3.0)
            waitings.answer(reply, b"", b"", b"")
            await waiting.future
            waitings.remove(reply)
        assert len(made) == 1
        reply, waiting = waitings.add("s", None, first_s=0.5, idle_s=0.5)  # due before that one
        start = now()
        assert await ended(waiting) - start < 0.52
        waitings.remove(reply)

    played(main())


def test_several_answers_are_waited_for_as_long_as_one_comes_now_and_then() -> None:
    async def main() -> None:
        got: list[bytes] = []
        waitings = Waitings()

        def take(reply: Reply) -> bool:
            got.append(reply.data)
            return reply.data == b"last"

        start, loop = now(), asyncio.get_running_loop()
        reply, waiting = waitings.add("s", take, first_s=0.5, idle_s=1.0)
        for number in range(5):
            loop.call_later(0.45 * (number + 1), waitings.answer, reply, b"", b"%d" % number, b"")
        at = await ended(waiting)
        assert 5 * 0.45 + 0.2 < at - start <= 5 * 0.45 + 2.1 and len(got) == 5
        waitings.remove(reply)
        reply, waiting = waitings.add("s", take, first_s=0.5, idle_s=1.0)
        waitings.answer(reply, b"", b"last", b"")
        assert (await waiting.future).data == b"last"  # type: ignore[union-attr]
        waitings.remove(reply)

    played(main())


def test_a_denial_ends_what_was_sent_there_and_a_lost_connection_all() -> None:
    async def main() -> None:
        waitings = Waitings()
        made = [waitings.add(s, None, first_s=9.0, idle_s=9.0)[1] for s in ("A.b", "A.c", "A.b")]
        waitings.end_denied("a.b")
        assert [one.future.done() for one in made] == [True, False, True]
        assert made[0].future.result() == Denied("A.b")
        waitings.end_all(NoReply("lost", lost=True))
        assert made[1].future.result() == NoReply("lost", lost=True)
        unheard = waitings.add("A.d", None, first_s=9.0, idle_s=9.0)[1]
        waitings.end_unheard("_INBOX.")
        assert unheard.future.result() == Denied("_INBOX.")

    played(main())


def test_a_closed_connection_leaves_no_timer_behind() -> None:
    async def main() -> None:
        waitings = Waitings()
        waitings.add("s", None, first_s=3600.0, idle_s=1.0)
        waitings.stop()
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):  # no timer will ever make anything ready
        played(main())


@pytest.mark.parametrize(
    ("data", "headers", "nobody"),
    [
        (b"", b"NATS/1.0 503\r\n\r\n", True),
        (b"", {"Status": "503"}, True),
        (b"", b"NATS/1.0 404\r\n\r\n", False),
        (b"", b"", False),
        (b"x", b"NATS/1.0 503\r\n\r\n", False),
    ],
)
def test_the_servers_word_that_nobody_listens(data: bytes, headers: Any, nobody: bool) -> None:
    assert Reply(data, headers).nobody is nobody

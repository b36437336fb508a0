"""Runs of one key go one at a time: who asks for it when, one of them gets it (R54)."""

from __future__ import annotations

import asyncio

import pytest

from journal import keys
from journal.ids import RunId
from journal.keys import Keys
from journal.stores.jetstream import JetStreamStore
from journal.values import digest

KEY = "customer 7"
TOPIC = f"key.{digest('key', KEY)}"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that comes later than that is missed."""
    monkeypatch.setattr(keys, "WAIT_S", 0.5)


@pytest.mark.parametrize(("earlier", "later"), [("b", "a"), ("a", "b")])
async def test_of_two_that_want_it_the_one_with_the_lower_id_gets_it_whoever_asks_first(
    direct: JetStreamStore, earlier: str, later: str
) -> None:
    """The first has asked before the second listens: it hears of it by its question alone."""
    asked = asyncio.Event()

    def heard(question: bytes) -> None:
        asked.set()

    async with asyncio.TaskGroup() as group:
        async with direct.reporting(heard, TOPIC):
            first = group.create_task(Keys(direct).take(KEY, RunId(earlier)))
            await asyncio.wait_for(asked.wait(), 10)
        second = group.create_task(Keys(direct).take(KEY, RunId(later)))
    got = {earlier: first.result(), later: second.result()}
    assert [run for run, give in got.items() if give is not None] == ["a"]
    for give in got.values():
        if give is not None:
            give()


async def test_who_holds_it_keeps_it_until_it_is_given_up(direct: JetStreamStore) -> None:
    holder, other = Keys(direct), Keys(direct)
    give = await holder.take(KEY, RunId("b"))
    assert give is not None
    assert await other.take(KEY, RunId("a")) is None
    give()
    await asyncio.gather(*holder._closing)
    again = await other.take(KEY, RunId("a"))
    assert again is not None
    again()


async def test_what_is_no_claimants_word_keeps_nobody_from_a_key(direct: JetStreamStore) -> None:
    def broken(question: bytes) -> bytes:
        raise KeyError("x")

    async with direct.reporting(broken, TOPIC), direct.reporting(lambda _: b"\xff", TOPIC):
        asking = asyncio.create_task(Keys(direct).take(KEY, RunId("b")))
        await direct.ask_workers(0.1, TOPIC, b"[]")
        give = await asking
    assert give is not None
    give()

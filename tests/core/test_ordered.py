"""Pages of what many runs say: in order however the reads end, whole runs, no read without need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import ordered as module
from journal.ids import RunId
from journal.ordered import AT_ONCE, ordered


class Journals:
    """Runs and what each says; a read of a later run ends sooner."""

    def __init__(self, said: Sequence[int]) -> None:
        self.runs = [RunId(f"r{number:03}") for number in range(len(said))]
        self._said = dict(zip(self.runs, said, strict=True))
        self.read: list[RunId] = []
        self.now = self.most = 0

    async def listed(self) -> AsyncIterator[RunId]:
        for run in self.runs:
            yield run

    async def items(self, run: RunId) -> list[str]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            for _ in range(20 - len(self.read) % 20):
                await asyncio.sleep(0)
            self.read.append(run)
            return [f"{run}.{number}" for number in range(self._said[run])]
        finally:
            self.now -= 1

    def all(self) -> list[str]:
        return [f"{run}.{number}" for run in self.runs for number in range(self._said[run])]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 12))
def test_pages_hold_everything_once_in_order_and_end_with_a_whole_run(
    said: list[int], limit: int
) -> None:
    async def play() -> None:
        journals = Journals(said)
        found: list[str] = []
        after: RunId | None = None
        while True:
            page, after = await ordered(journals.listed(), journals.items, after=after, limit=limit)
            assert len(page) < limit + 3
            found += page
            if after is None:
                break
            assert len(page) >= limit and page[-1].startswith(after)
        assert found == journals.all()
        assert journals.most <= AT_ONCE and journals.now == 0

    asyncio.run(play())


async def test_without_a_limit_all_is_read_so_many_at_once() -> None:
    journals = Journals([1] * 100)
    assert await ordered(journals.listed(), journals.items) == (journals.all(), None)
    assert journals.most == AT_ONCE


async def test_a_page_reads_no_more_than_fits() -> None:
    journals = Journals([1] * 100)
    page, after = await ordered(journals.listed(), journals.items, limit=5)
    assert (len(page), after) == (5, journals.runs[4])
    assert len(journals.read) == 5


async def test_a_page_of_runs_that_say_nothing_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOKED_AT_MAX", 30)
    journals = Journals([0] * 100)
    assert await ordered(journals.listed(), journals.items, limit=5) == ([], journals.runs[29])


async def test_a_read_that_fails_fails_the_page_and_leaves_no_other_behind() -> None:
    journals = Journals([1] * 40)

    async def items(run: RunId) -> list[str]:
        if run == journals.runs[3]:
            raise ValueError(run)
        return await journals.items(run)

    with pytest.raises(ValueError, match="r003"):
        await ordered(journals.listed(), items)
    assert journals.now == 0

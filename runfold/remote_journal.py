"""Shell: a run's journal behind a bridge, over HTTP: read whole, or followed as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

import msgspec
from msgspec import Struct

from journal.codec import Damage, Entry, decode
from journal.errors import DAMAGED_HINT, JournalDamaged, NewerVersion, RunfoldError, RunNotFound
from journal.fold import Fold
from journal.ids import RunId

from .events import Event
from .http_client import PAUSE_MAX_S, PAUSE_S, HttpClient, decoded
from .reach import Seen, Take
from .remote_errors import BridgeLost, NoBridge, passing, problem_error
from .terminal import note

JOURNAL_PAGE: Final = 200
AWAY_S: Final = 60.0
"""Who follows or waits sits out a bridge's restart for so long."""

LIVED_S: Final = 5.0


class _Records(Struct):
    """Raw: what is hashed is what was stored."""

    records: list[msgspec.Raw]
    next: int | None


class _End(Struct):
    status: str


async def journal_pages(
    client: HttpClient, run_id: RunId, *, after: int = 0
) -> AsyncGenerator[list[bytes], None]:
    """Its records behind ordinal `after` as they are stored. Raises RunNotFound, JournalDamaged."""
    following: int | None = after + 1
    while following is not None:
        query: dict[str, str | int] = {"from": following, "limit": JOURNAL_PAGE}
        answer = await client.ask("GET", f"/runs/{run_id}/journal", query=query)
        page: _Records = decoded(answer, _Records)
        yield [bytes(raw) for raw in page.records]
        following = page.next


async def read_journal(client: HttpClient, run_id: RunId, take: Take) -> Seen:
    """All of it. Raises RunNotFound; JournalDamaged after what is good of it."""
    fold = Fold()
    try:
        async for page in journal_pages(client, run_id):
            for raw in page:
                entry = _entry(raw)
                fold.apply(entry)
                take(entry)
    except JournalDamaged as damage:
        raise damaged(run_id, damage.message) from damage
    except Damage as damage:
        raise damaged(run_id, f"run {run_id}: {damage}") from damage
    unusable: RunfoldError | None = None
    if fold.started is None:
        unusable = RunNotFound(f"run {run_id} does not exist", run_id=run_id)
        unusable = unusable if fold.newer is None else newer(run_id, fold.newer)
    return Seen(fold, unusable=unusable)


class Following:
    """A run's records over as many streams as it takes, counted by `streams`. `last`: the ordinal
    that came last; `came`: how many did."""

    def __init__(
        self, client: HttpClient, run_id: RunId, after: int, take: Callable[[Entry], None]
    ) -> None:
        self._client = client
        self._run_id = run_id
        self._after = after
        self._take = take
        self.last = 0
        self.came = 0
        self.streams = 0

    async def until_end(self) -> str | None:
        """The run's status at its end; None where only that was not told any more. It sits out a
        bridge's restart."""
        loop = asyncio.get_running_loop()
        pause_s, away_since = PAUSE_S, 0.0
        while True:
            began, streams, came = loop.time(), self.streams, self.came
            try:
                return await self._once()
            except RunfoldError as error:
                if not passing(error) or not self._client.met:
                    raise
                if self.streams > streams or not away_since:
                    away_since = loop.time()
                if self.came > came or loop.time() - began > LIVED_S:
                    pause_s = PAUSE_S
                if loop.time() - away_since > AWAY_S:
                    error.hint = f"`--after {self.last}` goes on from here"
                    raise
                if pause_s == PAUSE_S:
                    note(f"{error.message}; asking again")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    async def _once(self) -> str | None:
        """One stream; the run's status at its end. Raises BridgeLost where it ended before."""
        query: dict[str, str | int] = {"follow": 1}
        headers = {"last-event-id": str(self.last)} if self.last else {}
        path = f"/runs/{self._run_id}/journal"
        async with self._client.events(path, query, headers) as events:
            self.streams += 1
            if events is None:
                return None
            async for event in events:
                status = self._heard(event)
                if status is not None:
                    return status
        raise BridgeLost("the bridge ended the stream")

    def _heard(self, event: Event) -> str | None:
        match event.name:
            case "record":
                self._record(event)
            case "end":
                end: _End = decoded(event.data.encode(), _End)
                return end.status
            case "problem":
                raise problem_error(event.data.encode()) or NoBridge("a problem without a reason")
            case _:  # previews: what is not recorded is not shown, as on a server
                pass
        return None

    def _record(self, event: Event) -> None:
        try:
            entry = _entry(event.data.encode())
        except Damage as damage:
            raise damaged(self._run_id, f"run {self._run_id}: {damage}") from damage
        n = entry.record.n
        if n <= self.last:
            return
        if n != self.last + 1:
            raise NoBridge(f"the bridge left out records: {n} came after {self.last}")
        self.last = n
        self.came += 1
        if n > self._after:
            self._take(entry)


def _entry(raw: bytes) -> Entry:
    return Entry(decode(raw), raw)


def damaged(run_id: str, message: str) -> JournalDamaged:
    return JournalDamaged(message, where="", run_id=run_id, hint=DAMAGED_HINT)


def newer(run_id: str, why: str) -> NewerVersion:
    return NewerVersion(
        f"run {run_id} holds a record this version can't read: {why}",
        run_id=run_id,
        hint="update this installation",
    )

"""Shell: what commands ask about runs and do to them, wherever the runs are: a directory, a NATS
server, a bridge.

Who owns the store appends to it, and signs with `cli:<user>`; anybody else goes through a bridge,
which says who they are (R66).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from journal.auditing import Journals
from journal.codec import Entry
from journal.cursor import Cursor
from journal.doors import Receipt, Started
from journal.errors import NewerVersion, RunfoldError, RunNotFound
from journal.fleet import Fleet
from journal.fold import Fold
from journal.following import followed
from journal.ids import RunId
from journal.inbox import InboxItem
from journal.inputs import InputState
from journal.limits import LIST_PAGE
from journal.listing import Filter, Page
from journal.messages import JSON
from journal.records import Mode
from journal.store import Store
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.rejected import Refusal
from journal.views import run_json
from journal.waits import instant_text

from .frame import UsageProblem
from .options import Target, bridge_token, opened, user

if TYPE_CHECKING:
    from .remote import BridgeRuns


Take: TypeAlias = Callable[[Entry], None]


def ignored(_: Entry) -> None:
    """For who wants the run alone."""


class Seen(NamedTuple):
    """A run, its journal read. `unusable`: why there is nothing to say of the run itself, which a
    newer version wrote, or which was purged."""

    fold: Fold
    held: bool = False
    torn: int = 0
    unusable: RunfoldError | None = None


class Talk(Protocol):
    """What may be said to a run. `Fleet` can."""

    async def signal(
        self, run_id: str, name: str, payload: dict[str, Any], *, request_id: str | None = None
    ) -> Receipt: ...
    async def send(
        self, run_id: str, content: JSON, *, mode: Mode = "steer", request_id: str | None = None
    ) -> InputState: ...
    async def input(self, run_id: str, request_id: str, *, wait_s: float = 0) -> InputState: ...
    async def withdraw(self, run_id: str, request_id: str) -> InputState: ...


class Runs(Protocol):
    """What may be asked about runs, and starting them."""

    async def start(
        self,
        agent: str,
        input: JSON,
        *,
        run_id: str | None = None,
        priority: int = 0,
        key: str | None = None,
        revision: str = "",
    ) -> Started: ...

    async def wait(self, run_id: str, *, timeout_s: float) -> object:
        """Until it is not running any more."""
        ...

    async def seen(self, run_id: RunId, take: Take = ignored) -> Seen:
        """Give `take` each record as it is read. Raises RunNotFound; JournalDamaged after what is
        good of it."""
        ...

    async def shape(self, run_id: RunId) -> dict[str, Any]:
        """As every `--json` has it. Raises RunNotFound, JournalDamaged, NewerVersion."""
        ...

    async def page(
        self, wanted: Filter, *, after: RunId | None = None, limit: int = LIST_PAGE
    ) -> Page: ...

    async def follow(self, run_id: RunId, *, after: int, take: Callable[[Entry], None]) -> str:
        """Give `take` each record behind ordinal `after`, until the run ends; its status."""
        ...

    async def inbox(self) -> list[InboxItem]: ...
    async def workers(self, *, wait_s: float) -> list[dict[str, Any]]: ...

    async def rejected(self, limit: int) -> Sequence[Refusal]:
        """Newest first."""
        ...


class StoreRuns:
    """Those of an open store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._fleet = Fleet(store, by=user())
        self.start = self._fleet.start
        self.wait = self._fleet.wait
        self.page = self._fleet.page
        self.inbox = self._fleet.inbox

    async def seen(self, run_id: RunId, take: Take = ignored) -> Seen:
        cursor = Cursor(self._store, run_id)
        unusable: RunfoldError | None = None
        try:
            while page := await cursor.page():
                for entry in page:
                    take(entry)
            if cursor.fold.started is None:
                cursor.check()
        except (RunNotFound, NewerVersion) as error:
            unusable = error
        held = await self._store.holder(run_id) is not None
        return Seen(cursor.fold, held, cursor.torn, unusable)

    async def shape(self, run_id: RunId) -> dict[str, Any]:
        found = await self.seen(run_id)
        if found.unusable is not None:
            raise found.unusable
        return run_json(found.fold, held=found.held, now=instant_text(datetime.now(UTC)))

    async def follow(self, run_id: RunId, *, after: int, take: Callable[[Entry], None]) -> str:
        fold = Fold()
        async with aclosing(followed(self._store, run_id)) as entries:
            async for entry in entries:
                fold.take(entry)  # `followed` has checked it
                if entry.record.n > after:
                    take(entry)
        return fold.status()

    async def workers(self, *, wait_s: float) -> list[dict[str, Any]]:
        server(self._store)
        return await self._fleet.workers(wait_s=wait_s)

    async def rejected(self, limit: int) -> Sequence[Refusal]:
        return await server(self._store).rejected.latest(limit)


def server(store: Store) -> JetStreamStore:
    """The store as a server's; raises UsageProblem for a directory."""
    if not isinstance(store, JetStreamStore):
        raise UsageProblem(
            "a directory has no workers, and nothing waits for one", hint="use a nats:// store"
        )
    return store


@asynccontextmanager
async def reached(target: Target) -> AsyncGenerator[Runs, None]:
    """The target's runs."""
    if target.bridge is not None:
        async with _bridge(target, target.bridge) as runs:
            yield runs
    else:
        async with opened(target) as store:
            yield StoreRuns(store)


@asynccontextmanager
async def journals(target: Target) -> AsyncGenerator[Journals, None]:
    """The target's journals, as they stand."""
    if target.bridge is not None:
        async with _bridge(target, target.bridge) as runs:
            yield runs
    else:
        async with opened(target) as store:
            assert isinstance(store, JetStreamStore | FileStore)  # what `opened` opens
            yield store


@asynccontextmanager
async def talking(target: Target) -> AsyncGenerator[Talk, None]:
    """Talking to the target's runs. A directory and the server in `.runfold/` are their owner's;
    on another server a bridge is asked first, so that `by` is who the server says it is."""
    if target.bridge is not None:
        async with _bridge(target, target.bridge) as runs:
            yield runs
    elif target.server is not None:
        from .nats_talk import NatsTalk

        async with NatsTalk(target) as talk:
            yield talk
    else:
        async with opened(target) as store:
            yield Fleet(store, by=user())


def _bridge(target: Target, address: str) -> BridgeRuns:
    try:
        from .remote import BridgeRuns
    except ImportError as error:  # httpx, which not everybody needs
        raise UsageProblem(str(error)) from error
    if target.namespace != "runfold":
        raise UsageProblem(
            f"the bridge at {address} has a namespace of its own: --namespace says nothing to it",
            hint="leave --namespace (RUNFOLD_NAMESPACE) out, or name the bridge of that namespace",
        )
    return BridgeRuns(address, bridge_token())

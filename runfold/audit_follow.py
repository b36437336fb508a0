"""Shell: `runfold check --follow`: an audit that goes on until it is told to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from signal import SIGINT, SIGTERM

from journal.audit import Violation
from journal.errors import StoreLocked, StoreUnavailable
from journal.escape import visible
from journal.ids import RunId
from journal.online_audit import online_audit
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore

from .frame import UsageProblem
from .options import Target, opened
from .terminal import note

LOOK_S = 0.5
LOOK_MAX_S = 10.0
"""Between two looks: as long as the last one took, so that a large directory is not all it does."""

TELL_S = 5.0

Say = Callable[[RunId | None, Violation], None]


class FollowedStore:
    """An open store, audited until the process is told to stop; Counts."""

    def __init__(self, store: JetStreamStore | FileStore, say: Say) -> None:
        self.violations = 0
        self.looked_at = 0.0
        self._store = store
        self._say = say
        self._audit = online_audit(store, self._found)

    @property
    def runs(self) -> int:
        return self._audit.runs

    @property
    def records(self) -> int:
        return self._audit.records

    @property
    def behind(self) -> int:
        return self._audit.behind

    @property
    def said(self) -> str:
        """The counts, for people."""
        return counted(self.runs, self.records, self.violations)

    async def until_told(self) -> None:
        """Until SIGTERM or Ctrl-C. Raises PermissionDenied; StoreUnavailable once the connection is
        closed for good."""
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (SIGTERM, SIGINT):
            loop.add_signal_handler(number, told.set)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in (self._look(), self._tell())]
            if isinstance(self._store, JetStreamStore):
                tasks.append(group.create_task(_closed(self._store)))
            await told.wait()
            for task in tasks:
                task.cancel()

    def _found(self, run: RunId | None, violation: Violation) -> None:
        self.violations += 1
        self._say(run, violation)

    async def _look(self) -> None:
        away = False
        while True:
            began = time.monotonic()
            try:
                await self._audit.look()
            except (StoreUnavailable, StoreLocked) as error:
                if not away:
                    note(f"{error.message}; looking again")
                away = True
            else:
                if away or not self.looked_at:
                    note(f"all that is there is audited: {self.said}")
                away, self.looked_at = False, time.time()
            took_s = time.monotonic() - began
            await asyncio.sleep(min(max(LOOK_S, took_s), LOOK_MAX_S))

    async def _tell(self) -> None:
        """How far the first look is."""
        while True:
            await asyncio.sleep(TELL_S)
            if self.looked_at:
                return
            note(f"{self.said} so far")


def counted(runs: int, records: int, violations: int) -> str:
    """As people say it."""
    what = ((runs, "run"), (records, "record"), (violations, "violation"))
    return ", ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in what)


async def _closed(store: JetStreamStore) -> None:
    raise await store.closed()


async def follow_store(target: Target, metrics: tuple[str, int] | None, say: Say) -> int:
    """Until it is told to stop; how many violations were found. Raises as `until_told`."""
    if target.bridge is not None:
        raise UsageProblem(
            "an audit that goes on reads the store itself, not through a bridge",
            hint="give --store nats://host:port, or a directory",
        )
    async with opened(target) as store:
        assert isinstance(store, JetStreamStore | FileStore)  # what `opened` opens
        followed = FollowedStore(store, say)
        if metrics is not None:
            _serve(*metrics, followed)
        await followed.until_told()
    note(f"{followed.said}")
    return followed.violations


def _serve(host: str, port: int, followed: FollowedStore) -> None:
    try:
        from .audit_metrics import serve_metrics
    except ImportError as error:
        raise UsageProblem(
            f"--metrics-port needs {error.name}", hint="pip install 'runfold[metrics]'"
        ) from error
    try:
        taken = serve_metrics(host, port, followed)
    except OSError as error:
        what = f"metrics can't be served at {visible(host)} port {port}"
        raise UsageProblem(f"{what}: {error.strerror or error}; choose another port") from error
    note(f"metrics: http://{f'[{host}]' if ':' in host else host}:{taken}/metrics")

"""Shell: whether the streams that requests need are there, and health said in the log.

A connection that stands says nothing of a stream that was deleted, or lost its quorum.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from journal.errors import NotProvisioned, PermissionDenied, RunfoldError
from journal.escape import visible
from journal.ids import RunId
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_raw import RawJournals

log = logging.getLogger("runfold")

PROBE_S: Final = 2.0
"""A small question to each stream so often."""

ANSWER_S: Final = 5.0
"""An election takes less."""

LOOK_S: Final = 1.0
SAID_MAX: Final = 8
"""Of one source, until it is well again: what it says may change with each try."""

NO_RUN: Final = RunId("_health")
"""Looked for, and never there: no id begins so."""


class Pulse:
    """Asks each stream for something small, again and again."""

    def __init__(self, store: JetStreamStore) -> None:
        self._store = store
        self._problems: dict[str, str] = {}
        self._questions: dict[str, Callable[[], Awaitable[Any]]] = {
            **{_called(journals, store): journals.probe for journals in store.journals},
            "the stream of tasks": lambda: store.tasks.holds(NO_RUN, NO_RUN),
            "the stream of signals": store.signals.backlog,
        }

    def problem(self) -> str:
        """Which streams can't be read, as of a moment ago; for anybody: no address is in it."""
        return "; ".join(self._problems.values())

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            async with asyncio.TaskGroup() as group:
                for what in self._questions:
                    group.create_task(self._ask(what))
            await asyncio.sleep(PROBE_S)

    async def _ask(self, what: str) -> None:
        why = ""
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._questions[what]()
        except TimeoutError:
            why = f"no answer within {ANSWER_S:g} s"
        except NotProvisioned:
            why = "it is not there"
        except PermissionDenied:
            why = "the NATS server denies it to this user"
        except RunfoldError as error:
            why = visible(error.message)
        if why and self._store.connected:  # else that is the problem, and none of theirs
            self._problems[what] = f"{what} can't be read: {why}"
        else:
            self._problems.pop(what, None)


def _called(journals: RawJournals, store: JetStreamStore) -> str:
    return "the journal" if len(store.journals) == 1 else f"journal stream {journals.stream}"


class HealthLog:
    """Says what health says, by source, once when it comes and once when it has gone."""

    def __init__(self, look: Callable[[], Mapping[str, str]]) -> None:
        self._look = look
        self._before: Mapping[str, str] = {}
        self._said: dict[str, list[str]] = {}

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        now = {source: text for source, text in self._look().items() if text}
        for source, text in now.items():
            if source in self._before:  # what is over at the next look is a start, or a reconnect
                self._say(source, text)
        for source in self._said.keys() - now.keys():
            log.warning("health: it is over: %s", visible(self._said.pop(source)[-1]))
        self._before = now

    def _say(self, source: str, text: str) -> None:
        said = self._said.setdefault(source, [])
        if len(said) < SAID_MAX and not any(_alike(text, other) for other in said):
            said.append(text)
            log.warning("health: %s", visible(text))


def _alike(one: str, other: str) -> bool:
    """But for numbers: how long it lasts is nothing new."""
    return re.sub(r"\d+", "#", one) == re.sub(r"\d+", "#", other)

"""One schedule, from its seed to what it came to."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from msgspec import Struct

import journal.stores.jetstream
import journal.stores.nats_connection
from journal.records import Claim, RunPurged

from . import patches
from .invariants import violations
from .loop import START_S, Deadlock, Restless, VirtualLoop
from .plans import Plan, draw, grouped
from .purgers import purge_violations
from .trace import Trace
from .world import Broken, World


class Outcome(Struct, kw_only=True):
    """`digest` of everything that happened; `end`: of the trace, where something is wrong.
    `rested_s`: from the last fault until the world was at rest."""

    seed: int
    plan: Plan
    digest: str
    violations: tuple[str, ...]
    end: str = ""
    virtual_s: float = 0.0
    rested_s: float = 0.0
    callbacks: int = 0
    runs: int = 0
    purged: int = 0
    records: int = 0
    takeovers: int = 0
    calls: int = 0
    injected: dict[str, int] = {}


def play(seed: int, *, profile: str | None = None, show: bool = False, purgers: int = 0) -> Outcome:
    """Play the seed's schedule. `show`: print its trace. `purgers`: so many remove, besides, what
    has ended."""
    with collecting_later():
        return _played(seed, profile, show, purgers)


@contextmanager
def collecting_later() -> Iterator[None]:
    """When garbage is collected is no part of a schedule, nor what the dead say then."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
            gc.collect()
    finally:
        sys.unraisablehook = hook
        gc.enable()


def _played(seed: int, profile: str | None, show: bool, purgers: int) -> Outcome:
    loop = VirtualLoop()
    trace = Trace(loop, show=show)
    plan = draw(seed, profile)
    wrong: list[str] = []
    with patches.deterministic(loop, seed), _quiet(loop, trace, show):
        world = World(plan, loop, trace, purgers)
        wanted = journal.stores.jetstream.commit_wanted
        if grouped(seed):
            journal.stores.jetstream.commit_wanted = lambda: "on"
        journal.stores.nats_connection.Client, real = (  # type: ignore[misc]
            world.server.client,
            journal.stores.nats_connection.Client,
        )
        try:
            loop.run_until_complete(world.play())
        except (Broken, Deadlock, Restless) as error:
            wrong.append(str(error))
        except RuntimeError:
            if not loop.failures:  # else the world stopped the loop at the violation
                raise
        finally:
            journal.stores.jetstream.commit_wanted = wanted
            journal.stores.nats_connection.Client = real  # type: ignore[misc]
        wrong += violations(world)
        wrong += purge_violations(world)
        outcome = _outcome(world, wrong)
        _bury(world)
    return outcome


def _outcome(world: World, wrong: list[str]) -> Outcome:
    journals = [world.records(run) for run in world.runs()]
    claims = [sum(isinstance(one, Claim) for one in records) for records in journals]
    world.trace.note("journals", *(record.id for records in journals for record in records))
    world.trace.over = True
    return Outcome(
        seed=world.plan.seed,
        plan=world.plan,
        digest=world.trace.digest,
        violations=tuple(wrong),
        end=world.trace.last() if wrong else "",
        virtual_s=world.loop.time() - START_S,
        rested_s=world.rested_s,
        callbacks=world.loop.handles,
        runs=len(journals),
        purged=sum(isinstance(records[-1], RunPurged) for records in journals),
        records=sum(len(records) for records in journals),
        takeovers=sum(max(0, count - 1) for count in claims),
        calls=world.calls.total(),
        injected=dict(world.injected),
    )


def _bury(world: World) -> None:
    """What the dead left undone ends without a word."""

    async def close() -> None:
        while left := [task for task in world.loop.pending() if task is not asyncio.current_task()]:
            for task in left:  # what it has in its `finally` blocks may begin others
                task.forget()
                with suppress(BaseException):
                    coro: Any = task.get_coro()
                    coro.close()
            world.loop.tasks = [task for task in world.loop.tasks if task not in left]

    world.loop.handles = 0  # a world without rest is buried, too
    world.loop.run_until_complete(close())
    world.loop.close()
    for one in (*world.members, *world.server.streams.values(), world.server, world):
        one.__dict__.clear()  # most of a schedule goes at once then, without a collection


class _Tell(logging.Handler):
    """Bugs that the product itself names are failures; the rest is part of the trace."""

    def __init__(self, loop: VirtualLoop, trace: Trace) -> None:
        super().__init__(logging.DEBUG)
        self._loop = loop
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._trace.note("log", record.levelname, text)
        if "a bug" in text:
            error = record.exc_info[1] if record.exc_info else None
            self._loop.failures.append(f"{text}: {error!r}")


@contextmanager
def _quiet(loop: VirtualLoop, trace: Trace, show: bool) -> Iterator[None]:
    log = logging.getLogger("runfold")
    tell = _Tell(loop, trace)
    level, propagate = log.level, log.propagate
    log.addHandler(tell)
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(tell)
        log.setLevel(level)
        log.propagate = propagate


def totals(outcomes: list[Outcome]) -> dict[str, Any]:
    """Of many schedules."""
    injected: Counter[str] = Counter()
    for one in outcomes:
        injected.update(one.injected)
    return {
        "schedules": len(outcomes),
        "virtual_s": round(sum(one.virtual_s for one in outcomes)),
        "callbacks": sum(one.callbacks for one in outcomes),
        "longest to rest": _longest(outcomes),
        "runs": sum(one.runs for one in outcomes),
        "records": sum(one.records for one in outcomes),
        "takeovers": sum(one.takeovers for one in outcomes),
        "calls of writes": sum(one.calls for one in outcomes),
        "faults": sum(injected.values()),
        "by kind": dict(sorted(injected.items())),
        "violations": sum(bool(one.violations) for one in outcomes),
    }


def _longest(outcomes: list[Outcome]) -> str:
    one = max(outcomes, key=lambda one: one.rested_s)
    return f"{one.rested_s:.1f} s (seed {one.seed})"

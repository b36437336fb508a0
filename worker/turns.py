"""Shell: carrying an owned run on: turn after turn, until it ends or waits (R40-R47).

Why it is safe: what stops a run is one record that is due only while nothing that would end the
wait is there, at the tail it is appended to (R61). A turn's outcome is committed only if no write
of it is unknown and no engine error was met in it, whatever the handler returned (R23).
"""

from __future__ import annotations

import asyncio
import logging
import traceback

import msgspec

from journal.ends import Clock, Ends, utc_now
from journal.errors import (
    RunfoldError,
    StepFailed,
)
from journal.handle import Journal
from journal.positions import ended_before
from journal.stops import AwaitDecisions, BoundReached, stopped, unplayed
from journal.terms import Complete, Continue, Fail, Next, Pause
from journal.unknown import indeterminate
from journal.values import Unrecordable

from .agent import Agent
from .calls import text_of
from .context import Context
from .loop import converse

log = logging.getLogger("runfold")


async def carry_on(
    journal: Journal,
    agent: Agent,
    *,
    attended: bool,
    lost: int = 0,
    deaf: bool = False,
    clock: Clock = utc_now,
) -> None:
    """Carry the run on until it has ended or waits; the claim has ended then, too.

    `attended`: somebody watches and runs it again: a failure or mismatch is raised to them. Else a
    failure is recorded and retried by the agent's policy, and a mismatch pauses the run. `lost`: so
    many holders in a row were lost: nothing of the run is called, that failure is recorded (R52).
    `deaf`: the turn ignored its time limit and was left; that failure is recorded.

    Raises Fenced, Draining, StoreUnavailable, JournalDamaged, NewerVersion; attended also
    StepFailed, ReplayMismatch.
    """
    ends = Ends(journal, agent, clock)
    while not journal.fold.finished:
        if not await unplayed(ends, lost=lost, deaf=deaf):
            try:
                await ends.commit(await _played(journal, agent, ends))
            except (RunfoldError, AwaitDecisions, BoundReached, Unrecordable) as error:
                await stopped(ends, error, attended=attended)
        if journal.fold.wait is not None or ends.rests:
            return


async def _played(journal: Journal, agent: Agent, ends: Ends) -> Next:
    """What the turn returned; raises the engine's error where it met one."""
    journal.begin_turn()
    ctx = Context(journal, agent)
    play = converse(ctx, agent) if agent.handler is None else agent.handler(ctx)
    limit = asyncio.timeout(ends.turn_limit_s())
    task = asyncio.current_task()
    assert task is not None
    try:
        with journal.bounded(ends.turn_limit_s()):
            async with limit:
                outcome = await play
    except (RunfoldError, AwaitDecisions, BoundReached, Unrecordable) as error:
        await _writes_ended(journal)
        await journal.recover()
        if ctx.ended is not None and ctx.ended is not error:
            raise ctx.ended from error
        raise
    except (Exception, asyncio.CancelledError) as error:
        if task.cancelling():  # whatever the handler made of it
            raise asyncio.CancelledError from error
        await _writes_ended(journal)
        await journal.recover()
        raise await _what_ended(journal, ctx, error, limit.expired(), ends) from error
    await _writes_ended(journal)
    ctx.check_cut_off()
    await journal.recover()
    if ctx.ended is not None:
        raise ctx.ended
    if limit.expired():
        raise await _what_ended(journal, ctx, TimeoutError(), True, ends)
    if agent.handler is not None:
        _check_played(ctx, outcome)
    return outcome


async def _writes_ended(journal: Journal) -> None:
    """A write that the handler did not await is waited for: while it runs, the run stays held."""
    while journal.writes:
        await journal.idle.wait()


async def _what_ended(
    journal: Journal, ctx: Context, error: BaseException, expired: bool, ends: Ends
) -> Exception:
    """The exception for a turn that failed by its own code or its time."""
    if ctx.ended is not None:
        return ctx.ended
    if not await ends.settled():  # the turn's end cut a write off
        return indeterminate(journal, journal.fold.unknown()[0].last)
    if expired and ends.over():
        return BoundReached("duration", "the run's time is over")
    what = f"{type(error).__name__}: {text_of(error)}"
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "its code"
    log.warning(
        "run %s: turn %s failed: %s (%s)",
        journal.run_id,
        ctx.iteration,
        what,
        where,
        extra={"run": journal.run_id},
    )
    if expired:
        what = f"it took longer than {ends.turn_limit_s():g} s"
    return StepFailed(
        f"run {journal.run_id}: turn {ctx.iteration}, attempt {ctx.attempt}, failed: {what}",
        step=f"{ctx.iteration}",
        run_id=journal.run_id,
        hint="what it recorded is kept; run again to go on from here",
    )


def _check_played(ctx: Context, outcome: object) -> None:
    if not isinstance(outcome, Continue | Complete | Fail | Pause):
        raise StepFailed(
            f"run {ctx.run_id}: turn {ctx.iteration} returned {type(outcome).__name__}, not "
            "Continue, Complete, Fail or Pause",
            step=f"{ctx.iteration}",
            run_id=ctx.run_id,
        )
    try:
        msgspec.convert(msgspec.structs.asdict(outcome), type(outcome))
    except msgspec.ValidationError as error:
        raise StepFailed(
            f"run {ctx.run_id}: turn {ctx.iteration} returned no {type(outcome).__name__}: {error}",
            step=f"{ctx.iteration}",
            run_id=ctx.run_id,
        ) from error
    if (left := ctx.leftover()) is not None:
        raise ended_before(ctx.journal.fold, left, type(outcome).__name__)

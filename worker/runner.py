"""Shell: `run()`: own one run, drive it, and leave it ended or waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import cast

import msgspec

from journal import ids
from journal.doors import start_in, start_value, started_body
from journal.errors import InputMismatch, NotEncodable, RunNotFound
from journal.handle import Journal
from journal.limits import ACK_WAIT_MAX_S, ACK_WAIT_MIN_S, ACK_WAIT_S
from journal.log import Log
from journal.messages import JSON, Message
from journal.owed import pay
from journal.store import Store
from journal.unknown import RetryLater
from journal.values import normalise
from journal.views import Outcome, Waiting, WaitingOn, outcome
from journal.waits import instant_text, parse_instant

from .agent import Agent
from .turns import carry_on, utc_now


async def run(
    store: Store,
    agent: Agent,
    run_id: str | None = None,
    input: JSON | Sequence[Message] = None,
    *,
    ack_wait_s: float = ACK_WAIT_S,
    on_wait: Callable[[str], None] | None = None,
) -> Outcome:
    """Start the run if it isn't there, take it as far as it goes, say how far that is (R5, R6).

    `input=None` only resumes. Without an id a random one is made. On a shared store the run is
    claimed; a holder that is gone is waited for at most `ack_wait_s` (1 to 600), told to `on_wait`.

    Raises RunNotFound, InputMismatch, StoreLocked (somebody else runs it), Fenced (somebody else
    took it over), StepFailed (a model call failed), ReplayMismatch, JournalDamaged,
    StoreUnavailable. In each case the run can be taken up again.
    """
    if not ACK_WAIT_MIN_S <= ack_wait_s <= ACK_WAIT_MAX_S:
        raise ValueError(f"ack_wait_s is {ACK_WAIT_MIN_S:g} to {ACK_WAIT_MAX_S:g} seconds")
    if input is None and run_id is None:
        raise RunNotFound("a run is started with an input, or resumed by its id")
    run = ids.new_run_id() if run_id is None else ids.run_id(run_id)
    value = None if input is None else start_value(agent.name, _plain(input))
    log = await Log.resumed(store, run, by="library")
    if value is not None:
        await start_in(log, started_body(run, agent.name, value, revision=agent.revision))
    _check(log, agent)
    ended = outcome(log.fold) if log.fold.finished else None
    if ended is not None:
        await pay(log)  # a crash may have come between the end and what it owes
        return ended
    while True:
        journal = await Journal.open(
            store,
            run,
            is_write=agent.is_unsafe,
            revision=agent.revision,
            ack_wait_s=ack_wait_s,
            on_wait=on_wait,
            known=log,
        )
        async with journal:
            stopped = await _carried(journal, agent)
            await pay(journal)
        if stopped is not None:
            return stopped
        log = journal  # a signal ended the wait as it began: take the run up again


async def _carried(journal: Journal, agent: Agent) -> Outcome | None:
    """Carry the run as far as it goes; None where by then more is to do, under a new claim."""
    fold = journal.fold
    ours = journal.claim > 0 if journal.store.shared else fold.runnable(instant_text(utc_now()))
    if ours and not fold.finished:
        try:
            await carry_on(journal, agent, attended=True)
        except RetryLater as later:
            return Waiting((_later(later),))
    fold = journal.fold
    if not fold.finished and fold.runnable(instant_text(utc_now())):
        return None
    return outcome(fold)


def _plain(input: JSON | Sequence[Message]) -> JSON:
    """Messages as plain JSON: what is recorded does not depend on how the caller wrote it."""
    if not isinstance(input, list | tuple):
        return input
    items = cast("Sequence[object]", input)
    plain = [_plain_message(item) if isinstance(item, Message) else item for item in items]
    if plain != list(items):
        try:
            msgspec.convert(normalise(plain, "the input"), list[Message])
        except msgspec.ValidationError as error:
            raise NotEncodable(f"the input is no list of messages: {error}") from error
    return plain


def _plain_message(message: Message) -> dict[str, JSON]:
    """As msgspec would write it, without its silent conversions (R16)."""
    plain: dict[str, JSON] = {"role": message.role, "content": message.content}
    if message.calls:
        plain["calls"] = [msgspec.to_builtins(call) for call in message.calls]
    if message.call_id is not None:
        plain["call_id"] = message.call_id
    return plain


def _check(log: Log, agent: Agent) -> None:
    log.check_runnable()
    assert log.fold.started is not None
    bound = log.fold.started.agent
    if bound != agent.name:
        raise InputMismatch(
            f"run {log.run_id} belongs to agent {bound}, not {agent.name}",
            run_id=log.run_id,
            hint="run it with that agent, or start under another id",
        )


def _later(later: RetryLater) -> WaitingOn:
    return WaitingOn(
        what="timer",
        since=datetime.now(UTC),
        until=parse_instant(later.until) if later.until else None,
        ended_by=f"the end, at the latest the deadline, of the earlier call of {later.step}",
    )

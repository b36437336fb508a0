"""Shell: the records that end a turn: park, commit, the run's end (R41, R44, R61).

Why it is safe: each is due only at a tail where nothing that would end the wait is there, no write
is unknown, and the run has neither ended nor been cancelled; what comes first wins the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Literal, assert_never

import msgspec

from .errors import NotEncodable, TooLarge
from .fold import Fold
from .handle import Journal
from .limits import REASON_CHARS_MAX
from .messages import JSON, Message
from .records import Asked, Commit, Park, RunCompleted, Waits
from .summary import with_summary
from .terms import Complete, Continue, Fail, Next, Pause, Terms
from .unknown import RetryLater, settle_without_code
from .values import normalise
from .waits import due, instant_text, parse_instant, wait_of, would_go_on

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The clock of a holder: it decides when a wait is over, never what is safe."""
    return datetime.now(UTC)


class Ends:
    """The records that end a turn, each due only at a tail where it still is. `rests`: the run
    waits for a person, without a record that says so (a store without claims). `record_id`: that
    of the record by which the turn itself ends; `unless_queued`: it does not complete the run while
    an input is queued (R62)."""

    def __init__(
        self,
        journal: Journal,
        terms: Terms,
        clock: Clock,
        *,
        record_id: str = "",
        unless_queued: bool = False,
    ) -> None:
        self.journal = journal
        self.terms = terms
        self.clock = clock
        self._record_id = record_id
        self._unless_queued = unless_queued or terms.loop
        self.rests = False

    # ---- time -------------------------------------------------------------------------------

    def _now(self) -> str:
        return instant_text(self.clock())

    def deadline(self) -> str:
        """The instant at which the run's duration is over; empty without a bound."""
        limit_s = self.terms.bounds.duration_s
        started = self.journal.fold.started
        if limit_s is None or started is None:
            return ""
        try:
            return instant_text(parse_instant(started.at) + timedelta(seconds=limit_s))
        except (ValueError, OverflowError):  # `at` is informative only; it bounds nothing then
            return ""

    def over(self) -> bool:
        return due(self.deadline(), self._now())

    def turn_limit_s(self) -> float | None:
        limits = [self.terms.bounds.turn_timeout_s]
        if deadline := self.deadline():
            limits.append(max((parse_instant(deadline) - self.clock()).total_seconds(), 0.0))
        given = [limit for limit in limits if limit is not None]
        return min(given, default=None)

    def _until(self, wanted: str = "") -> str:
        """The earlier one of an instant and the run's deadline."""
        given = [text for text in (wanted, self.deadline()) if text]
        return min(given, key=parse_instant, default="")

    # ---- records ----------------------------------------------------------------------------

    async def park(
        self,
        why: Literal["approval", "reconcile", "pause"],
        *,
        asks: tuple[Asked, ...] = (),
        reason: str = "",
    ) -> None:
        """Leave the run waiting, unless something that ends the wait has come: both are records
        that compete for the next sequence (R61)."""
        journal = self.journal
        await journal.refresh()
        needed = journal.store.shared or bool(asks) or why == "pause"

        def record(fold: Fold) -> Park | None:
            if fold.finished or fold.cancel is not None:
                return None
            if why == "reconcile" and fold.wait is not None and fold.wait.why == why:
                return None  # a doubted step has parked it already
            park = Park(
                why=why,
                iteration=fold.iteration,
                attempt=fold.attempt,
                until=self._until(),
                reason=reason[:REASON_CHARS_MAX],
                asks=asks,
            )
            return None if would_go_on(fold, park) else park

        if needed or (why == "reconcile" and self._overrules_policy()):
            await journal.append(record)
        else:
            self.rests = record(journal.fold) is not None

    async def retry_later(self, later: RetryLater) -> None:
        """A permitted retry waits for the deadline of the earlier call; past it, for a worker that
        says it still makes that call: look again after the ack wait (R22)."""
        until = later.until
        if not until or due(until, self._now()):
            until = instant_text(self.clock() + timedelta(seconds=self.journal.ack_wait_s))

        def record(fold: Fold) -> Park | None:
            if fold.finished or fold.cancel is not None:
                return None
            park = Park(
                why="retry",
                steps=(later.step,),
                iteration=fold.iteration,
                attempt=fold.attempt,
                until=self._until(until),
                reason=later.message,
            )
            return None if would_go_on(fold, park) else park

        await self.journal.append(record)

    async def commit(self, outcome: Next) -> None:
        match outcome:
            case Continue():
                await self._continue(outcome.state, self._waits(outcome))
            case Pause(reason=reason, state=state, until=until):
                instant = _instant("until", until) if until is not None else ""
                waits = Waits(resume=True, until=self._until(instant))
                await self._continue(state, waits, reason)
            case Complete(message=message):
                await self._complete(message)
            case Fail(retriable=True):
                await self.failed_attempt(outcome.reason, outcome.detail)
            case Fail():
                await self.fail(outcome.reason, outcome.detail)
            case other:
                assert_never(other)

    def _waits(self, outcome: Continue) -> Waits:
        given: list[str] = []
        if outcome.delay is not None:
            given.append(_delayed(self.clock(), outcome.delay))
        if outcome.until is not None:
            given.append(_instant("until", outcome.until))
        until = min(given, key=parse_instant, default="")
        if outcome.until_child and outcome.until_child not in self.journal.fold.children:
            raise NotEncodable(
                f"until_child={outcome.until_child}: it is no child of run {self.journal.run_id}",
                hint="wait for what ctx.spawn returned",
            )
        if not (until or outcome.until_input or outcome.until_child):
            return Waits()
        return Waits(
            until=self._until(until),
            until_input=outcome.until_input,
            until_child=outcome.until_child or "",
        )

    async def _continue(self, state: JSON, waits: Waits, reason: str = "") -> None:
        checkpoint = normalise(state, "the state of the next turn")
        shared = self.journal.store.shared

        def record(fold: Fold) -> Commit | None:
            if fold.finished or fold.cancel is not None or fold.unknown():
                return None
            commit = Commit(
                at=self._now(),
                action="continue",
                iteration=fold.iteration,
                state=checkpoint,
                waits=waits,
                reason=reason[:REASON_CHARS_MAX],
            )
            wait = wait_of(commit)
            if wait is not None and (due(wait.until, self._now()) or would_go_on(fold, commit)):
                commit = msgspec.structs.replace(commit, waits=Waits())
            return with_summary(fold, commit) if shared else commit

        if not self.terms.loop:
            await self._end(record)
            return
        try:
            await self.journal.append(record)
        except TooLarge:  # the loop's conversation: it goes on without a point to restart at
            self.journal.commit_steps *= 2

    async def _end(self, record: Callable[[Fold], Commit | RunCompleted | Park | None]) -> None:
        await self.journal.append(record, record_id=self._record_id)

    async def _complete(self, message: JSON) -> None:
        if not isinstance(message, Message):
            message = Message(role="assistant", content=normalise(message, "the answer"))
        plain = normalise(msgspec.to_builtins(message), "the answer")

        def record(fold: Fold) -> RunCompleted | None:
            if fold.finished or fold.cancel is not None or fold.unknown():
                return None
            if self._unless_queued and fold.queued():  # they are placed first (R62)
                return None
            return RunCompleted(message=plain, iteration=fold.iteration)

        await self._end(record)

    async def failed_attempt(self, reason: str, detail: str) -> None:
        """Record the failure: another attempt after a while, or the run's end (R44, R52)."""
        retry, fold = self.terms.retry, self.journal.fold
        afresh = not self.terms.loop
        failures = fold.attempt if afresh else fold.failures + 1
        if failures >= retry.attempts:
            await self.fail(reason, detail, retriable=True)
            return
        at = self.clock() + timedelta(seconds=retry.delay_s(failures))

        def record(fold: Fold) -> Park | None:
            if fold.finished or fold.cancel is not None or fold.unknown():
                return None
            return Park(
                why="retry",
                iteration=fold.iteration,
                attempt=fold.attempt,
                until=self._until(instant_text(at)),
                reason=f"{reason}: {detail}"[:REASON_CHARS_MAX],
                afresh=afresh,
            )

        await self._end(record)

    async def fail(self, reason: str, detail: str, *, retriable: bool = False) -> None:
        """End the run with a recorded reason; not while a write is unknown: a person is asked
        first."""

        if not await self.settled():
            await self._park_unknown()
            return

        def record(fold: Fold) -> Commit | None:
            if fold.finished or fold.unknown() or fold.cancel is not None:
                return None
            return Commit(
                action="fail",
                iteration=fold.iteration,
                reason=reason[:REASON_CHARS_MAX],
                detail=detail[:REASON_CHARS_MAX],
                retriable=retriable,
                afresh=not self.terms.loop,
            )

        await self._end(record)

    async def cancelled(self) -> None:
        """End a cancelled run. What is unknown is settled first: by its policy where no code is
        needed, else by a person."""
        journal = self.journal
        if not await self.settled():
            return await self._park_unknown()

        def record(fold: Fold) -> Commit | None:
            if fold.finished or fold.unknown() or fold.cancel is None:
                return None
            reason = fold.cancel.reason
            return Commit(action="cancel", iteration=fold.iteration, reason=reason)

        await journal.append(record)
        return None

    async def failed_untried(self, reason: str, detail: str) -> None:
        """As failed_attempt, where no code of the run may be called any more: what is unknown is
        settled without it, or by a person."""
        if not await self.settled():
            return await self._park_unknown()
        return await self.failed_attempt(reason, detail)

    async def settled(self) -> bool:
        """Settle what is unknown where its policy needs no code; False: a person is asked."""
        for step in self.journal.fold.unknown():
            if not await settle_without_code(self.journal, step):
                return False
        return True

    async def _park_unknown(self) -> None:
        """Nothing but the word on its unknown write moves the run on, or ends it."""

        def record(fold: Fold) -> Park | None:
            if fold.finished or not fold.unknown():
                return None
            return Park(why="reconcile", iteration=fold.iteration, attempt=fold.attempt)

        if self.journal.store.shared or self._overrules_policy():
            await self.journal.append(record)
        else:
            self.rests = True

    def _overrules_policy(self) -> bool:
        """Whether a park for a person must stand in the journal, on any store: else a policy would
        settle the write (R7)."""
        return any(not step.needs_person for step in self.journal.fold.unknown())


def _instant(what: str, when: datetime) -> str:
    if when.tzinfo is None:
        raise NotEncodable(
            f"{what}={when.isoformat()} has no time zone: which instant is meant?",
            hint="datetime(…, tzinfo=UTC), or ZoneInfo",
        )
    try:
        return instant_text(when)
    except OverflowError as error:
        raise NotEncodable(f"{what}={when.isoformat()} is no instant in UTC") from error


def _delayed(now: datetime, delay: timedelta) -> str:
    try:
        return instant_text(now + max(delay, timedelta()))
    except OverflowError as error:
        raise NotEncodable(f"delay={delay} ends after the year 9999") from error

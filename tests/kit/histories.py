"""Random honest histories: each record is one that its writer may write and the fold accepts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
from kit.build import (
    ALLOW,
    RUN,
    Log,
    answered,
    asked_for,
    asking,
    asks,
    cancelled_end,
    claimed,
    error_of,
    failed,
    goes_on,
    interrupted_of,
    model_start,
    parked,
    progress_of,
    released,
    reply_of,
    request,
    result_of,
    spawned,
    start_of,
    started,
    submitted,
)

from journal.audit import audit
from journal.codec import Damage
from journal.errors import RunfoldError
from journal.fold import Fold
from journal.inputs import decide_placing, decide_withdrawal
from journal.records import Commit, Record, StepStarted
from journal.signal_rules import Append, decide_signal
from journal.signals import AnySignal, Approve, Cancel, Child, Late, Reconcile, Reject, Resume
from journal.step_state import StepState
from journal.summary import with_summary
from journal.waits import instant_text, parse_instant

Pick = Callable[[Sequence[Any]], Any]
LATER = "2027-01-01T00:00:00.000Z"
WAITS: list[dict[str, Any]] = [
    {},
    {"until_input": True},
    {"until": LATER},
    {"until_child": "c1", "until_input": True},
    {"resume": True, "until": LATER},
]


class History:
    """Grows a journal one record at a time; `pick` is all that is random in it."""

    def __init__(self, pick: Pick) -> None:
        self.pick = pick
        self.shared: bool = pick([True, True, False])
        self.log = Log(started(revision=pick(["1", ""])))
        self.count = 0

    def grow(self) -> None:
        """One more record of a kind that is picked; nothing where that kind has none now."""
        self.count += 1
        self._time_passes()
        fold = self.log.fold
        kinds = ["holder"] * 6 + ["signal"] * 2 + ["input", "claim", "stop", "commit", "commit"]
        kinds += ["signal"] * 4 if fold.unknown() or fold.finished else []
        kinds += ["claim"] * 4 if fold.claim is None else []
        kinds += ["end"] if not self.count % 7 else []
        kind = self.pick(kinds)
        made = (self._keyed(body) for body in getattr(self, f"_{kind}")())
        found = [body for body in made if self._accepted(body)]
        if found:
            self.log.add(self.pick(found))

    def _time_passes(self) -> None:
        seconds = self.pick([0, 0, 1, 3600, 86400, 4 * 86400])
        self.log.at = instant_text(parse_instant(self.log.at) + timedelta(seconds=seconds))

    def _keyed(self, body: Record) -> Record:
        """A handler's own call of a later attempt has a key of its own."""
        attempt = self.log.fold.attempt
        if not isinstance(body, StepStarted) or attempt == 1 or not body.step[0].isdecimal():
            return body
        key = body.key.replace(f":{body.step}:", f":{body.step}@{attempt}:")
        return msgspec.structs.replace(body, key=key)

    def _accepted(self, body: Record) -> bool:
        try:
            self.log.fold.check(self.log.sealed(self.log.here(body)).record)
        except Damage:
            return False
        return True

    @property
    def _holds(self) -> bool:
        fold = self.log.fold
        return not fold.finished and (fold.claim is not None if self.shared else fold.wait is None)

    def _claim(self) -> Iterator[Record]:
        fold = self.log.fold
        if self.shared and not fold.finished and (fold.claim or fold.runnable(self.log.at)):
            for revision in ("1", "2"):
                yield claimed(f"w{self.count}", revision=revision, task=7)

    def _signal(self) -> Iterator[Record]:
        for signal in signals_for(self.log.fold):
            if isinstance(signal, Cancel) and self.pick(range(10)):
                continue  # a cancelled run starts nothing any more
            request_id = signal.run if isinstance(signal, Child) else f"r{self.count}"
            try:
                decision = decide_signal(self.log.fold, signal, request_id, held=not self.shared)
            except RunfoldError:
                continue
            if isinstance(decision, Append):
                yield decision.body

    def _input(self) -> Iterator[Record]:
        fold = self.log.fold
        if fold.finished:
            return
        for mode in ("steer", "follow_up"):
            yield submitted(f"i{self.count}", mode)
        for known in fold.queued():
            withdrawal = decide_withdrawal(fold, known.request_id)
            assert withdrawal is not None
            yield withdrawal

    def _holder(self) -> Iterator[Record]:
        fold = self.log.fold
        if not self._holds:
            return
        name = f"{fold.iteration}/{fold.attempt}.{self.count}"
        if fold.cancel is None:
            yield model_start(self.count)
            yield start_of(name, "lookup", self.pick([1, 2]), unsafe=False)
            for policy in ("reconcile", "interrupt", "probe"):
                yield start_of(name, "pay", self.pick([1, 2]), policy=policy)
            yield spawned(name, self.pick(["c1", "c2"]))
            yield from self._asked_for()
            yield from self._honoured(name)
        for step in list(fold.open.values()):
            last = step.last
            permit = step.reconciled.get(last.n)
            yield msgspec.structs.replace(last, permit=permit.n if permit else 0, claim=0)
            yield progress_of(step.name, self.count)
            if last.kind == "model":
                yield from self._replies(step)
                continue
            yield result_of(step.name, self.count)
            yield error_of(step.name, "tool_error")
            yield from self._settled(step)
            if step.unsafe:
                yield interrupted_of(step.name, step.partial)
        for modes in ((), ("steer",), ("follow_up",)):
            placing = decide_placing(fold, name, modes)
            if placing is not None:
                yield placing

    def _asked_for(self) -> Iterator[Record]:
        """Calls of the last reply that may start."""
        fold = self.log.fold
        for index, step in enumerate(fold.reply.steps if fold.reply else ()):
            marker = asking(int(step.split("/")[1]), 1, "pay").marker
            said = fold.decisions.get(marker) if index else None
            if step not in fold.steps and (index == 0 or said is not None):
                tool = step.rpartition("/")[2]
                permit = said.n if said else 0
                yield start_of(step, tool, {}, unsafe=index > 0, permit=permit)
                if said is not None and said.name == "reject":
                    yield error_of(step, "rejected", via="refused")

    def _honoured(self, name: str) -> Iterator[Record]:
        """Permitted retries of earlier attempts' writes."""
        for step in (one for steps in self.log.fold.honoured.values() for one in steps):
            said = step.reconciled.get(step.last.n)
            if said is not None and step.completed is None:
                replace = msgspec.structs.replace
                yield replace(step.last, step=name, permit=said.n, claim=0)

    def _settled(self, step: StepState) -> Iterator[Record]:
        """What is recorded of a write that somebody said the result of."""
        for via, said in (("reconcile", step.reconciled), ("late", step.late)):
            signal = said.get(step.last.n)
            if signal is not None and "result" in signal.payload:
                yield result_of(step.name, signal.payload["result"], via=via)
        if step.unknown and step.last.policy == "probe":
            yield result_of(step.name, self.count, via="probe")

    def _replies(self, step: StepState) -> Iterator[Record]:
        n = int(step.name.rpartition("/")[2])
        yield result_of(step.name, {"text": "hm"})
        yield reply_of(n, asks(request("lookup"), request("pay")), ALLOW, asking(n, 1, "pay"))

    def _stop(self) -> Iterator[Record]:
        fold = self.log.fold
        if not self._holds or not self.shared:
            return
        yield released()
        for until in ("", LATER):
            yield parked("retry", until=until, reason="TimeoutError")
            yield parked("retry", until=until, afresh=True)
            yield parked("pause", until=until, reason="the code changed")
        yield parked("approval", asks=(asked_for(f"{fold.iteration}/9"),))
        if fold.pending():
            yield parked("approval")
        if fold.unknown():
            yield parked("reconcile")
        safe = [step.name for step in fold.open.values() if not step.unsafe]
        if safe:
            yield parked("reconcile", steps=tuple(safe[:1]))

    def _commit(self) -> Iterator[Record]:
        if not self._holds:
            return
        state = {"seen": self.count}
        for waits in WAITS:
            if waits and not self.shared:
                continue
            commit = self.log.here(goes_on(state, **waits))
            assert isinstance(commit, Commit)
            yield with_summary(self.log.fold, msgspec.structs.replace(commit, at=self.log.at))
        yield goes_on(state)  # one without a summary is no point to restart at

    def _end(self) -> Iterator[Record]:
        if self._holds:
            for afresh in (False, True):
                yield failed("restart_limit", retriable=True, afresh=afresh)
        if self._holds and self.count > 40:
            yield answered()
            yield cancelled_end()


def signals_for(fold: Fold) -> Iterator[AnySignal]:
    """What people and workers might say now; not all of it is accepted."""
    markers = [ask.marker for ask in fold.asked()]
    for marker in [*markers, *fold.decisions, asking(99, 0, "pay").marker]:
        yield Approve(marker=marker)
        yield Reject(marker=marker, reason="no")
    yield Cancel(reason="enough")
    yield Resume()
    for step in fold.steps.values():
        for start in step.starts:
            yield Reconcile(step=step.name, outcome="done", result="D", start=start.n)
            yield Reconcile(step=step.name, outcome="retry", start=start.n)
            yield Late(step=step.name, start=start.n, result="L")
    for child in fold.children:
        yield Child(run=child, outcome={"status": "completed"})
        yield Child(run=child, outcome={"status": "failed"})


def history(pick: Pick, length: int) -> History:
    grown = History(pick)
    for _ in range(length):
        grown.grow()
    return grown


def seeded(seed: int, length: int = 60) -> Log:
    return history(random.Random(seed).choice, length).log


class Sound(History):
    """One whose records all pass the audit, too: what remains is what writers make. Fewer are
    cancelled or told of late results, so that people have more to say."""

    def _signal(self) -> Iterator[Record]:
        for body in super()._signal():
            rare = {"cancel": 8, "late": 4}.get(getattr(body, "name", ""), 0)
            if not rare or not self.pick(range(rare)):
                yield body

    def _claim(self) -> Iterator[Record]:
        if self.log.fold.claim is None or not self.pick(range(3)):
            yield from super()._claim()

    def _accepted(self, body: Record) -> bool:
        if not super()._accepted(body):
            return False
        return audit(RUN, [*self.log.entries, self.log.sealed(self.log.here(body))]) == ()


def sound(seed: int, length: int) -> Log:
    grown = Sound(random.Random(seed).choice)
    for _ in range(length):
        grown.grow()
    return grown.log

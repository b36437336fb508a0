"""Core: the books an audit keeps of a run: what was said of each step, call, input and claim.

Written from PROTOCOL.md 2-6, apart from the fold: a fault in one is not a fault in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from msgspec import Struct

from .limits import REPEATS_KEPT_S
from .records import (
    NO_WAITS,
    Commit,
    InputStatus,
    Mode,
    Park,
    RunCompleted,
    Signal,
    StepStarted,
    Summary,
    VerdictAsk,
    VerdictDeny,
)

LOOP_MODEL = re.compile(r"llm/(\d{1,18})", re.ASCII)
LOOP_TOOL = re.compile(r"tool/(\d{1,18})/\d+/.+", re.ASCII)
PLACE = re.compile(r"\d{1,18}/(\d{1,18})", re.ASCII)
"""A turn handler's call: its position in the iteration."""

_FIRST = datetime(1970, 1, 1, tzinfo=UTC)
"""No record is older, whatever it says."""

Finding: TypeAlias = tuple[str, str]
"""A rule's word, and what breaks it."""
Findings: TypeAlias = Iterator[Finding]


class StepBook:
    """One step of an attempt: its starts; the n of its result; what was said of each start
    (`said` reconcile, `late`); `doubted`: a park said that its safe start is unsafe; `asked`: the n
    of the last park for a person."""

    __slots__ = ("asked", "doubted", "late", "name", "result", "said", "starts")

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts: list[StepStarted] = []
        self.result = 0
        self.said: dict[int, Signal] = {}
        self.late: dict[int, Signal] = {}
        self.doubted = False
        self.asked = 0

    @property
    def last(self) -> StepStarted | None:
        return self.starts[-1] if self.starts else None

    @property
    def open(self) -> bool:
        return bool(self.starts) and not self.result

    @property
    def unsafe(self) -> bool:
        return self.doubted or any(start.replay == "unsafe" for start in self.starts)

    @property
    def unknown(self) -> bool:
        """A write without a result of which nobody has said anything."""
        return self.open and self.unsafe and not self.settled

    @property
    def settled(self) -> bool:
        """Whether somebody said what became of the last start."""
        return bool(self.starts) and (
            self.starts[-1].n in self.said or self.starts[-1].n in self.late
        )

    @property
    def told(self) -> bool:
        """Whether somebody said the result of the last start."""
        said = self.said.get(self.starts[-1].n)
        done = said is not None and said.payload["outcome"] == "done"
        return done or self.starts[-1].n in self.late

    def retry(self) -> Signal | None:
        """What permits another start: a retry of the last one that no late result overtook."""
        said = self.said.get(self.starts[-1].n) if self.open else None
        if said is None or said.payload["outcome"] != "retry" or self.starts[-1].n in self.late:
            return None
        return said


class Gated(Struct, frozen=True):
    """A call of the last model reply: the verdict that lets it run (None), asks or denies; `digest`
    of the call as the model made it, "" where its arguments are no JSON."""

    verdict: VerdictAsk | VerdictDeny | None
    digest: str


class Ask(Struct, frozen=True):
    """A turn handler's call that a person was asked about."""

    step: str
    digest: str


class Request(Struct, frozen=True):
    """A request id that was used: when (None: it does not say); `kept`: it is known for ever."""

    at: datetime | None
    kept: bool = False


class Queued(Struct):
    """An input: in which state, and since when."""

    n: int
    mode: Mode
    at: datetime | None
    status: InputStatus = "queued"


class Book:
    """The run so far.

    `claim`: the live one's n, 0 without one; `holder`: by whom; `remote`: who is known by requests
    alone; `claimers`: all who ever claimed; `shared`: each holder does, on this store; `fenced`:
    the record at hand is not under the claim.
    `steps`: of the attempt; `open`: those without a result; `model_calls`: the loop's last one;
    `earlier`: writes of earlier attempts, by tool and digest; `keys`: of their safe calls.
    `reply`: the model step that the `calls` are from; `replied`: it is one of the loop. `asks`: a
    handler's, by marker; `markers`: the step and digest of each there ever was; `rejected`: those
    that were, without their end. `permits`: signals by n; `spent`: by n, with the step they
    started; `interrupted`: digests of calls that were cut off.
    `queue`, `placed`: the `inputs` that are so; `told`: those that the ended iteration had placed;
    `oldest`: no request or input that is forgotten some day is from before. `wait`: the park or
    commit that the run waits after; `resumed`: the n of the last resume, `heard` of the last signal
    or input.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self.claim = 0
        self.remote = False
        self.holder = ""
        self.claimers: set[str] = set()
        self.shared = False
        self.fenced = False
        self.iteration = 0
        self.attempt = 1
        self.end: Commit | RunCompleted | None = None
        self.purged = False
        self.cancel = 0
        self.steps: dict[str, StepBook] = {}
        self.open: dict[str, StepBook] = {}
        self.model_calls = 0
        self.earlier: dict[tuple[str, str], list[StepBook]] = {}
        self.keys: dict[tuple[str, str], set[str]] = {}
        self.reply = ""
        self.replied = False
        self.calls: dict[str, Gated] = {}
        self.asks: dict[str, Ask] = {}
        self.markers: dict[str, tuple[str, str]] = {}
        self.decided: dict[str, Signal] = {}
        self.rejected: set[str] = set()
        self.permits: dict[int, Signal] = {}
        self.spent: dict[int, str] = {}
        self.requests: dict[str, Request] = {}
        self.inputs: dict[str, Queued] = {}
        self.queue: dict[str, Queued] = {}
        self.placed: list[str] = []
        self.oldest: datetime | None = None
        self.told: list[str] = []
        self.children: dict[str, bool] = {}
        self.wait: Park | Commit | None = None
        self.interrupted: set[str] = set()
        self.resumed = 0
        self.heard = 0

    @property
    def can_reopen(self) -> bool:
        end = self.end
        return isinstance(end, Commit) and end.action == "fail" and end.retriable

    def unknown(self) -> list[StepBook]:
        """Writes of which nobody knows whether they happened."""
        return [step for step in self.open.values() if step.unknown]

    def unanswered(self) -> str:
        """The first call of the last reply without a result."""
        found = (name for name in self.calls if name not in self.steps or name in self.open)
        return next(found, "")

    def begin(self, record: StepStarted) -> None:
        """Note a start."""
        step = self.steps.setdefault(record.step, StepBook(record.step))
        step.starts.append(record)
        self.open[record.step] = step
        loop = LOOP_MODEL.fullmatch(record.step)
        if loop is not None:
            self.model_calls = max(self.model_calls, int(loop[1]))
        self.goes_on()

    def finish(self, name: str, n: int) -> StepBook:
        """Note a result, record n."""
        step = self.steps.setdefault(name, StepBook(name))
        step.result = n
        self.open.pop(name, None)
        self.goes_on()
        return step

    def goes_on(self) -> None:
        """A holder is at work: what was waited for has ended."""
        self.wait = None

    def next_attempt(self, *, afresh: bool) -> None:
        """A new attempt; `afresh`: only the unsafe steps of the earlier ones count in it (R44)."""
        self.attempt += 1
        if afresh:
            self.begin_afresh()

    def begin_afresh(self) -> None:
        """Forget the steps; what an unsafe one came to, and a safe one's key, stays known."""
        for step in self.steps.values():
            last = step.last
            if last is None or last.kind == "model":
                continue
            what = (last.tool, last.digest)
            if not step.unsafe:
                self.keys.setdefault(what, set()).add(last.key)
            elif step not in self.earlier.setdefault(what, []):
                self.earlier[what].append(step)
        self._no_steps()

    def _no_steps(self) -> None:
        self.steps = {}
        self.open = {}
        self.model_calls = 0
        self.calls = {}
        self.asks = {}
        self.reply = ""

    def next_iteration(self) -> None:
        """The iteration is committed: its steps are done with, its inputs answered."""
        self.iteration += 1
        self.attempt = 1
        self.earlier = {}
        self.keys = {}
        self._no_steps()
        self.wait = None
        self.answer_placed()

    def answer_placed(self) -> None:
        for request_id in self.placed:
            self.inputs[request_id].status = "done"
        self.placed = []

    def reopen(self) -> None:
        """A failed run gets another try: the next iteration, which knows what the failed one did
        (R44, R52)."""
        assert isinstance(self.end, Commit)
        if self.end.afresh:
            self.begin_afresh()
        told = self.told if self.end.afresh else []
        steps = self.steps, self.open, self.model_calls, self.calls, self.reply
        earlier = self.earlier, self.keys
        self.end = None
        self.cancel = 0
        self.next_iteration()
        self.steps, self.open, self.model_calls, self.calls, self.reply = steps
        self.earlier, self.keys = earlier
        for request_id in told:
            self.inputs[request_id].status = "placed"
        self.placed = list(told)

    def forget_before(self, at: str) -> None:
        """At a commit: repeats are recognised for eight days (PROTOCOL 2)."""
        now = instant(at)
        if now is None or now < _FIRST:
            return
        oldest = now - timedelta(seconds=REPEATS_KEPT_S)
        if self.oldest is None or self.oldest >= oldest:
            return
        self.requests = {
            key: known
            for key, known in self.requests.items()
            if known.kept or known.at is None or known.at >= oldest
        }
        self.inputs = {
            key: known
            for key, known in self.inputs.items()
            if known.status == "queued" or known.at is None or known.at >= oldest
        }
        known = [one for one in self.requests.values() if not one.kept]
        known = [*known, *self.inputs.values()]
        self.oldest = min((one.at for one in known if one.at is not None), default=None)

    def decide(self, marker: str, said: Signal) -> None:
        """Note an approve or a reject."""
        self.decided[marker] = said
        if said.name == "reject":
            self.rejected.add(marker.rpartition(".")[0])

    def request(self, key: str, at: str, *, kept: bool = False) -> None:
        """Note that a signal's request id was used."""
        self.requests.setdefault(key, Request(None if kept else self._dated(at), kept))

    def input(self, name: str, n: int, mode: Mode, at: str, status: InputStatus = "queued") -> None:
        """Note an input."""
        known = self.inputs[name] = Queued(n, mode, self._dated(at), status)
        if status == "queued":
            self.queue[name] = known
        if status == "placed":
            self.placed.append(name)

    def _dated(self, text: str) -> datetime | None:
        at = instant(text)
        if at is not None:
            self.oldest = at if self.oldest is None else min(at, self.oldest)
        return at

    def restored(self, commit: Commit, summary: Summary) -> Book:
        """The books as of a commit that sums up what is before it."""
        book = Book(self.run)
        book.claim = summary.claim_n
        book.remote = summary.claim.get("remote") is True
        book.claimers, book.shared = self.claimers, self.shared
        book.iteration = commit.iteration + 1
        book.children = {run: ended is not None for run, ended in summary.children.items()}
        book.cancel = summary.cancel.n if summary.cancel is not None else 0
        book.spent = self.spent
        book.interrupted = set(summary.interrupted)
        book.wait = commit if commit.waits != NO_WAITS else None
        for one in summary.inputs:
            book.input(one.request_id, one.n, one.mode, one.at, one.status)
        for known in summary.requests:
            decision = known.name in ("approve", "reject")
            key = request_key(known.name, known.request_id)
            book.request(key, known.at, kept=decision)
            if decision:
                said = Signal(
                    name=known.name,
                    request_id=known.request_id,
                    payload={"marker": known.about},
                    n=known.n,
                )
                book.permits[known.n] = said
                book.decide(known.about, said)
        return book


def request_key(name: str, request_id: str) -> str:
    """Request ids of `late` and `child` are kept apart from everybody else's (PROTOCOL 5)."""
    return f"{name} {request_id}" if name in ("late", "child") else f"- {request_id}"


def instant(text: str) -> datetime | None:
    """An instant as records write it, in UTC; None for what is none."""
    try:
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None

"""What must hold of a run that has ended: its journal, what happened outside, and its answer."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.agents import ledger_of
from chaos.books import Book, Books, Heard
from chaos.plans import UNSAFE_TOOLS, calls_of, result_of
from msgspec import UNSET

from journal.audit import audit
from journal.codec import Entry
from journal.fold import Fold
from journal.ids import RunId
from journal.records import (
    SPAWN,
    Claim,
    Input,
    InputPlaced,
    InputWithdrawn,
    RunCompleted,
    RunStarted,
    Signal,
    StepCompleted,
    StepStarted,
)
from journal.stores.jetstream import JetStreamStore
from journal.views import final_message

SLOW_S = 25.0
"""Longer than anything but a permitted retry, or a hint that was lost, should take: kept, to see
what it was."""

REFUSALS = ("refused", "not_called")
FAILS = {"restart_limit"}
"""Reasons for which a run of the soak may fail: it loses workers faster than it moves."""


class Outside:
    """What the run's ledger says: by key, how often each call began and had its effect."""

    def __init__(self, run: str) -> None:
        self.begun: Counter[str] = Counter()
        self.effects: Counter[str] = Counter()
        self.tools: dict[str, str] = {}
        for _, kind, said in ledger_of(run).lines():
            if kind == "start":
                self.begun[said[0]] += 1
            elif kind == "effect":
                self.effects[said[0]] += 1
            if kind in ("start", "effect"):
                self.tools[said[0]] = said[1]

    def too_often(self, permitted: Counter[str]) -> list[str]:
        """Writes that began, or took effect, more often than the journal says they were started."""
        return [
            f"{tool} {key}: begun {self.begun[key]}, effects {self.effects[key]}, "
            f"starts in the journal {permitted[key]}"
            for key, tool in self.tools.items()
            if tool in UNSAFE_TOOLS and max(self.begun[key], self.effects[key]) > permitted[key]
        ]


class Checker:
    """`check` a run; what is wrong goes into the books, and its journal into `keep`."""

    def __init__(self, books: Books, store: JetStreamStore, keep: Path) -> None:
        self._books = books
        self._store = store
        self._keep = keep
        self.permitted: dict[str, Counter[str]] = {}
        """By run and key: how often each write was started by the journal."""

    async def can_reopen(self, book: Book) -> bool:
        fold = Fold()
        for entry in (await self._store.load(RunId(book.plan.run))).entries:
            fold.apply(entry)
        return fold.can_reopen

    async def check(self, book: Book) -> None:
        entries = (await self._store.load(RunId(book.plan.run))).entries
        before = len(self._books.wrong)
        found = Examined(book, entries, Outside(book.plan.run))
        self.permitted[book.plan.run] = found.permitted
        self._books.counts["takeovers"] += found.takeovers
        self._books.counts["records"] += len(entries) - book.records
        book.records = len(entries)
        for what, text in found.wrong:
            self._books.violation(book.plan.run, what, text)
        if len(self._books.wrong) > before:
            self.export(book.plan.run, entries)
        if time.monotonic() - book.begun > SLOW_S:
            self._books.counts[f"runs that took over {SLOW_S:g} s"] += 1
            self.export(book.plan.run, entries, "slow")

    def export(self, run: str, entries: Sequence[Entry], why: str = "violations") -> None:
        """The journal as it is stored, and the ledger beside it."""
        folder = self._keep / why
        folder.mkdir(parents=True, exist_ok=True)
        raw = b"".join(entry.raw + b"\n" for entry in entries)
        (folder / f"{run}.jsonl").write_bytes(raw)
        lines = "".join(json.dumps(line) + "\n" for line in ledger_of(run).lines())
        (folder / f"{run}.ledger").write_text(lines)


class Examined:
    """One look at one run. `wrong`: a word and a text each."""

    def __init__(self, book: Book, entries: Sequence[Entry], outside: Outside) -> None:
        self.book = book
        self.outside = outside
        self.records = [entry.record for entry in entries]
        self.wrong: list[tuple[str, str]] = []
        self.permitted: Counter[str] = Counter()
        self.takeovers = 0
        for one in audit(RunId(book.plan.run), entries):
            self._say("audit", f"record {one.n}: {one.rule}: {one.text}")
        self._follow(entries)
        self._start_is_whose()
        self._talk()
        for line in outside.too_often(self.permitted):
            self._say("a write too often", line)
        self._results()
        self._end()

    def _say(self, what: str, text: str) -> None:
        self.wrong.append((what, text))

    def _follow(self, entries: Sequence[Entry]) -> None:
        fold = Fold()
        for entry in entries:
            held = fold.claim is not None
            fold.apply(entry)
            match entry.record:
                case Claim():
                    self.takeovers += held
                case StepStarted(replay="unsafe", key=key):
                    self.permitted[key] += 1
                case _:
                    pass
        self.fold = fold

    def _start_is_whose(self) -> None:
        first = self.records[0]
        assert isinstance(first, RunStarted)
        if (first.agent, first.input) != (self.book.plan.agent, self.book.plan.input):
            self._say("another start", f"the journal began with {first.agent} {first.input}")

    def _talk(self) -> None:
        """Each request once; nothing placed that was withdrawn, or twice."""
        book, seen = self.book, Counter[tuple[str, str]]()
        book.heard, book.withdrawn, book.placed = [], set(), []
        for record in self.records:
            match record:
                case Signal(n=n, name=name, request_id=request, payload=payload):
                    seen[(name, request)] += 1
                    book.heard.append(Heard(n, name, request, payload))
                case Input(n=n, request_id=request, content=content, mode=mode):
                    seen[("input", request)] += 1
                    said = {"content": content, "mode": mode}
                    book.heard.append(Heard(n, "input", request, said))
                case InputWithdrawn(request_id=request):
                    book.withdrawn.add(request)
                case InputPlaced(request_id=request):
                    book.placed.append(request)
                case _:
                    pass
        for (name, request), times in seen.items():
            if times > 1:
                self._say("a request twice", f"{name} {request} stands {times} times")
        placed = Counter(book.placed)
        for request, times in placed.items():
            if times > 1 or request in book.withdrawn:
                self._say("an input placed wrongly", f"{request}: {times} times")

    def _results(self) -> None:
        by_hand = [
            record.payload
            for record in self.records
            if isinstance(record, Signal) and record.name == "reconcile"
        ]
        starts: dict[str, StepStarted] = {}
        for record in self.records:  # a handler's positions are used again by later attempts
            if isinstance(record, StepStarted):
                starts[record.step] = record
            elif isinstance(record, StepCompleted) and record.step in starts:
                self._result(record, starts[record.step], by_hand)

    def _result(
        self, record: StepCompleted, start: StepStarted, by_hand: list[dict[str, Any]]
    ) -> None:
        if start.kind == "model" or start.tool == SPAWN or record.result is UNSET:
            if record.error is not UNSET and record.via == "run" and start.kind == "tool":
                self._say("a result from nowhere", f"record {record.n}: {record.error}")
            return
        given: Any = start.input
        if record.via == "reconcile":
            if not any(
                said["step"] == record.step and said.get("result") == record.result
                for said in by_hand
            ):
                self._say("a result from nowhere", f"record {record.n}: nobody said so")
        elif record.result != result_of(start.tool, given["number"]):
            self._say("another result", f"record {record.n}: {record.result}")
        elif not self.outside.effects[start.key]:
            self._say("a result without an effect", f"record {record.n}, key {start.key}")

    # ---- how it ended -------------------------------------------------------------------------

    def _end(self) -> None:
        status = self.fold.status()
        match status:
            case "completed":
                self._answer()
            case "cancelled":
                if not self.book.parent and not any(
                    one.name == "cancel" for one in self.book.heard
                ):
                    self._say("cancelled by nobody", "no cancel stands in the journal")
            case "failed":
                end: Any = self.fold.end
                if end.reason not in FAILS:
                    self._say("failed", f"{end.reason}: {end.detail}")
            case _:
                self._say("no end", f"the journal says {status}")

    def _answer(self) -> None:
        end = self.records[-1]
        assert isinstance(end, RunCompleted)
        answer: Any = final_message(end.message).content
        plan = self.book.plan
        if plan.agent == "desk":
            answer = json.loads(answer)
        elif plan.agent == "small":
            answer = {"told": [answer], "heard": []}
        calls = calls_of(plan.agent, plan.input)
        if len(answer["told"]) != len(calls):
            self._say("another answer", f"{len(answer['told'])} of {len(calls)} results: {answer}")
            return
        for (tool, number, _), told in zip(calls, answer["told"], strict=True):
            expected = result_of("pay" if tool == "child" else tool, number)
            if told != expected and not self._explained(told, child=tool == "child"):
                self._say("another answer", f"{tool} {number}: {told}, and the journal has no why")
        placed = [one for one in self.book.heard if one.request in self.book.placed]
        contents = sorted(one.payload["content"] for one in placed if one.name == "input")
        if sorted(answer["heard"]) != contents:
            self._say("another answer", f"heard {answer['heard']}, placed {contents}")

    def _explained(self, told: Any, *, child: bool) -> bool:
        """Whether the journal says why it is not what the call comes to."""
        completed = [one for one in self.records if isinstance(one, StepCompleted)]
        if not isinstance(told, dict):
            return False
        if child:
            return "error" in told or "interrupted" in told or "by hand" in told
        if "by hand" in told:
            return any(one.via == "reconcile" and one.result == told for one in completed)
        text = json.dumps(told)
        if "interrupted" in text:
            return any(one.interrupted is not UNSET for one in completed)
        return "error" in told and any(
            one.error is not UNSET and one.via in REFUSALS for one in completed
        )

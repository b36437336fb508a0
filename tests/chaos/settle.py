"""The last look, once all is quiet: nothing acknowledged is lost, nothing left over, all well."""

from __future__ import annotations

import base64
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import httpx
from cases.zygote import Zygote
from chaos.books import Book, Books, Told
from chaos.check import Checker, Outside
from chaos.plans import Plan
from chaos.processes import Slot, until
from chaos.servers import api
from kit.bridge_process import bearer

from journal import doors
from journal.ids import RunId, from_subject_token
from journal.records import RunStarted
from journal.stores.jetstream import JetStreamStore

PAGE = 100_000
CHECK_S = 900.0


class Settling:
    """Each part says what is wrong to the books."""

    def __init__(
        self, books: Books, checker: Checker, store: JetStreamStore, plain: Any, shards: int
    ) -> None:
        self._shards = shards
        self._books = books
        self._checker = checker
        self._store = store
        self._plain = plain
        self._rejected: dict[str, list[str]] = defaultdict(list)

    async def left(self, stream: str) -> int:
        info = await api(self._plain, f"$JS.API.STREAM.INFO.RUNFOLD_{stream}")
        return int(info["state"]["messages"]) if "state" in info else -1

    async def subjects(self, stream: str, filter: str) -> dict[str, int]:
        """How many messages each subject has."""
        found: dict[str, int] = {}
        while True:
            request = {"subjects_filter": filter, "offset": len(found)}
            info = await api(self._plain, f"$JS.API.STREAM.INFO.RUNFOLD_{stream}", request)
            if "state" not in info:
                continue
            page = info["state"].get("subjects") or {}
            found |= page
            if len(page) < PAGE:
                return found

    # ---- runs ---------------------------------------------------------------------------------

    async def runs(self) -> None:
        """All are known, ended, and as they were when they were checked."""
        counts: dict[RunId, int] = {}
        for shard in range(self._shards):
            counted = await self.subjects(f"JOURNAL_{shard}", f"runfold.journal.{shard}.>")
            for subject, n in counted.items():
                counts[from_subject_token(subject.rpartition(".")[2])] = n
        for run in counts.keys() - self._books.runs.keys():
            await self._unheard(run)
        for run, book in self._books.runs.items():
            if RunId(run) not in counts:
                if book.acknowledged:
                    self._books.violation(run, "acknowledged start is lost", "no journal")
                continue
            if not book.ended:
                await self._unfinished(book)
            elif counts[RunId(run)] != book.records:
                await self._checker.check(book)
            if run in self._checker.permitted:
                for line in Outside(run).too_often(self._checker.permitted[run]):
                    self._books.violation(run, "a write too often", line)

    async def _unheard(self, run: RunId) -> None:
        """A child whose start we did not hear, being cut off ourselves just then."""
        first = (await self._store.load(run)).entries[0].record
        assert isinstance(first, RunStarted)
        if first.parent not in self._books.runs:
            self._books.violation(run, "a run nobody started", f"by {first.by}")
            return
        plan = Plan(run, first.agent, first.input, "spawn", 0, None)  # type: ignore[arg-type]
        book = self._books.begin(plan, time.monotonic(), parent=first.parent)
        await self._checker.check(book)
        book.ended = (await doors.state(self._store, run)).status

    async def _unfinished(self, book: Book) -> None:
        run = book.plan.run
        loaded = await self._store.load(RunId(run))
        self._checker.export(run, loaded.entries)
        self._books.violation(run, "no end", f"it is {book.status} after {len(loaded.entries)}")

    # ---- what was acknowledged ----------------------------------------------------------------

    async def acknowledged(self) -> None:
        await self._read_rejected()
        for book in self._books.runs.values():
            by_request = {(one.name, one.request): one for one in book.heard}
            by_n = {one.n: one for one in book.heard}
            for told in book.told:
                problem = self._lost(told, book, by_request, by_n)
                if problem:
                    self._books.violation(book.plan.run, "acknowledged signal is lost", problem)
                else:
                    self._books.counts["acknowledged signals found"] += 1
            for request in book.withdrawals:
                if request not in book.withdrawn or request in book.placed:
                    text = f"the withdrawal of {request} is not there"
                    self._books.violation(book.plan.run, "acknowledged withdrawal is lost", text)

    def _lost(
        self, told: Told, book: Book, by_request: dict[Any, Any], by_n: dict[int, Any]
    ) -> str:
        found = by_request.get((told.name, told.request))
        if found is not None:
            same = all(found.payload.get(key) == value for key, value in told.payload.items())
            return "" if same else f"{told} stands as {found}"
        same_said = [one for one in book.heard if _means(told, one)]
        if told.n is not None:
            one = by_n.get(told.n)
            good = told.result == "repeated" and one is not None and one in same_said
            return "" if good else f"{told}: record {told.n} is {one}"
        if told.result == "kept by the stream" and (
            same_said or any(told.request in text for text in self._rejected[told.run])
        ):
            return ""
        return f"{told} is neither in the journal nor in REJECTED"

    async def _read_rejected(self) -> None:
        reasons: Counter[str] = Counter()
        state: dict[str, int] = {}
        while not state:
            info = await api(self._plain, "$JS.API.STREAM.INFO.RUNFOLD_REJECTED")
            state = info.get("state", {})
        for sequence in range(max(state["first_seq"], 1), state["last_seq"] + 1):
            stored = await self._stored("REJECTED", sequence)
            if stored is None:
                continue
            refusal = json.loads(stored)
            reasons[refusal["code"]] += 1
            self._rejected[refusal["run"] or ""].append(refusal["payload"])
            if not refusal["code"] or not refusal["reason"]:
                self._books.violation(refusal["run"], "rejected without a reason", str(refusal))
        for code, count in reasons.items():
            self._books.counts[f"rejected: {code}"] += count

    async def _stored(self, stream: str, sequence: int) -> bytes | None:
        for _ in range(10):
            subject = f"$JS.API.STREAM.MSG.GET.RUNFOLD_{stream}"
            answer = await api(self._plain, subject, {"seq": sequence})
            if "message" in answer:
                return base64.b64decode(answer["message"].get("data", ""))
            if answer.get("error", {}).get("code") == 404:
                return None
        raise AssertionError(f"record {sequence} of {stream} can't be read")

    async def lost_acks(self, lost: Sequence[tuple[str, int]]) -> None:
        """What the server said that it has, and the proxy kept to itself, is there."""
        for stream, sequence in lost:
            if await self._stored(stream.removeprefix("RUNFOLD_"), sequence) is None:
                what = f"sequence {sequence} of {stream}"
                self._books.violation("", "a stored record is gone", what)
            else:
                self._books.counts["lost acks settled"] += 1

    async def audited(self, zygote: Zygote, url: str) -> None:
        """`runfold check --all`, as an operator runs it."""
        child = zygote.cli("check", "--all", "--store", url)
        if not await until(child.ended.is_set, CHECK_S):
            child.kill()
        done = child.wait()
        if done.code != 0:
            text = f"exit {done.code}: {(done.out + done.err)[-1000:]}"
            self._books.violation("", "runfold check --all", text)

    # ---- all is well --------------------------------------------------------------------------

    async def healthy(self, slots: Sequence[Slot]) -> list[str]:
        """What of the processes is not green."""
        found: list[str] = []
        async with httpx.AsyncClient(headers=bearer("rita"), timeout=5) as http:
            for slot in slots:
                for path in ("/healthz", "/readyz"):
                    try:
                        answer = await http.get(f"{slot.health_url}{path}")
                    except (httpx.HTTPError, httpx.InvalidURL) as error:
                        found.append(f"{slot.name}{path}: {type(error).__name__}")
                        continue
                    if answer.status_code != 200:
                        found.append(f"{slot.name}{path}: {answer.status_code} {answer.text[:200]}")
        return found


def _means(told: Told, heard: Any) -> bool:
    """Whether that record says what was told, for somebody else's request."""
    if told.name != heard.name:
        return False
    match told.name:
        case "approve" | "reject":
            return told.payload["marker"] == heard.payload["marker"]
        case "reconcile":
            keys = ("step", "outcome", "result", "start")
            return all(told.payload.get(key) == heard.payload.get(key) for key in keys)
        case "cancel" | "resume":
            return True
        case _:
            return False

"""People: they decide what runs wait for, send inputs, take some back, cancel, and sometimes say
the same twice, or nonsense. What was acknowledged to them is kept in the books."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from chaos.agents import ledger_of
from chaos.books import Book, Books, Told
from chaos.doors import DOORS, Answer, Doors

from journal.views import AwaitingApproval, Indeterminate, RunState, Waiting

THINKS_S = (0.05, 1.5)
TWICE, CONTRADICTED = 0.25, 0.08
RESUMES_MAX = 3


class People:
    """`attend` to a run that waits; `chat` with those that run."""

    def __init__(self, books: Books, doors: Doors, rng: random.Random, *, retries: bool) -> None:
        self._retries = retries
        self._books = books
        self._doors = doors
        self._rng = rng
        self._number = 0

    # ---- what waits for somebody --------------------------------------------------------------

    async def attend(self, book: Book, state: RunState) -> None:
        """Decide all that the run waits for; what was said before is said again, the same."""
        match state.outcome:
            case Indeterminate(unknown=unknown, pending=pending):
                for one in unknown:
                    await self._reconcile(book, one.step, one.start, one.key)
                for ask in pending:
                    await self._decide(book, ask.marker)
            case AwaitingApproval(pending=pending):
                for ask in pending:
                    await self._decide(book, ask.marker)
            case Waiting(on=waits):
                words = {wait.what for wait in waits}
                if "operator" in words:
                    await self._resume(book, state)
                if "input" in words and self._rng.random() < 0.7:
                    await self.send(book)
            case _:
                pass

    async def resume_failed(self, book: Book) -> bool:
        """Give a run that failed another try; whether it was asked for."""
        if book.resumed >= RESUMES_MAX:
            return False
        book.resumed += 1
        await self._say(book, "resume", {"reason": "again"}, self._request("resume"))
        return True

    async def _decide(self, book: Book, marker: str) -> None:
        before = book.decided.get(marker)
        if before is None:
            await asyncio.sleep(self._rng.uniform(*THINKS_S))
            word = "reject" if self._rng.random() < 0.2 else "approve"
            extra = {"reason": "no"} if word == "reject" else {}
            before = {"name": word, "payload": {"marker": marker} | extra}
            before["request"] = self._request(word)
            book.decided[marker] = before
            if self._rng.random() < CONTRADICTED:
                other = "approve" if word == "reject" else "reject"
                contrary = self._say(book, other, {"marker": marker}, self._request(other))
                await asyncio.gather(contrary, self._twice(book, before))
                return
        await self._twice(book, before)

    async def _reconcile(self, book: Book, step: str, start: int, key: str) -> None:
        """As the outside system shows it, mostly: who says `retry` although it happened gets two
        effects for two permits."""
        before = book.decided.get((step, start))
        if before is None:
            self._books.counts["unknown writes shown to people"] += 1
            await asyncio.sleep(self._rng.uniform(*THINKS_S))
            effects = [
                said
                for _, kind, said in ledger_of(book.plan.run).lines()
                if kind == "effect" and said[0] == key
            ]
            done = self._rng.random() < (0.9 if effects else 0.2) or not self._retries
            payload: dict[str, Any] = {"step": step, "start": start}
            if done:
                result = effects[0][2] if effects else {"by hand": step}
                payload |= {"outcome": "done", "result": result}
            else:
                payload |= {"outcome": "retry"}
            before = {"name": "reconcile", "payload": payload}
            before["request"] = self._request("reconcile")
            book.decided[(step, start)] = before
        await self._twice(book, before)

    async def _resume(self, book: Book, state: RunState) -> None:
        before = book.decided.setdefault(
            ("resume", state.records),
            {"name": "resume", "payload": {}, "request": self._request("resume")},
        )
        await self._twice(book, before)

    # ---- talk ---------------------------------------------------------------------------------

    async def chat(self) -> None:
        """Something to some run, now."""
        active = sorted(self._books.active)
        if not active:
            return
        book = self._books.runs[self._rng.choice(active)]
        if not book.acknowledged:
            return
        lot = self._rng.random()
        if lot < 0.6:
            await self.send(book)
        elif lot < 0.75 and not book.parent:
            book.cancel_asked = True
            await self._say(book, "cancel", {"reason": "never mind"}, self._request("cancel"))
        else:
            marker = f"{book.plan.run}/tool/1/0/pay@1.{self._rng.randrange(16**16):016x}"
            bad = self._rng.choice(
                (
                    ("approve", {"marker": marker}),
                    ("approve", {"marker": "nonsense"}),
                    ("reconcile", {"step": "tool/9/9/pay", "outcome": "done", "result": 1}),
                    ("cancel", {"why": "an unknown key"}),
                    ("dance", {}),
                )
            )
            # some of it is kept for a gate that never comes; that is acknowledged, too
            await self._say(book, *bad, self._request("bad"))

    async def send(self, book: Book) -> None:
        """An input, perhaps twice, perhaps taken back."""
        request = self._request("input")
        mode = self._rng.choice(("steer", "follow_up"))
        said = {"name": "input", "payload": {"content": request, "mode": mode}, "request": request}
        answers = await self._twice(book, said)
        if self._rng.random() < 0.25 and any(not one.code for one in answers):
            taken_back = await self._doors.withdraw(self._door(), book.plan.run, request)
            self._books.counts["withdrawals"] += 1
            if not taken_back.code:
                book.withdrawals.append(request)

    async def _twice(self, book: Book, said: dict[str, Any]) -> list[Answer]:
        """Once, or at once by two doors with one request id."""
        times = 2 if self._rng.random() < TWICE else 1
        return await asyncio.gather(
            *(self._say(book, said["name"], said["payload"], said["request"]) for _ in range(times))
        )

    async def _say(self, book: Book, name: str, payload: dict[str, Any], request: str) -> Answer:
        door = self._door()
        answer = await self._doors.signal(door, book.plan.run, name, payload, request)
        self._books.counts[f"said by {door.split()[0]}"] += 1
        if not answer.code:
            told = Told(book.plan.run, name, request, payload, door, answer.n, answer.result)
            book.told.append(told)
        elif answer.code != "raw":
            self._books.refused[f"{name}: {answer.code}"] += 1
        return answer

    def _door(self) -> str:
        return self._rng.choice(DOORS)

    def _request(self, word: str) -> str:
        self._number += 1
        return f"{word}-{self._number:06}"

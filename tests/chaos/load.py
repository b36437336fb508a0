"""Starts runs through all doors, one after another, and asks again until each is acknowledged."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time

import httpx
from cases.zygote import Zygote
from chaos.books import Book, Books
from chaos.plans import Plan, draw
from chaos.processes import BridgeSlot, until
from kit.bridge_process import bearer

from journal.errors import RunfoldError
from journal.fleet import Fleet
from journal.stores.jetstream import JetStreamStore

DOORS = {"http": 4.0, "library": 4.0, "process": 1.0}
QUICK_DOORS = {"http": 1.0, "library": 1.0}
HTTP_S = 8.0
AGAIN_S = (0.2, 1.5)
PROCESS_S = 20.0
AT_ONCE_MAX = 150
"""More runs than this at work: starting waits until some have ended."""


class Load:
    """`run` until it is cancelled: about `rate` starts a second."""

    def __init__(
        self,
        books: Books,
        rng: random.Random,
        *,
        rate: float,
        doors: dict[str, float],
        agents: tuple[str, ...],
        without: frozenset[str],
        bridges: list[BridgeSlot],
        stores: list[JetStreamStore],
        zygote: Zygote,
        url: str,
        ledgers: str,
        ack_wait_s: float,
    ) -> None:
        self._books = books
        self._rng = rng
        self._rate = rate
        self._doors = doors
        self._agents = agents
        self._without = without
        self._bridges = bridges
        self._fleets = [Fleet(store, by="soak") for store in stores]
        self._zygote = zygote
        self._url = url
        self._ledgers = ledgers
        self._ack_wait_s = ack_wait_s
        self._http = httpx.AsyncClient(headers=bearer("alice"), timeout=HTTP_S)
        self.starting: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(self._rng.expovariate(self._rate))
            if len(self._books.active) >= AT_ONCE_MAX:
                self._books.counts["starts held back"] += 1
                await asyncio.sleep(0.5)
                continue
            number += 1
            plan = draw(self._rng, number, self._doors, agents=self._agents, without=self._without)
            book = self._books.begin(plan, time.monotonic())
            task = asyncio.create_task(self._start(plan, book))
            self.starting.add(task)
            task.add_done_callback(self.starting.discard)

    async def close(self) -> None:
        """Once all that was begun is acknowledged."""
        if self.starting:
            await asyncio.wait(self.starting)
        await self._http.aclose()

    async def _start(self, plan: Plan, book: Book) -> None:
        """Until somebody says that it has started; what was not acknowledged is asked again, with
        the same id and input, by any door."""
        door = plan.door
        rng = random.Random(f"{plan.run}")
        while not book.acknowledged:
            try:
                match door:
                    case "http":
                        await self._by_http(plan, book, rng)
                    case "library":
                        fleet = rng.choice(self._fleets)
                        await fleet.start(
                            plan.agent,
                            plan.input,
                            run_id=plan.run,
                            priority=plan.priority,
                            key=plan.key,
                        )
                        book.acknowledged = True
                    case _:
                        await self._by_process(plan, book, rng)
            except RunfoldError as error:
                self._books.refused[f"start by {door}: {error.code}"] += 1
            except httpx.HTTPError as error:
                self._books.refused[f"start by {door}: {type(error).__name__}"] += 1
            else:
                if book.acknowledged:
                    break
            door = rng.choice(("http", "library")) if plan.key is None else "library"
            await asyncio.sleep(rng.uniform(*AGAIN_S))
        self._books.counts[f"started by {plan.door}"] += 1
        if rng.random() < 0.05:  # somebody asks twice
            again = await self._again(plan)
            if again is not None and again:
                self._books.violation(plan.run, "started twice", "a repeat says it created the run")

    async def _again(self, plan: Plan) -> bool | None:
        try:
            told = await self._fleets[0].start(
                plan.agent, plan.input, run_id=plan.run, priority=plan.priority, key=plan.key
            )
        except RunfoldError:
            return None
        return told.created

    async def _by_http(self, plan: Plan, book: Book, rng: random.Random) -> None:
        bridge = rng.choice(self._bridges)
        body = {
            "agent": plan.agent,
            "input": plan.input,
            "run": plan.run,
            "priority": plan.priority,
        }
        answer = await self._http.post(f"{bridge.health_url}/runs", json=body)
        if answer.status_code in (200, 201):
            book.acknowledged = True
        elif answer.status_code >= 500 or answer.status_code == 429:
            self._books.refused[f"start by http: {answer.status_code}"] += 1
        else:
            self._books.violation(plan.run, "start refused", f"{answer.status_code} {answer.text}")
            book.acknowledged = True

    async def _by_process(self, plan: Plan, book: Book, rng: random.Random) -> None:
        """`run()` in a process that may be killed; then it is started again by another door."""
        child = self._zygote.call(
            "chaos.driver:drive",
            url=self._url,
            run_id=plan.run,
            agent=plan.agent,
            given=plan.input,
            ledgers=self._ledgers,
            ack_wait_s=self._ack_wait_s,
        )
        limit_s = rng.uniform(0.05, 1.5) if rng.random() < 0.6 else PROCESS_S
        await until(child.ended.is_set, limit_s)
        if not child.ended.is_set():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                await asyncio.to_thread(child.kill, signal.SIGKILL)
            await asyncio.to_thread(child.ended.wait, PROCESS_S)
            self._books.counts["run() killed"] += 1
            return
        done = child.wait()
        said = done.out.strip().strip('"')
        self._books.counts[f"run() {said or f'exit {done.code}'}"] += 1
        if done.code != 0:
            self._books.violation(plan.run, "run() failed", done.err[-400:])
        if said.startswith("ended"):
            book.acknowledged = True

"""People of the simulated world: they start runs, decide what waits for them, and say more than
they are asked. Each saying is repeated with its request id until it is acknowledged."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import msgspec
from kit.simulated.client import PROCESS as CLIENT_OF
from msgspec import Struct

from bridge.problems import STATUS_BY_CODE
from journal.errors import InputMismatch, RunfoldError, StoreUnavailable
from journal.fleet import Fleet
from journal.inbox import FOR_PEOPLE, InboxItem
from journal.stores.jetstream import JetStreamStore
from journal.stores.nats_waiting import Reply

from .loop import Process, Task
from .plans import DOORS, Poke, RunPlan

if TYPE_CHECKING:
    from .world import World

LOOK_S: Final = 0.4
"""How often people look whether something waits for them."""

AGAIN_S: Final = 0.3
UNDECIDED_S: Final = 8.0
"""What still waits so long after it was decided is decided again."""


class Said(Struct, kw_only=True):
    """`answer`: `kept` by the SIGNALS stream; `applied`, `kept`, `repeated`, or the code of the
    refusal; "" while nothing was acknowledged."""

    run: str
    name: str
    payload: dict[str, Any]
    request_id: str
    door: str
    answer: str = ""


class Person:
    """All of them, in one process. A saying that is on its way keeps the world from its rest."""

    role = "person"

    def __init__(self, world: World) -> None:
        self.world = world
        self.process = Process("person")
        self.up = False
        self.main: Task
        self.started: set[str] = set()
        self._decided: dict[tuple[Any, ...], float] = {}
        self._saying = 0
        self._todo = len(world.plan.runs) + sum(len(run.pokes) for run in world.plan.runs)
        self._numbers = 0
        self._store: JetStreamStore
        self._fleet: Fleet

    def start(self) -> None:
        self.up = True
        self.main = self.process.run(self._live())
        self.main.add_done_callback(self._gone, context=self.world.context)

    def _gone(self, main: Task) -> None:
        self.up = False
        if not main.cancelled() and (error := main.exception()) is not None:
            self.world.loop.failures.append(f"people ended with {error!r}")

    def finish(self) -> None:
        self.main.cancel()

    def busy(self) -> str:
        if self._todo or self._saying:
            return f"people have {self._todo} things to do, {self._saying} to say"
        return ""

    # ---- their life -----------------------------------------------------------------------------

    async def _live(self) -> None:
        CLIENT_OF.set(self.process.name)
        self._store = JetStreamStore(self.world.server.url)
        while True:
            try:
                await self._store.__aenter__()
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)
            else:
                break
        try:
            self._fleet = Fleet(self._store, by="person")
            async with asyncio.TaskGroup() as group:
                for run in self.world.plan.runs:
                    group.create_task(self._bring_up(run))
                while True:
                    await asyncio.sleep(LOOK_S)
                    await self._look(group)
        finally:
            await self._store.__aexit__(None, None, None)

    async def _bring_up(self, run: RunPlan) -> None:
        """Start it, and poke it when it is time."""
        await asyncio.sleep(run.at_s + (4.0 if run.alone else 0.0))
        await self._start(run)
        begun = self.world.loop.time()
        self._todo -= 1
        for poke in run.pokes:
            await asyncio.sleep(max(0.0, begun + poke.at_s - self.world.loop.time()))
            await self._poke(run, poke)
            self._todo -= 1

    async def _start(self, run: RunPlan) -> None:
        while True:
            try:
                await self._fleet.start(
                    run.agent, run.agent, run_id=run.run, key=run.key, priority=run.priority
                )
            except StoreUnavailable:
                await asyncio.sleep(AGAIN_S)
            except InputMismatch:
                if not self.world.purged(run.run):
                    raise
                return
            else:
                self.started.add(run.run)
                self.world.trace.note("started", run.run)
                return

    async def _poke(self, run: RunPlan, poke: Poke) -> None:
        number = self._number()
        match poke.what:
            case "again":
                await self._start(run)
            case "cancel":
                await self._say(run.run, "cancel", {"reason": number}, poke.door)
            case "resume":
                await self._say(run.run, "resume", {}, poke.door)
            case "early":
                marker = f"{run.run}/tool/1/0/pay@1.{number:0>16}"
                await self._say(run.run, "approve", {"marker": marker}, poke.door)
            case "nonsense":
                await self._say(run.run, "approve", {"marker": 5}, poke.door)
            case _:
                said = await self._send(run.run, number, poke.door)
                if poke.what == "withdraw" and said.answer in ("applied", "kept"):
                    await self._withdraw(run.run, said)

    # ---- deciding -------------------------------------------------------------------------------

    async def _look(self, group: asyncio.TaskGroup) -> None:
        waiting = [run for run in self.world.runs() if self.world.status(run) in FOR_PEOPLE]
        if not waiting:
            return
        try:
            items = await self._fleet.inbox()
        except StoreUnavailable:
            return
        now = self.world.loop.time()
        for item in items:
            about = (item.kind, item.run, item.marker, item.step, item.start)
            if now - self._decided.get(about, -UNDECIDED_S) >= UNDECIDED_S:
                self._decided[about] = now
                group.create_task(self._decide(item))

    async def _decide(self, item: InboxItem) -> None:
        rng = self.world.rng
        self._saying += 1
        await self.world.think()
        match item.kind:
            case "approval":
                decisions = [("approve" if rng.random() < 0.75 else "reject", {})]
                if rng.random() < 0.15:  # somebody else has another opinion
                    decisions.append(("reject", {"reason": "no"}))
                for name, more in decisions:
                    payload = {"marker": item.marker, **more}
                    await self._say(item.run, name, payload, rng.choice(DOORS))
            case "reconcile":
                await self._reconcile(item)
            case "operator":
                await self._say(item.run, "resume", {}, rng.choice(DOORS))
        self._saying -= 1

    async def _reconcile(self, item: InboxItem) -> None:
        """By what can be seen outside."""
        found = [
            effect
            for effect in self.world.effects
            if (effect.run, effect.step) == (item.run, item.step)
        ]
        payload: dict[str, Any] = {"step": item.step, "start": item.start}
        if found:
            payload |= {"outcome": "done", "result": f"by hand: {found[-1].text}"}
        else:
            payload |= {"outcome": "retry"}
        await self._say(item.run, "reconcile", payload, self.world.rng.choice(DOORS))

    # ---- saying ---------------------------------------------------------------------------------

    def _number(self) -> str:
        self._numbers += 1
        return str(self._numbers)

    async def _say(self, run: str, name: str, payload: dict[str, Any], door: str) -> Said:
        said = Said(run=run, name=name, payload=payload, request_id=f"p{self._number()}", door=door)
        return await self._until_heard(said)

    async def _send(self, run: str, content: str, door: str) -> Said:
        mode = self.world.rng.choice(("steer", "steer", "follow_up"))
        return await self._say(run, "input", {"content": content, "mode": mode}, door)

    async def _until_heard(self, said: Said) -> Said:
        self.world.said.append(said)
        self._saying += 1
        while not said.answer:
            try:
                said.answer = await self._try(said)
            except RunfoldError as error:
                said.answer = self._refused(error.code)
            if not said.answer:
                await asyncio.sleep(AGAIN_S)
        self._saying -= 1
        self.world.trace.note("said", said.run, said.name, said.request_id, said.door, said.answer)
        return said

    def _refused(self, code: str) -> str:
        """The code; "" where it says: again."""
        if code == "internal":
            self.world.loop.failures.append("a bridge answered that it has a bug")
        return "" if STATUS_BY_CODE.get(code, 500) >= 500 else code

    async def _try(self, said: Said) -> str:
        """One try; what was acknowledged, or ""."""
        payload = {**said.payload, "request_id": said.request_id}
        match said.door:
            case "library" if said.name == "input":
                found = await self._fleet.send(
                    said.run,
                    said.payload["content"],
                    mode=said.payload["mode"],
                    request_id=said.request_id,
                )
                return "applied" if found.created else "repeated"
            case "library":
                receipt = await self._fleet.signal(
                    said.run, said.name, said.payload, request_id=said.request_id
                )
                return receipt.result
            case "stream":
                answer = await self._ask(f"signal.{said.run}.{said.name}", payload)
                return "kept" if answer is not None and answer.get("seq") else ""
            case _ if said.name == "input":
                answer = await self._ask("api.inputs.submit", {"run": said.run, **payload})
            case _:
                answer = await self._ask(f"api.signals.{said.run}.{said.name}", payload)
        if answer is None:
            return ""
        if "error" in answer:
            return self._refused(answer["error"]["code"])
        return answer.get("result") or ("applied" if answer.get("created", True) else "repeated")

    async def _withdraw(self, run: str, sent: Said) -> None:
        said = Said(
            run=run, name="withdraw", payload={}, request_id=sent.request_id, door=sent.door
        )
        self.world.said.append(said)
        while not said.answer:
            try:
                if said.door == "api":
                    request = {"run": run, "request_id": said.request_id}
                    answer = await self._ask("api.inputs.withdraw", request)
                    if answer is not None and "error" in answer:
                        said.answer = self._refused(answer["error"]["code"])
                    elif answer is not None:
                        said.answer = answer["status"]
                else:
                    found = await self._fleet.withdraw(run, said.request_id)
                    said.answer = found.status
            except RunfoldError as error:
                said.answer = self._refused(error.code)
            if not said.answer:
                await asyncio.sleep(AGAIN_S)
        self.world.trace.note("said", run, "withdraw", said.request_id, said.answer)

    async def _ask(self, subject: str, payload: dict[str, Any]) -> Any:
        """A request's answer; None without one."""
        reply = await self._store._connection.request(
            f"runfold.{subject}", msgspec.json.encode(payload), timeout_s=4.0
        )
        return msgspec.json.decode(reply.data) if isinstance(reply, Reply) else None

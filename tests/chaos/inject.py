"""Carries the scheduled faults out, and heals them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from chaos.faults import Fault
from chaos.processes import Slot
from chaos.servers import Servers, api, fill
from chaos.wires import Wires

DELAY_S = 0.4
LATER_S = 4.0


class Injector:
    """`run` the schedule. What can't be done at its time (the target is down already) is counted as
    skipped."""

    def __init__(
        self,
        servers: Servers,
        workers: Sequence[Slot],
        remotes: Sequence[Slot],
        bridges: Sequence[Slot],
        wires: Sequence[Wires],
        plain: Any,
        tasks: deque[tuple[str, bytes]],
        log: Callable[[str], None],
        shards: int,
    ) -> None:
        self._streams = [*(f"JOURNAL_{shard}" for shard in range(shards)), "TASKS", "SIGNALS"]
        self._servers = servers
        self._slots = {"worker": workers, "remote": remotes, "bridge": bridges}
        self._wires = wires
        self._plain = plain
        self._tasks = tasks
        self._log = log
        self._servers_busy: set[int] = set()
        self.done: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()

    async def run(self, faults: Sequence[Fault]) -> None:
        """Returns when the last one is healed."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, begun + fault.at - loop.time()))
                group.create_task(self._inject(fault))

    async def _inject(self, fault: Fault) -> None:
        what = await self._carry_out(fault)
        self._log(f"{'did' if what else 'skipped'} {fault}")
        (self.done if what else self.skipped)[fault.kind] += 1

    async def _carry_out(self, fault: Fault) -> bool:
        match fault.kind.split("_"):
            case ["worker" | "remote" | "bridge" as kind, word]:
                return await self._process(self._slots[kind], word, fault)
            case ["server", word]:
                return await self._server(word, fault)
            case ["disk", _]:
                return await self._disk(fault)
            case ["step", _]:
                return await self._step_down(fault)
            case ["duplicate", _]:
                return await self._duplicate(fault)
            case _:
                return await self._wire(fault)

    # ---- processes ----------------------------------------------------------------------------

    async def _process(self, slots: Sequence[Slot], word: str, fault: Fault) -> bool:
        """Of those that are killed, sometimes several at once."""
        if not slots:
            return False
        count = fault.times if word == "kill" else 1
        chosen = {slots[(fault.target + k) % len(slots)] for k in range(count)}
        hit = await asyncio.gather(*(self._one_process(slot, word, fault) for slot in chosen))
        return any(hit)

    async def _one_process(self, slot: Slot, word: str, fault: Fault) -> bool:
        if slot.busy or not slot.running:
            return False
        slot.busy = True
        slot.pause_s = fault.seconds if word != "stop" else 0.2
        try:
            match word:
                case "kill":
                    return slot.send(signal.SIGKILL)
                case "term":
                    await slot.drain()
                    return True
                case _:
                    if not slot.send(signal.SIGSTOP):
                        return False
                    await asyncio.sleep(fault.seconds)
                    return slot.send(signal.SIGCONT)
        finally:
            slot.busy = False

    # ---- servers ------------------------------------------------------------------------------

    async def _server(self, word: str, fault: Fault) -> bool:
        """One, or in a cluster now and then two of them: then there is no majority."""
        count = len(self._servers.all)
        numbers = {(fault.target + k) % count for k in range(min(max(fault.times - 1, 1), count))}
        if numbers & self._servers_busy:
            return False
        self._servers_busy |= numbers
        try:
            await asyncio.gather(*(self._one_server(number, word, fault) for number in numbers))
        finally:
            self._servers_busy -= numbers
        return True

    async def _one_server(self, number: int, word: str, fault: Fault) -> None:
        server = self._servers.all[number]
        if word == "stop":
            server.pause()
            await asyncio.sleep(fault.seconds)
            server.resume()
            return
        await server.kill()
        await asyncio.sleep(fault.seconds)
        await server.restart()

    async def _disk(self, fault: Fault) -> bool:
        """A server that met a full disk stays so until it is started again, also with space."""
        number = fault.target % len(self._servers.all)
        disk = self._servers.disk_of(number)
        if disk is None or number in self._servers_busy:
            return False
        self._servers_busy.add(number)
        try:
            filler = await asyncio.to_thread(fill, disk)
            await asyncio.sleep(fault.seconds)
            filler.unlink()
            await self._servers.all[number].kill()
            await self._servers.all[number].restart()
        finally:
            self._servers_busy.discard(number)
        return True

    async def _step_down(self, fault: Fault) -> bool:
        """Of a stream, or of a consumer on it."""
        stream = f"RUNFOLD_{self._streams[fault.target % len(self._streams)]}"
        subject = f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}"
        if fault.target % 2:
            names = (await api(self._plain, f"$JS.API.CONSUMER.NAMES.{stream}")).get("consumers")
            if names:
                name = sorted(names)[fault.target % len(names)]
                subject = f"$JS.API.CONSUMER.LEADER.STEPDOWN.{stream}.{name}"
        answer = await api(self._plain, subject)
        return bool(answer.get("success"))

    async def _duplicate(self, fault: Fault) -> bool:
        """A task that was published before is published again, at once or some seconds later."""
        if not self._tasks:
            return False
        subject, data = self._tasks[-1 - fault.target % len(self._tasks)]
        await asyncio.sleep(random.Random(fault.target).uniform(0, LATER_S))
        with contextlib.suppress(Exception):  # no server now: no duplicate
            for _ in range(fault.times):
                await self._plain.publish(subject, data)
            return True
        return False

    # ---- wires --------------------------------------------------------------------------------

    async def _wire(self, fault: Fault) -> bool:
        if not self._wires:
            return False
        wires = self._wires[fault.target % len(self._wires)]
        heal: Callable[[], None]
        match fault.kind.split("_"):
            case ["cut"]:
                wires.cut()
                return True
            case ["drop", _]:
                wires.drop_acks(fault.times)
                return True
            case ["stall", way]:
                wires.stall(way, True)
                heal = _later(wires.stall, way, False)
            case _:
                wires.delay(DELAY_S)
                heal = _later(wires.delay, 0.0)
        await asyncio.sleep(fault.seconds)
        heal()
        return True


def _later(work: Callable[..., None], *args: Any) -> Callable[[], None]:
    return lambda: work(*args)

"""Restate, one node, and a Python service that it calls by HTTP/2; the client asks its ingress.

usage: peer_restate.py w1|w2|w3|w4|w5 default|nofsync [options]

default: its log server syncs, in groups · nofsync: it does not (`rocksdb-disable-wal-fsync`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from keep_alive import Http
from load import INPUT, emit, measure_w1, measure_w5, now, options, signal_summary
from processes import HOST, Child, free_port, lengths, listens

SERVICE = Path(__file__).resolve().parent / "restate_service.py"
BUILD_S = 300.0
REPEATS = 3
INACTIVE_S = "60"  # Restate's own

CONFIG = """\
base-dir = "{folder}/data"
bind-address = "127.0.0.1:{node}"
advertised-address = "http://127.0.0.1:{node}/"
disable-telemetry = true
log-filter = "error"
{extra}
[ingress]
bind-address = "127.0.0.1:{ingress}"
[admin]
bind-address = "127.0.0.1:{admin}"
[log-server]
rocksdb-disable-wal-fsync = {nofsync}
"""
RETRY_SOON = '[default-retry-policy]\ninitial-interval = "10ms"'


class System:
    def __init__(self, folder: Path, server: Child, ports: dict[str, int]) -> None:
        self.folder = folder
        self.server = server
        self.ingress = Http(ports["ingress"])
        self.admin = Http(ports["admin"])
        self.port = ports["service"]

    @asynccontextmanager
    async def service(self, *arguments: str) -> AsyncIterator[Child]:
        """The process that Restate calls; killed at the end of the block."""
        command = [sys.executable, SERVICE, str(self.port), *arguments]
        async with Child(*command) as child:
            await listens(self.port)
            yield child

    async def register(self) -> None:
        body = json.dumps({"uri": f"http://{HOST}:{self.port}/"}).encode()
        for _ in range(100):
            try:
                await self.admin.ask("/deployments", body)
                return
            except RuntimeError:  # it is not ready yet
                await asyncio.sleep(0.2)
        raise RuntimeError("the service can't be registered")

    async def run(self, _: int) -> list[int]:
        return json.loads(await self.ingress.ask("/Bench/ten", json.dumps(INPUT).encode()))

    async def send(self, handler: str, body: int) -> None:
        await self.ingress.ask(f"/Bench/{handler}/send", str(body).encode())

    async def end_all(self) -> None:
        question = {"query": "select id from sys_invocation where status != 'completed'"}
        answer = await self.admin.ask(
            "/query", json.dumps(question).encode(), accept="application/json"
        )
        for row in json.loads(answer)["rows"]:
            await self.admin.ask(f"/invocations/{row['id']}/kill", method="PATCH")


async def w1(on: System, asked: argparse.Namespace) -> None:
    async with on.service() as service:
        await on.register()
        pids = [on.server.pid, service.pid]
        async for found in measure_w1(on.run, lambda: pids, asked, lambda: lengths(on.folder)):
            emit("w1", **found)


async def w2(on: System, asked: argparse.Namespace) -> None:
    """The service is killed in the step behind a long run, and started again. From Restate's
    request to that step; without what it waits before it asks again."""
    for steps in asked.steps:
        async with on.service() as service:
            if steps == asked.steps[0]:
                await on.register()
            begun = time.monotonic()
            await on.send("long", steps)
            await service.line("AT", within_s=BUILD_S)
            built_s = time.monotonic() - begun
        each: list[float] = []
        waits: list[float] = []
        for _ in range(REPEATS):
            started = now()
            async with on.service() as service:
                requested = int((await service.line("REQUEST", within_s=120))[1])
                there = int((await service.line("AT", within_s=200))[1])
            each.append((there - requested) / 1e6)
            waits.append((requested - started) / 1e6)
        emit(
            "w2",
            state="replay",
            steps=steps,
            replay_ms=round(statistics.median(each), 2),
            launch_to_step_ms=round(statistics.median(waits) + statistics.median(each), 2),
            build_s=round(built_s, 1),
        )
        await on.end_all()


async def w3(on: System, asked: argparse.Namespace) -> None:
    """The service is killed in a step, and one more is started at once."""
    each: list[float] = []
    for number in range(REPEATS):
        async with on.service() as service:
            if number == 0:
                await on.register()
            await on.send("long", 3)
            await service.line("AT", within_s=60)
        killed = now()
        async with on.service() as service:
            each.append((int((await service.line("AT", within_s=90))[1]) - killed) / 1e6)
            await on.end_all()
    emit("w3", tuned=asked.tuned, takeover_ms=round(statistics.median(each), 1), all_ms=each)


async def w4(on: System, asked: argparse.Namespace) -> None:
    """From resolving an awakeable to the call of the step behind it."""
    inactive_s = asked.tuned or INACTIVE_S
    async with on.service(inactive_s) as service:
        await on.register()
        for number in range(asked.count):
            await on.send("waiter", number)
        names = [(await service.line("WAITS", within_s=60))[2] for _ in range(asked.count)]
        await asyncio.sleep(1 if float(inactive_s) > 5 else float(inactive_s) + 2)

        async def resolve() -> None:
            for name in names:
                body = json.dumps({"t": now()}).encode()
                await on.ingress.ask(f"/restate/awakeables/{name}/resolve", body)
                await asyncio.sleep(random.uniform(0.01, 0.03))

        resolving = asyncio.create_task(resolve())
        each = [
            int((await service.line("SIGNALLED", within_s=60))[1]) / 1e6 for _ in range(asked.count)
        ]
        await resolving
    emit("w4", tuned=asked.tuned, **signal_summary(each))


async def w5(on: System, asked: argparse.Namespace) -> None:
    """So many runs wait; the service is let go after a second."""
    async with on.service("1") as service:
        await on.register()

        async def start(number: int) -> None:
            await on.send("waiter", number)

        async def all_wait() -> None:
            for _ in range(asked.count):
                await service.line("WAITS", within_s=120)

        waiting = asyncio.create_task(all_wait())
        pids = [on.server.pid, service.pid]
        found = await measure_w5(
            asked, start, lambda: waiting, pids, lambda: lengths(on.folder), settle_s=4
        )
        emit("w5", **found)


WORKLOADS = {"w1": w1, "w2": w2, "w3": w3, "w4": w4, "w5": w5}


async def main() -> None:
    asked = options("Restate.", ["default", "nofsync"])
    ports = {name: free_port() for name in ("node", "ingress", "admin", "service")}
    with tempfile.TemporaryDirectory(prefix="peer-restate-") as name:
        config = Path(name) / "restate.toml"
        nofsync = "true" if asked.variant == "nofsync" else "false"
        extra = RETRY_SOON if asked.workload == "w3" and asked.tuned else ""
        config.write_text(CONFIG.format(folder=name, nofsync=nofsync, extra=extra, **ports))
        binary = os.environ["RESTATE_SERVER"]
        async with Child(binary, "--config-file", config, "--node-name", "one") as server:
            await listens(ports["admin"])
            await listens(ports["ingress"])
            await WORKLOADS[asked.workload](System(Path(name), server, ports), asked)


if __name__ == "__main__":
    asyncio.run(main())

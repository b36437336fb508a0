"""DBOS on SQLite, in one process. Steps that are cut off are made again.

usage: peer_dbos.py w1|w2|w4 sqlite|sqlite-wal [options]

sqlite: as DBOS makes it (rollback journal, synchronous FULL) · sqlite-wal: journal_mode WAL, FULL.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sqlite3
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from dbos import DBOS, DBOSClient, DBOSConfig, SetWorkflowID
from load import INPUT, STEPS, emit, measure_w1, now, options, say, signal_summary, step_value
from processes import Child, blocks, itself
from sqlalchemy import event
from sqlalchemy.engine import Engine

REPEATS = 3
BUILD_S = 400.0
PARKED_S = 3600.0


@DBOS.step()
async def model(index: int) -> Any:
    return step_value(index)


@DBOS.step()
async def tool(index: int) -> Any:
    return step_value(index)


@DBOS.step()
async def stay() -> None:
    say("AT", now())
    await asyncio.sleep(PARKED_S)


async def step(index: int) -> Any:
    return await (tool if index % 2 else model)(index)


@DBOS.workflow()
async def ten(value: Any) -> list[int]:
    return [(await step(index))["t"] for index in range(STEPS)]


@DBOS.workflow()
async def long(steps: int) -> None:
    say("BEGUN", now())
    for index in range(steps):
        await step(index)
    await stay()


@DBOS.workflow()
async def waiter(value: Any) -> None:
    await step(0)
    sent = await DBOS.recv_async("go", timeout_seconds=PARKED_S)
    after = await step(1)
    say("SIGNALLED", after["t"] - sent["t"])


def url(folder: Path) -> str:
    return f"sqlite:///{folder}/dbos.sqlite"


def launch(folder: Path, **settings: Any) -> None:
    DBOS(
        config=DBOSConfig(
            name="bench",
            system_database_url=url(folder),
            executor_id="one",
            application_version="1",
            log_level="ERROR",
            **settings,
        )
    )
    DBOS.launch()


def prepare(folder: Path, variant: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if variant == "sqlite-wal":
        with sqlite3.connect(folder / "dbos.sqlite") as database:
            database.execute("PRAGMA journal_mode=WAL")


async def w1(folder: Path, asked: argparse.Namespace) -> None:
    prepare(folder, asked.variant)
    launch(folder)

    async def one(_: int) -> list[int]:
        return await ten(INPUT)

    async for found in measure_w1(one, lambda: [os.getpid()], asked, lambda: blocks(folder)):
        emit("w1", **found)


async def w2(folder: Path, asked: argparse.Namespace) -> None:
    """The process is killed in the step behind a long run (written without fsync) and started
    again. From the workflow's beginning to that step."""
    for steps in asked.steps:
        here = folder / str(steps)
        prepare(here, asked.variant)
        begun = time.monotonic()
        command = ("w2-child", asked.variant, "--child", here)
        async with Child(*itself(*command, "--steps", steps)) as child:
            await child.line("AT", within_s=BUILD_S)
        built_s = time.monotonic() - begun
        replay: list[float] = []
        launching: list[float] = []
        for _ in range(REPEATS):
            async with Child(*itself("w2-again", *command[1:])) as child:
                launched = int((await child.line("LAUNCH", within_s=60))[1])
                began = int((await child.line("BEGUN", within_s=60))[1])
                there = int((await child.line("AT", within_s=120))[1])
                replay.append((there - began) / 1e6)
                launching.append((there - launched) / 1e6)
        emit(
            "w2",
            state="replay",
            steps=steps,
            replay_ms=round(statistics.median(replay), 2),
            launch_to_step_ms=round(statistics.median(launching), 2),
            build_s=round(built_s, 1),
        )


async def w2_child(folder: Path, asked: argparse.Namespace) -> None:
    @event.listens_for(Engine, "connect")
    def unsafe(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA synchronous=OFF")

    launch(folder)
    with SetWorkflowID("long"):
        await long(asked.steps[0])


async def w2_again(folder: Path, asked: argparse.Namespace) -> None:
    say("LAUNCH", now())
    launch(folder)
    await asyncio.sleep(PARKED_S)


async def w4(folder: Path, asked: argparse.Namespace) -> None:
    """From `send` by another process to the call of the step behind `recv`."""
    prepare(folder, asked.variant)
    command = itself("w4-child", asked.variant, "--child", folder, "--count", asked.count)
    async with Child(*command, "--tuned", asked.tuned) as child:
        await child.line("READY", within_s=120)
        client = DBOSClient(system_database_url=url(folder))
        await asyncio.sleep(1)

        async def send() -> None:
            for number in range(asked.count):
                await asyncio.to_thread(client.send, f"waiter-{number}", {"t": now()}, "go")
                await asyncio.sleep(random.uniform(0.01, 0.03))

        sending = asyncio.create_task(send())
        each = [
            int((await child.line("SIGNALLED", within_s=30))[1]) / 1e6 for _ in range(asked.count)
        ]
        await sending
    emit("w4", tuned=asked.tuned, **signal_summary(each))


async def w4_child(folder: Path, asked: argparse.Namespace) -> None:
    polling = {"notification_listener_polling_interval_sec": float(asked.tuned or 0)}
    launch(folder, **(polling if asked.tuned else {}))
    for number in range(asked.count):
        with SetWorkflowID(f"waiter-{number}"):
            await DBOS.start_workflow_async(waiter, INPUT)
    await asyncio.sleep(3)
    say("READY")
    await asyncio.sleep(PARKED_S)


WORKLOADS = {
    "w1": w1,
    "w2": w2,
    "w2-child": w2_child,
    "w2-again": w2_again,
    "w4": w4,
    "w4-child": w4_child,
}


async def main() -> None:
    asked = options("DBOS on SQLite.", ["sqlite", "sqlite-wal"])
    if asked.child:
        await WORKLOADS[asked.workload](Path(asked.child), asked)
        return
    with tempfile.TemporaryDirectory(prefix="peer-dbos-", ignore_cleanup_errors=True) as name:
        await WORKLOADS[asked.workload](Path(name) / "dbos", asked)


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)  # threads of its own would go on

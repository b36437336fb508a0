"""Runfold on a directory, in one process: `run()`, as DBOS and LangGraph on SQLite run.

usage: peer_runfold_files.py w1|w2|w4 files [options]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from load import INPUT, emit, measure_w1, now, options, say, signal_summary
from processes import Child, blocks, itself
from runfold_agents import GATES, long, ten, waiter

from runfold import Agent, AwaitingApproval, Completed, FileStore, run, signal


async def asked_for(store: FileStore, agent: Agent, run_id: str, value: Any = None) -> str:
    """Take the run up to where it waits for a person; the marker."""
    outcome = await run(store, agent, run_id, value)
    assert isinstance(outcome, AwaitingApproval), outcome
    return outcome.pending[0].marker


async def answered(store: FileStore, agent: Agent, run_id: str, value: Any = None) -> Any:
    """Take the run to its end; its answer."""
    outcome = await run(store, agent, run_id, value)
    assert isinstance(outcome, Completed), outcome
    return outcome.message.content


async def w1(folder: Path, asked: argparse.Namespace) -> None:
    store = FileStore(folder)

    async def one(number: int) -> list[int]:
        return await answered(store, ten, f"ten-{number}", INPUT)

    async for found in measure_w1(one, lambda: [os.getpid()], asked, lambda: blocks(folder)):
        emit("w1", **found)


async def w2(folder: Path, asked: argparse.Namespace) -> None:
    """A long run waits for a person; a new process approves and goes on with it. From before the
    approval to the call of the next step."""
    state = asked.state or "replay"
    for steps in asked.steps:
        run_id, begun = f"long-{steps}", time.monotonic()
        value = {"steps": steps, "state": state}
        await asked_for(FileStore(folder), long, run_id, value)
        built_s = time.monotonic() - begun
        each: list[float] = []
        for _ in range(GATES):
            command = itself("w2-child", "files", "--child", folder, "--steps", steps)
            async with Child(*command) as child:
                said = int((await child.line("SAID", within_s=60))[1])
                each.append((int((await child.line("AT", within_s=60))[2]) - said) / 1e6)
                await child.line("DONE", within_s=60)
        replay_ms = round(statistics.median(each), 2)
        emit("w2", state=state, steps=steps, replay_ms=replay_ms, build_s=round(built_s, 1))


async def w2_child(folder: Path, asked: argparse.Namespace) -> None:
    store, run_id = FileStore(folder), f"long-{asked.steps[0]}"
    outcome = await run(store, long, run_id)
    assert isinstance(outcome, AwaitingApproval), outcome
    say("SAID", now())
    await signal(store, run_id, "approve", {"marker": outcome.pending[0].marker})
    await run(store, long, run_id)
    say("DONE")


async def w4(folder: Path, asked: argparse.Namespace) -> None:
    """From an approval to the call of the step behind it; the same process takes the run up."""
    store = FileStore(folder)
    runs = [f"waiter-{number}" for number in range(asked.count)]
    markers = {run_id: await asked_for(store, waiter, run_id, INPUT) for run_id in runs}
    each: list[float] = []
    for run_id in runs:
        said = now()
        await signal(store, run_id, "approve", {"marker": markers[run_id]})
        each.append((await answered(store, waiter, run_id) - said) / 1e6)
        await asyncio.sleep(random.uniform(0.01, 0.03))
    emit("w4", **signal_summary(each))


WORKLOADS = {"w1": w1, "w2": w2, "w2-child": w2_child, "w4": w4}


async def main() -> None:
    asked = options("Runfold on a directory.", ["files"])
    if asked.child:
        await WORKLOADS[asked.workload](Path(asked.child), asked)
        return
    with tempfile.TemporaryDirectory(prefix="peer-runfold-") as name:
        await WORKLOADS[asked.workload](Path(name) / "runs", asked)


if __name__ == "__main__":
    asyncio.run(main())

"""LangGraph on SQLite, in one process, `durability="sync"`; only its caller resumes a run.

usage: peer_langgraph.py w1|w2|w4|w5 sqlite|sqlite-normal [options]

sqlite: as AsyncSqliteSaver makes it (WAL, synchronous FULL) · sqlite-normal: synchronous NORMAL.
The state is a list of all values, as an agent's messages are; with `--state last`, the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, interrupt
from load import INPUT, STEPS, emit, measure_w1, now, options, say, signal_summary, step_value
from processes import Child, blocks, itself, pss_bytes

REPEATS = 3
BUILD_S = 400.0


class All(TypedDict):
    value: dict[str, Any]
    steps: int
    i: int
    said: Annotated[list[Any], operator.add]


class Last(TypedDict):
    value: dict[str, Any]
    steps: int
    i: int
    said: list[Any]


async def node(state: Any) -> Any:
    return {"said": [step_value(state["i"])], "i": state["i"] + 1}


async def stay(state: Any) -> Any:
    say("AT", now())
    await asyncio.sleep(3600)


async def wait(state: Any) -> Any:
    return {"said": [interrupt("go?")], "i": state["i"] + 1}


def loop_graph(saver: Any, *, shape: type = All, stays: bool = False) -> Any:
    graph = StateGraph(shape)
    graph.add_node("model", node)
    graph.add_node("tool", node)
    graph.add_edge(START, "model")
    graph.add_edge("model", "tool")
    end = END
    if stays:
        end = "stay"
        graph.add_node("stay", stay)
        graph.add_edge("stay", END)
    graph.add_conditional_edges(
        "tool", lambda state: end if state["i"] >= state["steps"] else "model", [end, "model"]
    )
    return graph.compile(checkpointer=saver)


def wait_graph(saver: Any) -> Any:
    graph = StateGraph(All)
    for name, function in (("model", node), ("wait", wait), ("after", node)):
        graph.add_node(name, function)
    for before, behind in ((START, "model"), ("model", "wait"), ("wait", "after"), ("after", END)):
        graph.add_edge(before, behind)
    return graph.compile(checkpointer=saver)


def config(thread: str, steps: int = STEPS) -> Any:
    return {"configurable": {"thread_id": thread}, "recursion_limit": steps + 10}


def begin(steps: int) -> dict[str, Any]:
    return {"value": INPUT, "steps": steps, "i": 0, "said": []}


@asynccontextmanager
async def saver_on(folder: Path, variant: str, sync: str = "") -> AsyncIterator[Any]:
    os.makedirs(folder, exist_ok=True)
    async with AsyncSqliteSaver.from_conn_string(f"{folder}/langgraph.sqlite") as saver:
        sync = sync or ("NORMAL" if variant == "sqlite-normal" else "")
        if sync:
            await saver.conn.execute(f"PRAGMA synchronous={sync}")
        yield saver


async def w1(folder: Path, asked: argparse.Namespace) -> None:
    async with saver_on(folder, asked.variant) as saver:
        graph = loop_graph(saver)

        async def one(number: int) -> list[int]:
            made = await graph.ainvoke(begin(STEPS), config(str(number)), durability="sync")
            return [value["t"] for value in made["said"]]

        async for found in measure_w1(one, lambda: [os.getpid()], asked, lambda: blocks(folder)):
            emit("w1", **found)


async def w2(folder: Path, asked: argparse.Namespace) -> None:
    """The process is killed in the node behind a long run (written without fsync); a new one goes
    on. From opening the file to that node."""
    state = asked.state or "all"
    for steps in asked.steps:
        here, begun = folder / str(steps), time.monotonic()
        command = (asked.variant, "--child", here, "--steps", steps, "--state", state)
        async with Child(*itself("w2-child", *command)) as child:
            await child.line("AT", within_s=BUILD_S)
        built_s = time.monotonic() - begun
        each: list[float] = []
        for _ in range(REPEATS):
            async with Child(*itself("w2-again", *command)) as child:
                opening = int((await child.line("OPEN", within_s=60))[1])
                each.append((int((await child.line("AT", within_s=60))[1]) - opening) / 1e6)
        replay_ms = round(statistics.median(each), 2)
        stored_mb = round(blocks(here) / 1e6, 1)
        emit(
            "w2",
            state=state,
            steps=steps,
            replay_ms=replay_ms,
            build_s=round(built_s, 1),
            stored_mb=stored_mb,
        )


async def w2_child(folder: Path, asked: argparse.Namespace) -> None:
    again = asked.workload == "w2-again"
    steps, shape = asked.steps[0], Last if asked.state == "last" else All
    say("OPEN", now())
    async with saver_on(folder, asked.variant, sync="" if again else "OFF") as saver:
        graph = loop_graph(saver, shape=shape, stays=True)
        await graph.ainvoke(
            None if again else begin(steps), config("long", steps), durability="sync"
        )


async def w4(folder: Path, asked: argparse.Namespace) -> None:
    """From the caller's resuming a run to the call of the node behind the interrupt."""
    async with saver_on(folder, asked.variant) as saver:
        graph = wait_graph(saver)
        for number in range(asked.count):
            await graph.ainvoke(begin(1), config(str(number)), durability="sync")
        each: list[float] = []
        for number in range(asked.count):
            said = now()
            going_on = Command(resume={"t": said})
            made = await graph.ainvoke(going_on, config(str(number)), durability="sync")
            each.append((made["said"][-1]["t"] - said) / 1e6)
            await asyncio.sleep(random.uniform(0.01, 0.03))
    emit("w4", **signal_summary(each))


async def w5(folder: Path, asked: argparse.Namespace) -> None:
    """So many runs wait: each is only rows."""
    async with saver_on(folder, asked.variant) as saver:
        graph, left = wait_graph(saver), iter(range(asked.count))

        async def client() -> None:
            for number in left:
                await graph.ainvoke(begin(1), config(str(number)), durability="sync")

        before, stored, begun = pss_bytes(os.getpid()), blocks(folder), time.monotonic()
        await asyncio.gather(*(client() for _ in range(64)))
        took_s = round(time.monotonic() - begun, 1)
        emit(
            "w5",
            parked=asked.count,
            started_s=took_s,
            parked_s=took_s,
            memory_mb=round(pss_bytes(os.getpid()) / 1e6, 1),
            memory_before_mb=round(before / 1e6, 1),
            idle_cores=0,
            stored_b_per_run=round((blocks(folder) - stored) / asked.count),
        )


WORKLOADS = {"w1": w1, "w2": w2, "w2-child": w2_child, "w2-again": w2_child, "w4": w4, "w5": w5}


async def main() -> None:
    asked = options("LangGraph on SQLite.", ["sqlite", "sqlite-normal"])
    if asked.child:
        await WORKLOADS[asked.workload](Path(asked.child), asked)
        return
    with tempfile.TemporaryDirectory(prefix="peer-langgraph-") as name:
        await WORKLOADS[asked.workload](Path(name) / "langgraph", asked)


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)

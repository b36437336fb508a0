"""What the processes of the crash matrix over HTTP do (see matrix_http.py).

A worker is examples/http_worker.py, a bridge is the bridge; wrapped, in these processes only, so
that one of them meets its fault at the cell's place. `python matrix_http_worker.py` is a zygote
that has the bridge imported.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from base64 import urlsafe_b64decode
from pathlib import Path
from typing import Any, Self

from cases.zygote import Child, Zygote
from kit.http_agents import example
from kit.ledger import Ledger
from kit.matrix_http_cells import TOOLS
from kit.matrix_worker import POLL_S, Seam, place_of

import journal.stepping
from journal.codec import Entry
from journal.ids import RunId
from journal.store import AppendAnswer, Appended
from journal.stores.jetstream import JetStreamStore

ACK_WAIT_S = 1.0
TIMEOUT_S = 0.3
APPEND_BUDGET_S = 1.0
"""Instead of 30 s, where a deadline has to pass."""

HERE = Path(__file__).resolve()


class PreparedZygote(Zygote):
    """Its children need import nothing."""

    def __enter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="zygote-")
        self._children: list[Child] = []
        self._lock = threading.Lock()
        paths = os.pathsep.join([str(HERE.parents[2]), str(HERE.parents[1])])
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=HERE.parents[2],
            env=os.environ | {"PYTHONPATH": paths},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self


class HttpSeam(Seam):
    """`fault` may be `bridge`, too: not this process, the bridge is killed. `stays`: whether this
    process waits where it may, for a zombie to go on beside it."""

    stays = True

    def reach(self, place: str) -> None:
        if self.fault != "bridge":
            super().reach(place)
        elif place == self.place and self.once("taken.new"):
            pid = json.loads((self.folder / "bridge").read_text())["pid"]
            taken = self.folder / "taken.new"
            taken.write_text(f"{pid} none none")
            taken.with_name("taken").hardlink_to(taken)
            os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        if self.stays and self.held:
            self.note("held", str(os.getpid()))
        while self.stays and self.held:
            time.sleep(POLL_S)


# ---- the worker -------------------------------------------------------------------------------


def build(seam: HttpSeam, policy: str, commits: bool, timeout_s: float) -> Any:
    """Safe tool, unsafe tool, safe tool, answer; in one turn, or each in a turn of its own."""
    http = example()
    ledger = Ledger(seam.folder / "ledger")

    def body(name: str, result: str) -> Any:
        def run(call: Any) -> str:
            ledger.add("", "start", [name, os.getpid(), call.key])
            seam.reach(f"in {name} before")
            ledger.add("", "effect", [name, os.getpid(), call.key])
            seam.reach(f"in {name} after")
            return result

        return run

    def probe(key: str) -> dict[str, Any]:
        done = any(kind == "effect" and args[2] == key for _, kind, args in ledger.lines())
        return {"happened": "booked"} if done else {"did_not_happen": True}

    def make(ctx: Any, number: int) -> Any:
        name = TOOLS[number]
        if name != "book":
            return ctx.tool(name, {}, body(name, ("one", "", "three")[number]), safe=True).output
        how = {"probe": probe} if policy == "probe" else {}
        book = body(name, "booked")
        ctx.tool(name, "seat", book, on_unknown=policy, timeout_s=timeout_s, **how)
        return None

    def handler(ctx: Any) -> Any:
        seam.wait()
        if not commits:
            told = [make(ctx, number) for number in range(3)]
            return http.Complete([told[0], told[2]])
        told = ctx.state or []
        if len(told) == 3:
            return http.Complete([told[0], told[2]])
        return sys.modules["http_task"].Continue(state=[*told, make(ctx, len(told))])

    return handler


def what_of(path: str, body: Any) -> str:
    verb = path.rpartition("/")[2]
    record = body.get("record", {})
    if record:
        return f"{record['type']} {record['position']}"
    return f"continue {len(body['state'])}" if verb == "continue" else verb


def work(
    url: str,
    agent: str,
    folder: str,
    place: str,
    fault: str,
    policy: str,
    commits: bool,
    stays: bool,
    timeout_s: float,
) -> None:
    """A worker of the cell, until it is killed."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    http = example()
    lower: Any = sys.modules["http_task"]
    seam = HttpSeam(folder, place, fault)
    seam.stays = stays
    now = threading.local()
    real_once, real_play = lower.Bridge.once, http.play

    class Connection(lower.HTTPConnection):
        def getresponse(self) -> Any:
            seam.reach(f"sent {now.what}")
            return super().getresponse()

    def once(bridge: Any, path: str, body: Any, timeout_s: float) -> Any:
        now.what = what_of(path, body)
        seam.reach(f"before {now.what}")
        answer = real_once(bridge, path, body, timeout_s)
        if now.what == "poll":
            if not answer:
                return answer
            padded = answer["task"] + "=" * (-len(answer["task"]) % 4)
            seam.worker = json.loads(urlsafe_b64decode(padded))[4]
            seam.note("tasks", f"{os.getpid()} {seam.worker}")
        seam.reach(f"after {now.what}")
        return answer

    def play(*args: Any) -> bool:
        try:
            return real_play(*args)
        finally:
            seam.note("played", str(os.getpid()))

    lower.HTTPConnection, lower.Bridge.once, http.play = Connection, once, play
    seam.note("ready", str(os.getpid()))
    http.serve(url, "", {agent: build(seam, policy, commits, timeout_s)})


# ---- the bridge -------------------------------------------------------------------------------


async def bridge(
    url: str,
    namespace: str,
    folder: str,
    port: int = 0,
    place: str = "nowhere",
    fault: str = "",
    append_budget_s: float = APPEND_BUDGET_S,
) -> None:
    """A bridge, as `runfold bridge --no-auth`, with short times, until it is killed."""
    from bridge.auth import NoAuth
    from bridge.service import Bridge
    from journal.stores.tasks import TaskQueue

    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    journal.stepping.APPEND_BUDGET_S = append_budget_s  # type: ignore[misc]
    seam = HttpSeam(folder, place, fault)
    append, ack = JetStreamStore.append, TaskQueue.ack

    async def appended(
        self: JetStreamStore, run_id: RunId, entry: Entry, *, expected: int
    ) -> AppendAnswer:
        seam.reach(f"before {place_of(entry.record)}")
        answer = await append(self, run_id, entry, expected=expected)
        if isinstance(answer, Appended):
            seam.reach(f"after {place_of(entry.record)}")
        return answer

    async def acked(self: TaskQueue, task: Any) -> bool:
        seam.reach("before ack")
        return await ack(self, task)

    if place != "nowhere":
        JetStreamStore.append, TaskQueue.ack = appended, acked  # type: ignore[method-assign]

    def ready() -> None:
        path = Path(folder) / "bridge.new"
        path.write_text(json.dumps({"url": made.address, "pid": os.getpid()}))
        path.rename(path.with_name("bridge"))

    made = Bridge(
        url,
        auth=NoAuth(),
        namespace=namespace,
        port=port,
        ack_wait_s=ACK_WAIT_S,
        on_ready=ready,
    )
    await made.serve()


if __name__ == "__main__":
    import kit.matrix_http_worker  # noqa: F401
    from cases import zygote

    import bridge.service  # noqa: F401

    zygote._serve()  # pyright: ignore[reportPrivateUsage]

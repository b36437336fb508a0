"""A Runfold worker over HTTP in plain Python, standard library only: copy it, port it.

The protocol is docs/http-workers.md; http_task.py beside this file is its lower half. One process
works one task at a time; start several.

    RUNFOLD_URL=http://127.0.0.1:8787 RUNFOLD_TOKEN=… python examples/http_worker.py
"""

import json
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

from http_task import JSON, UNRECORDABLE, Body, Bridge, Complete, End, Fail, Refused, Stop, Task

log = logging.getLogger("http_worker")

POLL_S = 20.0
BUDGET_S = 30.0  # deadline less timeout_s is so long after the start, and no clock can be wrong


class ToolError(Exception):
    """Raised by a tool that surely did not do it: a result like any other, shown to the model."""


class ToolCall(NamedTuple):
    """`key`: give it to the outside system with a write, so that it knows a repeat. `timeout_s`:
    the tool must give up by then; half a minute later somebody may have it done again elsewhere."""

    input: JSON
    key: str
    timeout_s: float


class ToolResult(NamedTuple):
    """`interrupted`: it may or may not have happened; `partial` is what it last reported."""

    output: JSON = None
    error: str | None = None
    interrupted: bool = False
    partial: JSON = None


class Ctx:
    """What a handler sees of its run. Calls go by position: with the same results it must make the
    same calls, for after a crash it is played again over what was recorded."""

    def __init__(self, task: Task, turn: Body) -> None:
        self.run, self.input, self.state = turn["run"], turn["input"], turn["state"]
        self.iteration, self.attempt = turn["iteration"], turn["attempt"]
        self.calls = self.placed = 0
        self._task = task
        self._recorded = {s["position"]: s for s in turn["steps"] if s["status"] == "completed"}
        self._told: list[Body] = turn["told"]
        self._seen: Counter[tuple[str, str, str]] = Counter()
        self._made: set[int] = set()
        self._ended: Stop | None = None

    def check(self) -> None:
        """Raises Stop once the turn has ended, again and again: nothing is started any more."""
        self._ended = self._ended or self._task.stop
        if self._ended is None and self._task.cancelled:
            self._ended = Stop("cancelled")
        if self._ended is not None:
            raise self._ended

    def model(self, fn: Callable[[], JSON]) -> JSON:
        """What it raises is no result: it ends the attempt, and the next one asks anew."""
        record = {"position": self._take(), "kind": "model", "tool": "", "input": None}
        found = self._known(record) or self._start(record)
        if found["decision"] == "call":
            found = self._complete(record, found["n"], {"result": fn()})
        return found["result"]

    def tool(
        self,
        name: str,
        input: JSON,
        fn: Callable[[ToolCall], JSON],
        *,
        safe: bool = False,
        probe: Callable[[str], Body] | None = None,
        timeout_s: float = 300.0,
        **policy: str,
    ) -> ToolResult:
        """`safe`: twice is harmless. `policy`: `on_unknown`, `approval`. `probe`: what the outside
        system says of a key: {"happened": result}, {"did_not_happen": True}, {"cannot_tell": True}.
        """
        record: Body = {"position": self._take(), "kind": "tool", "tool": name, "input": input}
        record |= {"replay": "safe" if safe else "unsafe", "timeout_s": timeout_s, **policy}
        # Counted for recorded calls, too: in a new attempt it says which of equal calls this is.
        what = (name, _canonical(input), record["replay"])
        record["occurrence"] = self._seen[what]
        self._seen[what] += 1
        found = self._known(record) or self._start(record)
        while found["decision"] != "recorded":
            if found["decision"] == "call":
                found = self._call(record, found, fn)
            elif found["decision"] == "probe":
                said = {"n": found["n"], **_probed(probe, found["key"])}
                found = self._start({**record, "probe": said})
            else:  # withdrawn, as the first answer never came
                found = self._complete(record, found["n"], {"not_called": "its start came late"})
        if "interrupted" in found:
            return ToolResult(interrupted=True, partial=found["interrupted"].get("partial"))
        error = found.get("error", {}).get("message")
        return ToolResult(output=found.get("result"), error=error)

    def place_inputs(self, mode: str) -> list[Body]:
        """The queued inputs, placed here once and for ever; first what earlier attempts knew."""
        record = {"type": "input.placed", "position": self._take(), "mode": mode}
        placed = self._append(record)["inputs"]
        self.placed += len(placed)
        told, self._told = self._told, [one for one in self._told if one["mode"] != mode]
        return [*(one for one in told if one["mode"] == mode), *placed]

    def _take(self) -> int:
        self.check()
        self.calls += 1
        return self.calls - 1

    def _known(self, record: Body) -> Body | None:
        """What journal.read gave of the very same call. Of anything else the bridge judges."""
        step = self._recorded.get(record["position"], {})
        for key in ("kind", "tool", "input"):
            if _canonical(step.get(key)) != _canonical(record[key]):
                return None
        return {**step, "decision": "recorded"}

    def _append(self, record: Body) -> Body:
        try:
            answer = self._task.ask_once("journal.append", {"record": record})
        except Stop as stop:
            self._ended = stop
            raise
        self._task.hear(answer)
        return answer

    def _start(self, record: Body) -> Body:
        asked_at = time.monotonic()  # before the first try, not before the one that was answered
        return {**self._append({"type": "step.started", **record}), "asked_at": asked_at}

    def _call(self, record: Body, start: Body, fn: Callable[[ToolCall], JSON]) -> Body:
        n, unsafe = start["n"], record["replay"] == "unsafe"
        if unsafe:
            if n in self._made:
                raise RuntimeError(f"start {n} was answered twice, and its call was made")
            if why := self._too_late(start["asked_at"]):
                return self._complete(record, n, {"not_called": why})
            self._made.add(n)
        try:
            result = fn(ToolCall(record["input"], start["key"], record["timeout_s"]))
        except ToolError as error:
            return self._complete(record, n, {"error": {"message": str(error)}})
        except Exception as error:
            if not unsafe:
                raise  # no result either: it ends the attempt
            # It may have happened. Never "failed, try again": its policy decides, or a person.
            log.warning("%s: %r; whether it happened is unknown", record["tool"], error)
            return self._start(record)
        return self._complete(record, n, {"result": result})

    def _too_late(self, asked_at: float) -> str:
        """Why a write is not made after all. While the answer travelled, or this process stood
        still, others may have taken the run: Stop is raised then, and nothing was called."""
        asked = asked_at
        while time.monotonic() - asked >= self._task.ack_wait_s / 3:
            asked = time.monotonic()
            self._task.beat()
        if self._task.cancelled:
            return "the run was cancelled"
        return "recording its start took too long" if time.monotonic() - asked_at > BUDGET_S else ""

    def _complete(self, record: Body, start: int, outcome: Body) -> Body:
        """Always sent, whatever was heard meanwhile: a fenced worker's result is told as late."""
        completed = {"type": "step.completed", "position": record["position"], "start": start}
        try:
            self._append({**completed, **outcome})
        except (Refused, *UNRECORDABLE) as error:
            if record.get("replay") == "unsafe":  # it did happen: nobody must wonder for ever
                problem = {"message": f"it returned what can't be recorded: {error}"[:1000]}
                self._append({**completed, "error": problem})
            raise
        if "not_called" in outcome:
            outcome = {"error": {"message": outcome["not_called"]}}
        # As it will be read after a crash: lists for tuples, texts for keys.
        return {**json.loads(json.dumps(outcome)), "decision": "recorded"}


def _canonical(value: JSON) -> str:
    return json.dumps(value, sort_keys=True)  # 1, 1.0 and True are equal in Python, not in JSON


def _probed(probe: Callable[[str], Body] | None, key: str) -> Body:
    try:
        return probe(key) if probe is not None else {"cannot_tell": True}
    except Exception as error:
        log.warning("the probe failed: %r", error)
        return {"cannot_tell": True}


Handler: TypeAlias = Callable[[Ctx], End]


def play(task: Task, handler: Handler) -> bool:
    """One turn; whether the next one is this task's, too. Raises Stop."""
    placed = -1
    while True:
        ctx = Ctx(task, task.read())
        try:
            verb, fields = handler(ctx)
            ctx.check()  # after a Stop nothing counts that the handler returned
            more: Body = {"calls": ctx.calls, **fields}
            if verb == "complete" and ctx.placed == placed:
                more["leave_inputs"] = True
            return task.ask_once(verb, more)["more"]
        except Stop as stop:
            # Inputs came. Once more over the recorded calls: its last place_inputs finds them.
            if stop.code != "inputs_queued":
                raise
            placed = ctx.placed
        except Exception as error:
            ctx.check()
            log.warning("run %s: turn %d failed", ctx.run, ctx.iteration, exc_info=True)
            why = f"{type(error).__name__}: {error}"
            return task.ask_once(*Fail("step_failed", why, retriable=True))["more"]


def serve(
    url: str, token: str, agents: dict[str, Handler], terms: dict[str, Body] | None = None
) -> None:
    """Work until SIGTERM or Ctrl-C: a poll ends at once, a turn in order; a second one ends all.
    `terms`: what a poll says of an agent besides its name: revision, bounds, retry."""
    polling = stopping = False

    def on_signal(number: int, _: object) -> None:
        nonlocal stopping
        signal.signal(number, signal.SIG_DFL)
        stopping = True
        if polling:
            raise KeyboardInterrupt  # a task that is on its way comes again, to others

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    bridge = Bridge(url, token)
    named = [{"name": name, **(terms or {}).get(name, {})} for name in agents]
    poll: Body = {"agents": named, "wait_s": POLL_S}
    while True:
        try:
            polling = True
            if stopping:
                return
            given = bridge.ask("/tasks/poll", poll, POLL_S + 10)
            polling = False
        except KeyboardInterrupt:
            return
        if not given:
            continue
        task = Task(bridge, given)
        try:
            while play(task, agents[given["agent"]]):
                if stopping:  # another worker goes on at once
                    task.ask("release", {})
                    break
        except Stop as stop:
            log.info("task of %s: %s", given["run"], stop)
        finally:
            task.over.set()


# ---- an agent -----------------------------------------------------------------------------------

LEDGER = Path(os.environ.get("CLERK_LEDGER", "charges.txt"))


def lookup(call: ToolCall) -> JSON:
    """Asking twice is harmless."""
    return {"customer": call.input, "owes": len(str(call.input))}


def charge(call: ToolCall) -> JSON:
    """Paying twice is not."""
    with LEDGER.open("a") as ledger:
        ledger.write(f"{call.key} {json.dumps(call.input)}\n")
    return "RECEIPT-1"


def clerk(ctx: Ctx) -> End:
    owed = ctx.tool("lookup", ctx.input, lookup, safe=True).output
    charged = ctx.tool("charge", owed, charge).output
    return Complete(ctx.model(lambda: f"Charged {owed['owes']} EUR: {charged}."))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    url = os.environ.get("RUNFOLD_URL", "http://127.0.0.1:8787")
    serve(url, os.environ.get("RUNFOLD_TOKEN", ""), {"http-clerk": clerk})

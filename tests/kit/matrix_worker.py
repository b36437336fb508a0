"""What the processes of the crash matrix do (see matrix.py; forked by cases.zygote).

A worker whose store and tools are wrapped, in this process only, so that whoever first reaches the
cell's place dies there, or stops until it is let go on. The product has no such places.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from kit.ledger import Ledger

import journal.handle
import journal.stepping
import journal.sweep
from journal import doors
from journal.codec import Entry
from journal.ids import RunId
from journal.messages import Message, Reply
from journal.records import Claim, Commit, Park, Record, StepCompleted, StepStarted
from journal.steps import DidNotHappen, Happened, Probed
from journal.store import AppendAnswer, Appended, Loaded
from journal.stores.tasks import Task
from journal.sweep import Swept
from runfold import Agent, Retry, ToolCall, open_store, read, write
from runfold.testing import ScriptedModel, call, say
from worker.dispatch import Dispatcher
from worker.service import Worker

ACK_WAIT_S = 1.0
SWEEP_S = 1.0
POLL_S = 0.002
_looking: ContextVar[str] = ContextVar("looking", default="none")


def place_of(record: Record) -> str:
    """`claim new`, `step.started tool/1/0/alpha`, `park retry`, `commit 0`, `run.completed`."""
    match record:
        case StepStarted() | StepCompleted():
            detail = record.step
        case Park():
            detail = record.why
        case Commit():
            detail = str(record.iteration)
        case Claim():
            detail = record.reason
        case _:
            detail = ""
    return f"{record.__struct_config__.tag} {detail}".strip()


class Seam:
    """The one place at which one process of the cell meets its fault, by who is first there."""

    def __init__(self, folder: str, place: str, fault: str) -> None:
        self.folder = Path(folder)
        self.place = place
        self.fault = fault
        self.mine = False
        self.worker = ""

    def once(self, name: str, text: str = "") -> bool:
        """Whether this is the first one of all processes to come here."""
        try:
            fd = os.open(self.folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        os.write(fd, text.encode())
        os.close(fd)
        return True

    def note(self, name: str, text: str) -> None:
        fd = os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(fd, f"{text}\n".encode())
        os.close(fd)

    def reach(self, place: str) -> None:
        if place != self.place or not self.once("taken.new", ""):
            return
        self.mine = True
        taken = self.folder / "taken.new"
        taken.write_text(f"{os.getpid()} {self.worker or 'none'} {_looking.get()}")
        taken.with_name("taken").hardlink_to(taken)  # whole, and `taken.new` stays taken
        if self.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGSTOP)
        while not (self.folder / "go").exists():  # the stop may come a moment later
            time.sleep(POLL_S)

    @property
    def held(self) -> bool:
        """Whether this process, not the one that met the fault, is to stay where it is."""
        folder = self.folder
        return not self.mine and (folder / "taken").exists() and (folder / "hold").exists()

    async def stay(self) -> None:
        if self.held:
            self.note("held", str(os.getpid()))
        while self.held:  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def build(
    name: str,
    seam: Seam,
    *,
    policy: str,
    trigger: str,
    approval: bool,
    lingers: bool,
    backoff_s: float,
    timeout_s: float,
) -> Agent:
    """Safe tool, unsafe tool, safe tool, answer. `trigger`: what fails, the first time. `lingers`:
    the write goes on in its thread until the file `land` is there. `timeout_s`: of the write."""
    ledger = Ledger(seam.folder / "ledger")

    def start(call: ToolCall) -> None:
        ledger.add(call.run_id, "start", [call.step, os.getpid(), call.key])

    def effect(call: ToolCall) -> None:
        seam.reach(f"in {call.step} before")
        while lingers and seam.mine and not (seam.folder / "land").exists():
            time.sleep(POLL_S)
        ledger.add(call.run_id, "effect", [call.step, os.getpid(), call.key])
        seam.reach(f"in {call.step} after")

    async def probe(key: str) -> Probed:
        ledger.add("", "probe", ["", os.getpid(), key])
        done = any(kind == "effect" and args[2] == key for _, kind, args in ledger.lines())
        return Happened("booked") if done else DidNotHappen()

    @read
    async def alpha(call: ToolCall) -> str:
        start(call)
        await seam.stay()
        while trigger == "slow" and not (seam.folder / "taken").exists():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        effect(call)
        return "one"

    async def book(what: str, call: ToolCall) -> str:
        start(call)
        await seam.stay()
        if trigger == "write" and seam.once("failed"):
            raise RuntimeError("the line went dead")
        effect(call)
        return "booked"

    def book_in_thread(what: str, call: ToolCall) -> str:
        start(call)
        effect(call)
        return "booked"

    @read
    async def gamma(call: ToolCall) -> str:
        start(call)
        await seam.stay()
        effect(call)
        return "three"

    class Model(ScriptedModel):
        async def reply(self, messages: Any, tools: Any, **options: Any) -> Reply:
            await seam.stay()
            n = sum(message.role == "assistant" for message in messages) + 1
            if trigger == f"model {n}" and seam.once("failed"):
                raise RuntimeError("the model is down")
            found = await super().reply(messages, tools, **options)
            return found if found.calls else say(f"{heard(messages)}.")

    def heard(messages: tuple[Message, ...]) -> str:
        """The results of the safe tools, as the model was told."""
        told = [message.content for message in messages if message.role == "tool"]
        return f"{len(told)} calls: {told[0]}, {told[2]}"

    unsafe = write(
        name="book",
        approval=approval,
        on_unknown=policy,  # type: ignore[arg-type]
        probe=probe if policy == "probe" else None,
        timeout_s=timeout_s,
    )(book_in_thread if lingers else book)
    model = Model(call("alpha"), call("book", what="seat"), call("gamma"), say("?"))
    return Agent(name, model=model, tools=[alpha, unsafe, gamma], retry=Retry(backoff_s=backoff_s))


def install(made: Worker, seam: Seam) -> None:
    """Wrap this worker's store, and write down which tasks were followed and what was swept."""
    store: Any = made._store  # pyright: ignore[reportPrivateUsage]
    tasks: Any = store.tasks
    append, load, ack = store.append, store.load, tasks.ack
    look, sweep = Dispatcher.look, journal.sweep.sweep_shard

    async def appended(run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        seam.reach(f"before {place_of(entry.record)}")
        answer = await append(run_id, entry, expected=expected)
        if isinstance(answer, Appended):
            seam.reach(f"after {place_of(entry.record)}")
        return answer

    async def acked(task: Task) -> bool:
        seam.reach("before ack")
        return await ack(task)

    async def looked(dispatcher: Dispatcher, task: Task) -> None:
        word = f"{task.sequence}/{task.delivery}"
        _looking.set(word)
        try:
            await look(dispatcher, task)
        finally:
            seam.note("looked", f"{os.getpid()} {word}")

    async def swept(*args: Any, **how: Any) -> Swept:
        found = await sweep(*args, **how)
        for run_id in found.dispatched:
            seam.note("swept", run_id)
        return found

    async def loaded(run_id: RunId, *, after: int = 0) -> Loaded:
        found = await load(run_id, after=after)
        task = asyncio.current_task()
        if task is not None and task.get_name().startswith("heartbeat"):
            seam.reach("after heartbeat")
        return found

    store.append, store.load, tasks.ack = appended, loaded, acked
    Dispatcher.look = looked  # type: ignore[method-assign]
    journal.sweep.sweep_shard = swept  # type: ignore[assignment]


async def work(
    url: str,
    namespace: str,
    agent: str,
    folder: str,
    place: str,
    fault: str,
    policy: str,
    trigger: str = "",
    approval: bool = False,
    commit_each: bool = False,
    lingers: bool = False,
    backoff_s: float = 1.0,
    timeout_s: float = 20.0,
    append_budget_s: float = 30.0,
) -> None:
    """A worker of the cell, until it is killed. The deadline of its write is `timeout_s` and
    `append_budget_s` after its start."""
    journal.stepping.APPEND_BUDGET_S = append_budget_s  # type: ignore[misc]
    if commit_each:
        journal.handle.COMMIT_STEPS = 2
    seam = Seam(folder, place, fault)
    built = build(
        agent,
        seam,
        policy=policy,
        trigger=trigger,
        approval=approval,
        lingers=lingers,
        backoff_s=backoff_s,
        timeout_s=timeout_s,
    )
    made = Worker(
        url,
        [built],
        namespace=namespace,
        ack_wait_s=ACK_WAIT_S,
        sweep_s=SWEEP_S,
        on_ready=lambda: seam.note("ready", str(os.getpid())),
    )
    seam.worker = made.id
    install(made, seam)
    await made.serve()


async def tell(
    url: str,
    namespace: str,
    folder: str,
    fault: str,
    run_id: str,
    name: str,
    payload: dict[str, Any],
    request_id: str,
) -> None:
    """A signaller that meets its fault between its record and the task."""
    seam = Seam(folder, "after signal", fault)
    async with open_store(url, namespace=namespace) as store:
        append = store.append

        async def appended(run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
            answer = await append(run_id, entry, expected=expected)
            if isinstance(answer, Appended):
                seam.reach(f"after {place_of(entry.record)}")
            return answer

        store.append = appended  # type: ignore[method-assign]
        await doors.signal(store, run_id, name, payload, request_id=request_id, by="signaller")

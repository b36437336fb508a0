"""For tests of turn handlers: a world that counts its calls, and a holder's clock and claim."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from kit.build import RUN, FaultyStore, PlainView

from journal.doors import start
from journal.handle import Journal
from journal.limits import RESTART_LIMIT
from journal.log import Log
from journal.messages import JSON, Message
from journal.owed import pay
from journal.records import Claim
from journal.store import Store
from journal.terms import Next
from journal.views import Completed, RunState
from journal.waits import instant_text
from worker.agent import Agent, turn
from worker.context import Call, Context
from worker.tools import SAFE, UNSAFE, ToolCall
from worker.turns import carry_on

Handler = Callable[[Context], Awaitable[Next]]


class World:
    """What the calls of handlers did, in order; `raising` makes a call fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.keys: list[str] = []
        self.raising: dict[str, BaseException] = {}

    def does(self, name: str) -> Callable[[], Awaitable[JSON]]:
        async def fn() -> JSON:
            self.calls.append(name)
            if name in self.raising:
                raise self.raising[name]
            return f"{name} {self.calls.count(name)}"

        return fn

    def call(self, name: str, input: JSON = None, *, safe: bool = False, **options: Any) -> Call:
        async def fn(call: ToolCall) -> JSON:
            self.keys.append(call.key)
            return await self.does(name)()

        return Call(name=name, input=input, fn=fn, replay=SAFE if safe else UNSAFE, **options)


class Clock:
    """A holder's clock, moved by hand."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def passes(self, **time: float) -> None:
        self.now += timedelta(**time)


def agent_of(handler: Handler, **options: Any) -> Agent:
    return turn("helpdesk", **options)(handler)


async def work(
    store: Store, agent: Agent, *, clock: Callable[[], datetime] | None = None, run: str = RUN
) -> RunState:
    """What a worker does that is told of the run: claim it where it can be, work, pay."""
    clock = clock or Clock()
    log = await Log.read(store, run, by="w1")
    fold = log.fold
    if fold.finished or (fold.claim is None and not fold.runnable(instant_text(clock()))):
        return log.state
    lost = fold.restarts + 1 if fold.claim is not None else 0
    claim = await log.append(
        lambda fold: Claim(worker="w1", revision="1", reason="wake", attempt=fold.attempt)
    )
    assert claim is not None
    journal = Journal.claimed(log, claim, is_write=agent.is_unsafe, ack_wait_s=30)
    lost = lost if lost >= RESTART_LIMIT else 0
    await carry_on(journal, agent, attended=False, lost=lost, clock=clock)
    await pay(journal)
    return journal.state


async def begun(*, shared: bool = True, input: JSON = "go") -> FaultyStore:
    store = FaultyStore(shared=shared)
    await start(PlainView(store), "helpdesk", input, run_id=RUN)
    return store


def ended(content: JSON) -> Completed:
    return Completed(Message(role="assistant", content=content))

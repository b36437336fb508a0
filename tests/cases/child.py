"""What tests let a child process do (see zygote.py): run the case's agent, dying on the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from cases.pay import build, die
from kit.deadlines import pass_deadlines

from journal.codec import Entry
from journal.doors import signal
from journal.ids import RunId
from journal.records import Signal
from journal.store import AppendAnswer, Store
from runfold import RunfoldError, open_store, run


class DyingStore:
    """A store under which the process dies by SIGKILL before or after its n-th append."""

    def __init__(self, inner: Store, when: str) -> None:
        number, _, self._phase = when.partition(":")
        self._number = int(number or 0)
        self._inner = inner
        self.appends: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def append(self, run_id: RunId, entry: Entry, *, expected: int) -> AppendAnswer:
        self.appends.append(name_of(entry))
        here = len(self.appends) == self._number
        if here and self._phase == "before":
            die()
        answer = await self._inner.append(run_id, entry, expected=expected)
        if here and self._phase == "after":
            die()
        return answer


def name_of(entry: Entry) -> str:
    """`step.started llm/1`, `run.completed`."""
    step = "" if isinstance(entry.record, Signal) else getattr(entry.record, "step", "")
    return f"{entry.type} {step}".strip()


async def run_pay(
    home: str,
    store: str,
    run_id: str,
    *,
    input: Any = None,
    script: str = "charge",
    at: str = "",
    when: str = "",
    namespace: str = "runfold",
    long_after: bool = False,
) -> dict[str, Any]:
    """`run` of the pay agent; `when` (`3:before`) is the append at which the process dies.
    `long_after`: when the deadline of a call that was cut off before has passed."""
    if long_after:
        pass_deadlines()
    agent = build(Path(home), script=script, at=at)
    async with open_store(store, namespace=namespace) as opened:
        dying = DyingStore(opened, when)
        try:
            end = await run(dying, agent, run_id, input, ack_wait_s=1)  # type: ignore[arg-type]
        except RunfoldError as error:
            return {"error": error.code, "message": error.message, "appends": dying.appends}
    return {"outcome": msgspec.to_builtins(end), "appends": dying.appends}


async def decide(
    store: str,
    run_id: str,
    name: str,
    payload: dict[str, Any],
    namespace: str = "runfold",
    barrier: str = "",
) -> dict[str, Any]:
    """A signal, as somebody else's process sends it; once the file `barrier` is there."""
    async with open_store(store, namespace=namespace) as opened:
        while barrier and not Path(barrier).exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.001)
        try:
            receipt = await signal(opened, run_id, name, payload, by="child")
        except RunfoldError as error:
            return {"error": error.code, "message": error.message}
    return msgspec.to_builtins(receipt)

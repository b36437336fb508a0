"""The agent of the cases. `charge` is an unsafe write: each effect is a line in a ledger.

Loaded by `runfold run tests/cases/pay.py:agent` (settings from the environment) and imported by
tests (`build`). Scripts: `charge` asks for it at once, `full` looks something up first, `gated`
is `charge` with approval, `twice` asks for 10 and, whatever became of it, for 9999 (gated).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kit.ledger import Ledger

from runfold import Agent, Message, Reply, ToolCall, ToolSpec, read, write
from runfold.testing import ScriptedModel, call, say

TO = "Zoë"
RECEIPT = {"receipt": "r-1", "note": "paid 😀"}
ANSWER = "Paid 10 € to Zoë. 😀"
CHARGE = call("charge", amount=10, to=TO)
SCRIPTS: dict[str, tuple[Reply, ...]] = {
    "charge": (CHARGE, say(ANSWER)),
    "gated": (CHARGE, say(ANSWER)),
    "full": (call("lookup", query="Zoë"), CHARGE, say(ANSWER)),
    "twice": (CHARGE, call("charge", amount=9999, to=TO), say(ANSWER)),
}


def die() -> None:
    """As a power cut would: nothing is flushed, no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)  # the signal may be delivered an instant later


class Model:
    """A scripted model; at the call named `model:N` the process dies, at `fail:N` it raises."""

    def __init__(self, replies: Sequence[Reply], ledger: Path, at: str) -> None:
        self.script = ScriptedModel(*replies, ledger=ledger)
        self.at = at

    @property
    def requests(self) -> list[Sequence[Message]]:
        return self.script.requests

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, preview: Any
    ) -> Reply:
        found = await self.script.reply(messages, tools, preview=preview)
        n = sum(message.role == "assistant" for message in messages) + 1
        if self.at == f"model:{n}":
            die()
        if self.at == f"fail:{n}":
            raise ConnectionError("the model is away")
        return found


class PayAgent(Agent):
    """With its model as what it is: tests look at the requests."""

    model: Model


def build(home: Path, *, script: str = "charge", at: str = "", revision: str = "1") -> PayAgent:
    """Everything of the agent lies in `home`. `at` is where something goes wrong.

    `tool:before`, `tool:after`: killed around charge's effect. After the effect also `tool:raise`,
    `tool:exit` (sys.exit), `tool:hold` (waits for a file `go`), `tool:fork` (killed, but a child
    lives on, its pid in a file `forked`). `model:N`: killed in that call; `fail:N`: it raises.
    """
    ledger = Ledger(home / "ledger")

    @read
    def lookup(query: str) -> str:
        """Find somebody."""
        return f"{query} is known"

    @write(approval=script in ("gated", "twice"))
    def charge(amount: int, to: str, this: ToolCall) -> dict[str, Any]:
        """Move money."""
        if at == "tool:before":
            die()
        ledger.add(this.run_id, this.step, {"amount": amount, "to": to})
        if at == "tool:after":
            die()
        if at == "tool:fork" and (pid := os.fork()):
            (home / "forked").write_text(str(pid))
            die()
        if at == "tool:exit":
            sys.exit(0)
        if at == "tool:raise":
            raise OSError("the line broke after the charge was sent")
        while at in ("tool:hold", "tool:fork") and not (home / "go").exists():
            time.sleep(0.005)
        return RECEIPT

    model = Model(SCRIPTS[script], home / "asked", at)
    return PayAgent("pay", model=model, tools=[lookup, charge], revision=revision)


agent = (
    build(
        Path(os.environ["CASE_HOME"]),
        script=os.environ.get("CASE_SCRIPT", "charge"),
        at=os.environ.get("CASE_AT", ""),
    )
    if "CASE_HOME" in os.environ
    else None
)

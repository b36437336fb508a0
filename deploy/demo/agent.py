"""The demo's agent: it looks an invoice up, then pays it, which a person must approve.

No key and no network: the model is a script over the conversation. The bank is a file outside of
the journal, DEMO_LEDGER: one line a payment that really happened, whoever ordered it. It takes
DEMO_PAY_S seconds (0) to pay: an odd invoice waits before the money moves, an even one after, so
that a kill in the middle leaves a payment that did not happen and one that did.

    runfold run deploy/demo/agent.py:agent --id i1 --input "invoice 1" --store ./runs
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

from runfold import Agent, Message, Reply, ToolCall, ToolRequest, ToolSpec, read, write

LEDGER = Path(os.environ.get("DEMO_LEDGER", "payments.jsonl"))
PAY_S = float(os.environ.get("DEMO_PAY_S", "0"))
SPARE_S = float(os.environ.get("DEMO_SPARE_S", "30"))
"""A payment may take so much longer, and no more: if its worker is lost, a retry waits for that."""


@read
async def look_up(invoice: int) -> dict[str, int | str]:
    """What an invoice says."""
    return {"invoice": invoice, "to": "ACME Ltd", "cents": 1000 + invoice}


@write(timeout_s=PAY_S + SPARE_S)
async def pay(invoice: int, cents: int, call: ToolCall) -> str:
    """Pay an invoice. A bank that knew the key could refuse a second payment; this one does not."""
    odd = invoice % 2 == 1
    await asyncio.sleep(PAY_S if odd else 0)
    _move_money(call, cents)
    await asyncio.sleep(0 if odd else PAY_S)
    return f"PAID-{invoice}"


def _move_money(call: ToolCall, cents: int) -> None:
    """One line, whole or not at all, on the disk."""
    line = json.dumps({"run": call.run_id, "step": call.step, "key": call.key, "cents": cents})
    ledger = os.open(LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(ledger, f"{line}\n".encode())
        os.fsync(ledger)
    finally:
        os.close(ledger)


class Clerk:
    """A model whose replies follow from the conversation alone: look up, pay, say so."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, preview: object
    ) -> Reply:
        asked = next(str(message.content) for message in messages if message.role == "user")
        invoice = int(asked.split()[-1])
        said = sum(message.role == "assistant" for message in messages)
        if said == 0:
            return _calls("look_up", invoice=invoice)
        if said == 1:
            return _calls("pay", invoice=invoice, cents=1000 + invoice)
        return Reply(text=f"Invoice {invoice} is paid.")


def _calls(tool: str, **arguments: int) -> Reply:
    request = ToolRequest(id=f"{tool}-1", name=tool, arguments=json.dumps(arguments))
    return Reply(calls=(request,), finish="tool_calls")


agent = Agent("payer", model=Clerk(), tools=[look_up, pay], system="You pay invoices.")

"""Agents for tests with real processes. What they do leaves lines in the folder they run in.

`requests`: each model request · `effects`: each call of a tool, with its key · `places`: each place
that was reached. While a file `hold/<place>` exists, whoever reaches that place stays there:
`model`, `lookup`, `create_ticket` (its effect has happened by then), `tick`.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from runfold import (
    Agent,
    Bounds,
    Message,
    Reply,
    Tool,
    ToolCall,
    ToolError,
    ToolSpec,
    read,
    write,
)
from runfold.testing import ScriptedModel, call, say

HOLD = Path("hold")
POLL_S = 0.005


def append(ledger: str, line: str) -> None:
    """One write, so that lines of several processes never mix."""
    fd = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(fd, f"{line}\n".encode())
    os.close(fd)


def stay(place: str) -> None:
    append("places", place)
    while HOLD.joinpath(place).exists():
        time.sleep(POLL_S)


class Model(ScriptedModel):
    """The scripted model, writing down what it is asked."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], **options: object
    ) -> Reply:
        append("requests", json.dumps(msgspec.to_builtins(messages)))
        append("places", "model")
        while HOLD.joinpath("model").exists():
            await asyncio.sleep(POLL_S)
        return await super().reply(messages, tools, **options)  # type: ignore[arg-type]


@read
def lookup(query: str, call: ToolCall) -> str:
    append("effects", f"lookup {call.key}")
    stay("lookup")
    return f"nothing known about {query}"


def file_ticket(title: str, call: ToolCall) -> str:
    append("effects", f"create_ticket {call.key}")
    stay("create_ticket")
    return "TICKET-1"


@read
async def tick(call: ToolCall) -> str:
    append("places", "tick")
    while HOLD.joinpath("tick").exists():
        await asyncio.sleep(POLL_S)
    return "tock"


@write(name="charge", approval=False)
def charge(amount: int) -> str:
    raise ToolError("the card was declined", {"amount": amount})


def helpdesk(name: str, ticket: Tool) -> Agent:
    model = Model(
        call("lookup", query="VPN"),
        call("create_ticket", title="VPN is down"),
        say("Ticket filed."),
    )
    return Agent(name, model=model, tools=[lookup, ticket])


create_ticket = write(name="create_ticket", timeout_s=20)(file_ticket)
desk = helpdesk("desk", create_ticket)
"""Looks up, asks a person, files a ticket, answers."""

quick = helpdesk("quick", write(name="create_ticket", approval=False)(file_ticket))
"""The same without a person."""

clock = Agent("clock", model=Model(call("tick"), say("It ticks.")), tools=[tick])
"""An async read, then the answer."""

declined = Agent("declined", model=Model(call("charge", amount=5), say("No.")), tools=[charge])
mute = Agent("mute", model=Model(say(""), say(" "), say("")), bounds=Bounds(bad_replies=3))
"""Answers nothing three times: the run fails."""

speechless = Agent("speechless", model=Model())
"""Its model has no reply at all: each call of it fails."""

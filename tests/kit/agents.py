"""Agents for tests with real processes. What they do leaves lines in the folder they run in.
Run as a program: the process that commands of `kit.cli` are forked from.

`requests`: each model request · `effects`: each call of a tool, with its key · `places`: each place
that was reached. While a file `hold/<place>` exists, whoever reaches that place stays there:
`model`, `lookup`, `create_ticket` (its effect has happened by then), `tick`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import msgspec
import typer

import journal.stepping
import runfold.cli
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

journal.stepping.APPEND_BUDGET_S = 3.0  # type: ignore[misc]
"""Instead of 30 s, where the deadline of a write has to pass."""

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
        while HOLD.joinpath("model").exists():  # noqa: ASYNC110
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
    while HOLD.joinpath("tick").exists():  # noqa: ASYNC110
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

brief = helpdesk("brief", write(name="create_ticket", timeout_s=3)(file_ticket))
"""As `desk`; what it is in the middle of is over soon."""

swift = helpdesk("swift", write(name="create_ticket", approval=False, timeout_s=3)(file_ticket))
"""As `quick`, likewise."""

clock = Agent("clock", model=Model(call("tick"), say("It ticks.")), tools=[tick])
"""An async read, then the answer."""

declined = Agent("declined", model=Model(call("charge", amount=5), say("No.")), tools=[charge])
mute = Agent("mute", model=Model(say(""), say(" "), say("")), bounds=Bounds(bad_replies=3))
"""Answers nothing three times: the run fails."""

speechless = Agent("speechless", model=Model())
"""Its model has no reply at all: each call of it fails."""


# -- the process that commands are forked from ----------------------------------------------------

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def command(words: list[str]) -> int:
    """The exit code of a command, run in this process."""
    sys.argv = ["runfold", *words]
    try:
        runfold.cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 99
    return 0


def fork(words: list[str], cwd: str, env: dict[str, str], to: str) -> int:
    """A child that runs a command and leaves its output in `<to>.out` and `<to>.err`."""
    pid = os.fork()
    if pid == 0:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        send(0, os.devnull, os.O_RDONLY)
        send(1, f"{to}.out")
        send(2, f"{to}.err")
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        code = command(words)
        threading._shutdown()  # type: ignore[attr-defined]  # as any program: waits for threads
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


def send(fd: int, path: str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, fd)
    os.close(opened)


def leave(path: str, number: int) -> None:
    """Whole or not at all."""
    Path(f"{path}.new").write_text(str(number))
    os.rename(f"{path}.new", path)


def warm_up() -> None:
    """Import what commands import late, in one that is refused; it starts no thread."""
    out, err = os.dup(1), os.dup(2)
    send(1, os.devnull)
    send(2, os.devnull)
    command(["show", "a bad id"])
    os.dup2(out, 1)
    os.dup2(err, 2)
    made = typer.main.get_command(runfold.cli.app)
    typer.main.get_command = lambda _: made  # type: ignore[assignment]
    gc.freeze()


def serve() -> None:
    """Fork one command for each line of JSON on stdin, until it ends."""
    warm_up()
    children: dict[int, tuple[int, str]] = {}
    rest = b""
    while True:
        for fd in select.select([0, *children], [], [])[0]:
            if fd in children:
                pid, to = children.pop(fd)
                os.close(fd)
                leave(f"{to}.code", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            found = os.read(0, 1 << 20)
            if not found:
                return
            *lines, rest = (rest + found).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = fork(**request)
                children[os.pidfd_open(pid)] = pid, request["to"]
                leave(f"{request['to']}.pid", pid)


if __name__ == "__main__":
    serve()

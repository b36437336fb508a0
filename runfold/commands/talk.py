"""Shell: `runfold send`, `withdraw`, `input`, `cancel`, `resume`: talking to a run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import typer

from journal.escape import visible, visible_json
from journal.ids import run_id as checked_run_id
from journal.inputs import InputState
from journal.limits import WAIT_MAX_S

from ..frame import UsageProblem, execute
from ..loading import json_option, read_input
from ..options import AnyStoreOption, CredsOption, JsonOption, NamespaceOption, Target
from ..reach import Talk, talking
from ..terminal import emit_json, say
from .decide import RequestOption, send_signal

RunArgument = Annotated[str, typer.Argument(help="Run id.")]
InputArgument = Annotated[str, typer.Argument(help="The input's request id.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Stands in the journal.")]

MODES: dict[str, Literal["steer", "follow_up"]] = {
    "steer": "steer",
    "follow-up": "follow_up",
    "follow_up": "follow_up",
}


def register(app: typer.Typer) -> None:
    app.command("send")(send)
    app.command("withdraw")(withdraw)
    app.command("input")(show_input)
    app.command("cancel")(cancel)
    app.command("resume")(resume)


def send(
    id: RunArgument,
    text: Annotated[
        str | None, typer.Argument(help="TEXT, @FILE, or - for stdin.", show_default=False)
    ] = None,
    input_json: Annotated[
        str | None, typer.Option("--input-json", help="The message as JSON, instead of TEXT.")
    ] = None,
    mode: Annotated[
        str,
        typer.Option("--mode", help="steer: before its next model call; follow-up: after its end."),
    ] = "steer",
    request_id: RequestOption = None,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Send a running agent a message. Repeating the request id sends nothing again."""

    async def body() -> int:
        if mode not in MODES:
            raise UsageProblem("--mode is steer or follow-up")
        if text is not None and input_json is not None:
            raise UsageProblem("TEXT and --input-json exclude each other")
        content = read_input(text, None)
        if input_json is not None:
            content = json_option("--input-json", input_json)
        elif text is None:
            raise UsageProblem("say what: TEXT or --input-json JSON")
        return await _input(
            id,
            Target(store, namespace, creds),
            json,
            lambda talk: talk.send(id, content, mode=MODES[mode], request_id=request_id),
        )

    execute(json, body())


def withdraw(
    id: RunArgument,
    request_id: InputArgument,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Take a message back while it is queued. Exit code 8 where the agent has it already."""
    target = Target(store, namespace, creds)
    execute(json, _input(id, target, json, lambda talk: talk.withdraw(id, request_id)))


def show_input(
    id: RunArgument,
    request_id: InputArgument,
    wait: Annotated[
        float,
        typer.Option("--wait", help=f"Seconds to wait until it is settled (0-{WAIT_MAX_S:g})."),
    ] = 0.0,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """What became of a message: queued, placed, done, unanswered, or withdrawn."""
    target = Target(store, namespace, creds)
    execute(json, _input(id, target, json, lambda talk: talk.input(id, request_id, wait_s=wait)))


def cancel(
    id: RunArgument,
    reason: ReasonOption = "",
    request_id: RequestOption = None,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """End a run: nothing new is started, a write that is running is let end."""
    target = Target(store, namespace, creds)
    execute(json, _signal(id, "cancel", reason, request_id, target, json))


def resume(
    id: RunArgument,
    reason: ReasonOption = "",
    request_id: RequestOption = None,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """End a pause or a wait for the next attempt; give a run that failed retriably another try."""
    target = Target(store, namespace, creds)
    execute(json, _signal(id, "resume", reason, request_id, target, json))


async def _signal(
    id: str, name: str, reason: str, request_id: str | None, target: Target, json: bool
) -> int:
    payload: dict[str, Any] = {"reason": reason} if reason else {}
    return await send_signal(checked_run_id(id), name, payload, request_id, target, json)


async def _input(
    id: str, target: Target, json: bool, ask: Callable[[Talk], Awaitable[InputState]]
) -> int:
    """Ask, and print the input that comes back."""
    run = checked_run_id(id)
    async with talking(target) as talk:
        found = await ask(talk)
    if json:
        emit_json(
            {
                "run": run,
                "request_id": found.request_id,
                "mode": found.mode,
                "content": found.content,
                "status": found.status,
                "created": found.created,
            }
        )
    else:
        content = visible_json(found.content, 200) if found.content is not None else ""
        say(f"{visible(found.request_id)}: {found.status} ({found.mode}) {content}".rstrip())
    return 0

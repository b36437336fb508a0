"""Shell: `runfold approve`, `reject`, `reconcile`: what a person decides."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from journal.ids import marker_run
from journal.ids import run_id as checked_run_id

from ..frame import UsageProblem, execute
from ..loading import json_option
from ..options import AnyStoreOption, CredsOption, JsonOption, NamespaceOption, Target
from ..reach import talking
from ..terminal import emit_json, say, say_wait

RequestOption = Annotated[
    str | None,
    typer.Option("--request-id", help="Repeat with the same id after an unclear answer."),
]
MarkerArgument = Annotated[str, typer.Argument(help="As `runfold show ID` prints it.")]


def register(app: typer.Typer) -> None:
    app.command("approve")(approve)
    app.command("reject")(reject)
    app.command("reconcile")(reconcile)


def approve(
    marker: MarkerArgument,
    comment: Annotated[str, typer.Option("--comment")] = "",
    request_id: RequestOption = None,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Let the call behind a marker run, once. It runs when the run is next taken up."""
    payload = {"marker": marker} | ({"comment": comment} if comment else {})
    execute(
        json, _decide(marker, "approve", payload, request_id, Target(store, namespace, creds), json)
    )


def reject(
    marker: MarkerArgument,
    reason: Annotated[str, typer.Option("--reason", help="The model sees it.")] = "",
    request_id: RequestOption = None,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Refuse the call behind a marker; the model is told the reason."""
    payload = {"marker": marker} | ({"reason": reason} if reason else {})
    execute(
        json, _decide(marker, "reject", payload, request_id, Target(store, namespace, creds), json)
    )


def reconcile(
    id: Annotated[str, typer.Argument(help="Run id.")],
    step: Annotated[str, typer.Argument(help="The write whose outcome is unknown.")],
    done: Annotated[
        str | None, typer.Option("--done", help="It happened; its result as JSON.")
    ] = None,
    done_text: Annotated[
        str | None, typer.Option("--done-text", help="It happened; its result as text.")
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="It did not happen: run it again.")
    ] = False,
    start: Annotated[
        int | None, typer.Option("--start", help="Which start of the step, by record ordinal.")
    ] = None,
    request_id: RequestOption = None,
    store: AnyStoreOption = None,
    namespace: NamespaceOption = "runfold",
    creds: CredsOption = None,
    json: JsonOption = False,
) -> None:
    """Say what became of a write that a crash cut off."""

    async def body() -> int:
        if [done is not None, done_text is not None, retry].count(True) != 1:
            raise UsageProblem("say one of --done JSON, --done-text TEXT, --retry")
        payload: dict[str, Any] = {"step": step, "outcome": "retry" if retry else "done"}
        if start is not None:
            payload["start"] = start
        if done is not None:
            hint = "quote a text: '\"TICKET-7\"', or use --done-text"
            payload["result"] = json_option("--done", done, hint)
        if done_text is not None:
            payload["result"] = done_text
        run = checked_run_id(id)
        return await send_signal(
            run, "reconcile", payload, request_id, Target(store, namespace, creds), json
        )

    execute(json, body())


async def _decide(
    marker: str,
    name: str,
    payload: dict[str, Any],
    request_id: str | None,
    target: Target,
    json: bool,
) -> int:
    return await send_signal(marker_run(marker), name, payload, request_id, target, json)


async def send_signal(
    run: str,
    name: str,
    payload: dict[str, Any],
    request_id: str | None,
    target: Target,
    json: bool,
) -> int:
    """Send it, and print what became of it."""
    async with talking(target) as talk:
        receipt = await talk.signal(run, name, payload, request_id=request_id)
    if json:
        shape: dict[str, Any] = {
            "run": run,
            "request_id": receipt.request_id,
            "result": receipt.result,
            "n": receipt.n,
        }
        if receipt.deadline is not None:
            shape["deadline"] = receipt.deadline
        emit_json(shape)
    else:
        words = {
            "applied": "recorded; a worker goes on from here"
            if target.shared
            else "recorded; it takes effect when the run is next taken up",
            "kept": "kept; it counts when the run reaches that call",
            "repeated": "said before",
        }
        say(f"{name}: {words[receipt.result]} (record {receipt.n})")
        say_wait(receipt.deadline, "  ")
    return 0

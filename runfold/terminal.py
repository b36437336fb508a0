"""Shell: what commands print. Everything recorded passes through journal.escape (R68)."""

from __future__ import annotations

import os
import re
import shlex
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from journal.codec import Damage, Entry, tag
from journal.escape import visible, visible_json, visible_lines
from journal.fold import Fold
from journal.messages import Reply
from journal.order import check_result
from journal.records import (
    Claim,
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    NewerRecord,
    Park,
    Release,
    RunCompleted,
    RunStarted,
    Signal,
    StepCompleted,
    StepProgress,
    StepStarted,
    VerdictAllow,
    VerdictAsk,
    VerdictDeny,
)
from journal.steps import completed_value
from journal.stores.nats_address import without_password
from journal.views import (
    Completed,
    Waiting,
    final_message,
    outcome,
    pending_calls,
    unknown_steps,
    waiting_on,
)
from journal.waits import instant_text

from .logs import note as note

EXIT_BY_STATUS = {
    "completed": 0,
    "running": 0,
    "awaiting_approval": 3,
    "indeterminate": 4,
    "waiting": 5,
    "paused": 5,
    "failed": 6,
    "cancelled": 7,
    "damaged": 1,
    "newer": 1,
}
_INPUT_CHARS = 200
_RAW_BYTES = 4000


def emit_json(value: Any) -> None:
    """One JSON object on stdout, in ASCII-safe UTF-8: a pipe is no terminal, so nothing is escaped
    beyond what JSON escapes."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


def say(text: str = "") -> None:
    """A line for people, already made visible."""
    print(text)


def options(store: str | None, namespace: str) -> str:
    """The options that a printed command needs to mean the same store, quoted for a shell. No
    password is printed: RUNFOLD_STORE, where the address stands there, says it by itself."""
    shown = store
    if store and "://" in store:
        shown = ",".join(without_password(url) for url in store.split(","))
    if shown != store and os.environ.get("RUNFOLD_STORE") == store:
        shown = None
    words = ["--store", shown] if shown else []
    words += ["--namespace", namespace] if namespace != "runfold" else []
    return "".join(f" {shlex.quote(word)}" for word in words)


def print_run(fold: Fold, option: str, *, held: bool = False, now: str = "") -> None:
    """Where the run stands, and what a person can do about it."""
    assert fold.started is not None
    run = fold.started.run
    status = fold.status(held=held, now=now)
    end = outcome(fold, held=held, now=now)
    if isinstance(end, Completed):
        content = end.message.content
        say(visible_lines(content) if isinstance(content, str) else visible_json(content))
        return
    say(f"run {run}: {status.replace('_', ' ')}")
    if isinstance(fold.end, Commit):
        say(f"  {visible(fold.end.reason)}: {visible(fold.end.detail)}".rstrip(": "))
    if end is None or fold.finished or isinstance(end, Waiting):
        for wait in waiting_on(fold, held=held, now=now):
            until = f" until {instant_text(wait.until)}" if wait.until else ""
            ended_by = visible(wait.ended_by)
            if " --store http" in option:  # a bridge runs nothing
                ended_by = re.sub(r" or `runfold run [^`]*`", "", ended_by)
            ended_by = ended_by.replace("` ", f"{option}` ")
            if ended_by.endswith("`"):
                ended_by = f"{ended_by[:-1]}{option}`"
            say(f"  waits for {wait.what}{until}: {ended_by}")
        return
    for step in unknown_steps(fold):
        name = visible(step.step)
        say(f"  {name} may or may not have happened (record {step.start})")
        name = shlex.quote(name)  # of a writer of ours it needs none
        say(f"    {visible(step.tool)} {visible_json(step.input)}")
        say(f"    key {visible(step.key)}")
        say_wait(step.deadline, "    ")
        say(f"    runfold reconcile {run} {name} --start {step.start} --done JSON{option}")
        say(f"    runfold reconcile {run} {name} --start {step.start} --retry{option}")
    for call in pending_calls(fold):
        say(f"  {visible(call.tool)} {visible_json(call.input)}")
        say(f"    {visible(call.text)}")
        marker = shlex.quote(visible(call.marker))
        say(f"    runfold approve {marker}{option}")
        say(f"    runfold reject {marker} --reason TEXT{option}")


def say_wait(deadline: datetime | None, indent: str) -> None:
    """How long a retry waits for an earlier call that may still be running, if it does (R22)."""
    if deadline is not None and deadline > datetime.now(UTC):
        over = f"{instant_text(deadline)}, when the earlier call is surely over"
        say(f"{indent}a retry waits until {over}, unless its worker says before that it has ended")


def timeline(entry: Entry) -> str:
    """One record as a line: ordinal, time, what."""
    record = entry.record
    time = record.at[11:23]
    return f"{record.n:>4}  {visible(time):<12}  {_what(entry)}"


def _what(entry: Entry) -> str:
    match entry.record:
        case RunStarted() as r:
            return f"started   {visible(r.agent)} {visible_json(r.input, _INPUT_CHARS)}"
        case StepStarted() as r:
            permit = f" (by record {r.permit})" if r.permit else ""
            text = f" {visible_json(r.input, _INPUT_CHARS)}" if r.kind == "tool" else ""
            if r.step[:1].isdecimal():  # a turn handler's position says nothing of what is called
                text = f" {visible(r.tool or r.kind)}{text}"
            return f"start     {visible(r.step)}{text}{permit}"
        case StepCompleted() as r:
            return f"result    {visible(r.step)} {_result(r, entry.raw)}"
        case Signal() as r:
            return f"{r.name:<9} {_said(r)} by {visible(r.by)}"
        case RunCompleted() as r:
            content = final_message(r.message).content
            return f"completed {visible_json(content, _INPUT_CHARS)}"
        case Commit(action="continue") as r:
            return f"commit    turn {r.iteration}{_waits(r)}"
        case Commit() as r:
            return f"{r.action:<9} {visible(r.reason)} {visible(r.detail[:_INPUT_CHARS])}"
        case Claim() as r:
            return f"claim     {visible(r.worker)} ({r.reason})"
        case Release() as r:
            return f"release   {visible(r.reason)}"
        case Park() as r:
            until = f" until {visible(r.until)}" if r.until else ""
            reason = f": {visible(r.reason[:_INPUT_CHARS])}" if r.reason else ""
            asks = "".join(
                f"; {visible(ask.tool)} {visible_json(ask.input, _INPUT_CHARS)} (asks for approval)"
                for ask in r.asks
            )
            return f"park      for {r.why}{until}{reason}{asks}"
        case StepProgress() as r:
            return f"progress  {visible(r.step)} {visible_json(r.output, _INPUT_CHARS)}"
        case Input() as r:
            content = visible_json(r.content, _INPUT_CHARS)
            return f"input     {visible(r.request_id)} ({r.mode}) {content} by {visible(r.by)}"
        case InputPlaced() as r:
            return f"placed    {visible(r.request_id)}"
        case InputWithdrawn() as r:
            return f"withdrawn {visible(r.request_id)}"
        case NewerRecord() as r:
            what = f"{visible(r.type_)}: {visible(r.why)}; update this installation"
            return f"newer     {what}\n      {_as_it_stands(entry.raw)}"
        case other:
            return tag(other)


def _waits(record: Commit) -> str:
    """What a finished turn waits for."""
    waits = record.waits
    words = [f"until {visible(waits.until)}"] if waits.until else []
    words += ["for input"] if waits.until_input else []
    words += [f"for child {visible(waits.until_child)}"] if waits.until_child else []
    words += ["for resume"] if waits.resume else []
    reason = f": {visible(record.reason[:_INPUT_CHARS])}" if record.reason else ""
    return f", waits {' or '.join(words)}{reason}" if words else ""


def _said(record: Signal) -> str:
    """What a person decided, with the reason or result they gave."""
    payload = record.payload
    if record.name == "reconcile":
        result = visible_json(payload.get("result"), _INPUT_CHARS)
        outcome = f"done {result}" if payload.get("outcome") == "done" else "retry"
        return f"{visible(str(payload.get('step')))} {outcome}"
    why = str(payload.get("reason") or payload.get("comment") or "")
    text = f" ({visible(why[:_INPUT_CHARS])})" if why else ""
    about = payload.get("marker") or payload.get("step") or payload.get("run") or ""
    return f"{visible(str(about))}{text}".strip()


def _as_it_stands(raw: bytes) -> str:
    """What this version can't read (R18)."""
    return visible(raw[:_RAW_BYTES].decode(errors="replace"))


def _result(record: StepCompleted, raw: bytes) -> str:
    try:
        check_result(record)
    except Damage:  # behind a newer version's record
        return _as_it_stands(raw)
    value, error = completed_value(record)
    via = "" if record.via == "run" else f" (via {record.via})"
    if error is not None:
        return f"error {visible(error.type)}: {visible(error.message[:_INPUT_CHARS])}{via}"
    if record.verdicts:
        return _calls(record)
    return f"{visible_json(value, _INPUT_CHARS)}{via}"


def _calls(record: StepCompleted) -> str:
    """A model reply's calls with what the gate said of each."""
    reply = msgspec.convert(record.result, Reply)
    words: list[str] = []
    for request, verdict in zip(reply.calls, record.verdicts, strict=True):
        match verdict:
            case VerdictAllow():
                said = ""
            case VerdictAsk():
                said = " (asks for approval)"
            case VerdictDeny(reason=reason):
                said = f" (denied: {visible(reason[:_INPUT_CHARS])})"
        arguments = visible(request.arguments[:_INPUT_CHARS])
        words.append(f"{visible(request.name[:_INPUT_CHARS])} {arguments}{said}")
    return f"calls {'; '.join(words)}"

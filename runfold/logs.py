"""Shell: how a command speaks on stderr: lines for people, or JSON, one object a line (R73).

In JSON nothing of a command that has begun speaks otherwise: its log, what it notes and why it
ends, and other libraries' logs and warnings. What a user's own code prints is its own.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from journal.escape import visible
from journal.waits import instant_text

FIELDS: Final = (
    *("run", "step", "claim", "agent", "worker", "code"),
    *("method", "path", "status", "seconds"),
)
"""What log calls may give as `extra`, and the line then has."""

log = logging.getLogger("runfold")


class LogFormat(StrEnum):
    """Words of the option."""

    TEXT = "text"
    JSON = "json"


LogOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar="RUNFOLD_LOG",
        help="What stderr holds: text, or a JSON object a line.",
    ),
]


class TextLines(logging.Formatter):
    """As `note` shows them; whatever they hold stays one line."""

    def format(self, record: logging.LogRecord) -> str:
        return f"runfold: {visible(record.getMessage())}"


class JsonLines(logging.Formatter):
    """An object a line, in ASCII: no text in it can end the line, or move a cursor. `fields` are in
    each."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: dict[str, Any] = {}

    def format(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = {
            "time": instant_text(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **self.fields,
        }
        given = vars(record)
        found |= {name: given[name] for name in FIELDS if given.get(name) not in (None, "")}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        text = json.dumps(found | _trace(), default=str, separators=(",", ":"))
        return text.replace("\x7f", "\\u007f")


class _Spoken:
    """Of this process: None where it speaks text."""

    json: JsonLines | None = None


def set_up(how: LogFormat) -> None:
    """From now on. In JSON, lines of level info too, which text leaves out."""
    handler = logging.StreamHandler()
    root = logging.getLogger()
    if how is LogFormat.JSON:
        _Spoken.json = JsonLines()
        handler.setFormatter(_Spoken.json)
        root.handlers[:] = [handler]
        log.handlers[:] = []
        log.propagate = True
        log.setLevel(logging.INFO)
        logging.captureWarnings(True)
        return
    _Spoken.json = None
    handler.setFormatter(TextLines())
    log.handlers[:] = [handler]
    log.propagate = False


def mark(**fields: str) -> None:
    """Each line from now on has these, where it is JSON."""
    if _Spoken.json is not None:
        _Spoken.json.fields |= fields


def note(text: str) -> None:
    """A line beside the answer."""
    if _Spoken.json is not None:
        log.info("%s", text)
    else:
        print(f"runfold: {visible(text)}", file=sys.stderr)


def complain(message: str, hint: str, code: str, run: str | None) -> None:
    """Why a command ends as it was not meant to."""
    text = f"{message} ({hint})" if hint else message
    if _Spoken.json is not None:
        log.error("%s", text, extra={"code": code, "run": run})
    else:
        print(f"runfold: {visible(text)}", file=sys.stderr)


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # a slip in a log call must not make a line of another kind
        return f"{record.msg} {record.args!r}"


def _trace() -> dict[str, str]:
    """Of the span that the line was written in, where somebody traces."""
    current: Any = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if current is None:
        return {}
    context = current().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

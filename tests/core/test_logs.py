"""How a command speaks on stderr: text as ever, or one JSON object a line (R73)."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from journal.errors import RunNotFound
from runfold import logs
from runfold.frame import report
from runfold.logs import FIELDS, JsonLines, LogFormat
from runfold.terminal import note

log = logging.getLogger("runfold")
HOSTILE = 'a\r\nb\x1b[2J\u2028c\u202ed\x7f"}\n{"level":"forged"}\ud800'


class Spoken:
    """What was said on stderr in a process that speaks JSON, or text."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def begin(self, how: LogFormat) -> None:
        logs.set_up(how)

    @property
    def text(self) -> str:
        return self._capsys.readouterr().err

    @property
    def objects(self) -> list[dict[str, Any]]:
        text = self.text
        assert text.isascii() and text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def spoken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Spoken]:
    """Afterwards all is as it was."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(logs._Spoken, "json", None)
    level = log.level
    yield Spoken(capsys)
    log.setLevel(level)
    logging.captureWarnings(False)


def test_a_log_line_is_one_object_with_what_the_call_gives(spoken: Spoken):
    spoken.begin(LogFormat.JSON)
    logs.mark(worker="w-1")
    log.warning("run %s is left", "a1", extra={"run": "a1", "step": "llm/1", "code": ""})
    (line,) = spoken.objects
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "runfold",
        "message": "run a1 is left",
        "worker": "w-1",
        "run": "a1",
        "step": "llm/1",
    }


def test_hostile_text_stays_in_its_line_and_its_field(spoken: Spoken):
    spoken.begin(LogFormat.JSON)
    log.error("%s", HOSTILE, extra={"run": HOSTILE})
    note(HOSTILE)
    found = spoken.objects
    assert [line["message"] for line in found] == [HOSTILE, HOSTILE]
    assert [line["level"] for line in found] == ["error", "info"]
    assert found[0]["run"] == HOSTILE


def test_an_exception_stands_in_its_line(spoken: Spoken):
    spoken.begin(LogFormat.JSON)
    try:
        raise KeyError("x\ny")
    except KeyError:
        log.exception("a bug")
    (line,) = spoken.objects
    assert line["message"] == "a bug"
    assert line["exception"].startswith("Traceback") and "KeyError: 'x\\ny'" in line["exception"]


def test_why_a_command_ends_what_it_notes_and_what_others_log_are_lines_too(spoken: Spoken):
    spoken.begin(LogFormat.JSON)
    report(RunNotFound("run a1 does not exist", run_id="a1", hint="`runfold list`"), json=False)
    note("worker w-1 is ready")
    logging.getLogger("someone.else").warning("hm")
    logging.getLogger("someone.else").info("not told")
    warnings.warn("old", stacklevel=1)
    found = spoken.objects
    assert [(line["logger"], line["level"]) for line in found] == [
        ("runfold", "error"),
        ("runfold", "info"),
        ("someone.else", "warning"),
        ("py.warnings", "warning"),
    ]
    assert found[0]["message"] == "run a1 does not exist (`runfold list`)"
    assert (found[0]["code"], found[0]["run"]) == ("run_not_found", "a1")


def test_a_slip_in_a_log_call_is_a_line_all_the_same(spoken: Spoken):
    spoken.begin(LogFormat.JSON)
    log.warning("%d of %s", "many")
    (line,) = spoken.objects
    assert line["message"] == "%d of %s ('many',)"


def test_a_value_that_is_no_json_is_told_as_text(spoken: Spoken):
    spoken.begin(LogFormat.JSON)
    log.warning("x", extra={"seconds": {1}, "agent": ValueError("no")})
    (line,) = spoken.objects
    assert (line["seconds"], line["agent"]) == ("{1}", "no")


def test_a_line_names_the_span_it_was_written_in(monkeypatch: pytest.MonkeyPatch):
    class Span:
        trace_id, span_id, is_valid = 0xABC, 0x12, True

        def get_span_context(self) -> Span:
            return self

    class Api:
        @staticmethod
        def get_current_span() -> Span:
            return Span()

    record = log.makeRecord("runfold", logging.INFO, "", 0, "x", (), None)
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", Api)  # type: ignore[arg-type]
    line = json.loads(JsonLines().format(record))
    assert line["trace_id"] == "0" * 29 + "abc" and line["span_id"] == "0" * 14 + "12"
    Span.is_valid = False
    assert "trace_id" not in json.loads(JsonLines().format(record))
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")
    assert "trace_id" not in json.loads(JsonLines().format(record))


def test_no_field_is_one_that_logging_has_itself():
    record = vars(log.makeRecord("runfold", logging.INFO, "", 0, "x", (), None))
    assert not set(FIELDS) & (record.keys() | {"message", "asctime", "time", "level", "logger"})


def test_text_is_as_ever(spoken: Spoken):
    spoken.begin(LogFormat.TEXT)
    logs.mark(worker="w-1")
    log.warning("run %s\nis left", "a1", extra={"run": "a1"})
    log.info("not told")
    note("worker w-1 is ready")
    report(RunNotFound("run a1 does not exist", run_id="a1", hint="look"), json=False)
    assert spoken.text == (
        "runfold: run a1\\nis left\n"
        "runfold: worker w-1 is ready\n"
        "runfold: run a1 does not exist (look)\n"
    )

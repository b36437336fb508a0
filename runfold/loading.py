"""Shell: what a command line names: an agent in a file, an input in a text, a file or a pipe."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from traceback import extract_tb
from typing import Any

from journal.errors import RunfoldError
from journal.ids import shown
from journal.values import BadJSON, parse_strict
from worker.agent import Agent

from .frame import UsageProblem


@contextmanager
def agents_output(json: bool) -> Generator[None]:
    """With --json, stdout holds one object: what the agent's code prints goes to stderr."""
    if not json:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # what its child processes print, too
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def read_input(text: str | None, json_text: str | None) -> Any:
    """The value of `--input TEXT|@FILE|-` or `--input-json JSON`; None where neither is there.
    Raises UsageProblem."""
    if text is not None and json_text is not None:
        raise UsageProblem("--input and --input-json exclude each other")
    if json_text is not None:
        value = json_option("--input-json", json_text)
        if value is None:
            raise UsageProblem("--input-json null is no input")
        return value
    if text == "-":
        return _decoded(sys.stdin.buffer.read(), "standard input")
    if text is not None and text.startswith("@"):
        path = Path(text[1:])
        try:
            return _decoded(path.read_bytes(), str(path))
        except OSError as error:
            raise UsageProblem(
                f"--input {shown(text, 300)}: {error.strerror}",
                hint="a text that starts with @ goes through --input-json",
            ) from error
    return text


def json_option(name: str, text: str, hint: str = "") -> Any:
    """The value of an option that is JSON; raises UsageProblem."""
    try:
        return parse_strict(text)
    except BadJSON as error:
        raise UsageProblem(f"{name} is not JSON: {error}", hint=hint) from error


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageProblem(f"{where} is not UTF-8") from error


def agent_name(where: str) -> tuple[str, str]:
    """The FILE.py or dotted.module, and the NAME in it; raises UsageProblem."""
    source, colon, attribute = where.rpartition(":")
    if not colon or not source or not attribute.isidentifier():
        raise UsageProblem(
            f"{shown(where, 300)} names no agent", hint="write FILE.py:NAME or dotted.module:NAME"
        )
    return source, attribute


def agent_file(source: str) -> Path:
    """The file of a FILE.py; raises UsageProblem."""
    path = Path(source).resolve()
    if not path.is_file():
        raise UsageProblem(f"{shown(source, 300)}: no such file")
    return path


def load_agent(where: str) -> Agent:
    """The Agent that FILE.py:NAME or dotted.module:NAME names; raises UsageProblem."""
    source, attribute = agent_name(where)
    try:
        module = _module(source)
    except RunfoldError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}"
        line = next(
            (
                f" line {f.lineno}"
                for f in reversed(extract_tb(error.__traceback__))
                if f.filename.endswith(Path(source).name)
            ),
            "",
        )
        raise UsageProblem(
            f"{shown(source, 300)}{line} can't be loaded: {what}", hint="RUNFOLD_DEBUG=1 shows more"
        ) from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Agent):
        what = "is not there" if found is None else f"is a {type(found).__name__}, not an Agent"
        raise UsageProblem(f"{attribute} in {shown(source, 300)} {what}")
    return found


def _module(source: str) -> Any:
    if not source.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(source)
    path = agent_file(source)
    spec = importlib.util.spec_from_file_location(f"_runfold_agent_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module

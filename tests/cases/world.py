"""A case's surroundings: a directory of journals, the effects ledger, the command, the checks."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from cases.pay import PayAgent, build
from cases.zygote import Done
from kit.audited import check
from kit.ledger import Ledger

from journal.codec import Entry, decode
from journal.fold import Fold
from journal.ids import RunId
from journal.store import Store
from journal.stores.file import FileStore
from runfold.cli import main

PAY = f"{Path(__file__).with_name('pay.py')}:agent"
TERMINAL = ("run.completed", "commit", "run.purged")


class World:
    """One test's files. `runs` is a file store's directory, made by whoever appends first."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.runs = home / "runs"
        self.ledger = Ledger(home / "ledger")

    def agent(self, script: str = "charge", at: str = "", revision: str = "1") -> PayAgent:
        return build(self.home, script=script, at=at, revision=revision)

    def store(self) -> FileStore:
        return FileStore(self.runs)

    def path(self, run_id: str) -> Path:
        return self.store().path(RunId(run_id))

    def asked(self) -> list[str]:
        """The model calls of all processes: `llm/1`, …"""
        path = self.home / "asked"
        return path.read_text().split() if path.exists() else []

    def env(self, script: str = "charge", at: str = "") -> dict[str, str]:
        return {"CASE_HOME": str(self.home), "CASE_SCRIPT": script, "CASE_AT": at}

    def run_args(self, run_id: str, *more: str, input: str | None = None) -> list[str]:
        given = [] if input is None else ["--input", input]
        return ["run", PAY, "--id", run_id, "--store", str(self.runs), *given, *more]

    def cli(self, *args: str, script: str = "charge", at: str = "") -> Done:
        """`runfold args…` in this process: the very `main`, its output as bytes."""
        with _environment(self.env(script, at)):
            return cli(*args)

    def run(
        self,
        run_id: str,
        *more: str,
        input: str | None = None,
        script: str = "charge",
        at: str = "",
    ) -> Done:
        return self.cli(*self.run_args(run_id, *more, input=input), script=script, at=at)

    def show(self, run_id: str, *more: str) -> Done:
        return self.cli("show", run_id, "--store", str(self.runs), *more)

    def list(self) -> dict[str, str]:
        """Run id to status, as `runfold list` says."""
        done = self.cli("list", "--store", str(self.runs), "--json")
        assert done.code == 0, done
        return {run["run"]: run["status"] for run in done.json["runs"]}

    def reconcile(self, run_id: str, step: str, *how: str) -> Done:
        return self.cli("reconcile", run_id, step, "--store", str(self.runs), *how)

    def check(self, run_id: str) -> list[dict[str, Any]]:
        """The run's file, held to what every journal must be."""
        data = self.path(run_id).read_bytes()
        assert data.endswith(b"\n")
        return check_lines(data[:-1].split(b"\n"))


def cli(*args: str) -> Done:
    """`runfold args…` in this process, outside any event loop."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n") for _ in range(2)]
    argv, sys.argv = sys.argv, ["runfold", *args]
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            try:
                main()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.argv = argv
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]
    return Done(code, *texts)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def one_line(text: str) -> str:
    """The text, which is one line of an error and no traceback."""
    assert text.endswith("\n") and text.count("\n") == 1, text
    assert text.startswith("runfold: "), text
    assert "Traceback" not in text and "internal error" not in text
    return text[:-1]


# ---- what every journal must be ---------------------------------------------------------------


def check_lines(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Strict JSON, no gap, chained by hashes, each step completed once, nothing after the end; and
    the product folds and audits it. The first part leans on nothing of the product's."""
    records: list[dict[str, Any]] = []
    head = "0" * 32
    completed: set[str] = set()
    ended = False
    for n, line in enumerate(lines, 1):
        record = strict(line)
        assert not ended, f"record {n} stands after the end"
        assert record["n"] == n
        assert record["prev"] == head, f"record {n} does not chain"
        if record["type"] == "step.completed":
            assert record["step"] not in completed, f"{record['step']} has two results"
            completed.add(record["step"])
        ended = record["type"] in TERMINAL
        head = blake2b(line, digest_size=16).hexdigest()
        records.append(record)
    fold = Fold()
    for line in lines:
        fold.apply(Entry(decode(line), line))
    assert fold.newer is None
    check(records[0]["run"], [Entry(decode(line), line) for line in lines])
    return records


async def check_store(store: Store, run_id: str) -> list[dict[str, Any]]:
    """As check_lines, for a run in any store."""
    loaded = await store.load(RunId(run_id))
    return check_lines([entry.raw for entry in loaded.entries])


def strict(line: bytes) -> dict[str, Any]:
    """The line as a JSON object; no NaN, no key twice, no half surrogate."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        assert len(found) == len(pairs), "a key stands twice"
        return found

    def refuse(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    record: dict[str, Any] = json.loads(
        line.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse
    )
    json.dumps(record, ensure_ascii=False).encode("utf-8")
    return record


def named(records: Sequence[dict[str, Any]]) -> list[str]:
    """`step.started llm/1`, `run.completed` of each record."""
    return [f"{r['type']} {r.get('step', '')}".strip() for r in records]


def rechain(records: Sequence[dict[str, Any]], *, ascii: bool = False) -> list[bytes]:
    """Edited records as lines that chain again: what a writer with that content would have left."""
    lines: list[bytes] = []
    head = "0" * 32
    for record in records:
        text = json.dumps(record | {"prev": head}, ensure_ascii=ascii, separators=(",", ":"))
        lines.append(text.encode("utf-8"))
        head = blake2b(lines[-1], digest_size=16).hexdigest()
    return lines

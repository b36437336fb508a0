"""The next release of Runfold, in a child process: it knows one more type of record, and writes it.

Where this release records a write's partial output as `step.progress`, that one has `step.noted`.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import msgspec

from journal import codec, handle, ownership, taking
from journal.records import AnyRecord, StepProgress
from worker import report

RELEASE = "9.0.0"


class StepNoted(StepProgress, frozen=True, kw_only=True, tag="step.noted"):
    """By the holder: like the progress that it was made of."""

    noted: bool = True


def become_newer() -> None:
    codec._decode = msgspec.json.Decoder(AnyRecord | StepNoted).decode
    handle.StepProgress = StepNoted  # type: ignore[misc]
    for module in (taking, ownership, report):
        assert hasattr(module, "RELEASE")
        module.RELEASE = RELEASE  # type: ignore[attr-defined]


def cli(args: list[str], env: dict[str, str]) -> NoReturn:
    """Its `runfold args…`."""
    from runfold.cli import main

    become_newer()
    os.environ.update(env)
    sys.argv = ["runfold", *args]
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""Copies of the tree to mutate: the tree that people work in is never touched."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("journal", "worker", "bridge", "runfold", "tests", "examples", "pyproject.toml")


@contextmanager
def copied_tree() -> Generator[Path]:
    """Compiled, checked by hash: a mutant of the same length in the same second is noticed."""
    with tempfile.TemporaryDirectory(prefix="runfold-mutants-") as folder:
        where = Path(folder)
        for part in PARTS:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, where / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, where / part)
        command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
        parts = ("journal", "worker", "bridge", "runfold", "tests/kit")
        subprocess.run([*command, *parts], cwd=where, check=True)
        yield where


@contextmanager
def written(path: Path, text: str) -> Generator[None]:
    """The file with another text, for as long as the block runs."""
    had = path.read_text(encoding="utf-8")
    path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(had, encoding="utf-8")

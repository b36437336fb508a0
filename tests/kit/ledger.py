"""The effects ledger: the one oracle of what happened outside. One fsynced line per effect."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Ledger:
    """`add` is what an unsafe tool does to the world; `lines` is what became of the world."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def add(self, run: str, step: str, args: Any) -> None:
        line = json.dumps([run, step, args], separators=(",", ":")) + "\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line.encode())  # one write: whole or not at all, also between processes
            os.fsync(fd)
        finally:
            os.close(fd)

    def lines(self, run: str | None = None) -> list[tuple[str, str, Any]]:
        """(run, step, args) of each effect in order; only those of `run` where one is given."""
        if not self.path.exists():
            return []
        whole = self.path.read_text().rpartition("\n")[0]  # one that is being written is not yet
        found = [tuple(json.loads(line)) for line in whole.split("\n") if line]
        return [line for line in found if run is None or line[0] == run]

"""Charges after a crash in the middle of one: Runfold and its peers, the same program.

    python bench/crash_in_write/run.py [NAME …] [--json] [--cache FOLDER] [--no-install]

Without names: all. Peers are installed into FOLDER (default ~/.cache/runfold-crash-in-write).
Exit code: 0, or 1 where Runfold's count is not 1; a peer that can't be had here is skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_adapters as peers
import runfold_adapters as ours
from drive import Wrong
from environments import CACHE, Environment, NotHere, environment
from outcome import Outcome

OURS: dict[str, Callable[[], Outcome]] = {
    "runfold-directory": ours.directory,
    "runfold-server": ours.server,
    "runfold-fleet": ours.fleet,
}
PEERS: dict[str, tuple[str, Callable[[Environment], Outcome]]] = {
    "dbos": ("dbos", peers.dbos),
    "dbos-no-recovery": ("dbos", peers.dbos_no_recovery),
    "pydantic-ai-dbos": ("pydantic-ai-dbos", peers.pydantic_ai_dbos),
    "langgraph": ("langgraph", peers.langgraph),
    "restate": ("restate", peers.restate),
    "restate-once": ("restate", peers.restate_once),
    "temporal": ("temporal", peers.temporal),
    "temporal-once": ("temporal", peers.temporal_once),
}
"""By name: the environment it needs, and its adapter."""


def measure(name: str, cache: Path, *, install: bool) -> dict[str, Any]:
    """One row: an Outcome's fields and `seconds`; or `skipped` or `wrong` with the reason."""
    begun = time.monotonic()
    try:
        if name in OURS:
            outcome = OURS[name]()
        else:
            needs, adapter = PEERS[name]
            outcome = adapter(environment(needs, cache, install=install))
    except NotHere as error:
        return {"name": name, "skipped": str(error)}
    except Wrong as error:
        return {"name": name, "wrong": str(error)}
    seconds = round(time.monotonic() - begun, 1)
    return {"name": name, **dataclasses.asdict(outcome), "seconds": seconds}


def is_right(row: dict[str, Any]) -> bool:
    """Runfold charged once, before and after a person's word; a peer's figure is only told."""
    if row["name"] not in OURS:
        return True
    return (row.get("charges"), row.get("charges_in_the_end")) == (1, 1)


def table(rows: list[dict[str, Any]]) -> str:
    """GitHub's kind of table, as README.md has it."""
    lines = [
        "| system | version | charges | run | what the operator sees | then | charges in the end |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        told = row.get("skipped") or row.get("wrong")
        if told is not None:
            kind = "skipped" if "skipped" in row else "wrong"
            cells = [row["name"], "", kind, "", told, "", ""]
        else:
            then = f"{row['way_on']}: {row['state_in_the_end']}" if row["way_on"] else ""
            cells = [row["system"], row["version"], row["charges"], row["state"], row["seen"], then]
            cells.append(row["charges_in_the_end"])
        lines.append("| " + " | ".join(" ".join(str(cell).split()) for cell in cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = [*OURS, *PEERS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    parser.add_argument("--cache", type=Path, default=CACHE, help=f"default: {CACHE}")
    parser.add_argument("--no-install", action="store_true", help="skip what is not there yet")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in names]
    if unknown:
        parser.error(f"no such system: {', '.join(unknown)}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended too
    rows: list[dict[str, Any]] = []
    for name in options.names or names:
        row = measure(name, options.cache.resolve(), install=not options.no_install)
        rows.append(row)
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            told = row.get("skipped") or row.get("wrong") or f"charges {row['charges']}"
            print(f"{name}: {told}", file=sys.stderr, flush=True)
    if not options.json:
        print(table(rows))
    return 0 if all(is_right(row) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Writes what `runfold bench --out` measured into docs/performance.md, as tables.

usage: python bench/report.py OUT.json [OUT.json …]

Of several files of one kind (one server, or three), each workload is taken from the last that has
it. Only what stands between the markers `<!-- measured R1 -->`, `<!-- measured R3 -->` and the next
`<!-- end -->` is written anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from runfold.benchmark.tables import machine_line, markdown
from runfold.benchmark.targets import rows

PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
END = "<!-- end -->"


def main(files: list[str]) -> None:
    kinds: dict[int, list[dict[str, Any]]] = {}
    for file in files:
        result = json.loads(Path(file).read_bytes())
        kinds.setdefault(result["replicas"], []).append(result)
    page = PAGE.read_text()
    for replicas, results in kinds.items():
        before, marker, rest = page.partition(f"<!-- measured R{replicas} -->\n")
        _, end, after = rest.partition(END)
        if not marker or not end:
            raise SystemExit(f"{PAGE} has no markers for R{replicas}")
        page = before + marker + section(results) + END + after
    PAGE.write_text(page)


def section(results: list[dict[str, Any]]) -> str:
    """Which command measured what, and where; then the table."""
    whole: dict[str, Any] = {}
    for result in results:
        whole |= result
    said = [f"- `{result['command']}`: {machine_line(result)}" for result in results]
    table = markdown(rows(whole))
    return "\n".join([*said, "", *table, ""])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(sys.argv[1:])

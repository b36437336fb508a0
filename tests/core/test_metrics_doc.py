"""docs/metrics.md is true as far as a test can tell: it has every metric there is, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from kit.registered import registered

DOC = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text("utf-8")
ROW = re.compile(r"^\| `(runfold_\w+)` \| (\w+) \|\s*([^|]*?)\s*\| [^|]+ \|$", re.MULTILINE)


def test_the_tables_have_the_name_type_and_labels_of_every_metric() -> None:
    rows = {
        name: (kind, tuple(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in ROW.findall(DOC)
    }
    made = {name: (one.kind, one.labels) for name, one in registered().items()}
    assert rows == made
    assert DOC.count("\n| `runfold_") == len(rows)


def test_every_metric_says_what_it_is() -> None:
    assert all(one.about for one in registered().values())

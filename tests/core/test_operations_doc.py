"""docs/operations.md: the defaults it gives are the code's, and what it points at is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from journal import limits, shards

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "operations.md").read_text()
SETTINGS = {
    cells[0].strip(): cells[1].strip()
    for cells in (line.strip("|").split("|") for line in TEXT.splitlines())
    if len(cells) == 4
}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (
            "`worker --ack-wait`",
            f"{limits.ACK_WAIT_S:g} s; {limits.ACK_WAIT_MIN_S:g}–{limits.ACK_WAIT_MAX_S:g}",
        ),
        ("`worker --grace`", f"{limits.GRACE_S:g} s; from 0"),
        ("`worker --concurrency`", f"{limits.CONCURRENCY}; 1–{limits.CONCURRENCY_MAX}"),
        ("`worker --restart-limit`", f"{limits.RESTART_LIMIT}; 1–{limits.RESTART_LIMIT_MAX}"),
        ("sweep", f"each worker, every {limits.SWEEP_S:g} s, {limits.SWEEP_RUNS} runs"),
        (
            "tool `timeout_s`",
            f"{limits.TOOL_TIMEOUT_S:g} s; to {limits.TOOL_TIMEOUT_MAX_S / 86400:g} days",
        ),
        (
            "`init --shards`",
            f"{shards.shards_for(1)} on one server, {shards.shards_for(3)} on a cluster; "
            f"1–{shards.SHARDS_MAX}",
        ),
    ],
)
def test_the_defaults_are_those_of_the_code(setting: str, said: str) -> None:
    assert SETTINGS[setting] == said


def test_a_result_is_tried_for_as_long_as_is_said() -> None:
    assert limits.RESULT_PATIENCE_S == 3600.0
    assert "tries for an\nhour" in TEXT or "tries for an hour" in TEXT


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) > 20
    for link in links:
        path, _, anchor = link.partition("#")
        target = ROOT / "docs" / (path or "operations.md")
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.M)
            assert anchor in [one.lower().replace(" ", "-") for one in headings], link

"""An account that is nearly full is said to be (R14)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from journal.stores.account import account_findings, read_account


def use(storage: int, limit: int) -> dict[str, Any]:
    return {"storage": storage, "limits": {"max_storage": limit}}


@pytest.mark.parametrize(
    ("info", "full"),
    [
        (use(899, 1000), []),
        (use(900, 1000), [1000]),
        (use(1001, 1000), [1000]),
        (use(10**12, -1), []),
        (use(0, 0), []),
        ({}, []),
        ({"tiers": {"R1": use(1, 500), "R3": use(499, 500)}, **use(500, 0)}, [500]),
        ({"error": {"code": 503, "err_code": 10039}}, []),
    ],
    ids=str,
)
def test_from_nine_tenths_on_with_the_limit_that_is_meant(info: Any, full: list[int]) -> None:
    findings = list(account_findings(read_account(json.dumps(info))))
    assert [finding.level for finding in findings] == ["degraded" for _ in full]
    assert all(f"of the {limit} " in one.what for one, limit in zip(findings, full, strict=True))

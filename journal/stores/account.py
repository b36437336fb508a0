"""Core: how much of what its account may keep a namespace uses up (R14)."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Struct

from .safety import Finding

USED_MAX = 0.9
"""Of the limit; what is left is for the runs that go on while somebody makes room."""


class _Limits(Struct, frozen=True):
    max_storage: int = -1  # bytes; nats-server 2.15.1 has -1 for no limit


class _Use(Struct, frozen=True):
    """Of an account, or, where it is limited by the number of replicas, of one such tier."""

    storage: int = 0  # bytes; with replicas each record once
    limits: _Limits = _Limits()


class AccountInfo(_Use, frozen=True):
    """The answer of $JS.API.INFO."""

    tiers: dict[str, _Use] = {}


read_account = msgspec.json.Decoder(AccountInfo).decode


def account_findings(info: AccountInfo) -> Iterator[Finding]:
    """What is nearly full. All streams of an account share its limit."""
    for use in (info, *info.tiers.values()):
        limit = use.limits.max_storage
        if limit > 0 and use.storage >= limit * USED_MAX:
            yield Finding(
                level="degraded",
                what=f"the account keeps {use.storage} bytes of the {limit} that it may (max_file)",
                why="at the limit nothing is stored: a write that happened can't be recorded",
                fix="`runfold purge` what has ended while there is room for tombstones, or raise "
                "max_file (a reload will do)",
            )

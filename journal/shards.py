"""Core: which of a namespace's P journal streams a run is in (R74).

Each stream is a Raft group of its own. P and the hash are fixed when `runfold init` makes them and
stand in each stream's metadata: a client that took another P would look for runs where they are
not, and start them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Final

from .ids import RunId

SHARDS_MAX: Final = 64
"""Each costs a Raft group on every replica, and a question when a store is opened."""

SHARDS_ALONE: Final = 4
"""Where each record has one replica: see `shards_for`."""

SHARDS: Final = "runfold.shards"
HASH: Final = "runfold.hash"
BLAKE2B: Final = "blake2b"


def shard_of(run_id: RunId, shards: int) -> int:
    """BLAKE2b-64 of the id, big-endian, modulo P: the same in every version and language."""
    digest = blake2b(run_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % shards


def shards_for(replicas: int) -> int:
    """P, where nobody asks for one. A server alone syncs a stream's messages one after the other,
    and streams beside each other; three servers sync the log of one stream in groups, and more of
    them are slower on few cores (docs/scale.md)."""
    return SHARDS_ALONE if replicas == 1 else 1


def shards_metadata(shards: int) -> dict[str, str]:
    """What each journal stream says of itself."""
    return {SHARDS: str(shards), HASH: BLAKE2B}


def named_shards(config: Mapping[str, Any]) -> int | None:
    """P as the stream's configuration has it; None where it names none."""
    text = _metadata(config).get(SHARDS, "")
    count = int(text) if text.isascii() and text.isdecimal() and len(text) <= 4 else 0
    return count if 1 <= count <= SHARDS_MAX else None


def known_hash(config: Mapping[str, Any]) -> bool:
    """Whether runs are spread by the hash that this version has."""
    return _metadata(config).get(HASH) == BLAKE2B


def named(config: Mapping[str, Any]) -> str:
    """What it says of that, for people."""
    told = _metadata(config)
    return ", ".join(f"{key} is {told.get(key, 'missing')!r}" for key in (SHARDS, HASH))


def _metadata(config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = config.get("metadata") or {}  # the server adds its own
    return found

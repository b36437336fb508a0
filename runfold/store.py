"""Shell: stores, for who writes or uses one: the protocol, its answers, and `open_store`."""

from __future__ import annotations

from journal.codec import Entry
from journal.store import AppendAnswer, Appended, Conflict, Loaded, Store, Unknown
from worker.opening import HOME, SCHEMES, is_url, open_store

__all__ = [
    "HOME",
    "SCHEMES",
    "AppendAnswer",
    "Appended",
    "Conflict",
    "Entry",
    "Loaded",
    "Store",
    "Unknown",
    "is_url",
    "open_store",
]

"""Store: notices that a connection's server is cut off from the others of its cluster.

Such a server answers pings, so its clients stay with it; but its JetStream has no leader, and says
so. nats-server 2.15.1: error 10008 to each leader read and to all about consumers, from some 10 s
after the cut on; STREAM.INFO and direct reads it goes on to answer, from what it has.
"""

from __future__ import annotations

from typing import Final

LEADERLESS_S: Final = 10.0
"""An election takes 4-9 s (NATS.md), on whichever server one asks."""

TELLING: Final = ("$JS.API.STREAM.MSG.GET.", "$JS.API.CONSUMER.")
"""Requests whose answers tell."""

_NO_LEADER: Final = b'"err_code":10008,'
_HEAD_BYTES: Final = 200
"""Of an answer: an error stands at its beginning."""


class Quorum:
    """What the API of the server said lately."""

    def __init__(self) -> None:
        self._lost_at: float | None = None

    def lost(self, subject: str, answer: bytes, now: float) -> bool:
        """Whether this answer, heard `now` (monotonic seconds), is the last one of LEADERLESS_S in
        which the API said nothing else; from then on it is counted anew."""
        if not subject.startswith(TELLING):
            return False
        if _NO_LEADER not in answer[:_HEAD_BYTES]:
            self._lost_at = None
            return False
        if self._lost_at is None:
            self._lost_at = now
        if now - self._lost_at < LEADERLESS_S:
            return False
        self._lost_at = None
        return True

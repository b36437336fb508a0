"""Core: the workers that a worker knows of, and which of them it watches (R51, R83).

Workers stand in a ring, in an order that spreads those of one machine over it, and each watches the
next few: so each is watched, by as many, whatever their number. Who is asked and who is gone is a
hint like a task: what comes of it is a claim, and claims.py decides that. So a hello that is
forged, late or lost costs questions, or time.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from msgspec import Struct

from .fold import Fold
from .ids import valid_name
from .limits import (
    HELLO_S,
    HELLOS_PER_S,
    HURRIED_RESTARTS,
    PEER_AGENTS_MAX,
    PEERS_MAX,
    PEERS_WATCHED,
)
from .records import Claim, InputPlaced, Record, StepCompleted, StepProgress, StepStarted


class Peer(Struct, frozen=True):
    """A worker, as its hello says it: its id, and its agents' names."""

    worker: str
    agents: tuple[str, ...]


_decode = msgspec.json.Decoder(Peer).decode
_encode = msgspec.json.Encoder().encode


def hello(peer: Peer) -> bytes:
    return _encode(peer)


def read_hello(payload: bytes) -> Peer | None:
    """None: it is none, or names what can't be."""
    try:
        peer = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    names = (peer.worker, *peer.agents)
    if len(peer.agents) > PEER_AGENTS_MAX or not all(valid_name(name) for name in names):
        return None
    return peer


class Peers:
    """Those that `me` has heard of and not found gone; so many at most. `suspects`: of whom it was
    said lately that nobody is there; not watched meanwhile."""

    def __init__(self, me: Peer) -> None:
        self.me = me
        self.suspects: set[str] = set()
        self._known: dict[str, Peer] = {}
        self._ring: list[Peer] = []

    def __len__(self) -> int:
        return len(self._known)

    def hear(self, peer: Peer) -> None:
        full = len(self._known) >= PEERS_MAX
        if peer.worker == self.me.worker or (full and peer.worker not in self._known):
            return
        if self._known.get(peer.worker) != peer:
            self._known[peer.worker] = peer
            self._ring.clear()

    def assume(self, worker: str) -> None:
        """It holds a run of our agents, and may not have heard our hello yet."""
        if worker not in self._known and valid_name(worker):
            self.hear(Peer(worker, self.me.agents))

    def forget(self, worker: str) -> None:
        """It is gone; heard again, it is a peer again."""
        if self._known.pop(worker, None) is not None:
            self._ring.clear()

    def watched(self) -> list[Peer]:
        """The next in the ring, whom nobody is said to be behind left out."""
        if not self._ring:
            mine = _place(self.me)
            ordered = sorted(self._known.values(), key=_place)
            behind = [peer for peer in ordered if _place(peer) < mine]
            self._ring = ordered[len(behind) :] + behind
        found: list[Peer] = []
        for peer in self._ring:
            if peer.worker not in self.suspects:
                found.append(peer)
                if len(found) == PEERS_WATCHED:
                    break
        return found

    @property
    def hello_every_s(self) -> float:
        """Of one worker, so that all together are heard no more often than is cheap."""
        return max(HELLO_S, len(self._known) / HELLOS_PER_S)


def _place(peer: Peer) -> bytes:
    """By a digest: ids begin with the host's name, and those that go together would be watched by
    each other."""
    return blake2b(peer.worker.encode(), digest_size=16).digest()


def hurried(fold: Fold) -> bool:
    """Whether a run under a live claim is taken over at once where its worker is gone. Left to the
    redelivery, after the ack wait, are one with a write that was begun and has no result: nothing
    is gained by asking a person sooner; one that loses worker after worker without a step between:
    what kills its workers is not to go round the fleet in seconds; and one worked over HTTP: its
    worker lives, and goes on at another bridge."""
    claim = fold.claim
    assert claim is not None
    return not claim.remote and not fold.unknown() and fold.restarts < HURRIED_RESTARTS


def holder_after(record: Record) -> str:
    """The worker that surely held the run when this was its last record; "" where that takes the
    records before it."""
    match record:
        case Claim():
            return record.worker
        case StepStarted() | StepProgress() | StepCompleted() | InputPlaced() if record.claim:
            return record.by
        case _:
            return ""

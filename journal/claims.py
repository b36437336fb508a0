"""Core: who may take a run on a shared store (PROTOCOL 4), for `run()`, which has no task message.

Why it is safe: a claim is an append at the tail at which this function said Take, so of two takers
one loses and reads the other's claim; the holder before loses its next append and reads a newer
claim. Asking the holder only keeps a live holder from losing its run; no answer makes it unsafe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from .fold import Fold
from .limits import HOLDER_GRACE_S

Answer: TypeAlias = Literal["yes", "no", "nobody", "silent"]


class Take(Struct, frozen=True):
    """Append a claim with this reason."""

    reason: Literal["new", "wake", "adopted"]


class AskHolder(Struct, frozen=True):
    """Ask `worker` whether it holds the run under claim `claim`, `after_s` seconds from now."""

    worker: str
    claim: int
    after_s: float


class HeldBy(Struct, frozen=True):
    """Leave it: `worker` holds the run, or (`silent`) does not answer but is connected."""

    worker: str
    silent: bool


class Rest(Struct, frozen=True):
    """Nothing to do for a holder: the run has ended, or a person must act first."""


ClaimDecision: TypeAlias = Take | AskHolder | HeldBy | Rest


def decide_claim(fold: Fold, answers: Sequence[Answer], *, ack_wait_s: float) -> ClaimDecision:
    """What a would-be holder does at this fold; `answers` are those about the live claim, in order.

    No responder twice means gone, because clients reconnect within the grace between; with an open
    write the second ask comes after the ack wait: nothing is gained by asking a person sooner.
    """
    assert fold.newer is None
    if fold.finished:
        return Rest()
    if fold.claim is None:
        if not fold.runnable():
            return Rest()
        return Take("wake" if fold.claims else "new")
    live = fold.claim
    match list(answers):
        case []:
            return AskHolder(live.worker, live.n, 0.0)
        case [*_, "yes"]:
            return HeldBy(live.worker, silent=False)
        case [*_, "silent"]:
            return HeldBy(live.worker, silent=True)
        case [*_, "no"] | [*_, "nobody", "nobody"]:
            return Take("adopted")
        case _:
            after = ack_wait_s if fold.unknown() else HOLDER_GRACE_S
            return AskHolder(live.worker, live.n, after)

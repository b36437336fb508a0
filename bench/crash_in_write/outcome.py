"""What an adapter tells of its system."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Outcome:
    system: str
    version: str
    charges: int
    """Lines in the ledger when the recovered run stood still: ended, or waiting for a person."""
    state: str
    """Where it stood still, in the system's own word."""
    seen: str
    """What the operator sees of the interrupted charge, from the system's own output; one line."""
    way_on: str = ""
    """What a person then does, where the run did not end by itself."""
    charges_in_the_end: int
    """Lines in the ledger after that; the same as `charges` for a run that ended by itself."""
    state_in_the_end: str

"""Core: whom a signal's subject names: the run, the signal, and who says it (PROTOCOL 1, R58, R66).

`<run…>.<name>`, or `as.<user>.<run…>.<name>`: the last token is the name, what is between is the
run's id, with dots or with `~` for them. Three tokens or more that begin with `as` are always of
the second form, since permissions tie it to a user: a run whose id begins with `as.` is written
with `~` (`as~x`). A run called `as` has two tokens. Dots and `~` in one id are refused: the earlier
signals of a run are found by filters, one for each spelling.
"""

from __future__ import annotations

import re

from msgspec import Struct

from .errors import InvalidId
from .ids import RunId, run_id, shown, subject_token

NOBODY = "nats"
"""Who says what carries no user (R66)."""

_USER = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)
_RESERVED = frozenset({NOBODY, "library", "bridge", "dev"})


class SignalAddress(Struct, frozen=True):
    run: RunId
    name: str
    by: str


def user(value: str) -> str:
    """The value as the name of a user; raises InvalidId."""
    if _USER.fullmatch(value) is None or value in _RESERVED:
        raise InvalidId(
            f"{shown(value)} is not a user",
            hint="a user is 1 to 32 of a-z 0-9 _ - and not one of " + ", ".join(sorted(_RESERVED)),
        )
    return value


def kept_address(rest: str) -> SignalAddress:
    """Of a signal's subject, what follows `ns.signal.`; raises InvalidId."""
    tokens = rest.split(".")
    if tokens[0] != "as" or len(tokens) < 3:
        return run_address(rest)
    if len(tokens) == 3:
        raise InvalidId(
            f"{shown(rest)} names no run behind the user",
            hint="as.<user>.<run>.<name>; a run whose id begins with `as.` is written as~…",
        )
    return run_address(".".join(tokens[2:]), by=user(tokens[1]))


def run_address(rest: str, *, by: str = NOBODY) -> SignalAddress:
    """`<run…>.<name>`; raises InvalidId."""
    run, dot, name = rest.rpartition(".")
    if not dot:
        raise InvalidId(
            f"{shown(rest)} is not a run and a signal", hint="a subject ends in <run>.<name>"
        )
    if "." in run and "~" in run:
        raise InvalidId(f"{shown(run)} has dots and ~: write the id with one of them")
    return SignalAddress(run_id(run.replace("~", ".")), name, by)


def run_filters(run: RunId) -> tuple[str, ...]:
    """Filters of all that follows `ns.signal.` for this run, its id in dots or in `~`."""
    token = subject_token(run)
    found = [f"{token}.*", f"as.*.{token}.*"]
    if token != run and "" not in run.split("."):  # empty tokens are in no subject
        found.append(f"as.*.{run}.*")
        if not run.startswith("as."):
            found.append(f"{run}.*")
    return tuple(found)

"""Core: identities and their encodings. One validator per kind, used at every door (R1, R2)."""

from __future__ import annotations

import re
import secrets
from typing import NewType

from .errors import InvalidId
from .limits import NAME_CHARS_MAX, RUN_ID_CHARS_MAX

RunId = NewType("RunId", str)
Marker = NewType("Marker", str)

_RUN_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{RUN_ID_CHARS_MAX - 1}}}", re.ASCII)
_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{NAME_CHARS_MAX - 1}}}", re.ASCII)
_NAMESPACE = re.compile(r"[a-z][a-z0-9-]{0,31}", re.ASCII)
_STEP = re.compile(r"[A-Za-z0-9_.?/-]{1,200}", re.ASCII)
_MARKER = re.compile(
    rf"({_RUN_ID.pattern})/({_STEP.pattern})@([1-9][0-9]{{0,5}})\.([0-9a-f]{{16}})", re.ASCII
)
_RESERVED = frozenset(
    ["con", "prn", "aux", "nul", *(f"{d}{i}" for d in ("com", "lpt") for i in range(1, 10))]
)
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford: nothing that reads as something else


def valid_run_id(value: str) -> bool:
    """True for `[A-Za-z0-9][A-Za-z0-9_.-]{0,127}` (R1)."""
    return isinstance(value, str) and _RUN_ID.fullmatch(value) is not None  # pyright: ignore[reportUnnecessaryIsInstance]


def run_id(value: str) -> RunId:
    """The value as a run id; raises InvalidId. Every door passes through here (R1)."""
    if not valid_run_id(value):
        raise InvalidId(
            f"{shown(value)} is not a run id",
            hint="a run id is 1 to 128 of A-Z a-z 0-9 _ . - and starts with a letter or digit",
        )
    return RunId(value)


def new_run_id() -> RunId:
    """A random id (80 bits), never time-based: ids of different makers must not meet (R3)."""
    return RunId("".join(secrets.choice(_ALPHABET) for _ in range(16)))


def valid_name(value: str) -> bool:
    """True for an agent, tool or worker name (R2)."""
    return isinstance(value, str) and _NAME.fullmatch(value) is not None  # pyright: ignore[reportUnnecessaryIsInstance]


def name(value: str, what: str) -> str:
    """The value as an agent, tool or worker name (`what`, for the message); raises InvalidId."""
    if not valid_name(value):
        raise InvalidId(
            f"{shown(value)} is not a name for {what}",
            hint=f"a name is 1 to {NAME_CHARS_MAX} of A-Z a-z 0-9 _ . - and starts with a letter, "
            "digit or _",
        )
    return value


def tool_name(value: str) -> str:
    """The value as a tool's name; raises InvalidId, also for what the engine's own steps have."""
    if value.startswith("runfold."):
        raise InvalidId(f"{shown(value)} is no name for a tool: the engine's own begin so")
    return name(value, "a tool")


def step_name(value: str) -> str:
    """The value as a step's name; raises InvalidId. It stands in keys, markers and messages."""
    if _STEP.fullmatch(value) is None:
        raise InvalidId(
            f"{shown(value)} is not a step's name",
            hint="a step's name is 1 to 200 of A-Z a-z 0-9 _ . ? / -",
        )
    return value


def namespace(value: str) -> str:
    """The value as a namespace; raises InvalidId (R2)."""
    if _NAMESPACE.fullmatch(value) is None:
        raise InvalidId(
            f"{shown(value)} is not a namespace",
            hint="a namespace is 1 to 32 of a-z 0-9 - and starts with a letter",
        )
    return value


def shown(value: str, chars: int = 64) -> str:
    """A refused value, quoted, escaped and cut, fit for a message."""
    value = str(value)  # it was refused, perhaps for being none
    quoted = ascii(value[:chars])
    return quoted if len(value) <= chars else f"{quoted}… ({len(value)} characters)"


def subject_token(run: RunId) -> str:
    """The id as one subject token: `.` becomes `~`, which no id holds (R2)."""
    return run.replace(".", "~")


def from_subject_token(token: str) -> RunId:
    """Inverse of subject_token; raises InvalidId for a token that no id has."""
    if "." in token:
        raise InvalidId(f"{shown(token)} is not a run's subject token")
    return run_id(token.replace("~", "."))


def file_stem(run: RunId) -> str:
    """The id as a file name without suffix; two ids never meet, ignoring case (R2).

    Where the id has capitals, `~` and a hex mask of them follow its first dotted part, as they do
    where that part is a name Windows reserves (it reserves `nul.anything`, so a mask at the very
    end, as PROTOCOL.md first had it, would not help).
    """
    mask = sum(1 << i for i, char in enumerate(run) if char.isupper())
    head, dot, rest = run.partition(".")
    if mask or head.lower() in _RESERVED:
        return f"{head}~{mask:x}{dot}{rest}"
    return run


def from_file_stem(stem: str) -> RunId | None:
    """Inverse of file_stem; None for a name no run's file has."""
    head, tilde, rest = stem.partition("~")
    candidate = head + rest[len(rest.partition(".")[0]) :] if tilde else stem
    if not valid_run_id(candidate) or file_stem(RunId(candidate)) != stem:
        return None
    return RunId(candidate)


def marker(run: RunId, step: str, attempt: int, digest: str) -> Marker:
    """`<run>/<step>@<attempt>.<16 hex>`: unique in the fleet, so an approval needs no other id."""
    return Marker(f"{run}/{step}@{attempt}.{digest}")


def marker_run(value: str) -> RunId:
    """The run a marker belongs to; raises InvalidId when it is no marker."""
    found = _MARKER.fullmatch(value)
    if found is None:
        raise InvalidId(
            f"{shown(value)} is not a marker",
            hint="a marker looks like run/tool/2/0/create_ticket@1.0123456789abcdef; "
            "`runfold show ID` prints the pending ones",
        )
    return RunId(found[1])

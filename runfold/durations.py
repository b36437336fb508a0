"""Shell: times as people write them on a command line: `30d`, `12h`."""

from __future__ import annotations

import re

from journal.ids import shown

from .frame import UsageProblem

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_TEXT = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,3})?)([smhdw])")


def seconds(text: str, option: str, *, most_s: float) -> float:
    """Of a number and its unit. Raises UsageProblem, which names the option."""
    match = _TEXT.fullmatch(text)
    found = float(match[1]) * _UNITS[match[2]] if match is not None else -1.0
    if not 0 <= found <= most_s:
        raise UsageProblem(
            f"{option} is a number and s, m, h, d or w (30d), up to {most_s / 86400:g}d, "
            f"not {shown(text)}"
        )
    return found

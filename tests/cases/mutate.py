"""Faults of any line-based journal, without knowing its format: `mutants(bytes)`.

From ../shared/cases/mutate.py, tidied so that the tests run without it; a test compares the two
where both are there. At least 5 lines; the last but one ideally an unsafe tool's result.
"""

from __future__ import annotations

from typing import NamedTuple

TORN = "torn"
"""Tail dropped, reported once; earlier records intact; the next append readable."""
NEVER = "never"
"""The run never started; starting it works once."""
REFUSED = "refused"
"""Refused, position named, nothing executed, file unchanged."""


class Mutant(NamedTuple):
    name: str
    data: bytes
    expect: str
    line: int
    """Of a refused one: the line that must be named, from 1; 0 for another kind."""


def mutants(source: bytes) -> list[Mutant]:
    """Every fault of `source`, a journal that ends in a newline."""
    assert source.endswith(b"\n")
    lines = source[:-1].split(b"\n")
    assert len(lines) >= 5
    return [
        *_torn(source, lines),
        *_never(lines),
        *_broken_line(lines),
        *_broken_file(source, lines),
    ]


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join(lines) + b"\n"


def _torn(source: bytes, lines: list[bytes]) -> list[Mutant]:
    before, last = _joined(lines[:-1]), lines[-1]
    found = [Mutant("no_final_newline", source[:-1], TORN, 0)]
    for cut in sorted({1, 2, len(last) // 4, len(last) // 2, len(last) - 1}):
        found.append(Mutant(f"torn_{cut:05d}", before + last[:cut], TORN, 0))
    inside = next((i for i, byte in enumerate(last) if byte >= 0xC0), None)
    if inside is not None:
        found.append(Mutant(f"torn_utf8_{inside:05d}", before + last[: inside + 1], TORN, 0))
    found.append(Mutant("nul_tail", before + b"\0" * 512, TORN, 0))
    return found


def _never(lines: list[bytes]) -> list[Mutant]:
    return [
        Mutant("torn_first_only", lines[0][: len(lines[0]) // 2], NEVER, 0),
        Mutant("empty", b"", NEVER, 0),
        Mutant("only_newline", b"\n", NEVER, 0),
    ]


def _broken_line(lines: list[bytes]) -> list[Mutant]:
    k = len(lines) // 2
    before, it, after = lines[:k], lines[k], lines[k + 1 :]
    garbage = it[: len(it) // 2] + b"\x00\x01GARBAGE"
    found = [
        Mutant("garbage_middle", _joined([*before, garbage, *after]), REFUSED, k + 1),
        Mutant("missing_middle", _joined([*before, *after]), REFUSED, k + 1),
        Mutant("missing_first", _joined(lines[1:]), REFUSED, 1),
        Mutant("duplicate_line", _joined([*before, it, it, *after]), REFUSED, k + 2),
        Mutant("swapped", _joined([*before, after[0], it, *after[1:]]), REFUSED, k + 1),
        Mutant("fused", _joined([*before, it[:20] + it, *after]), REFUSED, k + 1),
        Mutant("nul_middle", _joined([*before, b"\0" * 300, *after]), REFUSED, k + 1),
    ]
    flipped = bytearray(it)
    digit = next((i for i, b in enumerate(flipped) if 48 <= b <= 56 and i > len(it) // 2), None)
    if digit is not None:
        flipped[digit] += 1  # this record shows it, or the next one's hash of it
        data = _joined([*before, bytes(flipped), *after])
        found.append(Mutant("digit_changed", data, REFUSED, k + 1))
    return found


def _broken_file(source: bytes, lines: list[bytes]) -> list[Mutant]:
    middle = len(source) // 2
    not_utf8 = bytearray(source)
    not_utf8[middle] = 0xEB
    blanks = b"\n" + lines[0] + b"\n\n" + _joined(lines[1:]) + b"\n"
    return [
        Mutant("bom", b"\xef\xbb\xbf" + source, REFUSED, 1),
        Mutant("crlf", b"\r\n".join(lines) + b"\r\n", REFUSED, 1),
        Mutant("blank_lines", blanks, REFUSED, 1),
        Mutant("twice", source + source, REFUSED, len(lines) + 1),
        Mutant("not_utf8", bytes(not_utf8), REFUSED, source[:middle].count(b"\n") + 1),
    ]

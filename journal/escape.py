"""Core: text made visible: control, bidirectional and invisible characters are shown as escapes.

For terminals, logs and pages (R68): nothing that is recorded may move the cursor, hide or reorder
what a person reads before deciding.
"""

from __future__ import annotations

import re

from .messages import JSON
from .values import canonical

_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f"  # C0, DEL, C1
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f"  # invisible fillers
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f"  # zero width, separators, bidirectional
    "\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffc\ud800-\udfff"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # shorthand and musical formatting
    "\U000e0000-\U000e0fff]"  # tags and variation selectors
)


def visible(text: str) -> str:
    """The text on one line, harmless: what can't be seen stands as `\\n`, `\\x1b`, `\\u202e`."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_lines(text: str) -> str:
    """As visible, but line breaks and tabs stay: for text that stands in a block of its own."""
    return "\n".join(
        "\t".join(visible(cell) for cell in line.split("\t")) for line in text.split("\n")
    )


def escaped_json(raw: bytes) -> str:
    """JSON that has no space between its values, as the same JSON: what can't be seen stands as
    `\\u202e`, which whoever reads the JSON turns back."""

    def escape(found: re.Match[str]) -> str:
        units = found[0].encode("utf-16-be").hex()
        return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))

    return _UNSAFE.sub(escape, raw.decode())


def visible_json(value: JSON, chars_max: int | None = None) -> str:
    """A value as canonical JSON on one line; cut, and said to be cut, only where asked."""
    text = visible(canonical(value).decode())
    if chars_max is None or len(text) <= chars_max:
        return text
    return f"{text[:chars_max]}… ({len(text)} characters)"

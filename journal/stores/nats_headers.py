"""Core: the headers of a NATS message.

`NATS/1.0[ status[ description]]`, a line for each, an empty one. Read as nats-py 2.16.0 reads them;
but for a status line with headers behind it, into whose description nats-py puts them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

STATUS: Final = "Status"
"""The code of a status line (`NATS/1.0 503`) stands under this name."""

DESCRIPTION: Final = "Description"
"""And what it says behind the code."""

_VERSION: Final = b"NATS/1.0"
_BLANK: Final = " \t\r\n\v\f"
_PLAIN: Final = re.compile(
    rb"NATS/1\.0\r\n(?:[!-9;-~]+: [!-~](?:[ -~]*[!-~])?\r\n)+\r\n"
)  # as all headers of ours, and the server's own, are
_LINE_ENDS: Final = str.maketrans({"\r": " ", "\n": " "})


def block_of(headers: Mapping[str, str]) -> bytes:
    """The headers on the wire. Names are ours: tokens."""
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    lines = len(headers)
    if text.count("\n") != lines or text.count("\r") != lines:
        # Else the rest of a value would be a header of its own, or the end of them.
        clean = [f"{name}: {value.translate(_LINE_ENDS)}\r\n" for name, value in headers.items()]
        text = "".join(clean)
    return b"NATS/1.0\r\n%b\r\n" % text.encode()


def parsed(block: bytes) -> dict[str, str]:
    """The headers, each once: the last one of its name. What is no header says nothing."""
    if _PLAIN.fullmatch(block):
        lines = block[len(_VERSION) + 2 : -4].decode("ascii").split("\r\n")
        return dict([line.split(": ", 1) for line in lines])
    if not block.startswith(_VERSION):
        return {}
    first, *lines = block[len(_VERSION) :].decode("utf-8", "replace").split("\r\n")
    found = _status(first) if first else {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.strip(_BLANK)
        if colon and name.isascii() and not any(char.isspace() for char in name):
            found[name] = value.strip(_BLANK)
    return found


def _status(line: str) -> dict[str, str]:
    """Of what follows the version."""
    code, _, text = line[1:].partition(" ")
    if not (line.startswith(" ") and len(code) == 3 and code.isascii() and code.isdecimal()):
        return {}
    return {STATUS: code, DESCRIPTION: text} if text else {STATUS: code}

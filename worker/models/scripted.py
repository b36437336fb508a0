"""Core but for its ledger: a model that plays a list of replies and counts, for tests and examples.

It picks its reply by the number of assistant messages, not by a counter, so a process that starts
again in the middle gives reply 3 for `llm/3`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike

from journal.messages import JSON, Message, Preview, Reply, ToolRequest, ToolSpec
from journal.values import canonical, digest


class ScriptedModel:
    """Plays `replies`. `requests` holds what this process asked; `ledger` (a file) gets one line
    for each request, so that requests are counted over processes."""

    def __init__(self, *replies: Reply, ledger: str | PathLike[str] | None = None) -> None:
        self.replies = replies
        self.ledger = ledger
        self.requests: list[Sequence[Message]] = []

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, preview: Preview
    ) -> Reply:
        self.requests.append(messages)
        n = sum(message.role == "assistant" for message in messages) + 1
        if self.ledger is not None:
            _append_line(self.ledger, f"llm/{n}")
        if n > len(self.replies):
            raise LookupError(f"the script has {len(self.replies)} replies; llm/{n} was asked for")
        return self.replies[n - 1]


def call(tool: str, /, **arguments: JSON) -> Reply:
    """A reply that asks for one tool call."""
    text = canonical(arguments).decode()
    request = ToolRequest(id=f"call-{digest(tool, text)[:8]}", name=tool, arguments=text)
    return Reply(calls=(request,), finish="tool_calls")


def say(text: str, /) -> Reply:
    """A final answer."""
    return Reply(text=text)


def _append_line(path: str | PathLike[str], line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, f"{line}\n".encode())
    finally:
        os.close(fd)

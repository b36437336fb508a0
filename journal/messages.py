"""Core: what goes to a model and comes back. The shapes stand in records: they are wire format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

from msgspec import Struct

JSON: TypeAlias = Any
"""A strict JSON value (R16): checked at run time by values.normalise, not by the type checker."""

Preview: TypeAlias = Callable[[str], Awaitable[None]]


class ToolRequest(Struct, frozen=True, kw_only=True):
    """A tool call as the model asked for it, verbatim. `arguments` is raw text, parsed strictly."""

    id: str
    name: str
    arguments: str


class Message(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message of a conversation. `call_id` ties a tool's result to its request."""

    role: Literal["system", "user", "assistant", "tool"]
    content: JSON
    calls: tuple[ToolRequest, ...] = ()
    call_id: str | None = None


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one model call."""

    input_tokens: int = 0
    output_tokens: int = 0


class Reply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A complete model reply; a reply that was cut off in streaming is never one (R36)."""

    text: str = ""
    calls: tuple[ToolRequest, ...] = ()
    finish: Literal["stop", "tool_calls", "length", "refusal"] = "stop"
    usage: Usage | None = None


class ToolSpec(Struct, frozen=True, kw_only=True):
    """What a model is told of a tool. `schema` is the JSON schema of the arguments object."""

    name: str
    description: str
    schema: dict[str, JSON]
    write: bool


class Model(Protocol):
    """A language model. An exception out of `reply` records no result; it is asked again later."""

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, preview: Preview
    ) -> Reply: ...

"""Core: the body of a Chat Completions request, and what tools are called in one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from journal.messages import JSON, Message, ToolSpec
from journal.values import canonical, digest

OURS: Final = frozenset({"model", "messages", "tools", "stream", "n", "temperature"})
"""Fields of a request that `extra` can't set: the adapter relies on what it sends there."""

_NAME_MAX = 64
"""Of a function, as OpenAI and most servers have it; and no dots in it."""


def request_body(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    names: Mapping[str, str],
    temperature: float | None,
    extra: Mapping[str, JSON],
) -> bytes:
    """The body of a request; `names` as `wire_names` gave them."""
    body: dict[str, JSON] = {
        "model": model,
        "messages": [_message(message, names) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if tools:
        body["tools"] = [_tool(spec, names[spec.name]) for spec in tools]
    if temperature is not None:
        body["temperature"] = temperature
    body |= extra
    # None takes a field out: some servers refuse stream_options
    return msgspec.json.encode({key: item for key, item in body.items() if item is not None})


def wire_names(tools: Sequence[ToolSpec]) -> dict[str, str]:
    """What each tool is called on the wire, where names have no dots: `a.b` is `a__b` there.

    Raises ValueError where two tools would have one name: a call could be either's.
    """
    names: dict[str, str] = {}
    owners: dict[str, str] = {}
    for spec in tools:
        wire = spec.name.replace(".", "__")
        if len(wire) > _NAME_MAX:
            wire = _stand_in(spec.name)
        if wire in owners:
            raise ValueError(
                f"the tools {owners[wire]} and {spec.name} would both be {wire} to the model, "
                "because its API allows no dots: rename one"
            )
        owners[wire] = spec.name
        names[spec.name] = wire
    return names


def _wire_name(name: str, names: Mapping[str, str]) -> str:
    """The name for a call of the past. It may be no tool's: models invent names, and an API that
    refuses such a name in the conversation would refuse every request from then on."""
    if name in names:
        return names[name]
    if re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) and name not in names.values():
        return name
    return _stand_in(name)


def _stand_in(name: str) -> str:
    plain = re.sub(r"[^a-zA-Z0-9_-]", "_", name)
    return f"{plain[: _NAME_MAX - 9]}_{digest(name)[:8]}"


def _tool(spec: ToolSpec, name: str) -> JSON:
    function: dict[str, JSON] = {"name": name, "parameters": spec.schema}
    if spec.description:
        function["description"] = spec.description
    return {"type": "function", "function": function}


def _message(message: Message, names: Mapping[str, str]) -> JSON:
    content = message.content
    text = content if isinstance(content, str) else canonical(content).decode()
    found: dict[str, JSON] = {"role": message.role, "content": text}
    if message.calls:
        found["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": _wire_name(call.name, names), "arguments": call.arguments},
            }
            for call in message.calls
        ]
        if not content:
            found["content"] = None
    if message.call_id is not None:
        found["tool_call_id"] = message.call_id
    return found

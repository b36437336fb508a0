"""Core: the policy gate: allow, ask a person, or deny, per call (R31)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from msgspec import Struct

from journal.messages import JSON, ToolSpec

from .tools import Tool


class Allow(Struct, frozen=True):
    """The call runs."""


class NeedsApproval(Struct, frozen=True):
    """The call waits for a person, who is shown `text`; it is part of the marker's digest (R32)."""

    text: str


class Deny(Struct, frozen=True):
    """The call is never started; the model sees the reason."""

    reason: str


GateDecision: TypeAlias = Allow | NeedsApproval | Deny


class Gate(Protocol):
    """Decides per call. Must be deterministic: it is asked when a reply is recorded and again
    before the call runs, and an approval covers only what it asked for then."""

    def decide(self, tool: ToolSpec, input: JSON) -> GateDecision: ...

    def is_write(self, tool: str) -> bool: ...


class PolicyGate:
    """Reads allowed, writes as declared (`approval=`); `rules` by tool name come first."""

    def __init__(
        self, tools: Sequence[Tool], rules: Mapping[str, GateDecision] | None = None
    ) -> None:
        self._tools = {tool.spec.name: tool for tool in tools}
        self._rules = dict(rules or {})
        unknown = sorted(self._rules.keys() - self._tools.keys())
        if unknown:
            raise TypeError(f"gate rules for tools that are not there: {', '.join(unknown)}")
        for name, rule in self._rules.items():
            check_decision(rule, f"the rule for {name}")

    def decide(self, tool: ToolSpec, input: JSON) -> GateDecision:
        rule = self._rules.get(tool.name)
        if rule is not None:
            return rule
        if self._tools[tool.name].approval:
            return NeedsApproval(f"{tool.name} is a write and asks for approval")
        return Allow()

    def is_write(self, tool: str) -> bool:
        """An undeclared tool counts as a write."""
        return tool not in self._tools or self._tools[tool].spec.write


def check_decision(decision: object, what: str) -> None:
    """Raises TypeError for anything but Allow(), NeedsApproval(text), Deny(reason), with text."""
    match decision:
        case Allow():
            return
        case NeedsApproval(text=str() as text) | Deny(reason=str() as text):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise TypeError(f"{what} holds half a surrogate pair, which is no text") from error
        case _:
            raise TypeError(
                f"{what} is {decision!r}, not Allow(), NeedsApproval(text) or Deny(reason)"
            )

"""Core: an agent: a model, declared tools, a gate, bounds."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from journal import ids, limits
from journal.messages import Model

from .gate import Gate, PolicyGate
from .tools import Replay, Tool


class Bounds(Struct, frozen=True, kw_only=True):
    """Limits of one run; reaching one ends it with a recorded reason (R36, R47).

    `iterations`: model calls · `calls_per_reply`: tool calls in one reply · `bad_replies`: rounds
    in a row with nothing usable.
    """

    iterations: int = limits.ITERATIONS_MAX
    calls_per_reply: int = limits.CALLS_PER_REPLY_MAX
    bad_replies: int = limits.BAD_REPLIES_MAX


class Agent:
    """What runs: bound to runs by `name`; `revision` is the application's and stands in claims.

    Raises at definition: InvalidId for a bad name; TypeError for a tool that is not declared with
    `@read` or `@write`, or two tools of one name.
    """

    def __init__(
        self,
        name: str,
        *,
        model: Model,
        tools: Sequence[Tool] = (),
        gate: Gate | None = None,
        system: str = "",
        revision: str = "1",
        bounds: Bounds | None = None,
    ) -> None:
        self.name = ids.name(name, "an agent")
        if not isinstance(revision, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the revision of agent {name} is {revision!r}, not text")
        if not callable(getattr(model, "reply", None)):
            raise TypeError(f"the model of agent {name} has no method reply: {model!r}")
        self.revision = revision
        self.model = model
        self.system = system
        self.bounds = bounds or Bounds()
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{tool!r} is not declared: put @read or @write on it")
            if tool.spec.name in self.tools:
                raise TypeError(f"two tools are named {tool.spec.name}")
            self.tools[tool.spec.name] = tool
        self.gate: Gate = gate if gate is not None else PolicyGate(list(self.tools.values()))

    def is_unsafe(self, name: str) -> bool:
        """Whether twice would not be harmless: declared so, a write to the gate that was declared
        a read, or a tool that is not there (R30)."""
        tool = self.tools.get(name)
        if tool is None or tool.replay is Replay.UNSAFE:
            return True
        return self.gate.is_write(name) and not tool.spec.write

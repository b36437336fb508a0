"""Core: an agent: what runs. A model with tools (the built-in loop), or a turn handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from journal import ids
from journal.messages import Model
from journal.terms import Bounds, Next, Retry

from .gate import Gate, PolicyGate
from .tools import Replay, Tool

if TYPE_CHECKING:
    from .context import Context


Turn: TypeAlias = "Callable[[Context], Awaitable[Next]]"


class Agent:
    """What runs: bound to runs by `name`; `revision` is the application's and stands in claims. A
    worker takes runs of this revision and of those it is `compatible` with (R8).

    `parallel_writes`: writes of one reply run at the same time, as its reads do (R35).

    Raises at definition: InvalidId for a bad name; TypeError for a tool that is not declared with
    `@read` or `@write`, or two tools of one name.
    """

    handler: Turn | None = None

    def __init__(
        self,
        name: str,
        *,
        model: Model,
        tools: Sequence[Tool] = (),
        gate: Gate | None = None,
        system: str = "",
        revision: str = "1",
        compatible: Sequence[str] = (),
        bounds: Bounds | None = None,
        retry: Retry | None = None,
        parallel_writes: bool = False,
    ) -> None:
        self._identify(name, revision, compatible, bounds, retry)
        if not callable(getattr(model, "reply", None)):
            raise TypeError(f"the model of agent {name} has no method reply: {model!r}")
        self.model = model
        self.system = system
        self.parallel_writes = parallel_writes
        self.tools: dict[str, Tool] = {}
        for tool in tools:
            if not isinstance(tool, Tool):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"{tool!r} is not declared: put @read or @write on it")
            if tool.spec.name in self.tools:
                raise TypeError(f"two tools are named {tool.spec.name}")
            self.tools[tool.spec.name] = tool
        self.gate: Gate = gate if gate is not None else PolicyGate(list(self.tools.values()))

    def _identify(
        self,
        name: str,
        revision: str,
        compatible: Sequence[str],
        bounds: Bounds | None,
        retry: Retry | None,
    ) -> None:
        self.name = ids.name(name, "an agent")
        if isinstance(compatible, str):
            raise TypeError(f"compatible of agent {name} is one text, not several revisions")
        for text in (revision, *compatible):
            if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"the revision of agent {name} is {text!r}, not text")
        self.revision = revision
        self.accepts = (revision, *compatible)
        self.bounds = bounds or Bounds()
        self.retry = retry or Retry()

    @property
    def loop(self) -> bool:
        """Whether the built-in loop plays it."""
        return self.handler is None

    def is_unsafe(self, name: str) -> bool:
        """Whether twice would not be harmless: declared so, a write to the gate that was declared
        a read, or a tool that is not there (R30)."""
        tool = self.tools.get(name)
        if tool is None or tool.replay is Replay.UNSAFE:
            return True
        return self.gate.is_write(name) and not tool.spec.write


class TurnAgent(Agent):
    """An agent made of a turn handler, by `@turn`."""

    def __init__(
        self,
        name: str,
        handler: Turn,
        *,
        revision: str,
        compatible: Sequence[str],
        bounds: Bounds | None,
        retry: Retry | None,
    ) -> None:
        self._identify(name, revision, compatible, bounds, retry)
        self.handler = handler
        self.tools = {}

    def is_unsafe(self, name: str) -> bool:
        """A handler's calls say it themselves."""
        return True


def turn(
    name: str,
    *,
    revision: str = "1",
    compatible: Sequence[str] = (),
    bounds: Bounds | None = None,
    retry: Retry | None = None,
) -> Callable[[Turn], Agent]:
    """Declare `async def handler(ctx) -> Next` as an agent (R40). Its code between durable calls
    must do the same again when it is replayed."""

    def declare(handler: Turn) -> Agent:
        return TurnAgent(
            name,
            handler,
            revision=revision,
            compatible=compatible,
            bounds=bounds,
            retry=retry,
        )

    return declare

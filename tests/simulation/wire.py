"""HTTP between workers and bridges: requests that are slow or lost, on either way."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from .loop import Task

if TYPE_CHECKING:
    from .members import BridgeProcess, Member
    from .world import World

LOST, SLOW = 0.03, 0.2
"""Of each way, where anything goes wrong at all."""


class Http:
    """`send` gives what will hold the answer; None in it: the connection was lost."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[str, list[asyncio.Future[Any]]] = {}

    def send(
        self, sender: Member, bridge: BridgeProcess, verb: str, task: str, body: dict[str, Any]
    ) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._world.loop.create_future()
        process = bridge.process
        self._world.trace.note("http", sender.process.name, process.name, verb, repr(body))
        self._open.setdefault(process.name, []).append(answer)

        def arrive() -> None:
            if process.dead or answer.done():
                return
            if bridge.tasks is None:
                self._set(answer, None)
                return
            from .remote import served

            serving = process.run(served(bridge.tasks, verb, task, body), f"http {verb}")
            bridge.serving.append(serving)
            serving.add_done_callback(answered, context=self._world.context)
            answer.add_done_callback(lambda _: hung_up(serving), context=self._world.context)

        def hung_up(serving: Task) -> None:
            if verb == "poll" and answer.cancelled():  # bridge/call.py: `attended` ends with it
                serving.cancel()

        def answered(serving: Task) -> None:
            bridge.serving.remove(serving)
            if serving.cancelled():
                return
            if (error := serving.exception()) is not None:
                self._world.loop.failures.append(f"{verb} over HTTP raised {error!r}")
                return
            self._on_its_way(lambda: self._set(answer, serving.result()))

        self._on_its_way(arrive)
        return answer

    def cut(self, process: str) -> None:
        """The process is gone: who waits for it is told."""
        for answer in self._open.pop(process, []):
            self._world.later(0.001, lambda answer=answer: self._set(answer, None))

    def _set(self, answer: asyncio.Future[Any], found: Any) -> None:
        if not answer.done():
            self._world.trace.note("http answer", repr(found))
            answer.set_result(found)

    def _on_its_way(self, then: Any) -> None:
        world = self._world
        calm = world.chaos.quiet or world.plan.profile == "calm"
        lot = 1.0 if calm else world.rng.random()
        if lot < LOST:
            world.injected["http lost"] += 1
        elif lot < LOST + SLOW:
            world.later(world.rng.uniform(0.0, 1.0), then)
        else:
            world.later(world.rng.uniform(0.0002, 0.003), then)

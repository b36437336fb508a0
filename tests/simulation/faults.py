"""Faults of a schedule: each message's by lot, and those at a moment."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kit.simulated.faults import IN_FLIGHT, UNAVAILABLE, Fate, Handing, Policy

from .plans import Event, Odds
from .trace import Trace

if TYPE_CHECKING:
    from .world import World

FAST_S = (0.0002, 0.003)
STALE_S = 1.5
"""A deposed leader that goes on hears of its successor within this (bridge/settling.py)."""


class Chaos(Policy):
    """What becomes of each message. `quiet`: from then on nothing goes wrong."""

    def __init__(
        self, odds: Odds, rng: random.Random, injected: Counter[str], trace: Trace
    ) -> None:
        self._note, self._time = trace.note, trace.time
        self.odds = odds
        self.quiet = False
        self.injected = injected
        self._rng = rng
        self._fuses: dict[str, tuple[int, bool, Callable[[], None]]] = {}
        self.lands_by = 0.0
        """When the last late publish will have landed, in the loop's time."""
        self._stale: tuple[str, int] | None = None
        """Stream and moment that a deposed leader answers from."""

    def light(self, process: str, sends: int, lost: bool, blow: Callable[[], None]) -> None:
        """Call `blow` when the process sends its message of that number from now on."""
        self._fuses[process] = sends, lost, blow

    def calm_down(self) -> None:
        self.quiet = True
        self._fuses.clear()
        self._stale = None

    def depose(self, stream: str, moment: int) -> None:
        self._stale = stream, moment

    def crown(self) -> None:
        self._stale = None

    # ---- what the model asks --------------------------------------------------------------------

    def to_server(self, client: Any, subject: str, data: bytes) -> float | None:
        odds, lot = self.odds, self._rng.random()
        self._note(">", client.process, subject, data)
        if client.process in self._fuses and self._blown(client.process):
            return None
        if self.quiet or lot >= odds.slow + odds.lost:
            return 0.0
        if lot < odds.lost:
            self.injected["lost"] += 1
            return None
        return self._slow()

    def to_client(self, client: Any, what: str, subject: str, data: bytes) -> float | None:
        odds, lot = self.odds, self._rng.random()
        self._note("<", client.process, what, subject, data)
        if self.quiet or lot >= odds.slow + odds.unanswered:
            return 0.0
        if lot < odds.unanswered and what != "delivery":
            self.injected["unanswered"] += 1
            return None
        return self._slow()

    def stored(
        self, client: Any, stream: str, subject: str, data: bytes, headers: Any
    ) -> Fate | None:
        if self.quiet:
            return None
        odds, lot = self.odds, self._rng.random()
        for name, probability in (
            ("lost_ack", odds.lost_ack),
            ("late", odds.late),
            ("never", odds.never),
            ("refused", odds.refused),
        ):
            if lot < probability:
                self.injected[name] += 1
                return self._fate(name)
            lot -= probability
        return None

    def read(self, client: Any, stream: str, subject: str) -> int | None:
        if self._stale is None or self._stale[0] != stream or self._rng.random() < 0.5:
            return None
        self.injected["stale"] += 1
        return self._stale[1]

    def delivered(
        self, stream: str, consumer: str, subject: str, sequence: int, count: int
    ) -> Handing:
        if self.quiet:
            return "once"
        odds, lot = self.odds, self._rng.random()
        if lot < odds.twice:
            self.injected["twice"] += 1
            return "twice"
        if lot < odds.twice + odds.forgotten:
            self.injected["forgotten"] += 1
            return "forgotten"
        return "once"

    def _blown(self, process: str) -> bool:
        """Count one message of it; True: it blew, and the message is lost."""
        sends, lost, blow = self._fuses.pop(process)
        if sends > 1:
            self._fuses[process] = sends - 1, lost, blow
            return False
        blow()
        return lost

    def _slow(self) -> float:
        self.injected["slow"] += 1
        rng = self._rng
        return rng.uniform(*FAST_S) if rng.random() < 0.5 else rng.uniform(0.0, self.odds.slow_s)

    def _fate(self, name: str) -> Fate:
        rng = self._rng
        match name:
            case "lost_ack":
                return Fate(answers=False)
            case "late":
                after_s = rng.choice((0.01, 0.3, 2.0, 4.0)) * rng.uniform(0.5, 1.5)
                self.lands_by = max(self.lands_by, self._time() + after_s)
                return Fate(after_s=after_s, answers=rng.random() < 0.5)
            case "never":
                return Fate(lands=False, answers=False)
            case _:
                error = rng.choice((IN_FLIGHT, UNAVAILABLE))
                return Fate(lands=rng.random() < 0.5, error=error)


def happen(world: World, event: Event) -> None:
    """Let it happen now, to one of those that it may hit."""
    kind, _, what = event.kind.partition("_")
    if kind in ("kill", "stall", "drain"):
        members = [one for one in world.members if one.role == what and one.up]
        if members:
            _hit(world, members[event.who % len(members)], kind, event)
        return
    server = world.server
    streams = sorted(server.streams)
    stream = streams[event.who % len(streams)]
    clients = [client for client in server.clients if not client.process.startswith("root")]
    client = clients[event.who % len(clients)] if clients else None
    match event.kind:
        case "restart":
            server.restart(down_s=min(event.for_s, 2.0))
        case "pause":
            server.pause()
            world.later(event.for_s, server.resume)
        case "leader":
            fate = "lost" if event.who % 2 else "applied"
            server.change_leader(
                stream,
                away_s=min(event.for_s, 2.0),
                in_flight=fate,
                silent=event.who % 3 == 0,
                forgets=event.who % 4,
            )
        case "deposed":
            world.chaos.depose(stream, server.streams[stream].moment)
            world.later(STALE_S, world.chaos.crown)
        case "redeliver":
            for name in sorted(server.streams[stream].consumers):
                server.redeliver(stream, name)
        case "cut" if client is not None:
            client.cut(reconnect_s=0.2, half_open_s=event.for_s if event.who % 2 else 0.0)
        case "partition" if client is not None:
            client.partition(to_server=event.who % 3 != 1, from_server=event.who % 3 != 2)
            world.partitioned.append(client)
            world.later(event.for_s, lambda: mend(world, client))
        case _:
            return
    world.injected[event.kind] += 1
    world.trace.note("fault", event.kind, stream, event.for_s)


def mend(world: World, client: Any) -> None:
    """The network is whole again. What a connection swallowed TCP would still bring: so it is a new
    one."""
    if client in world.partitioned:
        world.partitioned.remove(client)
        client.heal()
        if client.is_connected:
            client.cut()


def _hit(world: World, member: Any, kind: str, event: Event) -> None:
    def blow() -> None:
        if member.up:
            world.injected[event.kind] += 1
            world.trace.note("fault", kind, member.process.name)
            match kind:
                case "kill":
                    member.kill()
                case "stall":
                    member.stall(event.for_s)
                case _:
                    member.drain()

    if event.fuse:
        member.process.light(event.fuse, blow)
    elif event.sends:
        world.chaos.light(member.process.name, event.sends, event.lost, blow)
    else:
        blow()

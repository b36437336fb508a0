"""The wires between a process and the servers: one proxy a server, all told the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from kit.proxy import Proxy, is_publish_ack


class _Gated:
    """What a client sends goes on only while the gate is open."""

    def __init__(self, reader: asyncio.StreamReader, gate: asyncio.Event) -> None:
        self._reader = reader
        self._gate = gate

    async def read(self, size: int) -> bytes:
        data = await self._reader.read(size)
        await self._gate.wait()
        return data


class Wire(Proxy):
    """A proxy that can also hold back what the client sends: it lands late."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.sending = asyncio.Event()
        self.sending.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gated: Any = _Gated(reader, self.sending)
        super()._accept(gated, writer)


class Wires:
    """`await Wires.to(urls)`; `url` for the process. `dropped`: the journal streams' sequences
    whose acknowledgements were lost."""

    def __init__(self) -> None:
        self._wires: list[Wire] = []
        self.dropped: list[tuple[str, int]] = []

    @classmethod
    async def to(cls, urls: list[str]) -> Wires:
        made = cls()
        for url in urls:
            wire = await Wire.start(url)
            assert isinstance(wire, Wire)
            made._wires.append(wire)
        return made

    @property
    def url(self) -> str:
        return ",".join(wire.url for wire in self._wires)

    @property
    def acks_seen(self) -> int:
        return sum(wire.acks_seen for wire in self._wires)

    def cut(self) -> None:
        for wire in self._wires:
            wire.cut()

    def stall(self, way: str, stalled: bool) -> None:
        """`in`: from the server; `out`: to it."""
        for wire in self._wires:
            if way == "out":
                (wire.sending.clear if stalled else wire.sending.set)()
            else:
                (wire.pause if stalled else wire.resume)()

    def delay(self, seconds: float) -> None:
        for wire in self._wires:
            wire.delay_acks(seconds)

    def drop_acks(self, count: int) -> None:
        """The next so many publish acks on each wire are lost."""
        for wire in self._wires:
            for _ in range(count):
                wire.drop_next_ack(self._lost())

    def _lost(self) -> Callable[[bytes], bool]:
        """Matches a publish ack, and notes which one: what matches next is lost (count 1)."""

        def match(payload: bytes) -> bool:
            if not is_publish_ack(payload):
                return False
            ack = json.loads(payload)
            if "_JOURNAL_" in ack["stream"] and "error" not in ack:
                self.dropped.append((ack["stream"], ack["seq"]))
            return True

        return match

    def calm(self) -> None:
        """No faults from here on."""
        for wire in self._wires:
            wire.sending.set()
            wire.resume()
            wire.delay_acks(0.0)
            wire._drops.clear()

    async def stop(self) -> None:
        self.calm()
        for wire in self._wires:
            await wire.stop()

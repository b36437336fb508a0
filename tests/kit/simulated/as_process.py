"""The model with the handles of a server process and of a proxy, for tests that run on both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kit.proxy import is_publish_ack

from .client import ModelClient
from .faults import Policy, What
from .server import ModelServer


class ModelProcess:
    """As kit.servers.NatsServer. No process, no ports."""

    def __init__(self) -> None:
        self.model = ModelServer()
        self.url = self.model.url

    async def stop(self) -> None:
        self.model.stop()

    async def kill(self) -> None:
        self.model.stop()

    async def restart(self) -> None:
        self.model.stop()
        self.model.start()

    def pause(self) -> None:
        self.model.pause()

    def resume(self) -> None:
        self.model.resume()


class ModelProxy(Policy):
    """As kit.proxy.Proxy: what it does meets the clients that were given its `url`."""

    url = "nats://model-proxy:4222"

    def __init__(self, model: ModelServer) -> None:
        self._model = model
        self._drops: list[tuple[Callable[[bytes], bool], asyncio.Event]] = []
        self.acks_seen = 0
        model.policy = self

    @property
    def _clients(self) -> list[ModelClient]:
        return [client for client in self._model.clients if client.urls == [self.url]]

    def to_client(self, client: ModelClient, what: What, subject: str, data: bytes) -> float | None:
        if client.urls != [self.url]:
            return 0.0
        if is_publish_ack(data):
            self.acks_seen += 1
        for drop in self._drops:
            match, dropped = drop
            if match(data):
                self._drops.remove(drop)
                dropped.set()
                return None
        return 0.0

    def drop_next_ack(self, match: Callable[[bytes], bool] | None = None) -> asyncio.Event:
        dropped = asyncio.Event()
        self._drops.append((match or is_publish_ack, dropped))
        return dropped

    def pause(self) -> None:
        for client in self._clients:
            client.stall()

    def resume(self) -> None:
        for client in self._clients:
            client.heal()

    def cut(self) -> None:
        for client in self._clients:
            client.cut(loses=False)

    def refuse(self, refusing: bool) -> None:
        self._model.refuses = lambda client: refusing and client.urls == [self.url]

    async def stop(self) -> None:
        self._model.policy = None

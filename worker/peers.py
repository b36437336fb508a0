"""Shell: a worker watches others, and wakes the runs of those that are gone (R51, R83).

Two of its peers are asked whether they are there, a few times a second: the ordinary question about
a run, about none. The server says at once where nobody listens, as after a SIGKILL; a worker that
stands still is silent, and is left to the ack wait. The runs of one that nobody answers for are
looked at at once, and again after the grace if it is still not there: its tasks that it had not
begun on are told from others' then. The same is done at the start, for the worker before this one.

journal/adopting.py says why a false alarm harms nobody. A worker that may not say hello (its user
has no permission for `peer`) watches nobody, and nobody it: its runs wait for the ack wait.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterable, Sequence

from journal.adopting import nobody_there, wake_abandoned
from journal.errors import PermissionDenied, RunfoldError
from journal.limits import (
    HOLDER_GRACE_S,
    PEER_MEET_S,
    PEER_PROBE_S,
    PEER_TRUST_S,
    PEERS_WATCHED,
    SUSPECTS_MAX,
)
from journal.peers import Peer, Peers, hello, read_hello
from journal.stores.jetstream import JetStreamStore

log = logging.getLogger("runfold")


class PeerWatch:
    """`run` until it is cancelled. Raises nothing else."""

    def __init__(self, store: JetStreamStore, worker: str, agents: Iterable[str]) -> None:
        me = Peer(worker, tuple(agents))
        self._store = store
        self._hello = hello(me)
        self._peers = Peers(me)

    @property
    def watched(self) -> Sequence[Peer]:
        """Whom it asks now."""
        return self._peers.watched()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_back())
            while True:
                try:
                    async with self._store.hints.peers(self._hear, self._hello):
                        group.create_task(self._greet())
                        for place in range(PEERS_WATCHED):
                            group.create_task(self._watch(place, group))
                        await asyncio.Event().wait()
                except PermissionDenied as error:
                    log.warning("runs of a killed worker wait for the ack wait: %s", error.message)
                    return
                except RunfoldError as error:
                    log.warning("other workers are not watched yet: %s", error.message)
                    await asyncio.sleep(PEER_MEET_S)  # else one closed for good would stop the loop

    # ---- who is there -----------------------------------------------------------------------

    def _hear(self, payload: bytes) -> None:
        peer = read_hello(payload)
        if peer is not None:
            self._peers.hear(peer)

    async def _greet(self) -> None:
        """Say hello at the start, with an answer wanted, and now and then."""
        first = True
        while True:
            try:
                if first:
                    await self._store.hints.meet(self._hello, self._hear, PEER_MEET_S)
                else:
                    await self._store.hints.greet(self._hello)
                first = False
            except RunfoldError as error:
                log.debug("other workers could not be greeted: %s", error.message)
            await asyncio.sleep(self._peers.hello_every_s * random.uniform(0.5, 1.5))

    async def _watch(self, place: int, group: asyncio.TaskGroup) -> None:
        """Ask one peer after the other that comes to stand there."""
        loop = asyncio.get_running_loop()
        trusting_until = 0.0
        while True:
            await asyncio.sleep(PEER_PROBE_S * random.uniform(0.7, 1.0))
            if not self._store.connected:
                trusting_until = loop.time() + PEER_TRUST_S
            watched = self.watched
            if (
                loop.time() < trusting_until
                or place >= len(watched)
                or len(self._peers.suspects) >= SUSPECTS_MAX
            ):
                continue
            peer = watched[place]
            if await self._is_gone(peer) and peer.worker not in self._peers.suspects:
                self._peers.suspects.add(peer.worker)
                group.create_task(self._follow(peer))

    async def _is_gone(self, peer: Peer) -> bool:
        try:
            return await nobody_there(self._store, peer.worker)
        except RunfoldError:
            return False

    # ---- whose runs nobody works ------------------------------------------------------------

    async def _follow(self, peer: Peer) -> None:
        gone = frozenset([peer.worker])
        try:
            first = await wake_abandoned(self._store, peer.agents, {}, gone)
            await asyncio.sleep(HOLDER_GRACE_S)
            if await self._is_gone(peer):
                again = await wake_abandoned(self._store, peer.agents, first.left, gone)
                self._peers.forget(peer.worker)
                woken = len(first.woken) + len(again.woken)
                log.info("worker %s is gone; %d of its runs are woken", peer.worker, woken)
        except RunfoldError as error:
            log.warning("the runs of worker %s wait: %s", peer.worker, error.message)
        finally:
            self._peers.suspects.discard(peer.worker)

    async def _look_back(self) -> None:
        """At the start: runs at work whose worker is gone, or did not live to claim them."""
        try:
            first = await wake_abandoned(self._store, self._peers.me.agents, {})
            for worker in sorted(first.there):  # killed before it answers our hello, it is watched
                self._peers.assume(worker)
            if first.left:
                await asyncio.sleep(HOLDER_GRACE_S)
                await wake_abandoned(self._store, self._peers.me.agents, first.left)
        except RunfoldError as error:
            log.warning("runs at work could not be looked at: %s", error.message)

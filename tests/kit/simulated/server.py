"""A nats-server with JetStream in process: no sockets, no threads, no time but the loop's.

Checked against nats-server 2.15.1 by the contract tests, which run on both.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Literal

from journal.stores import jetstream_streams, signals_queue

from . import streams
from .api import Api
from .client import ModelClient
from .clock import Clock
from .consumers import Consumer
from .consumers import full_config as consumer_config
from .faults import Policy, What
from .landing import Landing
from .messages import status
from .sessions import Session, Subscribed
from .streams import Stream
from .subjects import Table

MAX_PAYLOAD = 1024 * 1024
VERSION = "2.15.1"

_CAPTURES_MAX = 10_000


class ModelServer:
    """`client` makes clients of it: put it in place of `journal.stores.nats_connection.Client`.

    `now`: the wall clock, nanoseconds since 1970. `rng`: picks of a queue group; None: its oldest
    member. Within one event loop.
    """

    name = "MODEL"
    url = "nats://model:4222"

    def __init__(
        self,
        *,
        now: Callable[[], int] = time.time_ns,
        rng: random.Random | None = None,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        self.clock = Clock(now)
        self.max_payload = max_payload
        self.policy: Policy | None = None
        self.clients: list[ModelClient] = []
        self.streams: dict[str, Stream] = {}
        self.up = True
        self.refuses: Callable[[ModelClient], bool] = lambda client: False
        """Whether a connection of the client is refused just now."""
        self.trace: Callable[[tuple[Any, ...]], None] | None = None
        """Told of each message: ("from", process, subject, data) as it arrives at the server,
        ("to", process, what, subject, data) as it leaves it, also one that is lost then."""
        self._rng = rng
        self._api = Api(self)
        self._listening: Table[Subscribed] = Table()
        self._captures: dict[str, Stream | None] = {}
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] | None = None
        self._later: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._landing = Landing(self)
        self._numbers = 0

    def client(self) -> ModelClient:
        return ModelClient(self)

    def number(self) -> int:
        """Of the next client or inbox: names are the same in every run of a schedule."""
        self._numbers += 1
        return self._numbers

    def provision(self, namespace: str = "runfold", shards: int = 1) -> None:
        """What `journal.stores.provision` makes, in no time."""
        for shard in range(shards):
            wanted = jetstream_streams.stream_config(namespace, 1, shard, shards)
            self.add_stream(streams.full_config(wanted))
        for config in (
            jetstream_streams.tasks_config,
            jetstream_streams.signals_config,
            jetstream_streams.rejected_config,
        ):
            self.add_stream(streams.full_config(config(namespace, 1)))
        stream = self.streams[jetstream_streams.signals_name(namespace)]
        wanted = {
            "durable_name": signals_queue.CONSUMER,
            "ack_wait": int(signals_queue.ACK_WAIT_S * 1e9),
            "filter_subject": f"{namespace}.signal.>",
            "max_ack_pending": signals_queue.ACK_PENDING_MAX,
            "max_waiting": signals_queue.PULLS_MAX,
        }
        stream.consumers[signals_queue.CONSUMER] = Consumer(stream, consumer_config(wanted))

    # ---- streams ----------------------------------------------------------------------------

    def add_stream(self, config: dict[str, Any]) -> Stream:
        stream = self.streams[config["name"]] = Stream(self, config)
        self.forget_captures()
        return stream

    def remove_stream(self, stream: Stream) -> None:
        del self.streams[stream.name]
        for consumer in stream.consumers.values():
            consumer.end()
        for message in list(stream.messages.values()):
            stream.schedules.forget(message)
        self.forget_captures()

    def forget_captures(self) -> None:
        self._captures.clear()

    def _capturing(self, subject: str) -> Stream | None:
        if subject in self._captures:
            return self._captures[subject]
        if subject.startswith("_INBOX."):
            return None
        found = next((one for one in self.streams.values() if one.takes(subject)), None)
        if len(self._captures) > _CAPTURES_MAX:
            self._captures.clear()
        self._captures[subject] = found
        return found

    def moment_for(self, session: Session, stream: Stream, subject: str) -> int | None:
        if self.policy is None:
            return None
        return self.policy.read(session.client, stream.name, subject)

    # ---- what clients send ------------------------------------------------------------------

    def receive(
        self, session: Session, subject: str, data: bytes, reply: str, headers: dict[str, str]
    ) -> None:
        """A message has arrived."""
        if self._held is not None:
            self._held.append((self.receive, (session, subject, data, reply, headers)))
            return
        if not session.read:
            return
        if self.trace is not None:
            self.trace(("from", session.client.process, subject, data))
        if subject.startswith("$JS."):
            if not self._api.take(session, subject, data, reply) and reply:
                self._nobody(session, subject, reply)
            return
        heard = self.send(subject, subject, data, headers, reply, "message")
        stream = self._capturing(subject)
        if stream is not None and stream.away in ("", "silent"):
            self._store(session, stream, subject, data, reply, headers)
        elif reply and not heard:
            self._nobody(session, subject, reply)

    def _store(
        self,
        session: Session,
        stream: Stream,
        subject: str,
        data: bytes,
        reply: str,
        headers: dict[str, str],
    ) -> None:
        if stream.away:
            return
        fate = None
        if self.policy is not None:
            fate = self.policy.stored(session.client, stream.name, subject, data, headers)
        if fate is not None:
            self._landing.take(stream, subject, data, headers, reply, fate)
            return
        ack = stream.publish(subject, data, headers)
        if reply:
            self.send(reply, reply, ack, {}, "", "ack")

    def _nobody(self, session: Session, subject: str, reply: str) -> None:
        for subscribed in self._listening.find(reply):
            if subscribed.session is session:
                headers = status("503", "", **{"Nats-Subject": subject})
                session.push(subscribed, reply, "", b"", headers, "nobody")

    # ---- what clients get -------------------------------------------------------------------

    def subscriptions(self) -> list[tuple[str, str]]:
        """Process and subject of each, as the server has them."""
        return [
            (client.process, each.subject)
            for client in self.clients
            if client.wire.session is not None
            for each in client.wire.session.subscribed.values()
        ]

    def listens(self, subject: str) -> bool:
        return bool(self._listening.find(subject))

    def send(
        self,
        to: str,
        subject: str,
        data: bytes,
        headers: dict[str, str],
        reply: str,
        what: What,
    ) -> bool:
        """To whoever listens on `to`, under `subject`; whether somebody does."""
        found = self._listening.find(to)
        if not found:
            return False
        groups: dict[str, list[Subscribed]] | None = None
        for subscribed in found:
            if subscribed.queue:
                groups = groups if groups is not None else {}
                groups.setdefault(subscribed.queue, []).append(subscribed)
            else:
                subscribed.session.push(subscribed, subject, reply, data, headers, what)
        for members in (groups or {}).values():
            one = members[0] if self._rng is None else self._rng.choice(members)
            one.session.push(one, subject, reply, data, headers, what)
        return True

    def subscribe(self, subscribed: Subscribed) -> None:
        if self._held is not None:
            self._held.append((self.subscribe, (subscribed,)))
        elif subscribed.session.read and subscribed.sid not in subscribed.session.subscribed:
            subscribed.session.subscribed[subscribed.sid] = subscribed
            self._listening.add(subscribed.subject, subscribed)

    def unsubscribe(self, session: Session, sid: int) -> None:
        if self._held is not None:
            self._held.append((self.unsubscribe, (session, sid)))
            return
        subscribed = session.subscribed.pop(sid, None)
        if subscribed is not None:
            self._listening.remove(subscribed.subject, subscribed)

    def ping(self, session: Session, pong: Callable[[], None]) -> None:
        if self._held is not None:
            self._held.append((self.ping, (session, pong)))
        elif session.read:
            session.call(pong)

    def end_session(self, session: Session) -> None:
        """The server knows that the connection is gone."""
        session.read = False
        self.leave(session)

    def leave(self, session: Session) -> None:
        """Its subscriptions are gone; what it sent may still arrive."""
        for subscribed in session.subscribed.values():
            self._listening.remove(subscribed.subject, subscribed)
        session.subscribed.clear()

    # ---- faults -----------------------------------------------------------------------------

    @property
    def at_work(self) -> bool:
        return self.up and self._held is None

    def later(self, callback: Callable[..., None], *args: Any) -> None:
        """What was due while the server, or a stream's leader, was away."""
        self._later.append((callback, args))

    def _catch_up(self) -> None:
        due, self._later = self._later, []
        for callback, args in due:
            callback(*args)
        for stream in self.streams.values():
            for consumer in stream.consumers.values():
                consumer.serve()

    def pause(self) -> None:
        """SIGSTOP: what comes is kept."""
        if self._held is None:
            self._held = []
            for client in self.clients:
                client.wire.watch(0.0, loses=False)

    def resume(self) -> None:
        for client in self.clients:
            client.wire.heard()
        held, self._held = self._held or [], None
        for callback, args in held:
            callback(*args)
        self._catch_up()

    def restart(self, down_s: float = 0.0) -> None:
        """As `stop`; and it is there again after `down_s`."""
        self.stop()
        self.clock.after(down_s, self.start)

    def stop(self) -> None:
        """Everything on the way is lost, and all connections. Streams and consumers are kept."""
        self.up = False
        self._held = None
        self._landing.end(None, applied=False)
        for stream in self.streams.values():
            stream.batches.forget()
            for consumer in stream.consumers.values():
                consumer.pulls.end_all()
        for client in list(self.clients):
            client.cut()

    def start(self) -> None:
        self.up = True
        self._catch_up()

    def redeliver(self, stream: str, consumer: str, sequence: int | None = None) -> None:
        """The ack wait of what was delivered is over now."""
        self.streams[stream].consumers[consumer].redeliver(sequence)

    def change_leader(
        self,
        stream: str,
        *,
        away_s: float = 2.0,
        in_flight: Literal["lost", "applied"] = "lost",
        silent: bool = False,
        unavailable: bool = False,
        forgets: int = 0,
    ) -> None:
        """Late publishes of the stream are lost, or land without an ack; pulls are told to end; for
        `away_s` nobody listens for it, and the API gives no answer. `silent`: nobody is told
        anything; `unavailable`: the API says so. `forgets`: so many of each consumer's last
        deliveries."""
        changed = self.streams[stream]
        self._landing.end(changed, applied=in_flight == "applied")
        changed.batches.forget()
        changed.away = "silent" if silent else "unavailable" if unavailable else "nobody"
        for consumer in changed.consumers.values():
            consumer.forget_deliveries(forgets)
            if silent:
                consumer.pulls.end_all()
            else:
                consumer.pulls.end_all("409", "Leadership Change")
        self.clock.after(away_s, self._lead_again, changed)

    def _lead_again(self, stream: Stream) -> None:
        stream.away = ""
        self._catch_up()

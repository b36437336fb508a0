"""A stream: what it stores and refuses, as nats-server 2.15.1 does on its own (R1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .batches import BATCH_ID, Batches, Member
from .index import Index
from .messages import ApiError, Message, encode, rfc3339
from .schedules import Schedules
from .subjects import matcher, overlap

if TYPE_CHECKING:
    from .consumers import Consumer
    from .server import ModelServer

LAST_SUBJECT = "Nats-Expected-Last-Subject-Sequence"
_DEFAULTS: dict[str, Any] = {
    "name": "",
    "subjects": [],
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 120_000_000_000,
    "compression": "none",
    "allow_direct": False,
    "mirror_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "consumer_limits": {},
    "allow_msg_ttl": False,
}
_NATS = {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1"}


def full_config(given: dict[str, Any]) -> dict[str, Any]:
    """With the settings that are left out; a server that stands alone makes one replica."""
    config = {**_DEFAULTS, **{name: value for name, value in given.items() if value or value == 0}}
    for name in [name for name in given if name not in _DEFAULTS and not given[name]]:
        config.pop(name, None)
    if config.get("allow_msg_schedules"):
        config["allow_rollup_hdrs"] = True
    config["metadata"] = {**_NATS, **given.get("metadata", {})}
    return config


class Stream:
    """`moment` counts its changes; a read may be answered from the past (`view`)."""

    def __init__(self, server: ModelServer, config: dict[str, Any]) -> None:
        self.server = server
        self.created = server.clock.now()
        self.index = Index()
        self.last_seq = 0
        self.last_stamp = 0
        self.moment = 0
        self.away: str = ""
        """Without a leader: "nobody" listens, the API says "unavailable", or all is "silent"."""
        self.consumers: dict[str, Consumer] = {}
        self.schedules = Schedules(self)
        self.batches = Batches(self)
        self._dead: list[Message] = []
        self._ids: dict[str, tuple[int, int]] = {}
        self._last_id = ""
        self.configure(config)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config["name"]
        self.work_queue: bool = config["retention"] == "workqueue"
        self._scheduling = bool(config.get("allow_msg_schedules"))
        self._acked = b'{"stream":%b,"seq":' % encode(self.name)
        self._takes = [matcher(subject) for subject in config["subjects"]]
        self.config_json = encode(config)
        self.created_text = rfc3339(self.created)

    @property
    def messages(self) -> dict[int, Message]:
        return self.index.messages

    @property
    def by_subject(self) -> dict[str, list[Message]]:
        return self.index.by_subject

    def takes(self, subject: str) -> bool:
        return any(takes(subject) for takes in self._takes)

    # ---- storing ----------------------------------------------------------------------------

    def publish(self, subject: str, data: bytes, headers: dict[str, str]) -> bytes:
        """Store it, or not; the acknowledgement, or the refusal."""
        if headers:
            if BATCH_ID in headers:
                answer = self.batches.take(subject, data, headers)
                return answer if isinstance(answer, bytes) else self._refusal(answer)
            refused = self._refused(subject, headers)
            if refused is not None:
                return refused
        if self._scheduling:
            self.schedules.drop(subject, replaced="Nats-Schedule" in headers)
        message = self.store(subject, data, headers)
        if "Nats-Msg-Id" in headers:
            self._last_id = headers["Nats-Msg-Id"]
            self._ids[self._last_id] = (message.seq, message.stamp)
        if "Nats-Schedule" in headers and self._scheduling:
            headers["Nats-Rollup"] = "sub"
            self.schedules.add(message)
        return self._acked + b"%d}" % message.seq

    def publish_all(self, batch: str, members: list[Member]) -> bytes:
        """Store all of a batch, or none; the answer to its commit."""
        if len({member.subject for member in members}) < len(members):
            return self._refusal(ApiError(400, 10164, "wrong last sequence"))
        for member in members:
            refused = self._refused(member.subject, member.headers)
            if refused is not None:
                return refused
        for member in members:
            self.store(*member)
        more = b'%d,"batch":%b,"count":%d}' % (self.last_seq, encode(batch), len(members))
        return self._acked + more

    def store(self, subject: str, data: bytes, headers: dict[str, str]) -> Message:
        self.last_seq += 1
        self.moment += 1
        self.last_stamp = self.server.clock.now()
        message = Message(self.last_seq, subject, data, headers, self.last_stamp, self.moment)
        self.index.add(message)
        for consumer in self.consumers.values():
            if consumer.takes(subject):
                consumer.offer(message)
        return message

    def _refused(self, subject: str, headers: dict[str, str]) -> bytes | None:
        expected = headers.get(LAST_SUBJECT)
        if expected:
            about = headers.get(f"{LAST_SUBJECT}-Subject", subject)
            last = self.index.last(about)
            last_seq = last.seq if last is not None else 0
            if expected != str(last_seq):
                return self._refusal(ApiError(400, 10071, f"wrong last sequence: {last_seq}"))
        for name in headers:  # the others are rare
            if name.startswith("Nats-") and name != LAST_SUBJECT:
                return self._refused_for_others(subject, headers)
        return None

    def _refused_for_others(self, subject: str, headers: dict[str, str]) -> bytes | None:
        if headers.get("Nats-Expected-Stream", self.name) != self.name:
            return self._refusal(ApiError(400, 10060, "expected stream does not match"))
        last = headers.get("Nats-Expected-Last-Sequence")
        if last and last != str(self.last_seq):
            return self._refusal(ApiError(400, 10071, f"wrong last sequence: {self.last_seq}"))
        if headers.get("Nats-Expected-Last-Msg-Id", self._last_id) != self._last_id:
            return self._refusal(ApiError(400, 10070, f"wrong last msg ID: {self._last_id}"))
        if "Nats-Rollup" in headers and not self.config["allow_rollup_hdrs"]:
            return self._refusal(ApiError(500, 10111, "rollup not permitted"))
        if "Nats-TTL" in headers and not self.config["allow_msg_ttl"]:
            return self._refusal(ApiError(400, 10166, "per-message TTL is disabled"))
        if "Nats-Schedule" in headers:
            wrong = self.schedules.wrong(subject, headers)
            if wrong is not None:
                return self._refusal(wrong)
        return self._duplicate(headers.get("Nats-Msg-Id", ""))

    def _duplicate(self, message_id: str) -> bytes | None:
        known = self._ids.get(message_id)
        if known is None:
            return None
        sequence, stamp = known
        if self.server.clock.now() - stamp > self.config["duplicate_window"]:
            del self._ids[message_id]
            return None
        return self._acked + b'%d,"duplicate": true}' % sequence

    def _refusal(self, error: ApiError) -> bytes:
        return publish_refusal(self.name, error)

    # ---- removing ---------------------------------------------------------------------------

    def remove(self, message: Message) -> None:
        """By an acknowledgement, a purge, a deletion, a newer schedule."""
        if message.died:
            return
        self.moment += 1
        message.died = self.moment
        self.index.remove(message)
        self._dead.append(message)

    def purge(self, pattern: str, before: int, keep: int) -> int:
        """How many went. `before`: only what has a lower sequence (0: all); `keep` the last."""
        found = self.index.after(pattern, 0)
        if before:
            found = [message for message in found if message.seq < before]
        if keep:
            found = found[:-keep]
        for message in list(found):
            self.drop(message)
        return len(found)

    def drop(self, message: Message) -> None:
        """Remove it against the will of the consumers."""
        self.schedules.forget(message)
        self.remove(message)
        for consumer in self.consumers.values():
            consumer.forget(message)

    # ---- looking ----------------------------------------------------------------------------

    def view(self, moment: int | None) -> Index:
        """The messages that were there at the moment; None: that are there."""
        if moment is None or moment >= self.moment:
            return self.index
        there = [
            message
            for message in (*self._dead, *self.messages.values())
            if message.born <= moment and not 0 < message.died <= moment
        ]
        there.sort(key=lambda message: message.seq)
        return Index(there)

    def state(self, index: Index, pattern: str, offset: int) -> dict[str, Any]:
        messages = list(index.messages.values())
        last = self.last_seq if index is self.index else max(index.messages, default=0)
        state: dict[str, Any] = {
            "messages": len(messages),
            "bytes": sum(message.size for message in messages),
            "first_seq": messages[0].seq if messages else (last + 1 if last else 0),
            "first_ts": rfc3339(messages[0].stamp) if messages else "0001-01-01T00:00:00Z",
            "last_seq": last,
            "last_ts": rfc3339(self.last_stamp) if last else "0001-01-01T00:00:00Z",
        }
        if index.by_subject:
            state["num_subjects"] = len(index.by_subject)
        if pattern:
            page = index.subjects(pattern)[offset : offset + 100_000]
            if page:
                state["subjects"] = {each: len(index.by_subject[each]) for each in page}
        state["consumer_count"] = len(self.consumers)
        return state


def publish_refusal(stream: str, error: ApiError) -> bytes:
    """In place of an acknowledgement."""
    return encode({"error": error.as_dict(), "stream": stream, "seq": 0})


def wrong_config(config: dict[str, Any], others: dict[str, Stream]) -> ApiError | None:
    """Why no such stream can be made."""
    if config["num_replicas"] > 1:
        return ApiError(500, 10074, "replicas > 1 not supported in non-clustered mode")
    for other in others.values():
        if other.name == config["name"]:
            continue
        if any(overlap(a, b) for a in config["subjects"] for b in other.config["subjects"]):
            return ApiError(400, 10065, "subjects overlap with an existing stream")
    if config.get("allow_msg_schedules") and config["discard"] == "new":
        return ApiError(500, 10052, "message schedules can not be used with discard new")
    return None

"""What servers and strangers send: answers, tasks, headers, the names of tasks. As
targets_journal.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from typing import Any

import msgspec
from fuzz.draw import Draw, forged
from kit.build import RUN
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

from bridge.problems import NotFound
from bridge.task_id import AgentTerms, decode_name, encode_name, named
from journal.errors import NotProvisioned, StoreUnavailable
from journal.ids import RunId
from journal.store import Appended, Conflict, RawRecord, Unknown
from journal.stores.delivery import Malformed, read_delivery
from journal.stores.jetstream_answers import ApiError, read_ack
from journal.stores.jetstream_headers import HeaderCheck, commit_of, status_of
from journal.stores.jetstream_read import _headers, api_answer, raise_if_gone
from journal.stores.nats_client import Client
from journal.stores.nats_errors import denied_subject
from journal.stores.nats_feed import Feed
from journal.stores.nats_headers import parsed
from journal.stores.nats_waiting import Incoming, Reply
from journal.stores.rejected import _read as read_refusal
from journal.stores.stream_api import _consumer, _stream
from journal.stores.tasks_message import Task, encode_payload, read_task, task_subject

REPLY = "$JS.ACK.RUNFOLD_TASKS.helpdesk.3.17.5.1700000000000000000.2"
ANSWERS: tuple[dict[str, Any], ...] = (
    {"stream": "S", "seq": 8, "duplicate": False},
    {"error": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 7"}},
    {"error": {"code": 503, "err_code": 10164, "description": "x"}},
    {"message": {"subject": "s", "seq": 3, "data": "e30=", "hdrs": "TkFUUy8xLjA=", "time": "t"}},
    {"config": {"ack_wait": 30, "filter_subject": "x"}, "num_pending": 1},
    {"state": {"messages": 1, "first_seq": 1, "last_seq": 2, "subjects": {"a": 1}}, "total": 3},
)
_encode = msgspec.json.Encoder().encode


def answer(data: bytes) -> None:
    """Any answer of a server, or of somebody in its place: stored, refused, unknown, or an error
    that says so. Stored only with a sequence above the expected one."""
    draw = Draw(data)
    raw = _encode(forged(draw, draw.pick(ANSWERS))) if draw.below(4) else draw.rest()
    expected = draw.below(16)
    with contextlib.suppress(StoreUnavailable):
        found = read_ack(raw, stream="S", expected=expected)
        assert isinstance(found, Appended | Conflict | Unknown)
        assert not isinstance(found, Appended) or found.tail > expected
    for decoder in (_consumer, _stream):
        with contextlib.suppress(StoreUnavailable, NotProvisioned):
            error = api_answer(decoder, Reply(raw, {})).error
            raise_if_gone(error or ApiError(), "S")
    read_refusal(raw)


def task(data: bytes) -> None:
    """Any delivery is a task, or is no delivery."""
    draw = Draw(data)
    honest = bool(draw.below(2))
    subject = task_subject("runfold", "helpdesk", RunId("a.1"), draw.pick([1, 0, -1]))
    message = Incoming(
        subject=subject if honest else draw.text(),
        data=draw.pick([encode_payload(draw.below(1 << 16)), b"", draw.take(64)]),
        headers={},
        reply=draw.pick([REPLY, draw.text(), REPLY + draw.text(), REPLY[: draw.below(64)]]),
    )
    with contextlib.suppress(Malformed):
        delivery = read_delivery(message.reply)
        assert delivery.at.tzinfo is UTC
    with contextlib.suppress(Malformed):
        found = read_task(message, "helpdesk")
        assert found.run_id and found.delivery >= 0


def task_name(data: bytes) -> None:
    """Any path is the name of a task of this owner, the same once more, or of none."""
    draw = Draw(data)
    text = draw.rest().decode("latin-1") if draw.below(2) else _name(draw)
    try:
        name, found = decode_name(text, "alice", "runfold")
    except NotFound:
        return
    assert name.owner == "alice" and found.run_id == name.run
    assert decode_name(encode_name(name), "alice", "runfold") == (name, found)


def _name(draw: Draw) -> str:
    """An honest one, with some of it changed."""
    at = datetime(2026, 1, 2, tzinfo=UTC)
    given = Task(
        run_id=RUN,
        agent="helpdesk",
        cause=7,
        sequence=17,
        delivery=3,
        priority=0,
        pending=2,
        at=at,
        reply=REPLY,
        arrived=0.0,
    )
    honest = named(given, "alice", AgentTerms(name="helpdesk"), "0123456789abcdef", 30.0)
    value = msgspec.to_builtins(honest)
    assert decode_name(encode_name(honest), "alice", "runfold")[0] == honest
    for _ in range(draw.below(3)):
        value = forged(draw, value)
    raw = _encode(value)
    return urlsafe_b64encode(raw).decode().rstrip("=")


def headers(data: bytes) -> None:
    """Any headers say something or nothing."""
    draw = Draw(data)
    block = b"NATS/1.0" + draw.rest() if draw.below(2) else draw.rest()
    found = _headers(block)
    assert all(name == name.strip() and value == value.strip() for name, value in found.items())
    for value in ["self", "", block.decode("latin-1")]:
        assert commit_of({"Runfold-Commit": value}) >= -1
        status_of({"Runfold-Status": value})
        record = RawRecord(block, 1, {"Nats-Expected-Last-Subject-Sequence": "0", **found})
        list(HeaderCheck().broken(record))
    denied_subject(Exception(block.decode("latin-1").lower()))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def protocol(data: bytes) -> None:
    """Whatever is in a message, who listens gets it, and the client reads on."""
    _loop().run_until_complete(_parsed(Draw(data)))


async def _parsed(draw: Draw) -> None:
    """A message as a server passes it on, with whatever a stranger put into it, and then another:
    what reads the connection must still be there, be it ours or nats-py's."""
    client = Client()
    taken: list[tuple[bytes, bytes, bytes, bytes]] = []
    client._takers[1] = lambda *message: taken.append(message)
    client._subs[2] = Subscription(client, 2, subject="a")

    async def on_error(error: Exception) -> None:
        assert str(error)

    client._error_cb = on_error
    parser = Parser(client)
    client._ps, client._status = parser, Client.CONNECTED
    reader = asyncio.StreamReader()
    feed = Feed(client, reader, client._takers)
    subject = re.sub(rb"[ \t\r\n]", b"", draw.take(8)) or b"a"
    sid = draw.pick([b"1", b"2"])
    line = draw.pick([b"NATS/1.0", b"NATS/1.0 503", b"NATS/1.0 100 Idle Heartbeat", b""])
    head = line + draw.pick([b"\r\n", b""]) + draw.take(draw.below(64)) + b"\r\n\r\n"
    payload = draw.rest()
    sizes = b"%d %d" % (len(head), len(head) + len(payload))
    stream = b"HMSG %b %b %b\r\n%b%b\r\n" % (subject, sid, sizes, head, payload)
    ours, cut = bool(draw.below(2)), draw.below(len(stream))
    for part in (stream[:cut], stream[cut:], b"MSG b 1 2\r\nok\r\n"):
        if ours:
            feed(part)
        await parser.parse(await reader.read(len(reader._buffer)) if ours else part)
    *before, (_, _, last, _) = taken
    assert last == b"ok" and len(before) == (sid == b"1")
    for _, _, data, block in before:
        assert data == payload and block == head
        found = parsed(block)
        assert all(isinstance(part, str) for pair in found.items() for part in pair)

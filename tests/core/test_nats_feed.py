"""What a NATS server sends reaches who listens as nats-py's own parser would bring it."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, NamedTuple

import nats.errors
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nats.aio.client import Client as PlainClient
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from journal.stores.nats_client import Client
from journal.stores.nats_feed import Feed
from journal.stores.nats_headers import block_of, parsed

OURS, THEIRS, NOBODYS = 1, 3, 4
"""Subscriptions: with a taker, with a callback, ended."""


class Seen(NamedTuple):
    """What was heard, in its order: messages, and lines of the protocol."""

    what: str
    parts: tuple[Any, ...] = ()


class Heard(Client):
    """Notes what a parser calls, each after some turns of the loop."""

    def __init__(self, turns: int) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self._turns = turns
        self._status = PlainClient.CONNECTED

        def take(*message: bytes) -> None:
            self.seen.append(Seen("ours", message))

        self._takers[OURS] = take

    async def _note(self, what: str, *parts: Any) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)
        self.seen.append(Seen(what, parts))

    async def _process_msg(
        self, sid: int, subject: Any, reply: Any, data: Any, headers: Any
    ) -> Any:
        if sid in self._takers:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            await self._note("theirs", sid, subject, reply, data, headers or b"")

    async def _process_pong(self) -> None:
        await self._note("pong")

    async def _process_ping(self) -> None:
        await self._note("ping")

    async def _process_err(self, err_msg: str) -> None:
        await self._note("err", err_msg)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        await self._note("info", info)


async def as_nats_py(stream: bytes) -> list[Seen]:
    """nats-py's parser, of all at once."""
    client = Heard(0)
    await Parser(client).parse(stream)
    return client.seen


async def as_we(chunks: list[bytes], turns: int) -> list[Seen]:
    """Through the feed and, for the rest, nats-py's task, with some turns of the loop between."""
    client = Heard(turns)
    reader = asyncio.StreamReader()
    transport = TcpTransport()
    transport._io_reader = reader
    client._transport = transport
    client._ps = Parser(client)
    feed = Feed(client, reader, client._takers)
    reading = asyncio.create_task(client._read_loop())
    for chunk in chunks:
        feed(chunk)
        for _ in range(turns):
            await asyncio.sleep(0)
    feed_all = asyncio.Event()
    while not feed_all.is_set():
        before = len(client.seen), len(client._ps.buf)
        for _ in range(3 * turns + 20):
            await asyncio.sleep(0)
        if not reader._buffer and before == (len(client.seen), len(client._ps.buf)):
            feed_all.set()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return client.seen


WORDS = st.sampled_from([b"a", b"_INBOX.x.1f", b"a\x0bb", b"\xff\xc3", b"12", "ü".encode()])
PAYLOADS = st.one_of(
    st.sampled_from([b"", b"\r\n", b"PONG\r\n", b"MSG a 1 2\r\nok\r\n", b"+OK\r\n", b"x" * 300]),
    st.binary(max_size=12),
)
BLOCKS = st.sampled_from(
    [b"NATS/1.0\r\n\r\n", b"NATS/1.0 503\r\n\r\n", b"NATS/1.0\r\nA: b\r\n\r\n"]
)


@st.composite
def messages(draw: Any) -> bytes:
    """In the server's form most of the time; with tabs, or more spaces, at others."""
    gap = draw(st.sampled_from([b" "] * 8 + [b"\t", b"  "]))
    sid = draw(st.sampled_from([OURS, OURS, OURS, THEIRS, NOBODYS]))
    reply = draw(st.one_of(st.none(), WORDS))
    payload = draw(PAYLOADS)
    words = [draw(WORDS), b"%d" % sid, *([reply] if reply else [])]
    if draw(st.booleans()):
        block = draw(BLOCKS)
        words = [b"HMSG", *words, b"%d" % len(block), b"%d" % (len(block) + len(payload))]
        return gap.join(words) + b"\r\n" + block + payload + b"\r\n"
    return gap.join([b"MSG", *words, b"%d" % len(payload)]) + b"\r\n" + payload + b"\r\n"


LINES = st.sampled_from(
    [b"PONG\r\n", b"PING\r\n", b"+OK\r\n", b'INFO {"a":1}\r\n', b"-ERR 'Some Error'\r\n"]
)
STREAMS = st.lists(st.one_of(messages(), messages(), messages(), LINES), max_size=8)


@settings(max_examples=150, deadline=None)
@given(STREAMS, st.lists(st.integers(0, 900), max_size=6), st.integers(0, 3))
@example([b"PONG\r\n", b"MSG a 1 2\r\nok\r\n"], [4], 3)
@example([b"MSG a 3 2\r\nok\r\n", b"MSG a 1 2\r\nok\r\n", b"PONG\r\n"], [11], 2)
@example([b"MSG a\t1 1 2\r\nok\r\n"], [], 0)
def test_any_split_of_the_bytes_brings_the_same_messages(
    parts: list[bytes], cuts: list[int], turns: int
) -> None:
    stream = b"".join(parts)
    places = sorted({min(cut, len(stream)) for cut in cuts} | {0, len(stream)})
    chunks = [stream[a:b] for a, b in itertools.pairwise(places)]
    expected = asyncio.run(as_nats_py(stream))
    seen = asyncio.run(as_we(chunks, turns))
    for whose in ("ours", "theirs"):
        assert [one for one in seen if one.what == whose] == [
            one for one in expected if one.what == whose
        ]
    assert sorted(seen, key=repr) == sorted(expected, key=repr)
    for number, place in enumerate(_pongs(expected)):  # a round trip: all before it was taken
        before = _ours(expected[:place])
        assert _ours(seen[: _pongs(seen)[number]])[: len(before)] == before


def _pongs(seen: list[Seen]) -> list[int]:
    return [place for place, one in enumerate(seen) if one.what == "pong"]


def _ours(seen: list[Seen]) -> list[Seen]:
    return [one for one in seen if one.what == "ours"]


async def test_what_nats_py_has_begun_to_read_is_not_overtaken() -> None:
    """Half a line that is nats-py's: all behind it is, too, until it has it."""
    chunks = [b"PING\r\nPO", b"NG\r\n", b"MSG a 1 2\r\nok\r\n"]
    assert [one.what for one in await as_we(chunks, 0)] == ["ping", "pong", "ours"]
    client = Heard(0)
    reader = asyncio.StreamReader()
    client._ps = Parser(client)
    feed = Feed(client, reader, client._takers)
    for chunk in (b"PING\r\nMSG a ", b"1 2\r\nok\r\n", b"MSG b 1 2\r\nok\r\n"):
        feed(chunk)
    assert client.seen == []
    await client._ps.parse(await reader.read(100))
    feed(b"MSG c 1 2\r\nok\r\n")
    assert [one.parts[0] for one in client.seen if one.what == "ours"] == [b"a", b"b", b"c"]


async def test_a_message_of_many_pieces_is_joined_once() -> None:
    """Not at each piece: a large one would cost the square of its size."""
    payload = b"x" * 10_000
    stream = b"MSG a 1 %d\r\n%b\r\n" % (len(payload), payload)
    seen = await as_we([stream[at : at + 7] for at in range(0, len(stream), 7)], 0)
    assert seen == [Seen("ours", (b"a", b"", payload, b""))]


async def test_what_comes_after_the_connection_was_left_reaches_no_taker() -> None:
    client = Heard(0)
    reader = asyncio.StreamReader()
    client._ps = Parser(client)
    feed = Feed(client, reader, client._takers)
    feed(b"MSG a 1 2\r\nok\r\n")
    client._status = PlainClient.RECONNECTING
    feed(b"MSG b 1 2\r\nok\r\n")
    assert [one.parts[0] for one in client.seen] == [b"a"]


# ---- headers -------------------------------------------------------------------------------------

HEADER_LINES = st.lists(
    st.one_of(
        st.sampled_from(
            [b"A: b", b"A:b", b"A:\tb ", b"Nats-Sequence: 12", b": x", b"A", b"", b"A B: c"]
        ),
        st.binary(max_size=10),
        st.text(alphabet="aB:\t\v\x1c \xe9", max_size=8).map(str.encode),
    ),
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(HEADER_LINES)
def test_headers_are_read_as_nats_py_reads_them(lines: list[bytes]) -> None:
    block = b"NATS/1.0\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n"
    assert parsed(block) == (asyncio.run(PlainClient()._process_headers(block)) or {})


@pytest.mark.parametrize(
    ("block", "found"),
    [
        (b"NATS/1.0 503\r\n\r\n", {"Status": "503"}),
        (b"NATS/1.0 404 No Messages\r\n\r\n", {"Status": "404", "Description": "No Messages"}),
        (
            b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 7\r\n\r\n",
            {"Status": "100", "Description": "Idle Heartbeat", "Nats-Last-Consumer": "7"},
        ),
        (
            b"NATS/1.0 204\r\nNats-Num-Pending: 0\r\n\r\n",
            {"Status": "204", "Nats-Num-Pending": "0"},
        ),
        (b"NATS/1.0 1\r\n\r\n", {}),
        (b"NATS/1.0503\r\n\r\n", {}),
        (b"HTTP/1.0 503\r\n\r\n", {}),
        (b"", {}),
    ],
)
def test_a_status_line_says_its_code_and_its_text(block: bytes, found: dict[str, str]) -> None:
    assert parsed(block) == found


@settings(deadline=None)
@given(st.dictionaries(st.from_regex(r"[A-Za-z-]{1,9}", fullmatch=True), st.text(max_size=9)))
def test_headers_say_after_the_way_what_they_said_before(headers: dict[str, str]) -> None:
    found = parsed(block_of(headers))
    assert found.keys() == headers.keys()
    for name, value in headers.items():
        assert found[name] == value.replace("\r", " ").replace("\n", " ").strip(" \t\v\f")


def test_a_value_with_a_line_end_makes_no_header_of_its_own() -> None:
    block = block_of({"traceparent": "x\r\nNats-Expected-Last-Subject-Sequence: 0\r\n\r\npayload"})
    assert list(parsed(block)) == ["traceparent"] and block.count(b"\r\n") == 3


# ---- sending -------------------------------------------------------------------------------------


class Written(TcpTransport):
    """Keeps what is written, in its pieces."""

    class _Writer:
        def __init__(self) -> None:
            self.transport = self
            self.pieces: list[bytes] = []
            self.stuck = False

        def write(self, data: bytes) -> None:
            self.pieces.append(data)

        def is_closing(self) -> bool:
            return False

        def get_write_buffer_size(self) -> int:
            return sum(map(len, self.pieces)) if self.stuck else 0

    def __init__(self) -> None:
        super().__init__()
        self.writer = self._Writer()
        self._io_writer: Any = self.writer


def connected() -> tuple[Client, Written._Writer]:
    client, transport = Client(), Written()
    client._transport = transport
    client._status = PlainClient.CONNECTED
    client._max_payload = 1000
    return client, transport.writer


async def test_what_is_posted_in_one_turn_is_written_in_its_order_and_in_one_piece() -> None:
    client, writer = connected()
    await client._send_command(b"SUB a  1\r\n")
    assert client.post("a", b"1", headers={"A": "b"}) and client.post("b", b"22", b"r")
    assert writer.pieces == []
    await asyncio.sleep(0)
    block = b"NATS/1.0\r\nA: b\r\n\r\n"
    first = b"HPUB a  %d %d\r\n%b1\r\n" % (len(block), len(block) + 1, block)
    assert writer.pieces == [b"SUB a  1\r\n" + first + b"PUB b r 2\r\n22\r\n"]
    await asyncio.sleep(0)
    assert len(writer.pieces) == 1


async def test_what_is_said_about_a_delivery_is_written_before_the_turn_ends() -> None:
    """A process that is stopped then would say it when it goes on, about another's delivery."""
    client, writer = connected()
    assert client.post("a", b"") and client.send("$JS.ACK.x", b"+ACK")
    assert b"".join(writer.pieces) == b"PUB a  0\r\n\r\nPUB $JS.ACK.x  4\r\n+ACK\r\n"


async def test_what_a_lost_connection_had_not_written_is_not_written_to_the_next() -> None:
    client, writer = connected()
    assert client.post("a", b"")
    client._status = PlainClient.RECONNECTING  # nats-py tells of it some turns later
    assert not client.post("b", b"") and not client.send("c", b"")
    await asyncio.sleep(0)
    client.forget_unsent()
    client._status = PlainClient.CONNECTED
    assert client.post("d", b"")
    await asyncio.sleep(0)
    assert writer.pieces == [b"PUB d  0\r\n\r\n"]


async def test_a_server_that_reads_nothing_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("journal.stores.nats_client.UNSENT_BYTES_MAX", 5000)
    client, writer = connected()
    writer.stuck = True
    posted = 0
    while client.post("a", b"x" * 900):
        posted += 1
        assert posted < 100
        await asyncio.sleep(0)
    assert posted == 6
    writer.stuck = False
    assert client.post("a", b"x")


async def test_what_the_server_would_cut_the_connection_for_is_not_sent() -> None:
    client, writer = connected()
    assert client.post("a", b"x" * 1000)
    for payload, headers in ((b"x" * 1001, None), (b"x" * 990, {"A": "b"})):
        with pytest.raises(nats.errors.MaxPayloadError):
            client.post("a", payload, b"", headers)
    await asyncio.sleep(0)
    assert len(writer.pieces) == 1

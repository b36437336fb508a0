"""Signals are kept until they are settled, whatever is in them; refusals are kept to look at."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.backends import REAL_ONLY
from kit.raw_client import ask
from kit.servers import NatsServer

from journal.errors import InvalidId, NotProvisioned
from journal.ids import RunId
from journal.signal_address import SignalAddress, kept_address, run_address, run_filters
from journal.stores.jetstream import JetStreamStore
from journal.stores.rejected import PAYLOAD_BYTES_MAX, Refusal, refusal
from journal.stores.signals_queue import KeptSignal, SignalQueue

SIGNALS = "RUNFOLD_SIGNALS"
REJECTED = "RUNFOLD_REJECTED"


@pytest.fixture
def queue(direct: JetStreamStore) -> SignalQueue:
    return direct.signals


async def taken(queue: SignalQueue, count: int, wait_s: float = 5.0) -> list[KeptSignal]:
    found: list[KeptSignal] = []
    async with queue.pulling(found.append) as puller:
        while len(found) < count and (await puller.pull(count - len(found), wait_s)).why:
            if wait_s < 1:
                break
    return found


async def raw_publish(url: str, lines: bytes) -> None:
    """What no client library would send."""
    host, _, port = url.removeprefix("nats://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    writer.write(b'CONNECT {"verbose":false,"pedantic":false,"headers":true}\r\n' + lines)
    writer.write(b"PING\r\n")
    async with asyncio.timeout(5):
        assert b"PONG" in await reader.readline()
    writer.close()


# ---- delivery ------------------------------------------------------------------------------------


async def test_a_signal_arrives_as_it_was_published(queue: SignalQueue, server: NatsServer) -> None:
    headers = {"runfold-REQUEST": "r-1"}
    await ask(server.url, "runfold.signal.order.7.approve", b'{"marker":"m"}', headers)
    (one,) = await taken(queue, 1)
    assert one.address() == SignalAddress(RunId("order.7"), "approve", "nats")
    assert (one.data, one.request_id, one.sequence, one.delivery) == (
        b'{"marker":"m"}',
        "r-1",
        1,
        1,
    )
    assert (await queue.backlog()).waiting == 1 and await queue.first(RunId("order.7"), 0) == 1
    assert await queue.ack(one)
    assert (await queue.backlog()).waiting == 0 and await queue.first(RunId("order.7"), 0) == 0


async def test_what_is_put_off_comes_again_and_what_is_at_work_does_not(
    queue: SignalQueue, server: NatsServer
) -> None:
    await ask(server.url, "runfold.signal.r.cancel", b"{}")
    (one,) = await taken(queue, 1)
    assert await taken(queue, 1, 0.2) == []
    queue.nak(one, 0.05)
    (again,) = await taken(queue, 1)
    assert (again.sequence, again.delivery, again.key) == (1, 2, one.key)
    queue.in_progress(again)
    assert await queue.ack(one)  # of an overtaken delivery: it settles the message
    assert (await queue.backlog()).waiting == 0


async def test_init_makes_the_consumer_and_two_bridges_share_it(
    queue: SignalQueue, server: NatsServer
) -> None:
    for number in range(4):
        await ask(server.url, f"runfold.signal.r{number}.cancel", b"{}")
    assert await queue.ensure() == 30.0
    mine, others = await taken(queue, 2), await taken(queue, 2)
    assert [one.sequence for one in mine + others] == [1, 2, 3, 4]
    info = await ask(server.url, f"$JS.API.STREAM.INFO.{SIGNALS}")
    assert info["state"]["consumer_count"] == 1


async def test_the_first_of_a_run_is_found_in_all_its_spellings(
    queue: SignalQueue, server: NatsServer
) -> None:
    for subject in ("a.b.cancel", "a~b.x", "as.joe.a.b.y", "as.joe.a~b.z", "a.cancel", "a.b.c.d"):
        await ask(server.url, f"runfold.signal.{subject}", b"{}")
    order = [await queue.first(RunId("a.b"), after) for after in range(6)]
    assert order == [1, 2, 3, 4, 0, 0]
    assert await queue.first(RunId("a"), 0) == 5
    assert await queue.first(RunId("a.b.c"), 0) == 6


@REAL_ONLY
async def test_subjects_and_headers_that_are_no_text_are_delivered_and_end_nothing(
    queue: SignalQueue, server: NatsServer
) -> None:
    """nats-server 2.15.1 takes them all; nats-py 2.16.0 would stop reading, or reconnect for
    ever."""
    subjects = (b"a\x0bb.x", b"\xff\xfe.x", b"r*.x", b"a\x00b.x", b"a\x85b.x", b"y" * 3000 + b".x")
    for subject in subjects:
        await raw_publish(server.url, b"PUB runfold.signal.%b 2\r\n{}\r\n" % subject)
    headers = (b"NATS/1.0 \xff\xff\xff\r\n\r\n", b"NATS/1.0\r\nA: \xff\r\n\r\n", b"x\xff", b"N")
    for header in headers:
        sizes = (len(header), len(header) + 2)
        await raw_publish(
            server.url, b"HPUB runfold.signal.r.x %d %d\r\n%b{}\r\n" % (*sizes, header)
        )
    found = await taken(queue, 10)
    assert len(found) == 10 and {one.data for one in found} == {b"{}"}
    for one in found[:6]:
        with pytest.raises(InvalidId):
            one.address()
    assert queue._connection._nc.stats["reconnects"] == 0
    assert all([await queue.ack(one) for one in found])


# ---- whom a subject names ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "run", "name", "by"),
    [
        ("r.approve", "r", "approve", "nats"),
        ("order.7.approve", "order.7", "approve", "nats"),
        ("order~7.approve", "order.7", "approve", "nats"),
        ("as.alice.r.approve", "r", "approve", "alice"),
        ("as.alice.order.7.approve", "order.7", "approve", "alice"),
        ("as.bob.as.approve", "as", "approve", "bob"),
        ("as.approve", "as", "approve", "nats"),
        ("as~x~y.approve", "as.x.y", "approve", "nats"),
        ("as.bob.as~x.approve", "as.x", "approve", "bob"),
    ],
)
def test_a_subject_names_a_run_a_signal_and_a_user(rest: str, run: str, name: str, by: str) -> None:
    assert kept_address(rest) == SignalAddress(RunId(run), name, by)


@pytest.mark.parametrize(
    "rest",
    [
        *(
            "approve",
            "as",
            ".x",
            "",
            "as.x.approve",
            "~.approve",
            "-r.approve",
            "r/1.approve",
            "r*.x",
        ),
        *("as.Alice.r.approve", "as.nats.r.approve", "as.dev.r.approve", "as.library.r.x"),
        *("as.a~b.r.x", "a~b.c.approve", "as.joe.a~b.c.approve", "as~x.y.approve"),
    ],
)
def test_a_subject_that_names_no_run_or_no_user_is_refused(rest: str) -> None:
    with pytest.raises(InvalidId):
        kept_address(rest)


@given(st.lists(st.text("as~r0-_A*>\x0b\xe9", min_size=1, max_size=5), max_size=6).map(".".join))
def test_any_subject_is_an_address_or_refused(rest: str) -> None:
    """And a run's filters find each. Empty tokens are in no stream (nats-server 2.15.1)."""
    with contextlib.suppress(InvalidId):
        found = kept_address(rest)
        spelled = [f"{one.removesuffix('*')}{found.name}" for one in run_filters(found.run)]
        assert rest in [one.replace("as.*.", f"as.{found.by}.", 1) for one in spelled]


def test_a_request_names_its_user_elsewhere() -> None:
    assert run_address("as.x.approve", by="joe") == SignalAddress(RunId("as.x"), "approve", "joe")


def test_no_filter_has_an_empty_token() -> None:
    assert run_filters(RunId("a..b")) == ("a~~b.*", "as.*.a~~b.*")
    assert run_filters(RunId("as.b")) == ("as~b.*", "as.*.as~b.*", "as.*.as.b.*")


# ---- refusals ------------------------------------------------------------------------------------


def refused(number: int, **fields: str) -> Refusal:
    given = {"subject": "runfold.signal.a.b.approve", "run": "a.b", "name": "approve"} | fields
    return refusal(code="stale_signal", reason=f"no {number}", data=b"{}", by="nats", **given)


async def test_refusals_are_listed_newest_first_past_gaps_and_no_consumer_is_left(
    direct: JetStreamStore, server: NatsServer
) -> None:
    assert await direct.rejected.latest() == []
    for number in range(5):
        await direct.rejected.put(refused(number), f"k{number}")
    await ask(server.url, f"$JS.API.STREAM.MSG.DELETE.{REJECTED}", {"seq": 4})
    found = await direct.rejected.latest(3)
    assert [one.reason for one in found] == ["no 4", "no 2", "no 1"]
    assert len(await direct.rejected.latest(500)) == 4
    info = await ask(server.url, f"$JS.API.STREAM.INFO.{REJECTED}", {"subjects_filter": ">"})
    assert info["state"]["consumer_count"] == 0
    assert info["state"]["subjects"] == {"runfold.rejected.a~b.approve": 4}
    for limit in (0, 501):
        with pytest.raises(InvalidId):
            await direct.rejected.latest(limit)


async def test_a_refusal_that_is_put_again_is_one(direct: JetStreamStore) -> None:
    one = refused(1)
    assert not await direct.rejected.holds(one, "k")
    await direct.rejected.put(one, "k")
    await direct.rejected.put(one, "k")
    assert await direct.rejected.latest() == [one]
    assert await direct.rejected.holds(one, "k") and not await direct.rejected.holds(one, "other")


def test_a_refusal_is_bounded_and_shows_all() -> None:
    one = refusal(
        subject="s\x1b[2J" * 1000,
        run="no run \u202e",
        name="n\n" * 500,
        code="bad_payload",
        reason="because\x07" * 1000,
        data=b"\xff\x1b\xe2\x80\xae" + b"x" * 100_000,
        by="nats",
    )
    assert one.run is None
    for text in (one.subject, one.name or "", one.reason, one.payload):
        assert (text.isprintable() and text.isascii()) or "…" in text
        assert len(text) < 6 * PAYLOAD_BYTES_MAX
    assert one.payload.startswith("\\xff\\x1b\\u202e") and one.payload.endswith("(100005 bytes)")


async def test_what_others_put_there_is_shown_and_ends_nothing(
    direct: JetStreamStore, server: NatsServer
) -> None:
    await ask(server.url, "runfold.rejected.x.y", b"\xff\x1b not ours")
    await ask(server.url, "runfold.rejected.x.y", b"")
    found = await direct.rejected.latest()
    assert [one.code for one in found] == ["unreadable"] * 2
    assert found[1].payload == "\\xff\\x1b not ours"


async def test_without_the_streams_it_is_said(direct: JetStreamStore, server: NatsServer) -> None:
    for stream in (SIGNALS, REJECTED):
        await ask(server.url, f"$JS.API.STREAM.DELETE.{stream}")
    with pytest.raises(NotProvisioned):
        await direct.signals.ensure()
    with pytest.raises(NotProvisioned):
        await direct.signals.backlog()
    with pytest.raises(NotProvisioned):
        await direct.rejected.latest()
    with pytest.raises(NotProvisioned):
        await direct.rejected.put(refused(1), "k")


async def test_a_refusal_fits_a_small_server(
    direct: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = refusal(
        subject="s", run="r", name="n", code="c", reason="r" * 500, data=b"\x00" * 5000, by="nats"
    )
    monkeypatch.setattr(type(direct._connection), "max_payload", property(lambda _: 2048))
    await direct.rejected.put(big, "k")
    (kept,) = await direct.rejected.latest()
    assert kept.payload == "…" and len(kept.reason) == 80

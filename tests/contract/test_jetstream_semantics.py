"""What JetStream does that the stores and the simulation lean on: on both kinds of server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.stores.nats_connection import Connection
from journal.stores.nats_waiting import Incoming, NoReply, Reply
from journal.stores.provision import provision

JOURNAL = "RUNFOLD_JOURNAL_0"
TASKS = "RUNFOLD_TASKS"
RUN = "runfold.journal.0.r"
EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class Raw:
    """Asks what it likes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    async def ask(
        self, subject: str, request: dict[str, Any] | bytes = b"", headers: Any = None
    ) -> Any:
        """The JSON answer; "nobody" where nobody listens."""
        payload = request if isinstance(request, bytes) else json.dumps(request).encode()
        reply = await self.connection.request(subject, payload, headers, timeout_s=5)
        if isinstance(reply, NoReply):
            assert reply.nobody, reply
            return "nobody"
        return json.loads(reply.data) if reply.data else None

    async def error(self, *asked: Any) -> tuple[int, str]:
        error = (await self.ask(*asked))["error"]
        return error["err_code"], error["description"]

    async def collect(self, subject: str, request: dict[str, Any]) -> list[Reply]:
        """All answers, up to the one with a status."""
        found: list[Reply] = []

        def take(reply: Reply) -> bool:
            found.append(reply)
            return "Status" in reply.headers

        payload = json.dumps(request).encode()
        await self.connection.collect(subject, payload, take, idle_s=5)
        return found

    async def published(self, subject: str, *payloads: bytes) -> None:
        for payload in payloads:
            assert "error" not in await self.ask(subject, payload)

    async def consumer(self, agent: str = "a", **config: Any) -> Any:
        filter = f"runfold.task.{agent}.*"
        given = {"durable_name": agent, "ack_policy": "explicit", "filter_subject": filter}
        request = {"stream_name": TASKS, "action": "create", "config": given | config}
        return await self.ask(f"$JS.API.CONSUMER.CREATE.{TASKS}.{agent}.{filter}", request)

    async def info(self, agent: str = "a") -> Any:
        return await self.ask(f"$JS.API.CONSUMER.INFO.{TASKS}.{agent}")

    async def kept(self) -> dict[str, int]:
        """What is in TASKS, by subject."""
        asked = {"subjects_filter": ">"}
        info = await self.ask(f"$JS.API.STREAM.INFO.{TASKS}", asked)
        return info["state"].get("subjects", {})


class Pull:
    """What came to an inbox, and asking for more of a consumer there."""

    def __init__(self, raw: Raw, inbox: str) -> None:
        self._raw = raw
        self.inbox = inbox
        self.got: list[Incoming] = []

    @property
    def statuses(self) -> list[str]:
        return [
            f"{one.headers['Status']} {_text(one.headers)}"
            for one in self.got
            if one.subject == self.inbox
        ]

    @property
    def tasks(self) -> list[Incoming]:
        return [one for one in self.got if one.subject != self.inbox]

    @property
    def payloads(self) -> list[bytes]:
        return [task.data for task in self.tasks]

    @property
    def counts(self) -> list[int]:
        """How often each was delivered."""
        return [int(task.reply.split(".")[4]) for task in self.tasks]

    def ask(self, batch: int, expires_s: float = 30.0, agent: str = "a", **more: Any) -> None:
        request = {"batch": batch, "expires": int(expires_s * 1e9), **more}
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{TASKS}.{agent}"
        assert self._raw.connection.send(subject, json.dumps(request).encode(), self.inbox)

    async def have(self, count: int) -> list[Incoming]:
        """The first so many tasks, once they are there."""
        await eventually(lambda: len(self.tasks) >= count, what=f"{count} tasks: {self.got}")
        return self.tasks

    async def said(self, status: str) -> None:
        await eventually(lambda: status in self.statuses, what=f"{status}: {self.got}")

    async def settle(self, task: Incoming, word: bytes = b"+ACK") -> None:
        reply = await self._raw.connection.request(task.reply, word, timeout_s=5)
        assert isinstance(reply, Reply)


def _text(headers: Any) -> str:
    return next((text for name, text in headers.items() if name == "Description"), "")


@pytest.fixture
async def raw(server: NatsServer) -> AsyncIterator[Raw]:
    await provision(server.url)
    connection = Connection(server.url, namespace="test")
    await connection.open()
    yield Raw(connection)
    await connection.close()


@pytest.fixture
async def pull(raw: Raw) -> AsyncIterator[Pull]:
    async with pulling(raw) as pull:
        yield pull


@contextlib.asynccontextmanager
async def pulling(raw: Raw) -> AsyncIterator[Pull]:
    pull = Pull(raw, raw.connection.new_inbox())
    async with raw.connection.listening(pull.inbox, pull.got.append):
        yield pull


# ---- publishing ----------------------------------------------------------------------------------


async def test_the_expected_sequence_is_checked_as_the_journal_relies_on_it(raw: Raw) -> None:
    assert await raw.ask(RUN, b"1", {EXPECTED: "0"}) == {"stream": JOURNAL, "seq": 1}
    await raw.published("runfold.journal.0.other", b"2")
    for wrong in ("0", "2", "7", "abc", "-1"):
        assert await raw.error(RUN, b"x", {EXPECTED: wrong}) == (10071, "wrong last sequence: 1")
    assert (await raw.ask(RUN, b"3", {EXPECTED: "1"}))["seq"] == 3
    assert (await raw.ask(RUN, b"4", {EXPECTED: ""}))["seq"] == 4  # no check
    assert (await raw.ask(RUN, b"5", {EXPECTED.lower(): "9"}))["seq"] == 5  # no check
    about = {EXPECTED: "2", f"{EXPECTED}-Subject": "runfold.journal.0.other"}
    assert (await raw.ask(RUN, b"6", about))["seq"] == 6


async def test_a_message_id_settles_nothing_and_is_of_the_whole_stream(raw: Raw) -> None:
    first = {EXPECTED: "0", "Nats-Msg-Id": "x"}
    assert (await raw.ask(RUN, b"1", first))["seq"] == 1
    assert (await raw.error(RUN, b"1", first))[0] == 10071
    repeat = {EXPECTED: "1", "Nats-Msg-Id": "x"}
    again = {"stream": JOURNAL, "seq": 1, "duplicate": True}
    assert await raw.ask(RUN, b"1", repeat) == again
    assert await raw.ask("runfold.journal.0.other", b"2", {"Nats-Msg-Id": "x"}) == again


@pytest.mark.parametrize(
    ("headers", "err_code"),
    [
        ({"Nats-Expected-Stream": "OTHER"}, 10060),
        ({"Nats-Expected-Last-Sequence": "7"}, 10071),
        ({"Nats-Expected-Last-Msg-Id": "q"}, 10070),
        ({"Nats-Rollup": "sub"}, 10111),
        ({"Nats-TTL": "1s"}, 10166),
        ({"Nats-Schedule": "@at 2030-01-01T00:00:00Z", "Nats-Schedule-Target": RUN}, 10188),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_headers_that_the_journal_does_not_take_are_refused(
    raw: Raw, headers: dict[str, str], err_code: int
) -> None:
    assert (await raw.error(RUN, b"x", headers))[0] == err_code


@pytest.mark.parametrize(
    "subject",
    [
        "nobody.here",
        f"$JS.API.DIRECT.GET.{TASKS}",
        "$JS.API.DIRECT.GET.NONE",
        f"$JS.API.CONSUMER.MSG.NEXT.{TASKS}.none",
        f"$JS.ACK.{TASKS}.none.1.1.1.1.0",
        f"$JS.ACK.{TASKS}.bridge",
    ],
)
async def test_what_nobody_listens_to_is_said(raw: Raw, subject: str) -> None:
    assert await raw.ask(subject, {"seq": 1}) == "nobody"


# ---- reading -------------------------------------------------------------------------------------


async def test_the_leader_gets_messages_by_sequence_and_subject(raw: Raw) -> None:
    await raw.published(RUN, b"1", b"2")
    await raw.published("runfold.journal.0.s", b"")
    get = f"$JS.API.STREAM.MSG.GET.{JOURNAL}"

    async def found(**request: Any) -> Any:
        answer = await raw.ask(get, request)
        return answer["message"]["seq"] if "message" in answer else answer["error"]["err_code"]

    assert await found(seq=2) == 2
    assert await found(seq=9) == 10037
    assert await found(last_by_subj=RUN) == 2
    assert await found(last_by_subj="runfold.journal.0.*") == 3
    assert await found(last_by_subj="runfold.journal.0.none") == 10037
    assert await found(seq=1, next_by_subj="runfold.journal.0.s") == 3
    assert await found(next_by_subj=RUN) == 1
    assert await found(seq=3, next_by_subj=RUN) == 10037
    assert await found(seq=2, next_by_subj="runfold.journal.0.*") == 2
    for wrong in ({}, {"seq": 0}, {"seq": 1, "last_by_subj": RUN}):
        assert await found(**wrong) == 10003
    message = (await raw.ask(get, {"seq": 3}))["message"]
    assert set(message) == {"subject", "seq", "time"}  # an empty payload is left out
    assert (await raw.error(get, b"xx"))[0] == 10025


async def test_a_batch_names_its_predecessors_and_ends_with_a_status(raw: Raw) -> None:
    await raw.published(RUN, b"1", b"2", b"3")
    await raw.published("runfold.journal.0.s", b"4")
    await raw.published(RUN, b"5")
    direct = f"$JS.API.DIRECT.GET.{JOURNAL}"

    async def batch(**request: Any) -> list[tuple[str, ...]]:
        names = ("Nats-Sequence", "Nats-Last-Sequence", "Nats-Num-Pending")
        found = await raw.collect(direct, request)
        return [
            *(tuple(one.headers[name] for name in names) for one in found[:-1]),
            (found[-1].headers["Status"], *(found[-1].headers.get(name, "") for name in names[1:])),
        ]

    assert await batch(seq=2, next_by_subj=RUN, batch=10) == [
        ("2", "0", "2"),
        ("3", "2", "1"),
        ("5", "3", "0"),
        ("204", "5", "0"),
    ]
    assert await batch(seq=1, next_by_subj=RUN, batch=2) == [
        ("1", "0", "3"),
        ("2", "1", "2"),
        ("204", "2", "2"),
    ]
    assert await batch(seq=1, next_by_subj=RUN, batch=9, max_bytes=10) == [
        ("1", "0", "3"),
        ("204", "1", "3"),
    ]
    assert await batch(seq=6, next_by_subj=RUN, batch=2) == [("404", "", "")]
    assert await batch(seq=4, batch=1) == [("4", "0", "1"), ("204", "4", "1")]


async def test_the_last_of_many_subjects_come_in_order_of_their_sequences(raw: Raw) -> None:
    for subject in ("c", "a", "b", "a"):
        await raw.published(f"runfold.journal.0.{subject}", b"x")
    direct = f"$JS.API.DIRECT.GET.{JOURNAL}"

    async def last(**request: Any) -> list[str]:
        found = await raw.collect(direct, request)
        seqs = [one.headers["Nats-Sequence"] for one in found[:-1]]
        return [*seqs, found[-1].headers["Status"], found[-1].headers.get("Nats-UpTo-Sequence", "")]

    subjects = [f"runfold.journal.0.{name}" for name in ("a", "none", "b", "c", "a")]
    assert await last(multi_last=subjects) == ["1", "3", "4", "204", "4"]
    assert await last(multi_last=["runfold.journal.0.*"]) == ["1", "3", "4", "204", "4"]
    assert await last(multi_last=subjects, batch=2) == ["1", "3", "204", "4"]
    assert await last(multi_last=subjects, up_to_seq=3) == ["1", "2", "3", "204", "3"]
    assert await last(multi_last=["runfold.journal.0.none"]) == ["404", ""]


async def test_subjects_are_counted_in_pages(raw: Raw) -> None:
    for subject in ("b", "a", "b"):
        await raw.published(f"runfold.journal.0.{subject}", b"x")

    async def page(filter: str, offset: int) -> tuple[int, Any]:
        asked = {"subjects_filter": filter, "offset": offset}
        info = await raw.ask(f"$JS.API.STREAM.INFO.{JOURNAL}", asked)
        return info["total"], info["state"].get("subjects")

    a, b = "runfold.journal.0.a", "runfold.journal.0.b"
    assert await page("runfold.journal.0.>", 0) == (2, {a: 1, b: 2})
    assert await page("runfold.journal.0.>", 1) == (2, {b: 2})
    assert await page("runfold.journal.0.>", 10**9) == (2, None)
    assert await page(b, 0) == (1, {b: 2})
    assert await page("none.>", 0) == (0, None)


async def test_a_purge_keeps_what_is_at_its_sequence(raw: Raw) -> None:
    await raw.published(RUN, b"1", b"2")
    await raw.published("runfold.journal.0.s", b"3")
    await raw.published(RUN, b"4", b"5")
    purge = f"$JS.API.STREAM.PURGE.{JOURNAL}"
    assert (await raw.ask(purge, {"filter": RUN, "seq": 4}))["purged"] == 2
    state = (await raw.ask(f"$JS.API.STREAM.INFO.{JOURNAL}"))["state"]
    assert (state["messages"], state["first_seq"], state["last_seq"]) == (3, 3, 5)
    assert (await raw.error(RUN, b"x", {EXPECTED: "0"}))[0] == 10071
    assert (await raw.ask(purge, {"filter": RUN, "keep": 1}))["purged"] == 1
    assert (await raw.error(purge, {"filter": RUN, "keep": 1, "seq": 5}))[0] == 10003
    delete = f"$JS.API.STREAM.MSG.DELETE.{JOURNAL}"
    assert (await raw.error(delete, {"seq": 5}))[0] == 10057
    assert (await raw.ask(purge))["purged"] == 2
    state = (await raw.ask(f"$JS.API.STREAM.INFO.{JOURNAL}"))["state"]
    assert (state["messages"], state["first_seq"], state["last_seq"]) == (0, 6, 5)
    assert (await raw.ask(RUN, b"6", {EXPECTED: "0"}))["seq"] == 6  # why a tombstone stays


# ---- consumers -----------------------------------------------------------------------------------


async def test_a_consumer_is_made_once_and_overlaps_no_other(raw: Raw) -> None:
    made = await raw.consumer(ack_wait=10**9)
    assert made["config"]["max_ack_pending"] == 1000 and made["num_pending"] == 0
    again = await raw.consumer(ack_wait=10**9)
    assert (again["created"], again["config"]) == (made["created"], made["config"])
    assert (await raw.consumer(ack_wait=2 * 10**9))["error"]["err_code"] == 10148
    create = f"$JS.API.CONSUMER.CREATE.{TASKS}"

    async def refused(name: str, action: str = "", **config: Any) -> int:
        given = {"durable_name": name, "ack_policy": "explicit"} | config
        request = {"stream_name": TASKS, "action": action, "config": given}
        subject = f"{create}.{name}.{config.get('filter_subject', '')}".rstrip(".")
        return (await raw.error(subject, request))[0]

    assert await refused("b", filter_subject="runfold.task.>") == 10100
    assert await refused("b") == 10099
    assert await refused("b", "update", filter_subject="runfold.task.b.*") == 10149
    assert await refused("b", filter_subject="runfold.task.b.*", deliver_policy="new") == 10101
    assert await refused("b", filter_subject="runfold.task.b.*", ack_policy="none") == 10084
    assert (await raw.error("$JS.API.CONSUMER.INFO.NONE.a"))[0] == 10059
    assert (await raw.error(f"$JS.API.CONSUMER.INFO.{TASKS}.b"))[0] == 10014
    assert (await raw.error(f"$JS.API.CONSUMER.DELETE.{TASKS}.b"))[0] == 10014


async def test_what_waited_before_the_consumer_was_made_is_delivered_too(
    raw: Raw, pull: Pull
) -> None:
    await raw.published("runfold.task.a.r", b"1", b"2")
    await raw.published("runfold.task.b.r", b"x")
    assert (await raw.consumer())["num_pending"] == 2
    pull.ask(10)
    await pull.have(2)
    assert pull.payloads == [b"1", b"2"] and pull.counts == [1, 1]
    assert [task.subject for task in pull.tasks] == ["runfold.task.a.r"] * 2


async def test_pulls_end_with_the_statuses_that_a_puller_knows(raw: Raw, pull: Pull) -> None:
    await raw.consumer(max_waiting=1)
    pull.ask(1, 0, no_wait=True)
    await pull.said("404 No Messages")
    pull.ask(1, 0.4, idle_heartbeat=int(0.3e9))
    await pull.said("400 Bad Request - heartbeat value too large")
    pull.ask(2, 0.4, idle_heartbeat=int(0.15e9))
    await pull.said("408 Request Timeout")
    assert pull.statuses[-2:] == ["100 Idle Heartbeat", "408 Request Timeout"]
    assert pull.got[-1].headers["Nats-Pending-Messages"] == "2"
    pull.ask(1)
    await eventually(lambda: waiting(raw, 1))
    await raw.ask(f"$JS.API.CONSUMER.DELETE.{TASKS}.a")
    await pull.said("409 Consumer Deleted")


async def waiting(raw: Raw, count: int) -> bool:
    return (await raw.info())["num_waiting"] == count


async def test_pulls_take_turns(raw: Raw) -> None:
    await raw.consumer()
    async with pulling(raw) as one, pulling(raw) as other:
        one.ask(2)
        await eventually(lambda: waiting(raw, 1))
        other.ask(1)
        await eventually(lambda: waiting(raw, 2))
        await raw.published("runfold.task.a.r", b"1", b"2", b"3")
        await one.have(2)
        await other.have(1)
        assert (one.payloads, other.payloads) == ([b"1", b"3"], [b"2"])


async def test_a_pull_that_nobody_listens_to_any_more_gets_nothing(raw: Raw) -> None:
    await raw.consumer()
    async with pulling(raw) as gone:
        gone.ask(1)
        await eventually(lambda: waiting(raw, 1))
    async with pulling(raw) as pull:
        pull.ask(1)
        await raw.published("runfold.task.a.r", b"1")
        await pull.have(1)
        assert pull.counts == [1]


async def test_at_its_limit_of_pending_a_consumer_delivers_only_again(raw: Raw, pull: Pull) -> None:
    await raw.consumer(max_ack_pending=2)
    await raw.published("runfold.task.a.r", b"1", b"2", b"3")
    pull.ask(10)
    first, _ = await pull.have(2)
    await pull.settle(first, b"-NAK")
    await pull.have(3)
    info = await raw.info()
    assert (info["num_ack_pending"], info["num_pending"], info["num_redelivered"]) == (2, 1, 1)
    await pull.settle(first)  # of an overtaken delivery: it makes room all the same
    await pull.have(4)
    assert pull.payloads == [b"1", b"2", b"1", b"3"] and pull.counts == [1, 1, 2, 1]


async def test_deliveries_count_on_through_ack_waits_and_naks(raw: Raw, pull: Pull) -> None:
    await raw.consumer(ack_wait=int(0.3e9))
    await raw.published("runfold.task.a.r", b"1")
    pull.ask(10)
    await pull.have(3)  # twice the ack wait
    await pull.settle(pull.tasks[-1], b"-NAK")
    await pull.have(4)
    assert pull.counts[:4] == [1, 2, 3, 4]
    numbers = [task.reply.split(".")[6] for task in pull.tasks]
    assert numbers == [str(number + 1) for number in range(len(numbers))]
    assert len({task.reply.split(".")[7] for task in pull.tasks}) == 1  # when it was published


@pytest.mark.parametrize("word", [b"+ACK", b"", b"+TERM"])
async def test_what_is_settled_leaves_the_stream_also_by_an_overtaken_delivery(
    raw: Raw, pull: Pull, word: bytes
) -> None:
    await raw.consumer()
    await raw.published("runfold.task.a.r", b"1")
    pull.ask(10)
    (first,) = await pull.have(1)
    await pull.settle(first, b"-NAK")
    await pull.have(2)
    await pull.settle(first, word)
    assert await raw.kept() == {}
    info = await raw.info()
    assert (info["num_ack_pending"], info["num_redelivered"]) == (0, 0)
    for late in (b"+ACK", b"-NAK", b"+WPI"):
        await pull.settle(first, late)  # confirmed, and nothing comes of it
    assert len(pull.tasks) == 2


async def test_an_ack_before_its_delivery_is_not_confirmed(raw: Raw) -> None:
    await raw.consumer()
    await raw.published("runfold.task.a.r", b"1")
    early = f"$JS.ACK.{TASKS}.a.1.1.1.0.0"
    reply = await raw.connection.request(early, b"+ACK", timeout_s=0.3)
    assert isinstance(reply, NoReply) and not reply.nobody
    assert await raw.kept() == {"runfold.task.a.r": 1}


async def test_a_nak_puts_off_until_its_delay_is_over_or_another_word_comes(
    raw: Raw, pull: Pull
) -> None:
    await raw.consumer(ack_wait=60 * 10**9)
    await raw.published("runfold.task.a.r", b"1")
    pull.ask(10)
    (first,) = await pull.have(1)
    await pull.settle(first, b'-NAK {"delay": 100000000}')
    await pull.have(2)  # long before the ack wait is over
    await pull.settle(first, b'-NAK {"delay": 60000000000}')
    await pull.settle(first, b"-NAK")
    await pull.have(3)
    assert pull.counts == [1, 2, 3]


async def test_in_progress_begins_the_ack_wait_anew_whatever_a_nak_said(
    raw: Raw, pull: Pull
) -> None:
    await raw.consumer(ack_wait=int(0.5e9))
    await raw.published("runfold.task.a.r", b"1")
    pull.ask(10)
    loop = asyncio.get_running_loop()
    (first,) = await pull.have(1)
    await pull.settle(first, b'-NAK {"delay": 60000000000}')
    before = loop.time()
    await pull.settle(first, b"+WPI")
    await pull.have(2)
    assert loop.time() - before > 0.4
    await pull.settle(first, b'-NAK {"delay": 1000000}')
    await pull.settle(first, b"+WPI")
    await pull.have(3)


async def test_a_consumer_that_was_deleted_and_made_again_begins_anew(raw: Raw, pull: Pull) -> None:
    await raw.consumer()
    await raw.published("runfold.task.a.r", b"1", b"2")
    pull.ask(2)
    first, _ = await pull.have(2)
    await pull.settle(first)
    await raw.ask(f"$JS.API.CONSUMER.DELETE.{TASKS}.a")
    await raw.consumer()
    pull.ask(2)
    await pull.have(3)
    assert pull.payloads == [b"1", b"2", b"2"] and pull.counts == [1, 1, 1]


async def test_what_is_purged_is_not_delivered_again(raw: Raw, pull: Pull) -> None:
    await raw.consumer(ack_wait=int(0.3e9))
    await raw.published("runfold.task.a.gone", b"1")
    await raw.published("runfold.task.a.waits", b"2")
    await raw.published("runfold.task.a.kept", b"3")
    pull.ask(1)
    await pull.have(1)
    for gone in ("gone", "waits"):
        purge = {"filter": f"runfold.task.a.{gone}"}
        assert (await raw.ask(f"$JS.API.STREAM.PURGE.{TASKS}", purge))["purged"] == 1
    info = await raw.info()
    assert (info["num_ack_pending"], info["num_pending"]) == (0, 1)
    pull.ask(3)
    await pull.have(3)
    assert pull.payloads == [b"1", b"3", b"3"]


# ---- schedules -----------------------------------------------------------------------------------


def at(wait_s: float) -> str:
    due = datetime.now(UTC) + timedelta(seconds=wait_s)
    return f"@at {due.isoformat(timespec='microseconds')}"


async def test_a_schedule_becomes_a_message_that_says_where_it_is_from(
    raw: Raw, pull: Pull
) -> None:
    await raw.consumer()
    pull.ask(10)
    heard: list[Incoming] = []
    async with raw.connection.listening("runfold.task.>", heard.append):
        headers = {"Nats-Schedule": at(0.2), "Nats-Schedule-Target": "runfold.task.a.r", "X": "y"}
        assert (await raw.ask("runfold.timer.r", b"1", headers))["seq"] == 1
        assert await raw.kept() == {"runfold.timer.r": 1}
        (task,) = await pull.have(1)
    assert (task.subject, task.data) == ("runfold.task.a.r", b"1")
    assert task.headers == {
        "X": "y",
        "Nats-Scheduler": "runfold.timer.r",
        "Nats-Schedule-Next": "purge",
    }
    assert not heard  # it is stored, and not published
    assert await raw.kept() == {"runfold.task.a.r": 1}


async def test_a_schedule_is_replaced_ended_by_a_plain_message_and_purged(
    raw: Raw, pull: Pull
) -> None:
    await raw.consumer()
    pull.ask(10)
    for subject, payload, wait_s in (
        ("replaced", b"1", 60),
        ("replaced", b"2", 0.2),
        ("ended", b"3", 1.0),
        ("purged", b"4", 1.0),
        ("last", b"5", 1.3),
    ):
        headers = {"Nats-Schedule": at(wait_s), "Nats-Schedule-Target": "runfold.task.a.r"}
        assert "error" not in await raw.ask(f"runfold.timer.{subject}", payload, headers)
    await raw.published("runfold.timer.ended", b"6")
    purge = {"filter": "runfold.timer.purged"}
    assert (await raw.ask(f"$JS.API.STREAM.PURGE.{TASKS}", purge))["purged"] == 1
    await pull.have(2)
    assert pull.payloads == [b"2", b"5"]
    assert await raw.kept() == {"runfold.task.a.r": 2, "runfold.timer.ended": 2}


@pytest.mark.parametrize(
    ("schedule", "target", "err_code"),
    [
        ("nonsense", "runfold.task.a.r", 10189),
        ("@at 2030-01-01T00:00:00Z", "", 10190),
        ("@at 2030-01-01T00:00:00Z", "other.stream", 10190),
        ("@at 2030-01-01T00:00:00Z", "runfold.task.a.*", 10190),
        ("@at 2030-01-01T00:00:00Z", "runfold.timer.r", 10190),
    ],
)
async def test_a_schedule_that_is_none_is_refused(
    raw: Raw, schedule: str, target: str, err_code: int
) -> None:
    headers = {"Nats-Schedule": schedule} | ({"Nats-Schedule-Target": target} if target else {})
    assert (await raw.error("runfold.timer.r", b"1", headers))[0] == err_code
    assert await raw.kept() == {}


# ---- core NATS -----------------------------------------------------------------------------------


async def test_wildcards_take_what_they_should_and_each_subscription_gets_its_own(raw: Raw) -> None:
    heard: dict[str, list[str]] = {}
    async with contextlib.AsyncExitStack() as stack:
        for pattern in ("x.a", "x.*", "x.>", "*.a", "x.*.c", "x.a.*"):
            found = heard[pattern] = []
            listening = raw.connection.listening(
                pattern, lambda one, found=found: found.append(one.subject)
            )
            await stack.enter_async_context(listening)
        for subject in ("x", "x.a", "x.b", "x.b.c", "y.a", "x.a.b.c"):
            await raw.connection.publish(subject, b"")
        await raw.connection.confirm("x.a")
    assert heard == {
        "x.a": ["x.a"],
        "x.*": ["x.a", "x.b"],
        "x.>": ["x.a", "x.b", "x.b.c", "x.a.b.c"],
        "*.a": ["x.a", "y.a"],
        "x.*.c": ["x.b.c"],
        "x.a.*": [],
    }


async def test_a_queue_group_gets_each_message_once(raw: Raw) -> None:
    client = raw.connection._nc
    heard: list[bytes] = []

    async def take(message: Any) -> None:
        heard.append(message.data)

    for _ in range(3):
        await client.subscribe("work.*", queue="q", cb=take)
    await client.subscribe("work.*", cb=take)
    for number in range(5):
        await raw.connection.publish(f"work.{number}", b"%d" % number)
    await raw.connection.confirm("work.*")
    await eventually(lambda: len(heard) == 10)
    assert sorted(heard) == sorted([b"%d" % number for number in range(5)] * 2)

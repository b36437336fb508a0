"""What an atomic batch of JetStream is, as group commit leans on it: on one server, the model of
it, and three servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from kit.simulated.batches import INCOMPLETE

from journal.stores.jetstream_streams import stream_name, subject_prefix
from journal.stores.nats_connection import Connection
from journal.stores.nats_waiting import NoReply
from journal.stores.provision import provision

EXPECTED = "Nats-Expected-Last-Subject-Sequence"


class Batcher:
    """Sends batches to a namespace's journal stream as it likes."""

    def __init__(self, connection: Connection, namespace: str) -> None:
        self.connection = connection
        self.stream = stream_name(namespace)
        self.prefix = subject_prefix(namespace, 0)
        self._batches = 0

    async def single(self, run: str, expected: int, **headers: str) -> Any:
        more = {name.replace("_", "-"): text for name, text in headers.items()}
        return await self.ask(self.prefix + run, b"x", {EXPECTED: str(expected)} | more)

    async def batch(self, *members: tuple[str, int], **more: Any) -> Any:
        """The answer to the commit of these runs' records, each with what it expects. `id`,
        `places` and `commit`: other ones than usual."""
        self._batches += 1
        batch = more.get("id", f"b{self._batches}")
        places = more.get("places", range(1, len(members) + 1))
        for place, (run, expected) in zip(places, members, strict=True):
            headers = {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(place)}
            headers[EXPECTED] = str(expected)
            if place != places[-1]:
                assert self.connection.post(self.prefix + run, b"x", headers)
        headers["Nats-Batch-Commit"] = more.get("commit", "1")
        return await self.ask(self.prefix + run, b"x", headers)

    async def ask(self, subject: str, payload: bytes, headers: Any = None) -> Any:
        reply = await self.connection.request(subject, payload, headers, timeout_s=5)
        assert not isinstance(reply, NoReply), reply
        return json.loads(reply.data) if reply.data else None

    async def subjects(self) -> dict[str, int]:
        """Of each run: how many records, by the leader."""
        asked = json.dumps({"subjects_filter": ">"}).encode()
        info = await self.ask(f"$JS.API.STREAM.INFO.{self.stream}", asked)
        found = info["state"].get("subjects") or {}
        return {subject.removeprefix(self.prefix): count for subject, count in found.items()}

    async def run_at(self, sequence: int) -> str:
        asked = json.dumps({"seq": sequence}).encode()
        message = await self.ask(f"$JS.API.STREAM.MSG.GET.{self.stream}", asked)
        return message["message"]["subject"].removeprefix(self.prefix)


@pytest.fixture(params=["jetstream", "model", pytest.param("cluster", marks=pytest.mark.cluster)])
def url(request: pytest.FixtureRequest) -> str:
    match request.param:
        case "model":
            return request.getfixturevalue("model").url
        case "jetstream":
            return request.getfixturevalue("any_server").url
        case _:
            return ",".join(request.getfixturevalue("cluster").urls)


@pytest.fixture
async def batcher(url: str, namespace: str) -> AsyncIterator[Batcher]:
    await provision(url, namespace=namespace, replicas=3 if "," in url else 1)
    connection = Connection(url, namespace=namespace)
    await connection.open()
    yield Batcher(connection, namespace)
    await connection.close()


def code(answer: Any) -> int:
    return answer["error"]["err_code"]


async def test_a_batch_is_acknowledged_once_by_its_last_sequence_and_its_count(
    batcher: Batcher,
) -> None:
    assert (await batcher.single("s", 0))["seq"] == 1
    answer = await batcher.batch(("a", 0), ("b", 0), ("s", 1), id="x")
    assert answer == {"stream": batcher.stream, "seq": 4, "batch": "x", "count": 3}
    assert await batcher.subjects() == {"s": 2, "a": 1, "b": 1}
    assert [await batcher.run_at(sequence) for sequence in (2, 3, 4)] == ["a", "b", "s"]
    one = await batcher.batch(("c", 0), id="x")  # an id may come again
    assert (one["seq"], one["count"]) == (5, 1)


async def test_the_sequences_of_a_batch_have_no_gap_whoever_else_writes(batcher: Batcher) -> None:
    batched: dict[int, str] = {}

    async def write_batches(name: str) -> None:
        for number in range(8):
            runs = [f"{name}-{number}-{index}" for index in range(9)]
            answer = await batcher.batch(*((run, 0) for run in runs))
            assert answer["count"] == 9
            batched.update(zip(range(answer["seq"] - 8, answer["seq"] + 1), runs, strict=True))

    async def write_singles(name: str) -> None:
        for number in range(40):
            await batcher.single(f"{name}-{number}", 0)

    await asyncio.gather(*(write_batches(f"b{n}") for n in range(3)), *map(write_singles, "xyz"))
    assert len(batched) == 3 * 8 * 9
    for sequence, run in batched.items():
        assert await batcher.run_at(sequence) == run


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_one_lost_race_refuses_the_whole_batch(batcher: Batcher, at: int) -> None:
    await batcher.single("taken", 0)
    members = [("a", 0), ("b", 0)]
    members.insert(at, ("taken", 0))
    assert code(await batcher.batch(*members)) == 10071
    assert await batcher.subjects() == {"taken": 1}


@pytest.mark.parametrize("second", [0, 1, 2])
async def test_two_records_of_a_run_are_never_stored_by_one_batch(
    batcher: Batcher, second: int
) -> None:
    assert code(await batcher.batch(("a", 0), ("a", second))) in (10071, 10164)
    assert await batcher.subjects() == {}


@pytest.mark.parametrize("places", [(1, 3), (2, 3), (1, 1, 2)])
async def test_a_batch_that_lacks_a_message_is_refused(
    batcher: Batcher, places: tuple[int, ...]
) -> None:
    members = [(run, 0) for run in "abc"[: len(places)]]
    answer = await batcher.batch(*members, places=places)
    assert answer["error"] == INCOMPLETE.as_dict()
    assert await batcher.subjects() == {}


async def test_a_batch_without_its_commit_stores_nothing(batcher: Batcher) -> None:
    headers = {"Nats-Batch-Id": "x", "Nats-Batch-Sequence": "1", EXPECTED: "0"}
    assert await batcher.ask(f"{batcher.prefix}a", b"x", headers) is None  # taken, and no more
    assert (await batcher.single("b", 0))["seq"] == 1
    assert await batcher.subjects() == {"b": 1}
    headers |= {"Nats-Batch-Sequence": "2", "Nats-Batch-Commit": "1"}
    late = await batcher.ask(f"{batcher.prefix}c", b"x", headers)  # whoever sends it
    assert (late["seq"], late["count"]) == (3, 2)


async def test_a_batch_that_is_none_is_refused(batcher: Batcher) -> None:
    assert code(await batcher.batch(("a", 0), commit="x")) == 10200
    assert code(await batcher.batch(("a", 0), id="x" * 65)) == 10179
    headers = {"Nats_Batch_Id": "x", "Nats_Batch_Commit": "1"}
    assert code(await batcher.single("a", 0, **headers)) == 10175
    assert await batcher.subjects() == {}


async def test_a_stream_that_takes_no_batches_says_so(batcher: Batcher) -> None:
    subject = f"$JS.API.STREAM.INFO.{batcher.stream}"
    config = (await batcher.ask(subject, b""))["config"] | {"allow_atomic": False}
    update = await batcher.ask(
        f"$JS.API.STREAM.UPDATE.{batcher.stream}", json.dumps(config).encode()
    )
    assert "error" not in update
    assert code(await batcher.batch(("a", 0), ("b", 0))) == 10174


async def test_fifty_batches_are_open_at_once_and_no_more(batcher: Batcher) -> None:
    for number in range(51):
        headers = {"Nats-Batch-Id": f"open{number}", "Nats-Batch-Sequence": "1", EXPECTED: "0"}
        answer = await batcher.ask(f"{batcher.prefix}o{number}", b"x", headers)
        assert answer is None if number < 50 else code(answer) == 10210
    assert code(await batcher.batch(("a", 0), ("b", 0))) in (10176, 10210)
    assert (await batcher.single("s", 0))["seq"] == 1

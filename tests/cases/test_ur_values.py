"""UR-27, UR-29, UR-31: text that breaks stores, results that can't be recorded, long journals."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from typing import Any

import pytest
from cases.child import DyingStore
from cases.world import World, check_store, one_line
from cases.zygote import Zygote
from kit.ledger import Ledger

from journal.codec import Entry
from journal.doors import signal, start, state
from journal.ids import RunId
from journal.store import Loaded, Store
from journal.stores.file import FileStore
from journal.stores.jetstream import JetStreamStore
from journal.stores.memory import MemoryStore
from journal.stores.provision import provision
from runfold import (
    Agent,
    AwaitingApproval,
    BadPayload,
    Bounds,
    Completed,
    Failed,
    NotEncodable,
    Reply,
    TooLarge,
    ToolCall,
    ToolRequest,
    read,
    run,
    write,
)
from runfold.testing import ScriptedModel, call, say

TEXTS = {
    "nul": "a\0b",
    "controls": "".join(map(chr, range(0x20))) + "\x7f\x85\x9b",
    "emoji": "👩‍👩‍👧‍👦🏳️‍🌈",
    "bom": "\ufeffx\ufeff",
    "rlo": "invoice\u202egnp.exe",
    "nfd": "Zoe\u0308 e\u0301",
    "separators": "a\u2028b\u2029c\r\nd\u0085e\x1ef",
    "cjk": "漢字" * 17_000,
    "last": "\U0010ffff\ufffe\uffff",
    "quotes": "\"\\/{}[]'</script>",
}
REFUSED = {
    "half": "\ud83d",
    "wrong order": "\ude00\ud83d",
    "surrogateescape": bytes(range(0x80, 0x100)).decode("utf-8", "surrogateescape"),
}

# ---- UR-27 ------------------------------------------------------------------------------------


def echoing(text: str) -> Agent:
    """Reads the text, asks for an approval, answers with the text."""

    @read
    def echo() -> dict[str, str]:
        """Give the text, as a value and as a key."""
        return {text: text}

    @write
    def pay(what: str) -> str:
        """Give the text."""
        return what + text

    model = ScriptedModel(call("echo"), call("pay", what=text), say(text))
    return Agent("pay", model=model, tools=[echo, pay])


@pytest.mark.parametrize("name", TEXTS)
async def test_ur27_text_that_breaks_stores(store: Store, name: str) -> None:
    """UR-27: in inputs, results, keys, arguments, comments and answers: the value survives exactly;
    the first run and every replay tell the model the same."""
    text = TEXTS[name]
    first = echoing(text)
    end = await run(store, first, "r1", text)
    assert isinstance(end, AwaitingApproval)
    assert end.pending[0].input == {"what": text}
    approve = {"marker": end.pending[0].marker, "comment": text[:16_000]}
    await signal(store, "r1", "approve", approve)
    replay = echoing(text)  # as after a crash: nothing but the journal
    end = await run(store, replay, "r1")
    assert isinstance(end, Completed)
    assert end.message.content == text
    (live,) = first.model.requests[1:]  # type: ignore[attr-defined]
    (again,) = replay.model.requests  # type: ignore[attr-defined]
    assert again[: len(live)] == live
    assert live[0].content == text and live[2].content == {text: text}
    assert again[-1].content == text + text
    records = await check_store(store, "r1")
    assert records[0]["input"] == text
    (said,) = [r for r in records if r["type"] == "signal"]
    assert said["payload"] == approve
    assert (await state(store, "r1")).outcome == end
    assert await run(store, echoing(text), "r1", text) == end


@pytest.mark.parametrize("name", TEXTS)
def test_ur27_every_reader_of_the_command_prints_it(
    world: World, name: str, run_sync: Callable[..., Any]
) -> None:
    """UR-27: show and list print UTF-8 in which nothing hides, moves the cursor or reorders."""
    text = TEXTS[name]
    end = run_sync(run(world.store(), echoing(text), "r1", text))
    for pending in (True, False):
        shown, as_json = world.show("r1"), world.show("r1", "--json")
        assert shown.code == as_json.code == (3 if pending else 0)
        for char in "\0\x1b\x9b\x7f\r\u202e\u2028\ufeff\u200d\x85":
            assert char not in shown.out, ascii(char)
        assert as_json.out.count("\n") == 1
        if pending:
            assert as_json.json["pending"][0]["input"] == {"what": text}
            run_sync(signal(world.store(), "r1", "approve", {"marker": end.pending[0].marker}))
            assert isinstance(run_sync(run(world.store(), echoing(text), "r1")), Completed)
        else:
            assert as_json.json["message"] == text
    listed = world.cli("list", "--store", str(world.runs))
    assert listed.code == 0
    assert listed.out.count("\n") == 1
    world.check("r1")


@pytest.mark.parametrize("name", REFUSED)
async def test_ur27_what_is_no_text_is_refused_before_it_is_recorded(
    store: Store, name: str
) -> None:
    """UR-27: half surrogates and undecoded bytes: refused at each door by name; as a result they
    end the run with `not_recordable`; a write that returned them ran once, ever."""
    text = REFUSED[name]
    with pytest.raises(NotEncodable, match="half a surrogate pair"):
        await run(store, echoing("x"), "r1", text)
    with pytest.raises(NotEncodable):
        await start(store, "pay", {"a": [{text: 1}]}, run_id="r1")
    assert not (await store.load(RunId("r1"))).entries
    end = await run(store, echoing("x"), "r1", "x")
    assert isinstance(end, AwaitingApproval)
    with pytest.raises(BadPayload):
        await signal(store, "r1", "approve", {"marker": end.pending[0].marker, "comment": text})

    @read
    def echo() -> list[str]:
        return ["fine", text]

    agent = Agent("pay", model=ScriptedModel(call("echo"), say("x")), tools=[echo])
    end = await run(store, agent, "r2", "x")
    assert isinstance(end, Failed)
    assert (end.reason, "tool/1/0/echo" in end.detail) == ("not_recordable", True)
    end = await run(store, Agent("pay", model=ScriptedModel(say(f"a{text}"))), "r3", "x")
    assert isinstance(end, Failed)
    assert (end.reason, "llm/1" in end.detail) == ("not_recordable", True)
    for run_id in ("r1", "r2", "r3"):
        await check_store(store, run_id)


def test_ur27_undecoded_bytes_at_the_command(world: World) -> None:
    """UR-27: arguments that are not UTF-8 (Python gives them as surrogates): exit 2, one line."""
    assert world.run("r1", input="x", script="gated").code == 3
    (pending,) = world.show("r1", "--json").json["pending"]
    data = world.path("r1").read_bytes()
    where = ["--store", str(world.runs)]
    for args in (
        world.run_args("r2", input="a\udcff"),
        world.run_args("r2", "--input-json", '"\\ud83d"'),
        ["approve", pending["marker"], "--comment", "\udc80", *where],
        ["reject", pending["marker"], "--reason", "\udc80", *where],
        ["reconcile", "r1", "tool/1/0/charge", "--done-text", "\udc80", *where],
    ):
        done = world.cli(*args)
        assert done.code == 2, done
        one_line(done.err)
    assert world.path("r1").read_bytes() == data
    assert world.list() == {"r1": "awaiting_approval"}


# ---- UR-29 ------------------------------------------------------------------------------------


def _itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


def _deep() -> Any:
    found: Any = 1
    for _ in range(5000):
        found = [found]
    return found


UNRECORDABLE: dict[str, Callable[[int], Any]] = {
    "too large": lambda size: "x" * size,
    "generator": lambda _: (n for n in range(3)),
    "open file": lambda _: open(__file__),  # noqa: SIM115
    "itself": lambda _: _itself(),
    "deep": lambda _: _deep(),
    "NaN": lambda _: {"a": [float("nan")]},
    "set": lambda _: {1, 2},
    "bytes": lambda _: b"x",
    "int keys": lambda _: {1: "a", "1": "b"},
    "object": lambda _: object(),
    "half": lambda _: "\ud83d",
}


@pytest.mark.parametrize("what", UNRECORDABLE)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_ur29_a_write_whose_result_cannot_be_recorded(
    store: Store, kind: tuple[str, str], world: World, what: str
) -> None:
    """UR-29: it did happen: one effect, also after three restarts; the run ends with a named error
    and holds neither the value nor a null in its place."""
    size = 3_000_000 if kind[0] == "jetstream" else 17 * 1024 * 1024

    def agent() -> Agent:
        @write(approval=False)
        def charge(this: ToolCall) -> Any:
            world.ledger.add(this.run_id, this.step, {})
            return UNRECORDABLE[what](size)

        return Agent("pay", model=ScriptedModel(call("charge"), say("paid")), tools=[charge])

    for _ in range(4):
        end = await run(store, agent(), "r1", "x")
        assert isinstance(end, Failed)
        assert end.reason == "not_recordable"
        assert 0 < len(end.detail) < 4000
        assert len(world.ledger.lines()) == 1
    records = await check_store(store, "r1")
    (result,) = [r for r in records if r.get("step") == "tool/1/0/charge" and "error" in r]
    assert result["error"]["type"] == "not_recordable"
    assert "result" not in result
    assert sum(r["type"] == "step.completed" for r in records) == 2


async def test_ur29_a_read_a_reply_and_an_input_that_are_too_large(
    store: Store, kind: tuple[str, str]
) -> None:
    """UR-29: a read's result and a model's reply end the run with the size named; an input is
    refused before anything is written. What fits the store is simply stored."""
    size = 1_200_000 if kind[0] == "jetstream" else 17 * 1024 * 1024

    def agent(result: int, answer: int) -> Agent:
        @read
        def fetch() -> str:
            return "x" * result

        model = ScriptedModel(call("fetch"), say("y" * answer))
        return Agent("pay", model=model, tools=[fetch])

    for run_id, sizes, step in (("r1", (size, 1), "tool/1/0/fetch"), ("r2", (1, size), "llm/2")):
        end = await run(store, agent(*sizes), run_id, "x")
        assert isinstance(end, Failed)
        assert end.reason == "not_recordable"
        assert "exceeds" in end.detail
        names = [r.get("step") for r in await check_store(store, run_id)]
        assert names.count(step) == 1  # started once, never stored, not tried again
        assert await run(store, agent(*sizes), run_id, "x") == end
    with pytest.raises(TooLarge):
        await run(store, agent(1, 1), "r3", "x" * size)
    with pytest.raises(TooLarge):
        await start(store, "pay", ["x" * size], run_id="r3")
    assert not (await store.load(RunId("r3"))).entries
    assert isinstance(await run(store, agent(500_000, 500_000), "r4", "x" * 500_000), Completed)


async def test_ur29_in_a_file_megabytes_are_fine(world: World) -> None:
    """UR-29: 1.2 MB, 3 MB, 2 MB, 5 MB: below a file's bound all of them are stored exactly."""
    ledger = Ledger(world.home / "big")

    @read
    def fetch() -> str:
        return "r" * 1_200_000

    @write(approval=False)
    def charge(this: ToolCall) -> str:
        ledger.add(this.run_id, this.step, {})
        return "w" * 3_000_000

    model = ScriptedModel(call("fetch"), call("charge"), say("m" * 2_000_000))
    agent = Agent("pay", model=model, tools=[fetch, charge])
    end = await run(world.store(), agent, "r1", "i" * 5_000_000)
    assert isinstance(end, Completed)
    assert end.message.content == "m" * 2_000_000
    assert len(ledger.lines()) == 1
    assert [len(str(message.content)) for message in model.requests[-1]] == [
        *(5_000_000, 0, 1_200_000, 0, 3_000_000)
    ]
    world.check("r1")


def test_ur29_the_command_names_the_size(world: World) -> None:
    """UR-29: an input above the bound from a file: exit 2, one line with the sizes."""
    (world.home / "big").write_text("x" * (17 * 1024 * 1024))
    done = world.run("r1", input=f"@{world.home}/big")
    assert done.code == 2
    assert "exceeds the file store's 16777216" in one_line(done.err)
    assert world.list() == {}


# ---- UR-31 ------------------------------------------------------------------------------------

LONG = 4990
FURTHER = 10


class Looker:
    """A model of few words: reads 1, 2, 3 … without end, until it has made `calls` of them."""

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.requests = 0

    async def reply(self, messages: Any, tools: Any, *, preview: Any) -> Reply:
        self.requests += 1
        n = sum(message.role == "assistant" for message in messages)
        if n >= self.calls:
            return Reply(text="done")
        one = ToolRequest(id=f"c{n}", name="look", arguments=json.dumps({"n": n}))
        return Reply(calls=(one,), finish="tool_calls", text="t" * 3000)


def looking(calls: int) -> Agent:
    @read
    def look(n: int) -> str:
        return f"{n}:" + "x" * 4000

    return Agent("pay", model=Looker(calls), tools=[look], bounds=Bounds(iterations=5000))


@pytest.fixture(scope="module")
def long_journal(run_sync: Callable[..., Any]) -> tuple[Entry, ...]:
    """The first 4,990 records of a run, 2 kB each on average, as run() wrote them."""

    async def make() -> tuple[Entry, ...]:
        store = MemoryStore()
        assert isinstance(await run(store, looking(1250), "long", "x"), Completed)
        return (await store.load(RunId("long"))).entries

    entries = run_sync(make())[:LONG]
    size = sum(len(entry.raw) for entry in entries)
    assert len(entries) == LONG
    assert 1900 * LONG < size < 2300 * LONG
    return entries


class Counting(DyingStore):
    """A store that counts what is read from it."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, "")
        self.read = 0
        self.loads: list[int] = []

    async def load(self, run_id: RunId, *, after: int = 0) -> Loaded:
        loaded = await self._inner.load(run_id, after=after)
        self.read += len(loaded.entries)
        self.loads.append(len(loaded.entries))
        return loaded


async def _taken_over(store: Store, entries: tuple[Entry, ...]) -> Counting:
    """Lay the journal, take it up, go on for ten more steps, end."""
    if isinstance(store, FileStore):
        store.directory.mkdir()
        store.path(RunId("long")).write_bytes(b"".join(entry.raw + b"\n" for entry in entries))
    else:
        tail = 0
        for entry in entries:
            answer = await store.append(RunId("long"), entry, expected=tail)
            tail = answer.tail  # type: ignore[union-attr]
    counting = Counting(store)
    # The last record is a read's start: that read, and 10 model calls and reads more.
    agent = looking(LONG // 4 + FURTHER)
    end = await run(counting, agent, "long", ack_wait_s=1)  # type: ignore[arg-type]
    assert isinstance(end, Completed)
    assert agent.model.requests == FURTHER + 1  # type: ignore[attr-defined]
    assert len(counting.appends) >= 4 * FURTHER
    return counting


@pytest.fixture(params=["file", "jetstream"])
async def taken_over(
    request: pytest.FixtureRequest,
    long_journal: tuple[Entry, ...],
    world: World,
    namespace: str,
    nats_url: str,
) -> Counting:
    if request.param == "file":
        return await _taken_over(world.store(), long_journal)
    await provision(nats_url, namespace=namespace)
    async with JetStreamStore(nats_url, namespace=namespace) as store:
        return await _taken_over(store, long_journal)


async def test_ur31_no_step_reads_the_journal_again(taken_over: Counting) -> None:
    """UR-31: 5,000 records of 2 kB, taken over: whole reads come at the pick-up only, and their
    number does not depend on how many steps follow."""
    whole = [count for count in taken_over.loads if count > LONG // 2]
    assert len(whole) <= 3
    assert taken_over.read - sum(whole) <= 10


async def test_ur31_a_takeover_reads_each_record_about_once(taken_over: Counting) -> None:
    """UR-31: messages read ≤ 1.2 × 5,000 in total."""
    assert taken_over.read <= 1.2 * (LONG + 4 * FURTHER + 2)


async def _child_takes_over(directory: str) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = await run(FileStore(directory), looking(LONG // 4 + FURTHER), "long")
    assert isinstance(end, Completed)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.real
def test_ur31_memory_of_a_takeover(
    world: World, long_journal: tuple[Entry, ...], zygote: Zygote
) -> None:
    """UR-31: a process that takes the 10 MB journal over grows by less than 200 MB; show and list
    of it answer."""
    world.runs.mkdir()
    world.path("long").write_bytes(b"".join(entry.raw + b"\n" for entry in long_journal))
    grown = zygote.call("cases.test_ur_values:_child_takes_over", directory=str(world.runs)).wait()
    assert grown.code == 0, grown.err
    assert grown.json < 200 * 1024  # KiB
    assert world.list() == {"long": "completed"}
    assert world.show("long").out.count("\n") == len(world.check("long")) + 1

"""What every store promises (R10): one suite on memory, file, one nats-server, three of them."""

from __future__ import annotations

import asyncio

import pytest
from kit.records import Chain, raws

from journal.codec import Entry, decode, record_hash
from journal.errors import StoreLocked, TooLarge
from journal.fold import Fold
from journal.ids import RunId
from journal.store import Appended, Conflict, Loaded, Store, Unknown

MEETING_IDS = [
    "Run.a",
    "run.a",
    "run_a",
    "run-a",
    "RUN.A",
    "run.a.b",
    "run.a_b",
    "runa",
    "con",
    "CON",
]


async def append_all(store: Store, chain: Chain, *, expected: int = 0) -> list[int]:
    """The tokens of the entries, appended one after the other; 10164 and the like are settled."""
    tokens: list[int] = []
    for entry in chain.entries:
        expected = await append_settled(store, chain.run_id, entry, expected)
        tokens.append(expected)
    return tokens


async def append_settled(store: Store, run_id: RunId, entry: Entry, expected: int) -> int:
    """The token of the entry: appended until the answer is definite (PROTOCOL 3)."""
    while True:
        answer = await store.append(run_id, entry, expected=expected)
        if isinstance(answer, Appended):
            return answer.tail
        new = (await store.load(run_id, after=expected)).entries
        if new:
            assert new[0].raw == entry.raw, f"lost to another writer: {answer}"
            return new[0].position
        assert isinstance(answer, Unknown), f"{answer}, but nothing new"


async def test_what_was_appended_is_loaded_byte_for_byte(store: Store) -> None:
    chain = Chain()
    chain.started({"text": "grüße  \N{LINE SEPARATOR} \x00 😀", "n": [1, 2.5, None, True]})
    chain.steps(6)
    chain.completed()
    tokens = await append_all(store, chain)
    loaded = await store.load(chain.run_id)
    assert raws(loaded) == [entry.raw for entry in chain.entries]
    assert loaded.records == tuple(entry.record for entry in chain.entries)
    assert [entry.position for entry in loaded.entries] == tokens
    assert loaded.tail == tokens[-1]
    assert tokens == sorted(set(tokens)) and tokens[0] > 0


async def test_a_run_that_does_not_exist_is_empty(store: Store) -> None:
    assert await store.load(RunId("nobody")) == Loaded((), 0)


async def test_expecting_nothing_creates_a_run_once(store: Store) -> None:
    first, second = Chain(), Chain(nonce="ba9876543210")
    entry = first.started()
    await append_settled(store, first.run_id, entry, 0)
    assert await store.append(second.run_id, second.started(), expected=0) == Conflict()
    assert raws(await store.load(first.run_id)) == [entry.raw]


@pytest.mark.parametrize("behind", [0, 1, 2])
async def test_a_wrong_tail_is_a_conflict_and_stores_nothing(store: Store, behind: int) -> None:
    chain = Chain()
    chain.started()
    chain.steps(2)
    tokens = [0, *await append_all(store, chain)]
    before = await store.load(chain.run_id)
    rival = chain.rival()
    answer = await store.append(chain.run_id, rival.step_started("late/0"), expected=tokens[behind])
    assert answer == Conflict()
    assert await store.load(chain.run_id) == before


async def test_a_tail_that_never_was_is_a_conflict(store: Store) -> None:
    chain = Chain()
    answer = await store.append(chain.run_id, chain.started(), expected=12_345)
    assert answer == Conflict()
    assert await store.load(chain.run_id) == Loaded((), 0)


async def test_of_twenty_writers_at_one_tail_exactly_one_wins(store: Store) -> None:
    chain = Chain()
    tail = await append_settled(store, chain.run_id, chain.started(), 0)
    rivals = [chain.rival(f"{index:012x}") for index in range(20)]
    entries = [rival.step_started(f"work/{index}") for index, rival in enumerate(rivals)]
    answers = await asyncio.gather(
        *(store.append(chain.run_id, entry, expected=tail) for entry in entries)
    )
    stored = await store.load(chain.run_id, after=tail)
    assert len(stored.entries) == 1
    winner = [entry.raw for entry in entries].index(stored.entries[0].raw)
    for index, answer in enumerate(answers):
        if index == winner:
            assert answer in (Appended(stored.tail), *([answer] if is_unknown(answer) else []))
        else:
            assert answer == Conflict() or is_unknown(answer)
    if not store.shared:
        assert sum(answer == Conflict() for answer in answers) == 19


def is_unknown(answer: object) -> bool:
    return isinstance(answer, Unknown)


async def test_journals_whose_ids_look_alike_do_not_meet(store: Store) -> None:
    chains = [Chain(run_id) for run_id in MEETING_IDS]
    for chain in chains:
        chain.started(f"input of {chain.run_id}")
        await append_all(store, chain)
    for chain in chains:
        assert raws(await store.load(chain.run_id)) == [chain.entries[0].raw]
    assert [run_id async for run_id in store.runs()] == sorted(MEETING_IDS)


@pytest.mark.parametrize("seen", [0, 1, 4, 5])
async def test_a_load_after_a_token_gives_exactly_the_rest(store: Store, seen: int) -> None:
    chain, other = Chain("this"), Chain("other")
    chain.started()
    chain.steps(4)
    other.started()
    other.steps(4)
    tokens, other_tail = [0], 0
    for entry, foreign in zip(chain.entries, other.entries, strict=True):
        tokens.append(await append_settled(store, chain.run_id, entry, tokens[-1]))
        other_tail = await append_settled(store, other.run_id, foreign, other_tail)
    loaded = await store.load(chain.run_id, after=tokens[seen])
    assert raws(loaded) == [entry.raw for entry in chain.entries[seen:]]
    assert loaded.tail == tokens[-1]


async def test_runs_are_listed_in_order_and_after_one(store: Store) -> None:
    names = ["b", "a.2", "a-1", "a_3", "a", "Z", "0", "a.1", "a-"]
    for name in names:
        chain = Chain(name)
        chain.started()
        await append_all(store, chain)
    listed = [run_id async for run_id in store.runs()]
    assert listed == sorted(names)
    for index, run_id in enumerate(listed):
        assert [rest async for rest in store.runs(after=run_id)] == listed[index + 1 :]
    assert [rest async for rest in store.runs(after=RunId("a-0"))] == sorted(
        name for name in names if name > "a-0"
    )


async def test_an_empty_store_lists_nothing(store: Store) -> None:
    assert [run_id async for run_id in store.runs()] == []


async def test_a_trim_leaves_the_tombstone_and_the_id_stays_used(store: Store) -> None:
    chain = Chain()
    chain.started()
    chain.completed()
    tombstone = chain.purged()
    await append_all(store, chain)
    for _ in range(2):  # a purge that crashed half-way reads the journal and trims again
        loaded = await store.load(chain.run_id)
        await store.trim(chain.run_id, before=loaded.tail)
        assert raws(await store.load(chain.run_id)) == [tombstone.raw]
    loaded = await store.load(chain.run_id)
    again = Chain(nonce="ba9876543210")
    assert await store.append(chain.run_id, again.started(), expected=0) == Conflict()
    assert [run_id async for run_id in store.runs()] == [chain.run_id]
    fold = Fold()
    fold.apply(loaded.entries[0])
    assert fold.finished


async def test_unknown_fields_survive_byte_for_byte(store: Store) -> None:
    chain = Chain()
    made = chain.started()
    raw = made.raw[:-1] + b',"later": {"b":1,  "a":[ ]},"x":1.50}'
    chain.entries.clear()
    chain.add_raw(decode(raw), raw)
    await append_all(store, chain)
    (loaded,) = (await store.load(chain.run_id)).entries
    assert loaded.raw == raw
    assert record_hash(loaded.raw) == record_hash(raw)


async def test_a_record_of_a_newer_version_is_loaded_raw(store: Store) -> None:
    chain = Chain()
    chain.started()
    made = chain.step_started()
    raw = made.raw.replace(b'"type":"step.started"', b'"type":"step.invented"')
    chain.entries.pop()
    chain.add_raw(decode(raw), raw)
    await append_all(store, chain)
    assert raws(await store.load(chain.run_id)) == [entry.raw for entry in chain.entries]


async def test_a_held_run_excludes_a_second_holder_and_is_free_again(store: Store) -> None:
    chain = Chain()
    if store.shared:  # claims do it there
        async with store.hold(chain.run_id), store.hold(chain.run_id):
            assert await store.holder(chain.run_id) is None
        return
    assert await store.holder(chain.run_id) is None
    async with store.hold(chain.run_id):
        assert await store.holder(chain.run_id) is not None
        with pytest.raises(StoreLocked) as locked:
            async with store.hold(chain.run_id):
                raise AssertionError("two holders")
        assert locked.value.holder
        async with store.hold(RunId("another")):
            pass
        await append_settled(store, chain.run_id, chain.started(), 0)
    assert await store.holder(chain.run_id) is None
    async with store.hold(chain.run_id):
        pass


async def test_a_journal_of_two_thousand_records_loads_whole(store: Store) -> None:
    chain = Chain()
    chain.started()
    chain.steps(1_999)
    tokens = await append_all(store, chain)
    loaded = await store.load(chain.run_id)
    assert raws(loaded) == [entry.raw for entry in chain.entries]
    assert loaded.tail == tokens[-1]
    fold = Fold()
    for entry in loaded.entries:
        fold.apply(entry)
    assert fold.n == 2_000


async def test_a_record_above_the_limit_is_refused_and_stores_nothing(store: Store) -> None:
    chain = Chain()
    tail = await append_settled(store, chain.run_id, chain.started(), 0)
    made = chain.step_completed(result="x")
    large = Entry(made.record, made.raw[:-2] + b"x" * (17 * 1024 * 1024) + b'"}')
    with pytest.raises(TooLarge) as refused:
        await store.append(chain.run_id, large, expected=tail)
    assert str(len(large.raw))[:4] in str(refused.value)
    assert (await store.load(chain.run_id, after=tail)).entries == ()


async def test_a_place_names_where_people_find_the_record(store: Store) -> None:
    chain = Chain("run.X")
    chain.started()
    chain.steps(2)
    await append_all(store, chain)
    entries = (await store.load(chain.run_id)).entries
    places = [store.where(chain.run_id, index, entry) for index, entry in enumerate(entries)]
    assert len(set(places)) == 3
    assert "3" in store.where(chain.run_id, 2, None)

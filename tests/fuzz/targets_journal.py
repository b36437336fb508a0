"""What is read from disk: one record, a damaged file, a forged journal.

Each target takes any bytes, and returns where the product behaves: anything it raises is a finding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from fuzz.at_once import Directory, all_of, at_once
from fuzz.draw import Draw, forged
from fuzz.honest import file_of, journals
from fuzz.mutations import damaged
from fuzz.readers import NOW, look, told
from kit.build import RUN

from journal.audit import Auditor, Violation
from journal.codec import Damage, Entry, decode, record_hash, seal
from journal.errors import JournalDamaged
from journal.fold import Fold
from journal.log import Log
from journal.records import ZERO_HASH, Commit, NewerRecord, RunPurged
from journal.store import Appended, Conflict, Loaded
from journal.summary import is_restart_point, restored, summary_after

_json = msgspec.json.Encoder().encode


@functools.cache
def _store() -> Directory:
    return Directory()


# ---- one record -------------------------------------------------------------------------------


def codec(data: bytes) -> None:
    """Any bytes decode, or are Damage; what decodes is the same once more."""
    try:
        record = decode(data)
    except Damage:
        return
    assert record.n >= 1 and record.v >= 1 and record.claim >= 0
    entry = Entry(record, data)
    assert entry.type
    if isinstance(record, NewerRecord):
        return
    sealed, raw = seal(
        record,
        n=record.n,
        id=record.id,
        at=record.at,
        by=record.by,
        prev=record.prev,
        claim=record.claim,
    )
    assert decode(raw) == sealed
    assert msgspec.structs.replace(sealed, v=record.v) == record


def record(data: bytes) -> None:
    """The same of an honest record with parts of it replaced."""
    draw = Draw(data)
    value: Any = msgspec.json.decode(draw.pick(draw.pick(journals())).raw)
    for _ in range(1 + draw.below(3)):
        value = forged(draw, value)
    codec(_json(value))


# ---- a file -----------------------------------------------------------------------------------


def _laid(data: bytes) -> Directory:
    store = _store()
    store.path(RUN).write_bytes(data)
    return store


def _has_a_place(damage: JournalDamaged) -> None:
    assert damage.where and damage.run_id == RUN


def _loaded(store: Directory, after: int = 0) -> Loaded | None:
    """None: refused, with the place."""
    try:
        return at_once(store.load(RUN, after=after))
    except JournalDamaged as damage:
        _has_a_place(damage)
        return None


def file(data: bytes) -> None:
    """Any bytes as a journal's file load as whole lines and a torn tail, from wherever one reads,
    or are refused; looking changes nothing; an append removes nothing but a torn tail."""
    store = _laid(data)
    found = _loaded(store)
    pages = all_of(store.stored(RUN))
    lines = [line for page in pages for line in page]
    whole = b"".join(line.data + b"\n" for line in lines if line.flaw == "")
    torn = b"".join(line.data for line in lines if line.flaw == "torn")
    assert whole + torn == data
    assert all_of(store.runs()) == ([RUN] if data else [])
    if found is not None:
        _check_loaded(store, data, found)
    draw = Draw(data)
    ends = [line.position for line in lines]
    expected = draw.pick([*ends, found.tail if found else 0, draw.below(len(data) + 2), 0])
    _check_append(store, data, found, expected)


def _check_loaded(store: Directory, data: bytes, found: Loaded) -> None:
    assert data[: found.tail] == file_of(found.entries)
    assert len(data) == found.tail + found.torn
    assert b"\n" not in data[found.tail :].lstrip(b"\n")
    for at, entry in enumerate(found.entries):
        later = _loaded(store, entry.position)
        assert later is not None and later.entries == found.entries[at + 1 :]
        assert (later.tail, later.torn) == (found.tail, found.torn)
    assert store.path(RUN).read_bytes() == data


def _check_append(store: Directory, data: bytes, found: Loaded | None, expected: int) -> None:
    head = found.entries[-1] if found is not None and found.entries else None
    record, raw = seal(
        RunPurged(),
        n=head.record.n + 1 if head else 1,
        id="fedcba987654-1",
        at=NOW,
        by="fuzz",
        prev=record_hash(head.raw) if head else ZERO_HASH,
    )
    answer = at_once(store.append(RUN, Entry(record, raw), expected=expected))
    now = store.path(RUN).read_bytes()
    if isinstance(answer, Conflict):
        assert now == data
        assert found is None or expected != found.tail
        return
    assert isinstance(answer, Appended)
    assert now == data[:expected] + raw + b"\n" and answer.tail == len(now)
    assert b"\n" not in data[expected:].lstrip(b"\n"), "a whole line was removed"
    assert expected == 0 or data[expected - 1 : expected] == b"\n", "a line was written into one"
    if found is not None:
        assert expected == found.tail
        again = _loaded(store)
        assert again is not None and file_of(again.entries) == now and again.torn == 0


# ---- a damaged journal ------------------------------------------------------------------------


def journal(data: bytes) -> None:
    """An honest file after mishaps is refused, or is whole records of one honest journal and a torn
    tail. The last record alone may differ: no hash is there yet to tell."""
    raw = damaged(Draw(data))
    store = _laid(raw)
    try:
        log = at_once(Log.read(store, RUN))
    except JournalDamaged as damage:
        _has_a_place(damage)
        return
    look(log.fold)
    found = at_once(store.load(RUN))
    assert (log.tail, log.torn) == (found.tail, found.torn)
    *before, _ = [entry.raw for entry in found.entries] or [b""]
    assert any([entry.raw for entry in honest[: len(before)]] == before for honest in journals())
    raws = [entry.raw for entry in found.entries]
    said = [one.n for one in _violations(raws)]
    edited = not any(raws == [entry.raw for entry in honest[: len(raws)]] for honest in journals())
    assert said == [] or (edited and set(said) == {log.fold.n}), said


def lines(data: bytes) -> None:
    """The audit says what it finds in any lines, and never stops; what it lets pass, folds."""
    draw = Draw(data)
    raw = damaged(draw) if draw.below(4) else draw.rest()
    _violations(raw.split(b"\n"))


CHAIN = frozenset(["undecodable", "ordinal", "hash", "record_id", "after_end", "second_result"])
"""Rules whose breach no reader may take, whatever else the audit finds fault with."""

FENCED = "it was written under claim"
"""So begins what the audit says of a record under a claim that is not the live one."""


class Forged(NamedTuple):
    """A journal's records as JSON, to be chained; the ones before `changed` are honest. `slips`:
    by index, what is wrong in an envelope all the same."""

    values: Sequence[dict[str, Any]]
    changed: int = 0
    slips: Mapping[int, dict[str, Any]] = MappingProxyType({})


def forgery(data: bytes) -> None:
    """A journal that chains and says something else than any writer does: see check_forged."""
    draw = Draw(data)
    values = _forged(draw)
    slips: dict[int, dict[str, Any]] = {}
    if not draw.below(3):
        n = draw.below(len(values) + 1)
        wrong = {"n": n + draw.below(3)}, {"id": f"0123456789ab-{draw.below(n + 2)}"}
        slips[n] = draw.pick([*wrong, {"claim": draw.below(n + 2)}])
    check_forged(Forged(values, 0, slips), keep_claims=not draw.below(4))


def check_forged(forged: Forged, *, keep_claims: bool = True) -> None:
    """It is refused as damaged, or every reader takes it; what the fold refuses, the audit names,
    unless a newer version has written it; and the fold what breaks the chain."""
    raws = _chained(forged.values, keep_claims=keep_claims, slips=forged.slips)
    fold = Fold()
    refused: Damage | None = None
    for at, raw in enumerate(raws):
        try:
            entry = Entry(decode(raw), raw)
            fold.apply(entry)
        except Damage as damage:
            refused = damage
            break
        if at >= forged.changed:
            told(entry)
            look(fold)
    auditor = Auditor(RUN)
    found = [one for raw in raws for one in auditor.take(raw)]
    passed = not found and auditor.newer is None
    assert refused is None or not passed, f"the audit lets pass what readers refuse: {refused}"
    broken = [one for one in found if one.rule in CHAIN or one.text.startswith(FENCED)]
    taken = refused is None and fold.newer is None
    assert not (taken and broken), f"readers take what the audit refuses: {broken}"


def summary(data: bytes) -> None:
    """A commit whose summary says anything: see check_restored."""
    draw = Draw(data)
    points = [
        (entries, at)
        for entries in journals()
        for at, entry in enumerate(entries)
        if is_restart_point(entry.record)
    ]
    entries, at = draw.pick(points)
    values: list[Any] = [msgspec.json.decode(entry.raw) for entry in entries]
    for _ in range(1 + draw.below(4)):
        values[at]["summary"] = forged(draw, values[at].get("summary"))
    check_restored(values, at)


def check_restored(values: Sequence[dict[str, Any]], at: int) -> None:
    """The commit there is no point to restart at, or every reader goes on from it, over what
    follows in an honest journal."""
    raws = _chained(values, keep_claims=True)
    try:
        first, commit = Entry(decode(raws[0]), raws[0]), Entry(decode(raws[at]), raws[at])
        fold = restored(first, commit)
        look(fold)
        end = Commit(action="continue", n=fold.n + 1, at=NOW, iteration=fold.iteration)
        summary_after(fold, end)
        for raw in raws[at + 1 :]:
            fold.apply(Entry(decode(raw), raw))
            look(fold)
    except Damage:
        return


def _forged(draw: Draw) -> list[dict[str, Any]]:
    """An honest journal with some records changed, dropped or moved."""
    values: list[Any] = [msgspec.json.decode(entry.raw) for entry in draw.pick(journals())]
    for _ in range(1 + draw.below(3)):
        if not values:
            break
        at = draw.below(len(values))
        match draw.below(6):
            case 0:
                del values[at]
            case 1:
                values.insert(draw.below(len(values) + 1), values[at])
            case 2:
                other = draw.pick(draw.pick(journals())).raw
                values.insert(at, msgspec.json.decode(other))
            case _:
                values[at] = forged(draw, values[at])
    return [value for value in values if isinstance(value, dict)]


def _chained(
    values: Sequence[dict[str, Any]],
    *,
    keep_claims: bool,
    slips: Mapping[int, dict[str, Any]] = MappingProxyType({}),
) -> list[bytes]:
    """With ordinals, ids and hashes as they must be, but for the slips; claims as given, or the
    last one's where a record has one: some may have moved."""
    raws: list[bytes] = []
    head, live = ZERO_HASH, 0
    for n, value in enumerate(values, 1):
        value = value | {"v": 1, "n": n, "id": f"0123456789ab-{n}", "prev": head}
        if value.get("type") == "claim":
            live = n
        elif not keep_claims and value.pop("claim", 0):
            value["claim"] = live
        raws.append(_json(value | slips.get(n - 1, {})))
        head = record_hash(raws[-1])
    return raws


def _violations(raws: Sequence[bytes]) -> list[Violation]:
    auditor = Auditor(RUN)
    found = [one for raw in raws for one in auditor.take(raw)]
    assert all(one.n >= 1 and one.rule and one.text for one in found)
    return found

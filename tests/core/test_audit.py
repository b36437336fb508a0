"""R70: each rule of the audit finds what breaks it, by ordinal and word, and names nothing else."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.audit_cases import CASES, FREE, HELD, PAY, START, UNKNOWN, Case
from kit.build import (
    ALLOW,
    AT,
    NONCE,
    RUN,
    Log,
    answered,
    approved,
    asks,
    cancel,
    claimed,
    error_of,
    failed,
    goes_on,
    model_start,
    parked,
    placed,
    released,
    reply_of,
    request,
    result_of,
    resume,
    retry,
    start_of,
    started,
    submitted,
    withdrawn,
)
from kit.dishonest import Forged, said, told
from kit.histories import seeded

from journal.audit import RULES, Auditor, audit
from journal.codec import Entry, decode, record_hash, seal
from journal.ids import RunId
from journal.records import Commit, Known, Record, RunCompleted, RunPurged, Signal, Status, Summary
from journal.summary import summary_after, with_summary

ENDS = ("after_end", "purge")
CHAIN = ("undecodable", "ordinal", "hash", "record_id")
HEADERS = ("summary", "status")


# ---- every rule -------------------------------------------------------------------------------


def test_every_rule_has_a_journal_that_breaks_it():
    assert set(CASES) | set(CHAIN) | set(HEADERS) == set(RULES)


def broken() -> list[Any]:
    return [
        pytest.param(rule, case, id=f"{rule}-{index}")
        for rule, cases in CASES.items()
        for index, case in enumerate(cases)
    ]


@pytest.mark.parametrize(("rule", "case"), broken())
def test_a_record_that_breaks_a_rule_is_named_with_it_and_nothing_else_is(rule: str, case: Case):
    prefix, body, envelope = case
    log = Forged(*prefix)
    assert log.wrong() == []
    n = log.forge(body, **envelope)
    assert log.wrong() == [(n, rule)]


@pytest.mark.parametrize(("rule", "case"), broken())
def test_the_audit_goes_on_behind_a_record_that_breaks_a_rule(rule: str, case: Case):
    """What comes later is judged, too; and what was only a consequence is not named."""
    prefix, body, envelope = case
    log = Forged(*prefix)
    n = log.forge(body, **envelope)
    for request_id in ("later", "later", "last"):
        log.forge(submitted(request_id))
    found = log.wrong()
    ends = isinstance(body, RunCompleted) or getattr(body, "action", "") in ("fail", "cancel")
    if ends or rule in ENDS:
        assert found == [(n, rule), *((n + k, "after_end") for k in (1, 2, 3))]
    else:
        assert found == [(n, rule), (n + 2, "input")]


def test_a_fenced_writers_records_are_each_named_and_end_nobody_elses_claim():
    log = Forged(*HELD, claimed("w2"))
    log.forge(error_of(PAY, via="refused"), claim=2)
    log.forge(goes_on(until_input=True), claim=2)
    log.fold.claim = log.fold.claims[3]  # the live holder's own fold took neither
    log.fold.iteration = 1
    log.forge(Commit(action="continue", iteration=1), claim=3)
    assert log.wrong() == [(4, "claim"), (5, "claim")]


# ---- the chain --------------------------------------------------------------------------------


def journal() -> list[Entry]:
    return Forged(
        *HELD, start_of(PAY), result_of(PAY), submitted("i1"), submitted("i2"), placed()
    ).entries


def test_a_record_that_is_missing_is_named_once():
    entries = journal()
    del entries[3]
    assert told(entries) == [(5, "ordinal")]
    assert "record 4 is missing" in said(entries)[0].text


@pytest.mark.parametrize("n", range(1, 8))
def test_a_record_that_stands_twice_is_named_once(n: int):
    entries = journal()
    entries.insert(n - 1, entries[n - 1])
    assert told(entries) == [(n, "ordinal")]


@pytest.mark.parametrize("n", range(2, 7))
def test_a_record_that_was_edited_is_named_by_the_one_behind_it(n: int):
    entries = journal()
    raw = entries[n - 1].raw.replace(b'"at":"2026', b'"at":"2025')
    entries[n - 1] = Entry(decode(raw), raw)
    assert told(entries) == [(n + 1, "hash")]


@pytest.mark.parametrize("n", range(2, 7))
@pytest.mark.parametrize("raw", [b"", b"garbage", b"{}", b'{"type":"commit"}', b"\xff\xfe{}"])
def test_bytes_that_are_no_record_are_named_once_in_place_of_one_or_between(n: int, raw: bytes):
    raws = [entry.raw for entry in journal()]
    assert told_raw([*raws[: n - 1], raw, *raws[n:]]) == [(n, "undecodable")]
    assert told_raw([*raws[: n - 1], raw, *raws[n - 1 :]]) == [(n, "undecodable")]


def told_raw(raws: list[bytes], run: str = RUN) -> list[tuple[int, str]]:
    auditor = Auditor(RunId(run))
    return [(found.n, found.rule) for raw in raws for found in auditor.take(raw)]


@pytest.mark.parametrize("odd", [1, 5, 99, 2**40])
def test_a_record_with_an_ordinal_of_its_own_does_not_hide_the_rest(odd: int):
    log = Forged(*HELD)
    record, raw = seal(submitted("i1"), n=odd, id=f"{NONCE}-9", at=AT, by="eve", prev=log.fold.head)
    log.entries.append(Entry(record, raw))
    log.fold.n, log.fold.head = 3, record_hash(raw)
    log.forge(submitted("i2"), nonce="a" * 12)
    assert log.wrong() == [(odd, "ordinal")]


def test_a_stray_record_between_two_is_named_once():
    entries = journal()
    entries.insert(4, Forged(started(run="b2"), claimed(), model_start()).entries[2])
    assert told(entries) == [(3, "ordinal")]


@pytest.mark.parametrize("counter", [3, 1, 0])
def test_a_writers_id_never_comes_again_nor_a_lower_one(counter: int):
    log = Forged(*UNKNOWN)
    record, raw = seal(
        submitted(), n=4, id=f"{NONCE}-{counter}", at=AT, by="eve", prev=log.fold.head
    )
    assert told([*log.entries, Entry(record, raw)]) == [(4, "record_id")]


def test_behind_a_gap_only_the_chain_is_judged_until_a_commit_sums_up_what_is_lost():
    log = Forged(*HELD, submitted("i1"), model_start())
    commit = log.here(msgspec.structs.replace(goes_on(until_input=True), at=AT))
    assert isinstance(commit, Commit)
    log.forge(goes_on())  # what a reader of the journal with the gap can't tell from an honest one
    summed = with_summary(
        log.fold, msgspec.structs.replace(commit, iteration=1, waits=goes_on().waits)
    )
    log.forge(summed)
    log.forge(submitted("i1"))
    entries = [*log.entries[:2], *log.entries[3:]]
    assert told(entries) == [(4, "ordinal"), (7, "input")]


def test_the_journal_of_another_run_is_named():
    assert told_raw([entry.raw for entry in journal()], "b2")[0] == (1, "run_id")


# ---- summaries and headers --------------------------------------------------------------------


def summed_up(**fields: Any) -> Forged:
    log = Forged(*HELD, submitted("i1"), start_of("0/1", "look", unsafe=False), result_of("0/1"))
    commit = msgspec.structs.replace(goes_on(), at=AT)
    summary = msgspec.structs.replace(summary_after(log.fold, commit), **fields)
    log.forge(msgspec.structs.replace(commit, summary=summary))
    log.forge(submitted("i2"))
    return log


WRONG_SUMMARIES: dict[str, Any] = {
    "claim_n": 9,
    "claim": {"worker": "w9"},
    "revision": "7",
    "model_calls": 5,
    "requests": (Known(request_id="r", name="cancel", n=3, at=AT, digest=""),),
    "inputs": (),
    "children": {"c1": None},
    "interrupted": ("0" * 32,),
    "cancel": Known(request_id="r", name="cancel", n=3, at=AT, digest=""),
}


def test_an_honest_summary_is_clean_and_each_of_its_fields_is_compared():
    assert summed_up().wrong() == []
    assert set(WRONG_SUMMARIES) == set(Summary.__struct_fields__)


@pytest.mark.parametrize("field", WRONG_SUMMARIES)
def test_a_summary_that_its_records_do_not_make_is_named(field: str):
    found = said(summed_up(**{field: WRONG_SUMMARIES[field]}).entries)
    assert [(one.n, one.rule) for one in found] == [(6, "summary")]
    assert found[0].text.endswith(f": {field}")


HEADERS_SAY: list[tuple[Record, Status]] = [
    (started(), "running"),
    (claimed(), "running"),
    (start_of(PAY), "running"),
    (released(), "indeterminate"),
    (retry(PAY, START), "running"),
    (claimed("w2"), "running"),
    (start_of(PAY, permit=5), "running"),
    (result_of(PAY), "running"),
    (goes_on(resume=True), "paused"),
    (resume("r1"), "running"),
    (claimed("w3"), "running"),
    (goes_on(until_input=True), "waiting"),
    (submitted(), "running"),
    (claimed("w4"), "running"),
    (failed("restart_limit", retriable=True), "failed"),
    (resume("r2"), "running"),
    (cancel(), "running"),
    (claimed("w5"), "running"),
    (Commit(action="cancel"), "cancelled"),
    (RunPurged(), "cancelled"),
]


def with_headers(wrong: int = 0) -> list[Entry]:
    log = Forged()
    for body, status in HEADERS_SAY:
        word: Status = "completed" if log.fold.n + 1 == wrong else status
        log.forge(log.here(body), status=word)
    return log.entries


def test_status_headers_that_the_records_make_are_clean():
    assert said(with_headers()) == ()


@pytest.mark.parametrize("n", range(1, len(HEADERS_SAY) + 1))
def test_a_status_header_that_the_records_do_not_make_is_named(n: int):
    assert told(with_headers(n)) == [(n, "status")]


# ---- newer versions, purges, and any bytes ----------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"v": 2}, {"type": "step.paused"}, {"type": "park", "why": "tea"}], ids=str
)
def test_a_record_of_a_newer_version_is_no_violation_and_behind_it_the_chain_is_judged(
    change: dict[str, Any],
):
    log = Forged(*HELD)
    plain = json.loads(log.sealed(submitted()).raw) | change
    log.entries.append(entry := log.raw(json.dumps(plain, separators=(",", ":")).encode()))
    log.fold.mark(entry)
    log.forge(result_of(PAY))  # of a step that perhaps the newer record started
    log.forge(started())
    auditor = Auditor(RUN)
    found = [one for entry in log.entries for one in auditor.take(entry.raw)]
    assert found == []
    assert auditor.newer == log.entries[2].type
    assert told([*log.entries[:3], *log.entries[4:]]) == [(5, "ordinal")]


def test_a_reconcile_with_a_word_of_a_newer_version_is_one():
    log = Forged(*FREE)
    payload = {"step": PAY, "start": START, "outcome": "undo"}
    log.forge(Signal(name="reconcile", request_id="r", payload=payload))
    log.forge(start_of(PAY))
    auditor = Auditor(RUN)
    assert [one for entry in log.entries for one in auditor.take(entry.raw)] == []
    assert auditor.newer == "signal"


def test_a_tombstone_alone_is_clean_and_takes_nothing_behind_it():
    log = Forged(*HELD, answered(), RunPurged())
    assert told(log.entries[3:]) == []
    assert told(log.entries) == []
    log.forge(submitted())
    assert told(log.entries[3:]) == [(5, "after_end")]


@pytest.mark.parametrize("status", ["running", "indeterminate", "waiting"])
def test_a_tombstone_alone_of_a_run_that_had_not_ended_is_named(status: Status):
    log = Forged(*HELD, answered(), RunPurged())
    raw = log.entries[3].raw
    assert [one.rule for one in Auditor(RUN).take(raw, status=status)] == ["purge"]
    assert Auditor(RUN).take(raw, status="failed") == ()


def test_on_a_store_where_holders_claim_each_names_its_claim():
    entries = Forged(started(), model_start(), result_of("llm/1", "text"), answered()).entries
    assert told(entries) == []  # under a lock
    auditor = Auditor(RUN)
    found = [one for entry in entries for one in auditor.take(entry.raw, shared=True)]
    assert [(one.n, one.rule) for one in found] == [(2, "claim"), (3, "claim"), (4, "claim")]


@pytest.mark.parametrize("length", range(8))
def test_a_journal_that_still_runs_is_clean_wherever_it_ends(length: int):
    assert told(journal()[:length]) == []


def test_what_is_forgotten_after_eight_days_may_come_again():
    log = Forged(*HELD, submitted("i1"), withdrawn("i1"), goes_on())
    log.at = "2026-01-20T00:00:00.000Z"
    early = Forged(*HELD, submitted("i1"), withdrawn("i1"), goes_on())
    log.add(goes_on())
    log.add(submitted("i1"))
    assert log.wrong() == []
    early.forge(submitted("i1"))
    assert early.wrong() == [(6, "input")]


@pytest.mark.parametrize("name", ["llm/", "tool/", "0/", ""])
def test_a_number_of_any_length_in_a_name_makes_no_error(name: str):
    digits = "9" * 5000
    log = Forged(*HELD)
    for tail in (digits, f"{digits}/0/pay"):
        log.forge(start_of(name + tail, unsafe=False))
        log.forge(error_of(name + tail))
        log.forge(approved(f"{RUN}/{name}{tail}@1.{'0' * 16}", f"r{len(tail)}"))
    assert all(rule in RULES for _, rule in log.wrong())


def calls_for(steps: int) -> int:
    """Of functions, to audit a journal of so many rounds in one iteration."""
    log = Log(started())
    for n in range(1, steps + 1):
        log.add(model_start(n))
        log.add(reply_of(n, asks(request("pay")), ALLOW))
        log.add(start_of(f"tool/{n}/0/pay", input={}))
        log.add(result_of(f"tool/{n}/0/pay"))
    count = 0

    def counted(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(counted)
    try:
        found = audit(RUN, log.entries)
    finally:
        sys.setprofile(None)
    assert found == ()
    return count


def test_a_record_costs_no_more_in_a_long_journal_than_in_a_short_one():
    assert calls_for(200) < 4.4 * calls_for(50)


@given(st.lists(st.binary(max_size=40) | st.sampled_from([e.raw for e in journal()]), max_size=8))
def test_no_bytes_make_the_audit_raise(raws: list[bytes]):
    assert all(rule in RULES for _, rule in told_raw(raws))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)


@given(st.data(), st.integers(0, 40))
@settings(max_examples=150)
def test_no_value_in_any_field_makes_the_audit_raise(data: st.DataObject, seed: int):
    plain = [json.loads(entry.raw) for entry in seeded(seed, 30).entries]
    for _ in range(3):
        record = data.draw(st.sampled_from(plain))
        record[data.draw(st.sampled_from(sorted(record)))] = data.draw(VALUES)
    raws = [json.dumps(record, separators=(",", ":")).encode() for record in plain]
    assert all(rule in RULES for _, rule in told_raw(raws))


def test_the_audit_takes_the_entries_as_they_come():
    entries = Forged(*HELD, parked("pause"), resume()).entries
    assert audit(RUN, iter(entries)) == ()

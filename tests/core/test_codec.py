"""The wire format is frozen (R9, R18, R19): the bytes of every record type, what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import build
from kit.build import ALLOW, asking, asks, denying, request

from journal.codec import Damage, Entry, decode, record_hash, seal, tag
from journal.messages import Message, Reply, ToolRequest, Usage
from journal.records import (
    HOLDER_RECORDS,
    ZERO_HASH,
    AnyRecord,
    Claim,
    Commit,
    InputPlaced,
    Known,
    NewerRecord,
    Park,
    Record,
    Release,
    RunCompleted,
    RunPurged,
    RunStarted,
    Signal,
    StepCompleted,
    StepError,
    StepStarted,
    Submitted,
    Summary,
    Waits,
)

# Never edit a line of GOLDEN: journals of past releases look like this. A new optional field gets a
# new entry; the old bytes must still decode.
ENVELOPE = (
    '"v":1,"n":7,"id":"0123456789ab-7","at":"2026-01-02T03:04:05.678Z","by":"w1",'
    '"prev":"ffffffffffffffffffffffffffffffff"'
)
GOLDEN: dict[str, tuple[Record, str]] = {
    "run.started": (
        RunStarted(
            run="a1",
            agent="helpdesk",
            revision="1",
            input={"text": "VPN is down", "n": 1},
            digest="2d2a193fc2387577c6c394f0065f6a0d",
        ),
        '{"type":"run.started",%s,"run":"a1","agent":"helpdesk","revision":"1",'
        '"input":{"text":"VPN is down","n":1},"digest":"2d2a193fc2387577c6c394f0065f6a0d"}',
    ),
    "claim": (
        Claim(worker="w1", revision="1", reason="adopted", attempt=2, task=5, delivery=3),
        '{"type":"claim",%s,"worker":"w1","revision":"1","reason":"adopted","attempt":2,'
        '"task":5,"delivery":3}',
    ),
    "claim over HTTP": (
        Claim(worker="http-a-1", revision="1", reason="new", task=5, delivery=1, remote=True),
        '{"type":"claim",%s,"worker":"http-a-1","revision":"1","reason":"new","task":5,'
        '"delivery":1,"remote":true}',
    ),
    "claim with its release": (
        Claim(worker="w1", revision="1", reason="wake", runfold="0.5.0"),
        '{"type":"claim",%s,"worker":"w1","revision":"1","reason":"wake","runfold":"0.5.0"}',
    ),
    "claim of run()": (
        Claim(worker="w1", revision="1", reason="new"),
        '{"type":"claim",%s,"worker":"w1","revision":"1","reason":"new"}',
    ),
    "release": (
        Release(reason="stopped"),
        '{"type":"release",%s,"claim":2,"reason":"stopped"}',
    ),
    "step.started of a model call": (
        build.model_start(1),
        '{"type":"step.started",%s,"claim":2,"step":"llm/1","kind":"model",'
        '"digest":"6b774ac110f4ee0173ad87896f5f9f89","replay":"safe",'
        '"key":"a1:llm/1:6b774ac110f4ee01"}',
    ),
    "step.started of a write": (
        StepStarted(
            step="tool/1/1/pay",
            kind="tool",
            tool="pay",
            input={"a": 1},
            digest="c40d8628add51cffe2387e9227db6fa0",
            replay="unsafe",
            key="a1:tool/1/1/pay:c40d8628add51cff",
            permit=5,
            deadline="2026-01-02T03:09:35.678Z",
            attempt=2,
        ),
        '{"type":"step.started",%s,"claim":2,"step":"tool/1/1/pay","kind":"tool","tool":"pay",'
        '"input":{"a":1},"digest":"c40d8628add51cffe2387e9227db6fa0","replay":"unsafe",'
        '"key":"a1:tool/1/1/pay:c40d8628add51cff","permit":5,'
        '"deadline":"2026-01-02T03:09:35.678Z","attempt":2}',
    ),
    "step.completed of a model reply": (
        build.reply_of(
            1,
            asks(request("lookup", {"q": "VPN"}, id="c1"), request("pay", {"a": 1}, id="c2")),
            ALLOW,
            asking(1, 1, "pay"),
        ),
        '{"type":"step.completed",%s,"claim":2,"step":"llm/1","result":{"calls":['
        '{"id":"c1","name":"lookup","arguments":"{\\"q\\":\\"VPN\\"}"},'
        '{"id":"c2","name":"pay","arguments":"{\\"a\\":1}"}],"finish":"tool_calls"},'
        '"verdicts":[{"verdict":"allow"},'
        '{"verdict":"ask","marker":"a1/tool/1/1/pay@1.0123456789abcdef","text":"Pay?"}]}',
    ),
    "step.completed of a refused reply": (
        build.reply_of(2, asks(request("x", "{}", id="c3")), denying("unknown_tool", "no tool x")),
        '{"type":"step.completed",%s,"claim":2,"step":"llm/2","result":{"calls":['
        '{"id":"c3","name":"x","arguments":"{}"}],"finish":"tool_calls"},'
        '"verdicts":[{"verdict":"deny","type":"unknown_tool","reason":"no tool x"}]}',
    ),
    "step.completed with a null result": (
        StepCompleted(step="tool/1/0/lookup", result=None),
        '{"type":"step.completed",%s,"claim":2,"step":"tool/1/0/lookup","result":null}',
    ),
    "step.completed with an error": (
        StepCompleted(
            step="tool/1/1/pay",
            error=StepError(type="tool_error", message="declined", data={"code": 7}),
        ),
        '{"type":"step.completed",%s,"claim":2,"step":"tool/1/1/pay",'
        '"error":{"type":"tool_error","message":"declined","data":{"code":7}}}',
    ),
    "step.completed by a person": (
        StepCompleted(step="tool/1/1/pay", result="TICKET-7", via="reconcile"),
        '{"type":"step.completed",%s,"claim":2,"step":"tool/1/1/pay","result":"TICKET-7",'
        '"via":"reconcile"}',
    ),
    "park": (
        Park(why="reconcile", iteration=3, attempt=2),
        '{"type":"park",%s,"claim":2,"why":"reconcile","iteration":3,"attempt":2}',
    ),
    "commit": (
        Commit(action="fail", iteration=3, reason="iterations", detail="200 model calls made"),
        '{"type":"commit",%s,"claim":2,"action":"fail","iteration":3,"reason":"iterations",'
        '"detail":"200 model calls made"}',
    ),
    "run.completed": (
        RunCompleted(message=msgspec.to_builtins(Message(role="assistant", content="Done."))),
        '{"type":"run.completed",%s,"claim":2,"message":{"role":"assistant","content":"Done."}}',
    ),
    "signal approve": (
        Signal(
            name="approve",
            request_id="r1",
            payload={"marker": "a1/tool/1/1/pay@1.0123456789abcdef", "comment": "ok"},
        ),
        '{"type":"signal",%s,"name":"approve","request_id":"r1","payload":'
        '{"marker":"a1/tool/1/1/pay@1.0123456789abcdef","comment":"ok"}}',
    ),
    "signal reconcile": (
        build.done("tool/1/1/pay", 6, None, request_id="r2"),
        '{"type":"signal",%s,"name":"reconcile","request_id":"r2","payload":'
        '{"step":"tool/1/1/pay","outcome":"done","result":null,"start":6}}',
    ),
    "run.purged": (RunPurged(), '{"type":"run.purged",%s}'),
    # ---- the fleet
    "run.started of a child with a place in the queue": (
        RunStarted(
            run="a1.c1",
            agent="helpdesk",
            revision="1",
            input=None,
            digest="2d2a193fc2387577c6c394f0065f6a0d",
            parent="a1",
            depth=1,
            priority=-1,
            key="customer-7",
        ),
        '{"type":"run.started",%s,"run":"a1.c1","agent":"helpdesk","revision":"1","input":null,'
        '"digest":"2d2a193fc2387577c6c394f0065f6a0d","parent":"a1","depth":1,"priority":-1,'
        '"key":"customer-7"}',
    ),
    "step.started of a write with a policy": (
        build.start_of("0/1", "pay", {"a": 1}, policy="interrupt", deadline=""),
        '{"type":"step.started",%s,"claim":2,"step":"0/1","kind":"tool","tool":"pay",'
        '"input":{"a":1},"digest":"c40d8628add51cffe2387e9227db6fa0","replay":"unsafe",'
        '"key":"a1:0/1:c40d8628add51cff","policy":"interrupt"}',
    ),
    "step.progress": (
        build.progress_of("0/1", {"sent": 3}),
        '{"type":"step.progress",%s,"claim":2,"step":"0/1","output":{"sent":3}}',
    ),
    "step.completed of an interrupted write": (
        build.interrupted_of("0/1", {"sent": 3}),
        '{"type":"step.completed",%s,"claim":2,"step":"0/1","interrupted":{"partial":{"sent":3}},'
        '"via":"interrupted"}',
    ),
    "step.completed of an interrupted write without progress": (
        build.interrupted_of("0/1"),
        '{"type":"step.completed",%s,"claim":2,"step":"0/1","interrupted":{},"via":"interrupted"}',
    ),
    "step.completed by a probe": (
        StepCompleted(step="0/1", result="paid", via="probe"),
        '{"type":"step.completed",%s,"claim":2,"step":"0/1","result":"paid","via":"probe"}',
    ),
    "step.completed by a late result": (
        StepCompleted(step="0/1", result="paid", via="late"),
        '{"type":"step.completed",%s,"claim":2,"step":"0/1","result":"paid","via":"late"}',
    ),
    "step.completed of a call that was not made": (
        build.error_of("0/1", "not_called", "fenced", via="not_called"),
        '{"type":"step.completed",%s,"claim":2,"step":"0/1",'
        '"error":{"type":"not_called","message":"fenced"},"via":"not_called"}',
    ),
    "park for a decision with an end": (
        Park(
            why="approval",
            iteration=3,
            until="2026-01-03T00:00:00.000Z",
            asks=(build.asked_for("3/0"),),
        ),
        '{"type":"park",%s,"claim":2,"why":"approval","iteration":3,'
        '"until":"2026-01-03T00:00:00.000Z","asks":[{"marker":"a1/3/0@1.0123456789abcdef",'
        '"step":"3/0","tool":"pay","input":null,"text":"Pay?"}]}',
    ),
    "park for a reconcile of steps": (
        Park(why="reconcile", steps=("tool/1/1/pay",)),
        '{"type":"park",%s,"claim":2,"why":"reconcile","steps":["tool/1/1/pay"]}',
    ),
    "park for another attempt": (
        Park(
            why="retry",
            attempt=2,
            until="2026-01-02T03:04:06.678Z",
            reason="Timeout",
            afresh=True,
        ),
        '{"type":"park",%s,"claim":2,"why":"retry","attempt":2,'
        '"until":"2026-01-02T03:04:06.678Z","reason":"Timeout","afresh":true}',
    ),
    "park for an operator": (
        Park(why="pause", reason="the code changed"),
        '{"type":"park",%s,"claim":2,"why":"pause","reason":"the code changed"}',
    ),
    "commit that goes on at once": (
        Commit(action="continue", iteration=3, state={"seen": 2}),
        '{"type":"commit",%s,"claim":2,"action":"continue","iteration":3,"state":{"seen":2}}',
    ),
    "commit with waits": (
        Commit(
            action="continue",
            waits=Waits(
                until="2026-01-03T00:00:00.000Z",
                until_input=True,
                until_child="a1.c1",
                resume=True,
            ),
            reason="lunch",
        ),
        '{"type":"commit",%s,"claim":2,"action":"continue",'
        '"waits":{"until":"2026-01-03T00:00:00.000Z","until_input":true,"until_child":"a1.c1",'
        '"resume":true},"reason":"lunch"}',
    ),
    "commit with an empty summary": (
        Commit(action="continue", summary=Summary()),
        '{"type":"commit",%s,"claim":2,"action":"continue","summary":{}}',
    ),
    "commit with a summary": (
        Commit(
            action="continue",
            summary=Summary(
                claim_n=2,
                claim={"worker": "w1", "revision": "1"},
                revision="1",
                model_calls=3,
                requests=(
                    Known(
                        request_id="r1",
                        name="reject",
                        n=4,
                        at="2026-01-02T03:04:05.678Z",
                        digest="d" * 32,
                        by="anna",
                        about="a1/0/1@1.0123456789abcdef",
                        reason="no",
                    ),
                ),
                inputs=(
                    Submitted(
                        request_id="i1",
                        mode="follow_up",
                        content="and?",
                        n=5,
                        at="2026-01-02T03:04:05.678Z",
                    ),
                    Submitted(
                        request_id="i2",
                        mode="steer",
                        content=None,
                        n=6,
                        at="2026-01-02T03:04:05.678Z",
                        status="done",
                        placed_at="llm/2",
                    ),
                ),
                children={"a1.c1": None},
                interrupted=("c40d8628",),
                cancel=Known(
                    request_id="r2",
                    name="cancel",
                    n=7,
                    at="2026-01-02T03:04:05.678Z",
                    digest="e" * 32,
                ),
            ),
        ),
        '{"type":"commit",%s,"claim":2,"action":"continue","summary":{"claim_n":2,'
        '"claim":{"worker":"w1","revision":"1"},"revision":"1","model_calls":3,'
        '"requests":[{"request_id":"r1",'
        '"name":"reject","n":4,"at":"2026-01-02T03:04:05.678Z",'
        '"digest":"dddddddddddddddddddddddddddddddd","by":"anna",'
        '"about":"a1/0/1@1.0123456789abcdef","reason":"no"}],"inputs":[{"request_id":"i1",'
        '"mode":"follow_up","content":"and?","n":5,"at":"2026-01-02T03:04:05.678Z"},'
        '{"request_id":"i2","mode":"steer","content":null,"n":6,'
        '"at":"2026-01-02T03:04:05.678Z","status":"done","placed_at":"llm/2"}],'
        '"children":{"a1.c1":null},"interrupted":["c40d8628"],"cancel":{"request_id":"r2",'
        '"name":"cancel","n":7,"at":"2026-01-02T03:04:05.678Z",'
        '"digest":"eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee"}}}',
    ),
    "commit that fails and may be resumed": (
        Commit(action="fail", reason="restart_limit", retriable=True, afresh=True),
        '{"type":"commit",%s,"claim":2,"action":"fail","reason":"restart_limit",'
        '"retriable":true,"afresh":true}',
    ),
    "commit that cancels": (
        Commit(action="cancel", iteration=1, reason="enough"),
        '{"type":"commit",%s,"claim":2,"action":"cancel","iteration":1,"reason":"enough"}',
    ),
    "run.completed in a later iteration": (
        RunCompleted(message="Done.", iteration=4),
        '{"type":"run.completed",%s,"claim":2,"message":"Done.","iteration":4}',
    ),
    "signal cancel": (
        build.cancel("enough", "r3"),
        '{"type":"signal",%s,"name":"cancel","request_id":"r3","payload":{"reason":"enough"}}',
    ),
    "signal resume": (
        build.resume("r4"),
        '{"type":"signal",%s,"name":"resume","request_id":"r4","payload":{}}',
    ),
    "signal late": (
        build.late("0/1", 6, "paid", "r5"),
        '{"type":"signal",%s,"name":"late","request_id":"r5","payload":'
        '{"step":"0/1","start":6,"result":"paid"}}',
    ),
    "signal child": (
        build.child_ended("a1.c1", {"status": "failed"}),
        '{"type":"signal",%s,"name":"child","request_id":"a1.c1","payload":'
        '{"run":"a1.c1","outcome":{"status":"failed"}}}',
    ),
    "input": (
        build.submitted("i1", "follow_up", {"text": "and?"}),
        '{"type":"input",%s,"request_id":"i1","mode":"follow_up","content":{"text":"and?"}}',
    ),
    "input.withdrawn": (
        build.withdrawn("i1"),
        '{"type":"input.withdrawn",%s,"request_id":"i1"}',
    ),
    "input.placed": (
        InputPlaced(request_id="i1", iteration=2, position="2/0"),
        '{"type":"input.placed",%s,"claim":2,"request_id":"i1","iteration":2,"position":"2/0"}',
    ),
}


def golden(case: str) -> tuple[Record, bytes]:
    body, text = GOLDEN[case]
    return body, (text % ENVELOPE).encode()


def sealed(body: Record) -> tuple[Record, bytes]:
    claim = 2 if isinstance(body, HOLDER_RECORDS) else 0
    at, prev = "2026-01-02T03:04:05.678Z", "f" * 32
    return seal(body, n=7, id="0123456789ab-7", at=at, by="w1", prev=prev, claim=claim)


def edited(case: str, **changes: Any) -> bytes:
    """The golden record with fields changed, added, or (`...`) left out, as JSON."""
    fields = json.loads(golden(case)[1]) | changes
    kept = {name: value for name, value in fields.items() if value is not ...}
    return msgspec.json.encode(kept)


# ---- what is written --------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN)
def test_a_record_is_written_as_exactly_these_bytes(case: str):
    body, raw = golden(case)
    assert sealed(body)[1] == raw


@pytest.mark.parametrize("case", GOLDEN)
def test_these_bytes_are_read_as_the_record_that_was_written(case: str):
    body, raw = golden(case)
    record = decode(raw)
    assert record == sealed(body)[0]
    assert type(record) is type(body)
    assert Entry(record, raw).type == tag(body) == json.loads(raw)["type"]


def test_every_record_type_has_its_bytes_written_down_here():
    types = {type(body) for body, _ in GOLDEN.values()}
    assert types == set(AnyRecord.__args__)


def fields_of(kind: type) -> set[str]:
    return set(kind.__struct_fields__) - set(Record.__struct_fields__)


@pytest.mark.parametrize("kind", AnyRecord.__args__, ids=lambda kind: kind.__name__)
def test_every_field_of_a_record_stands_in_some_of_these_bytes(kind: type[Record]):
    texts = [text for body, text in GOLDEN.values() if type(body) is kind]
    written = {name for text in texts for name in json.loads(text % ENVELOPE)}
    assert fields_of(kind) - written == set()


@pytest.mark.parametrize("kind", [Known, Submitted, Summary, Waits])
def test_every_field_of_what_a_commit_holds_stands_in_these_bytes(kind: type):
    text = GOLDEN["commit with a summary"][1] + GOLDEN["commit with waits"][1]
    assert [name for name in kind.__struct_fields__ if f'"{name}":' not in text] == []


def test_the_shapes_inside_a_record_are_frozen_too():
    reply = Reply(
        text="t",
        calls=(ToolRequest(id="c", name="n", arguments="{}"),),
        finish="length",
        usage=Usage(input_tokens=3, output_tokens=4),
    )
    assert msgspec.json.encode(reply) == (
        b'{"text":"t","calls":[{"id":"c","name":"n","arguments":"{}"}],"finish":"length",'
        b'"usage":{"input_tokens":3,"output_tokens":4}}'
    )
    message = Message(role="tool", content={"a": 1}, call_id="c")
    assert msgspec.json.encode(message) == b'{"role":"tool","content":{"a":1},"call_id":"c"}'


def test_the_hash_of_a_record_is_blake2b_128_of_its_bytes():
    assert record_hash(b"") == "cae66941d9efbd404e4d88758ea67670"
    assert record_hash(golden("run.purged")[1]) == "f1a84c5522bf9a2e0eb56833e3cebe84"
    assert ZERO_HASH == "0" * 32


# ---- what a newer version wrote ---------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN)
def test_an_unknown_field_is_ignored_and_its_bytes_are_kept(case: str):
    body, _ = golden(case)
    raw = edited(case, zz_new={"deep": [1]})
    entry = Entry(decode(raw), raw)
    assert entry.record == sealed(body)[0]
    assert entry.raw == raw
    assert b'"zz_new":{"deep":[1]}' in entry.raw


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"type": "step.paused"}, "step.paused"),
        ({"v": 2}, "version 2"),
        ({"v": 2, "type": "input.placed"}, "input.placed"),
        ({"via": "rumour"}, "rumour"),
        ({"type": "input", "mode": "whisper", "request_id": "i", "content": 1}, "whisper"),
        ({"verdicts": [{"verdict": "defer"}]}, "defer"),
        ({"error": 7}, "error"),
        ({"step": ...}, "step"),
    ],
)
def test_a_well_formed_record_that_this_version_cannot_read_is_newer(
    changes: dict[str, Any], why: str
):
    record = decode(edited("step.completed by a person", **changes))
    assert isinstance(record, NewerRecord)
    assert (record.n, record.id, record.prev) == (7, "0123456789ab-7", "f" * 32)
    assert why in f"{record.type_}: {record.why}"


def test_a_newer_record_says_in_plain_words_what_is_new_about_it():
    def why(**changes: Any) -> str:
        record = decode(edited("step.completed by a person", **changes))
        assert isinstance(record, NewerRecord)
        return record.why

    assert why(type="step.paused") == "this version knows no such type"
    assert why(v=2) == "its format is version 2, and this one reads 1"
    assert why(via="rumour") == "this version can't read its via: Invalid enum value 'rumour'"


def test_a_newer_record_is_listed_under_its_own_type():
    raw = edited("signal approve", type="signal.sealed", claim=...)
    assert Entry(decode(raw), raw).type == "signal.sealed"


@pytest.mark.parametrize("name", ["approve", "cancel", "input"])
def test_a_signal_of_a_name_that_is_none_is_newer(name: str):
    record = decode(edited("signal resume", name=name + "s"))
    assert isinstance(record, NewerRecord)
    assert name + "s" in record.why


# ---- what no version wrote --------------------------------------------------------------------

MISSHAPEN: dict[str, tuple[bytes, str]] = {
    "blank line": (b"", "blank line"),
    "spaces": (b"  \t ", "blank line"),
    "not JSON": (b"hello", "not a JSON object"),
    "an array": (b"[1]", "not a JSON object"),
    "NUL bytes": (b"\0" * 512, "not a JSON object"),
    "gzip": (b"\x1f\x8b\x08\x00abc", "gzip"),
    "byte order mark": (b"\xef\xbb\xbf" + golden("claim")[1], "byte order mark"),
    "CR before the LF": (golden("claim")[1] + b"\r", "CR LF"),
    "a blank before": (b" " + golden("claim")[1], "not a JSON object"),
    "a blank after": (golden("claim")[1] + b" ", "not a JSON object"),
    "two records in one": (golden("claim")[1] * 2, "not a JSON record"),
    "half a record in front": (golden("claim")[1][:20] + golden("claim")[1], "not a JSON record"),
    "not UTF-8": (golden("claim")[1].replace(b"w1", b"w\xff"), "not a JSON record"),
    "half a surrogate": (golden("claim")[1].replace(b"w1", b"\\ud83d"), "not a JSON record"),
    "nested without end": (b'{"a":' * 20_000 + b"}" * 20_000, "not a JSON record"),
    "no type": (edited("claim", type=...), "type"),
    "a type that is no text": (edited("claim", type=7), "type"),
    "no version": (edited("claim", v=...), "version"),
    "version 0": (edited("claim", v=0), "version"),
    "a version that is no number": (edited("claim", v="1"), "version"),
    "a version that is true": (edited("claim", v=True), "version"),
    "no ordinal": (edited("claim", n=...), "ordinal"),
    "ordinal 0": (edited("claim", n=0), "ordinal"),
    "ordinal -1": (edited("claim", n=-1), "ordinal"),
    "an ordinal that is no number": (edited("claim", n="7"), "ordinal"),
    "a claim below 0": (edited("park", claim=-1), "ordinal"),
    "no writer id": (edited("claim", id=...), "record 7 has no writer id"),
    "another writer id": (edited("claim", id="7"), "record 7 has no writer id"),
    "a writer id in capitals": (edited("claim", id="0123456789AB-7"), "writer id"),
    "a writer id with a line end": (edited("claim", id="0123456789ab-7\n"), "writer id"),
    "no hash": (edited("claim", prev=...), "record 7 has no hash"),
    "a short hash": (edited("claim", prev="f" * 31), "record 7 has no hash"),
    "a newer record without its envelope": (b'{"type":"future","v":9}', "ordinal"),
}


@pytest.mark.parametrize("case", MISSHAPEN)
def test_what_no_version_writes_is_damage_with_the_reason(case: str):
    raw, why = MISSHAPEN[case]
    with pytest.raises(Damage) as raised:
        decode(raw)
    assert why in str(raised.value)


def outcome(raw: bytes) -> Record | None:
    """The record, or None where it is damage; anything else that decode raises is a failure."""
    try:
        return decode(raw)
    except Damage:
        return None


goldens = st.sampled_from(sorted(GOLDEN)).map(lambda case: golden(case)[1])


@given(goldens, st.data())
def test_a_truncated_record_is_never_accepted(raw: bytes, data: st.DataObject):
    cut = data.draw(st.integers(0, len(raw) - 1))
    assert outcome(raw[:cut]) is None


@pytest.mark.parametrize("case", GOLDEN)
def test_no_prefix_and_no_suffix_of_a_record_is_a_record(case: str):
    raw = golden(case)[1]
    assert [cut for cut in range(len(raw)) if outcome(raw[:cut]) is not None] == []
    assert [cut for cut in range(1, len(raw)) if outcome(raw[cut:]) is not None] == []


@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_damage(raw: bytes):
    assert outcome(raw) is None or raw.startswith(b"{")


@given(goldens, st.integers(0, 2**16), st.integers(0, 255))
def test_a_changed_byte_decodes_or_is_damage_and_changes_the_hash(raw: bytes, at: int, byte: int):
    edited = bytearray(raw)
    edited[at % len(raw)] = byte
    record = outcome(bytes(edited))
    assert record is None or isinstance(record, Record)
    assert (record_hash(bytes(edited)) == record_hash(raw)) == (bytes(edited) == raw)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(sorted(GOLDEN)),
    st.dictionaries(
        st.sampled_from(["v", "n", "id", "type", "prev", "claim", "at", "by", "step", "result"]),
        json_values,
    ),
)
def test_fields_of_any_json_type_decode_or_are_damage(case: str, changes: dict[str, Any]):
    record = outcome(edited(case, **changes))
    if record is not None:
        assert type(record.n) is int and record.n >= 1
        assert type(record.claim) is int and record.claim >= 0
        assert isinstance(record.id, str) and isinstance(record.prev, str)

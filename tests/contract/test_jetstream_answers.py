"""Which answers of the server are a lost race, and which only unknown (R12)."""

from __future__ import annotations

import json

import pytest

from journal.errors import (
    StoreUnavailable,
)
from journal.store import Appended, Conflict, Unknown
from journal.stores.jetstream_answers import read_ack, read_batch_ack

STREAM = "RUNFOLD_JOURNAL_0"


# ---- answers -------------------------------------------------------------------------------------


def answer_of(err_code: int, code: int) -> bytes:
    error = {"code": code, "err_code": err_code, "description": "wrong last sequence: 7"}
    return json.dumps({"error": error, "stream": STREAM, "seq": 0}).encode()


@pytest.mark.parametrize(
    ("err_code", "code"),
    [
        (10164, 400),  # in flight on a cluster
        (10158, 409),
        (10008, 503),
        (10023, 503),
        (10163, 503),
        (10047, 500),
        (10009, 500),
        (10167, 429),
        (10210, 429),
        (10194, 500),
    ],
)
def test_what_may_pass_is_unknown_and_never_a_lost_race(err_code: int, code: int) -> None:
    answer = read_ack(answer_of(err_code, code), stream=STREAM, expected=7)
    assert isinstance(answer, Unknown)
    assert str(err_code) in answer.cause


def test_only_a_wrong_last_sequence_is_a_lost_race() -> None:
    assert read_ack(answer_of(10071, 400), stream=STREAM, expected=7) == Conflict()


@pytest.mark.parametrize(
    ("err_code", "code"), [(10060, 400), (10077, 503), (10165, 400), (10054, 400), (10059, 404)]
)
def test_what_no_retry_settles_is_an_error(err_code: int, code: int) -> None:
    with pytest.raises(StoreUnavailable, match=str(err_code)):
        read_ack(answer_of(err_code, code), stream=STREAM, expected=7)


def test_no_error_code_of_the_server_is_taken_for_a_lost_race() -> None:
    for err_code in range(10000, 10300):
        for code in (400, 404, 409, 412, 429, 500, 503):
            try:
                answer = read_ack(answer_of(err_code, code), stream=STREAM, expected=7)
            except StoreUnavailable:
                continue
            assert not isinstance(answer, Appended)
            assert isinstance(answer, Conflict) == (err_code == 10071)


def test_an_ack_of_another_stream_is_an_error() -> None:
    with pytest.raises(StoreUnavailable, match="OTHER"):
        read_ack(b'{"stream":"OTHER","seq":8}', stream=STREAM, expected=7)


@pytest.mark.parametrize(
    "data",
    [b"", b"+OK", b"[]", b'{"stream":"RUNFOLD_JOURNAL_0","seq":"8"}', b"\xff\xfe"]
    + [b'{"stream":"RUNFOLD_JOURNAL_0","seq":%d}' % seq for seq in (0, 6, 7)],
)
def test_an_answer_that_is_no_ack_of_this_append_is_unknown(data: bytes) -> None:
    assert isinstance(read_ack(data, stream=STREAM, expected=7), Unknown)


def test_an_ack_is_appended_with_its_sequence() -> None:
    ack = b'{"stream":"RUNFOLD_JOURNAL_0","seq":8,"domain":"x"}'
    assert read_ack(ack, stream=STREAM, expected=7) == Appended(8)


# ---- answers to a batch --------------------------------------------------------------------------


def batch_ack(seq: int, count: int, stream: str = STREAM) -> bytes:
    return json.dumps({"stream": stream, "seq": seq, "batch": "b", "count": count}).encode()


def test_each_record_of_a_batch_has_the_sequence_of_its_place() -> None:
    answers = read_batch_ack(batch_ack(9, 3), stream=STREAM, expected=[0, 6, 7])
    assert answers == [Appended(7), Appended(8), Appended(9)]


@pytest.mark.parametrize("expected", [[7, 0, 0], [0, 8, 0], [0, 0, 9]])
def test_a_batch_is_stored_only_behind_what_each_of_its_records_expects(
    expected: list[int],
) -> None:
    answers = read_batch_ack(batch_ack(9, 3), stream=STREAM, expected=expected)
    assert [type(answer) for answer in answers] == [Unknown] * 3


@pytest.mark.parametrize("data", [batch_ack(9, 2), batch_ack(9, 4), batch_ack(9, 0), b"x", b""])
def test_what_does_not_acknowledge_the_batch_is_unknown_to_each(data: bytes) -> None:
    answers = read_batch_ack(data, stream=STREAM, expected=[0, 0, 0])
    assert [type(answer) for answer in answers] == [Unknown] * 3


@pytest.mark.parametrize("err_code", [10071, 10164, 10174, 10176, 10008, 10077])
def test_a_refused_batch_says_nothing_of_its_records(err_code: int) -> None:
    answer = answer_of(err_code, 400)
    assert read_batch_ack(answer, stream=STREAM, expected=[0, 0]) == [None, None]


def test_a_batch_that_another_stream_took_is_an_error() -> None:
    with pytest.raises(StoreUnavailable, match="OTHER"):
        read_batch_ack(batch_ack(9, 1, "OTHER"), stream=STREAM, expected=[0])

"""R1, R2: one rule for ids at every door; encodings that never let two ids meet."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal import ids
from journal.errors import InvalidId
from journal.ids import RunId

FIRST = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
BAD = [
    *("", ".", "..", "../x", "/etc/x", "a/b", "a\\b", "C:x", "a:b", "x ", " x", "a*", ">"),
    *("a\tb", "a\nb", "a\n", "\na", "a\r\nb", "a\0b", "%2e%2e", "~", "a~b", "-rf", "_a"),
    *("é", "😀", "\u0661", "a" * 129, "a" * 255, "a" * 5000),
]
GOOD = ["CON", "nul.txt", "x.", "a.b", "a", "A-1_b", "a" * 128, str(uuid.UUID(int=7)), "0", "a..b"]
RESERVED = ["con", "PRN", "aux", "Nul", "com1", "LPT9", "nul.txt", "Con.a.b", "aux."]

run_ids = st.builds(
    lambda first, rest: RunId(first + rest),
    st.sampled_from(FIRST),
    st.text(FIRST + "_.-", max_size=127),
)
crowded_ids = st.one_of(  # ids that are close to one another, where an encoding would slip
    run_ids,
    st.builds(lambda text: RunId(f"a{text}"), st.text("aA.", max_size=5)),
    st.sampled_from(RESERVED).map(RunId),
)


@pytest.mark.parametrize("value", GOOD)
def test_a_legal_run_id_is_taken_as_it_is(value: str):
    assert ids.valid_run_id(value)
    assert ids.run_id(value) == value


@pytest.mark.parametrize("value", BAD, ids=lambda value: ascii(value[:20]))
def test_any_other_run_id_is_refused_with_a_bounded_printable_message(value: str):
    assert not ids.valid_run_id(value)
    with pytest.raises(InvalidId) as raised:
        ids.run_id(value)
    assert raised.value.message.isprintable()
    assert len(raised.value.message) < 1000
    assert "A-Z a-z 0-9" in raised.value.hint


@given(st.text(max_size=140))
def test_what_is_refused_is_exactly_what_the_rule_excludes(value: str):
    allowed = set(FIRST + "_.-")
    legal = 1 <= len(value) <= 128 and set(value) <= allowed and value[0] in FIRST
    assert ids.valid_run_id(value) == legal


def test_a_made_up_run_id_is_legal_and_random():
    made = {ids.new_run_id() for _ in range(200)}
    assert len(made) == 200
    assert all(ids.valid_run_id(run) for run in made)


@pytest.mark.parametrize("value", ["-a", ".a", "a" * 65, "", "a b", "a/b", "ä", "a\n"])
def test_a_name_that_is_none_is_refused_and_says_what_it_was_for(value: str):
    assert not ids.valid_name(value)
    with pytest.raises(InvalidId, match="a tool"):
        ids.name(value, "a tool")


@pytest.mark.parametrize("value", ["a", "_a", "send.email", "send-email", "a" * 64])
def test_a_legal_name_is_taken_as_it_is(value: str):
    assert ids.name(value, "a tool") == value


@pytest.mark.parametrize("value", ["A", "1a", "", "a.b", "a_b", "a" * 33, "a\n", "*"])
def test_a_namespace_that_is_none_is_refused(value: str):
    with pytest.raises(InvalidId, match="not a namespace"):
        ids.namespace(value)


@pytest.mark.parametrize("value", ["a", "a-1", "a" * 32])
def test_a_legal_namespace_is_taken_as_it_is(value: str):
    assert ids.namespace(value) == value


# ---- encodings --------------------------------------------------------------------------------


@given(crowded_ids)
def test_a_run_is_one_subject_token_that_reads_back_as_the_same_run(run: RunId):
    token = ids.subject_token(run)
    assert not set(token) & set(".*> \t\r\n")
    assert ids.from_subject_token(token) == run


@given(crowded_ids, crowded_ids)
def test_two_runs_never_share_a_subject_token(one: RunId, other: RunId):
    assert (ids.subject_token(one) == ids.subject_token(other)) == (one == other)


@pytest.mark.parametrize("token", ["", "a.b", "~a", "*", ">", "a b", "a" * 129, "é"])
def test_a_subject_token_that_no_run_has_is_refused(token: str):
    with pytest.raises(InvalidId):
        ids.from_subject_token(token)


@given(crowded_ids)
def test_a_runs_file_name_reads_back_as_the_same_run(run: RunId):
    assert ids.from_file_stem(ids.file_stem(run)) == run


@given(crowded_ids, crowded_ids)
def test_two_runs_never_share_a_file_name_where_case_is_ignored(one: RunId, other: RunId):
    same = ids.file_stem(one).lower() == ids.file_stem(other).lower()
    assert same == (one == other)


@given(crowded_ids)
def test_a_file_name_stays_in_its_folder_and_within_255_bytes(run: RunId):
    stem = ids.file_stem(run)
    assert not set(stem) & set('/\\:*?"<>| ')
    assert not stem.startswith(".")
    assert len(f"{stem}.jsonl") <= 255


@pytest.mark.parametrize("run", RESERVED)
def test_no_run_gets_a_file_name_that_windows_reserves(run: str):
    assert ids.file_stem(RunId(run)).lower().partition(".")[0] != run.lower().partition(".")[0]


@pytest.mark.parametrize(
    "stem",
    [
        "",
        "..",
        "a~",
        "a~0",
        "a~1",
        "A",
        "A~2",
        "A~01",
        "A~1~1",
        "con",
        "nul.txt",
        "con~1",
        "a b",
        "A~g",
        "a.B~2",
        "é",
    ],
)
def test_a_file_name_that_no_run_has_is_no_run(stem: str):
    assert ids.from_file_stem(stem) is None


@given(st.text("aAcon~.01x", max_size=8))
def test_a_file_name_has_at_most_one_run(stem: str):
    run = ids.from_file_stem(stem)
    assert run is None or ids.file_stem(run) == stem


# ---- markers ----------------------------------------------------------------------------------


@given(run_ids, st.integers(1, 999_999), st.sampled_from(["tool/2/0/pay", "tool/1/31/?"]))
def test_a_marker_names_its_run(run: RunId, attempt: int, step: str):
    marker = ids.marker(run, step, attempt, "0123456789abcdef")
    assert ids.marker_run(marker) == run


@pytest.mark.parametrize(
    "value",
    [
        "",
        "a1",
        "a1/tool/2/0/pay",
        "a1/tool/2/0/pay@1",
        "a1/tool/2/0/pay@0.0123456789abcdef",
        "a1/tool/2/0/pay@1.0123456789ABCDEF",
        "a1/tool/2/0/pay@1.0123456789abcde",
        "a1/tool/2/0/pay@1.0123456789abcdef ",
        "a1/tool/2/0/pay@1.0123456789abcdef\n",
        "../tool/2/0/pay@1.0123456789abcdef",
        "/tool/2/0/pay@1.0123456789abcdef",
        "a1/@1.0123456789abcdef",
        "a1\n/tool/2/0/pay@1.0123456789abcdef",
    ],
)
def test_what_is_no_marker_is_refused(value: str):
    with pytest.raises(InvalidId, match="not a marker"):
        ids.marker_run(value)


@given(st.text(min_size=65, max_size=300))
def test_a_refused_value_is_shown_escaped_and_cut(value: str):
    shown = ids.shown(value)
    assert shown.replace("…", "").isascii()
    assert shown.isprintable()
    assert str(len(value)) in shown

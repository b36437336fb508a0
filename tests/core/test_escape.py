"""R68: nothing that is recorded may move the cursor, hide or reorder what a person reads."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from journal.escape import escaped_json, visible, visible_json, visible_lines

BIDIRECTIONAL = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
MARKS = {"\u200e", "\u200f", "\u061c"}
SEPARATORS = {"\u2028", "\u2029", "\x85"}
IGNORABLE = [  # Default_Ignorable_Code_Point of Unicode 16: what a terminal draws as nothing
    (0xAD, 0xAD),
    (0x34F, 0x34F),
    (0x61C, 0x61C),
    (0x115F, 0x1160),
    (0x17B4, 0x17B5),
    (0x180B, 0x180F),
    (0x200B, 0x200F),
    (0x202A, 0x202E),
    (0x2060, 0x206F),
    (0x3164, 0x3164),
    (0xFE00, 0xFE0F),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xE0000, 0xE0FFF),
]
FORMATS_THAT_SLIP = [(0xFFF0, 0xFFF8), (0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A)]

nasty = st.text(st.characters() | st.sampled_from("\x1b\x07\r\n\t\u202e\u2066\u200b\x9b"))


def controls(text: str) -> list[str]:
    """The characters of a text that a person could not see, or that reorder others."""
    return [
        char
        for char in text
        if unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp")
        or unicodedata.bidirectional(char) in BIDIRECTIONAL
        or char in MARKS
        or char in SEPARATORS
    ]


@given(nasty)
def test_visible_text_is_one_line_without_a_control_or_bidirectional_character(text: str):
    assert controls(visible(text)) == []


@pytest.mark.parametrize("code", [*range(0x20), *range(0x7F, 0xA0)])
def test_every_control_character_is_shown_as_an_escape(code: int):
    assert visible(chr(code)).startswith("\\")
    assert visible(chr(code)).isascii()


@pytest.mark.parametrize(("first", "last"), IGNORABLE, ids=[hex(a) for a, _ in IGNORABLE])
def test_a_character_that_is_drawn_as_nothing_is_shown(first: int, last: int):
    assert [hex(code) for code in range(first, last + 1) if visible(chr(code)) == chr(code)] == []


@pytest.mark.parametrize(("first", "last"), FORMATS_THAT_SLIP)
def test_a_rare_character_that_is_drawn_as_nothing_is_shown(first: int, last: int):
    assert [hex(code) for code in range(first, last + 1) if visible(chr(code)) == chr(code)] == []


@pytest.mark.parametrize(
    "text", ["", "Ticket 7", "naïve", "日本語", "😀", "مرحبا", "a\u0301", "\\n"]
)
def test_text_that_a_person_can_see_is_left_alone(text: str):
    assert visible(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", "a\\nb"),
        ("\x1b[2J", "\\x1b[2J"),
        ("user\u202egnp.exe", "user\\u202egnp.exe"),
        ("pay\u200b10", "pay\\u200b10"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud83d", "\\ud83d"),
    ],
)
def test_what_cannot_be_seen_stands_as_its_escape(text: str, shown: str):
    assert visible(text) == shown


@given(nasty)
def test_a_block_of_text_keeps_its_lines_and_tabs_and_nothing_else(text: str):
    shown = visible_lines(text)
    assert set(controls(shown)) <= {"\n", "\t"}
    assert shown.count("\n") == text.count("\n")
    assert shown.count("\t") == text.count("\t")


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text("a\x1b\u202eé")))
def test_a_value_is_shown_whole_on_one_line(value: dict[str, Any]):
    shown = visible_json(value)
    assert controls(shown) == []
    assert shown.startswith("{")


@given(st.dictionaries(st.text('ab"\\ \n\x1b'), st.text('a"\\ \n\x00\u0085x')))
def test_what_is_shown_for_approval_is_what_runs(value: dict[str, Any]):
    """What stands there is the very JSON text of the value, apart from what can't be seen."""
    assert json.loads(visible_json(value).replace("\\x85", "\x85")) == value


def test_a_cut_value_says_that_it_is_cut():
    shown = visible_json({"text": "x" * 100}, chars_max=20)
    assert shown.startswith('{"text":"xxxxxxxxxxx… (')
    assert "111 characters" in shown


@given(st.text())
def test_json_that_is_escaped_says_the_same_and_shows_nothing_unseen(text: str) -> None:
    raw = json.dumps({"text": text}, ensure_ascii=False, separators=(",", ":"))
    found = escaped_json(raw.encode("utf-8", "replace"))
    assert visible(found) == found
    assert json.loads(found) == json.loads(raw.encode("utf-8", "replace"))


def test_a_character_beyond_sixteen_bits_is_escaped_as_a_pair() -> None:
    assert escaped_json('"\U000e0041"'.encode()) == r'"\udb40\udc41"'

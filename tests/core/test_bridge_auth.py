"""Tokens: what a list of them is, who may what, and how a file gets one more (R66)."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from bridge.auth import (
    BadTokens,
    Identity,
    Token,
    TokenFile,
    Tokens,
    add_token,
    digest_of,
    new_token,
    parse_tokens,
)


def entry(**fields: Any) -> dict[str, Any]:
    return {"name": "alice", "scopes": ["read"], "sha256": digest_of("rf_x")} | fields


def listed(*entries: dict[str, Any]) -> str:
    return json.dumps({"tokens": entries})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"tokens": {}}',
        '{"tokens": [], "tokens": []}',
        '{"tokens": [], "more": 1}',
        listed(entry(name="Alice")),
        listed(entry(name="")),
        listed(entry(name="a" * 33)),
        listed(entry(name="a\n")),
        *(listed(entry(name=name)) for name in ("nats", "library", "bridge", "dev")),
        listed(entry(scopes=[])),
        listed(entry(scopes=["write"])),
        listed(entry(scopes="read")),
        listed(entry(sha256="")),
        listed(entry(sha256=digest_of("rf_x").upper())),
        listed(entry(sha256=digest_of("rf_x") + "\n")),
        listed(entry(token="rf_x")),
    ],
)
def test_a_list_that_is_not_one_is_refused_whole(text: str) -> None:
    with pytest.raises(BadTokens) as refused:
        parse_tokens(text)
    assert refused.value.message.isprintable() and "rf_x" not in refused.value.message


def test_a_token_is_known_by_its_hash_alone() -> None:
    both = entry(name="bob", scopes=["work", "read"], sha256=digest_of("rf_y"))
    tokens = Tokens(parse_tokens(listed(entry(), both)))
    assert tokens.identify("Bearer rf_x") == Identity("alice", frozenset({"read"}))
    assert tokens.identify("bearer rf_y") == Identity("bob", frozenset({"work", "read"}))
    hashed = digest_of("rf_x")
    for header in (
        None,
        "",
        "rf_x",
        "Bearer",
        "Bearer rf_z",
        f"Bearer {hashed}",
        "Basic rf_x",
        "é",
    ):
        assert tokens.identify(header) is None


@pytest.mark.parametrize(
    ("scope", "may"),
    [
        ("read", {"read"}),
        ("signal", {"read", "signal"}),
        ("work", {"work"}),
        ("admin", {"read", "signal", "work", "admin"}),
    ],
)
def test_what_a_scope_may(scope: Any, may: set[str]) -> None:
    scopes: tuple[Any, ...] = ("read", "signal", "work", "admin")
    assert {one for one in scopes if Identity("x", frozenset({scope})).may(one)} == may


def test_a_token_is_added_to_the_file_and_no_other_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    made = [new_token() for _ in range(3)]
    assert len(set(made)) == 3 and all(len(one) == 46 for one in made)
    for number, one in enumerate(made):
        add_token(path, entry(name=f"n{number}", sha256=digest_of(one)))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    file = TokenFile(path)
    assert [file.identify(f"Bearer {one}") for one in made] == [
        Identity(f"n{number}", frozenset({"read"})) for number in range(3)
    ]
    assert not any(one in path.read_text() for one in made)
    assert [one.name for one in tmp_path.iterdir()] == ["tokens.json"]


def test_a_file_that_is_no_list_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    path.write_text("{")
    with pytest.raises(BadTokens):
        add_token(path, entry())
    assert path.read_text() == "{"
    with pytest.raises(BadTokens):
        add_token(tmp_path / "none" / "tokens.json", entry())
    with pytest.raises(BadTokens):
        TokenFile(tmp_path / "none.json")


def test_a_token_in_a_record_is_never_shown() -> None:
    assert "rf_" not in repr(Token(name="a", scopes=("read",), sha256=digest_of("rf_x")))

"""Tokens: what a list of them is, who may what, and how a file gets one more (R66)."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bridge import auth
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


def test_tokens_that_are_made_at_once_are_all_in_the_file(tmp_path: Path) -> None:
    """Each was printed, once: one that is not in the file was acknowledged and lost."""
    path = tmp_path / "tokens.json"
    path.write_text(listed(entry()))
    entries = [
        {"name": f"n{i}", "scopes": ["read"], "sha256": digest_of(f"rf_{i}")} for i in range(16)
    ]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda entry: add_token(path, entry), entries))
    auth = TokenFile(path)
    lost = [i for i in range(16) if auth.identify(f"Bearer rf_{i}") is None]
    assert lost == []


def test_a_file_that_gets_a_token_keeps_its_owner_its_mode_and_the_link_to_it(
    tmp_path: Path,
) -> None:
    """Of it lives a bridge that runs as another user, in its group."""
    (tmp_path / "real").mkdir()
    real, link = tmp_path / "real" / "tokens.json", tmp_path / "tokens.json"
    real.write_text(listed(entry()))
    real.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(real, 4321, 8765)
    owner = (real.stat().st_uid, real.stat().st_gid)
    link.symlink_to(Path("real") / "tokens.json")
    add_token(link, entry(name="bob", sha256=digest_of("rf_bob")))
    assert link.is_symlink() and TokenFile(link).identify("Bearer rf_bob") is not None
    found = real.stat()
    assert (found.st_uid, found.st_gid) == owner and stat.S_IMODE(found.st_mode) == 0o640
    assert [one.name for one in real.parent.iterdir()] == ["tokens.json"]


def test_a_token_whose_file_would_change_its_owner_is_not_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(listed(entry()))
    before = path.read_text()

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    there = path.stat()
    monkeypatch.setattr(os, "chown", denied)
    monkeypatch.setattr(auth, "_read", lambda path: parse_tokens(before))
    seen = os.stat_result((*there[:4], there.st_uid + 1, *there[5:]))
    monkeypatch.setattr(Path, "stat", lambda self, **_: seen)
    with pytest.raises(BadTokens, match="owner"):
        add_token(path, entry(name="bob"))
    monkeypatch.undo()
    assert path.read_text() == before
    assert [one.name for one in tmp_path.iterdir()] == ["tokens.json"]


def test_who_adds_a_token_waits_for_another_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tokens.json"
    monkeypatch.setattr(auth, "LOCK_S", 0.05)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(BadTokens, match="locked"):
        add_token(path, entry())
    os.close(other)
    add_token(path, entry())
    assert TokenFile(path).identify("Bearer rf_x") is not None


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

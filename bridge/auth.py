"""Shell: who asks: bearer tokens with scopes, kept as hashes in a file or the environment (R66).

Identity comes from the token alone, never from a body.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from msgspec import Struct

from journal.errors import RunfoldError
from journal.escape import visible
from journal.ids import shown
from journal.values import BadJSON, parse_strict

from .operation import Scope

log = logging.getLogger("runfold")

NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)
RESERVED: Final = frozenset({"nats", "library", "bridge", "dev"})
"""What records say in `by` of those who have no token."""

GRANTED_BY: Final[dict[Scope, frozenset[Scope]]] = {
    "read": frozenset({"read", "signal", "admin"}),
    "signal": frozenset({"signal", "admin"}),
    "work": frozenset({"work", "admin"}),  # a worker can't approve its own calls
    "admin": frozenset({"admin"}),
}
SCOPES: Final = tuple(GRANTED_BY)
TOKENS_MAX: Final = 10_000
"""All are compared at each request."""

LOCK_S: Final = 10.0
"""Whoever adds a token has the file for some milliseconds."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


class BadTokens(RunfoldError):
    """The list of tokens is not one."""

    code = "bad_tokens"


class Identity(Struct, frozen=True):
    """Who asks, and what they may."""

    name: str
    scopes: frozenset[Scope]

    def may(self, scope: Scope) -> bool:
        return not self.scopes.isdisjoint(GRANTED_BY[scope])


DEV: Final = Identity("dev", frozenset({"admin"}))
"""Everybody, without auth."""


class Token(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A token as it is kept: never itself."""

    name: str
    scopes: tuple[Scope, ...]
    sha256: str


class TokenList(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file, and RUNFOLD_TOKENS."""

    tokens: tuple[Token, ...]


def parse_tokens(text: str | bytes) -> TokenList:
    """The list; raises BadTokens with the reason. Nothing of a hash is in it."""
    try:
        found = msgspec.convert(parse_strict(text), TokenList)
    except (BadJSON, msgspec.ValidationError) as error:
        raise BadTokens(f"not a list of tokens: {visible(str(error)[:300])}") from error
    if len(found.tokens) > TOKENS_MAX:
        raise BadTokens(f"more than {TOKENS_MAX} tokens")
    for token in found.tokens:
        check_name(token.name)
        if not token.scopes:
            raise BadTokens(f"the token of {token.name} has no scope")
        if _DIGEST.fullmatch(token.sha256) is None:
            raise BadTokens(f"the sha256 of {token.name} is not 64 hex digits in lower case")
    return found


def check_name(name: str) -> None:
    """Raises BadTokens for what is no name that records may say."""
    if NAME.fullmatch(name) is None or name in RESERVED:
        raise BadTokens(
            f"{shown(name)} is not a name for a token",
            hint="a name is 1 to 32 of a-z 0-9 _ - and starts with a letter or digit; not "
            + ", ".join(sorted(RESERVED)),
        )


def new_token() -> str:
    """256 random bits: what is guessed at can't be found, so a plain hash is enough."""
    return "rf_" + secrets.token_urlsafe(32)


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


class Auth(Protocol):
    """`open`: everybody may do everything, from this machine."""

    @property
    def open(self) -> bool: ...
    def identify(self, authorization: str | None) -> Identity | None:
        """Who has this header; None for nobody."""
        ...

    def problem(self) -> str | None:
        """What is wrong with the tokens, for health."""
        ...


class NoAuth:
    """For development: the bridge binds to loopback, and looks at Host and Origin (app.py)."""

    open = True

    def identify(self, authorization: str | None) -> Identity | None:
        return DEV

    def problem(self) -> str | None:
        return None


class Tokens:
    """Those of a fixed list."""

    open = False

    def __init__(self, listed: TokenList) -> None:
        self._known = [(one.sha256, one.name, frozenset(one.scopes)) for one in listed.tokens]

    def identify(self, authorization: str | None) -> Identity | None:
        kind, _, token = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not token:
            return None
        given = digest_of(token.strip(" "))
        found: Identity | None = None
        for digest, name, scopes in self._known:  # all of them: time tells nothing
            if hmac.compare_digest(digest, given):
                found = Identity(name, scopes)
        return found

    def problem(self) -> str | None:
        return None


class TokenFile:
    """Those of a file, read again when it changes. A new one that can't be read leaves the old
    tokens in force: a slip of the pen must not lock everybody out, nor go unseen."""

    open = False

    def __init__(self, path: Path) -> None:
        """Raises BadTokens."""
        self._path = path
        self._stamp = self._looked()
        self._tokens = Tokens(_read(path))
        self._problem: str | None = None

    def identify(self, authorization: str | None) -> Identity | None:
        self._refresh()
        return self._tokens.identify(authorization)

    def problem(self) -> str | None:
        self._refresh()
        return self._problem

    def _refresh(self) -> None:
        stamp = self._looked()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._tokens = Tokens(_read(self._path))
            if self._problem is not None:  # as loud as what it ends
                log.warning("tokens: %s can be read again", visible(str(self._path)))
            self._problem = None
            log.info("tokens: read %s again", self._path)
        except BadTokens as error:
            # Whoever asks for health needs no token: neither path nor name is theirs to know.
            self._problem = "the list of tokens can't be read; the one before it is in force"
            log.error("tokens: %s; the ones before it are in force", error.message)

    def _looked(self) -> tuple[int, ...]:
        try:
            found = os.stat(self._path)
        except OSError as error:
            return (-(error.errno or 1),)
        return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)


def _read(path: Path) -> TokenList:
    try:
        return parse_tokens(path.read_bytes())
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise BadTokens(f"{visible(str(path))} can't be read: {why}") from error
    except BadTokens as error:
        raise BadTokens(f"{visible(str(path))}: {error.message}", hint=error.hint) from error


def add_token(path: Path, entry: Mapping[str, Any]) -> None:
    """Add the entry to the file, or make it, readable for its owner alone. The file is always one
    of the two, never half of one; its owner and mode stay. Raises BadTokens."""
    path = Path(os.path.realpath(path))  # a link stays one
    try:
        with _locked(path.parent):
            there = path.stat() if path.exists() else None
            listed = _read(path).tokens if there is not None else ()
            added = TokenList(tokens=(*listed, msgspec.convert(entry, Token)))
            text = msgspec.json.format(msgspec.json.encode(added)) + b"\n"
            parse_tokens(text)
            _replace(path, text, there)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise BadTokens(f"{visible(str(path))} can't be written: {why}") from error


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Nobody else adds a token in this directory. Itself, since the file is replaced each time, and
    a lock file of one user may keep another out."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    opened = os.open(folder, os.O_RDONLY)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise BadTokens(
                        f"{visible(str(folder))} stays locked, as by another `runfold token`"
                    ) from error
            time.sleep(0.02)
        yield
    finally:
        os.close(opened)


def _replace(path: Path, text: bytes, there: os.stat_result | None) -> None:
    # In its directory, so that it can take the old one's place in one move.
    new, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600
    try:
        with open(new, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if there is not None:
            _keep_owner(path, name, there)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _keep_owner(path: Path, name: str, there: os.stat_result) -> None:
    """A bridge of another user or group than the caller's could read its tokens no more."""
    made = os.stat(name)
    if (made.st_uid, made.st_gid) != (there.st_uid, there.st_gid):
        try:
            os.chown(name, there.st_uid, there.st_gid)
        except PermissionError as error:
            raise BadTokens(
                f"{visible(str(path))} would change its owner",
                hint="add the token as the user whom the file belongs to",
            ) from error
    os.chmod(name, stat.S_IMODE(there.st_mode))

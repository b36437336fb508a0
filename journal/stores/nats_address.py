"""Store: where a NATS server is and as whom to connect, checked before nats-py sees it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from nats.aio.client import RawCredentials

from ..errors import PermissionDenied, StoreUnavailable


def without_password(url: str) -> str:
    """The address fit for messages."""
    scheme, found, rest = url.rpartition("://")
    return f"{scheme}{found}{rest.rpartition('@')[2]}"


_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def inbox_prefix(urls: Sequence[str], namespace: str) -> str:
    """Where answers come to: `_INBOX.<namespace>.<user>` where the addresses name one user with a
    password, so that permissions can tell the roles' answers apart (R66); else
    `_INBOX.<namespace>`. A user without a password is a token: it stands in no subject."""
    users: set[str] = set()
    for url in urls:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        users.add(unquote(parts.username or "") if parts.password else "")
    user = users.pop() if len(users) == 1 else ""
    own = f".{user}" if _PLAIN.fullmatch(user) else ""
    return f"_INBOX.{namespace}{own}"


def check_url(url: str) -> None:
    """Raises StoreUnavailable. nats-py 2.16.0 takes `http://host` for a host called http."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        known = parts.scheme in ("nats", "tls", "ws", "wss") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known or any(char.isspace() for char in url):
        raise StoreUnavailable(
            f"{without_password(url)!r} is not the address of a NATS server",
            hint="an address looks like nats://host:4222",
        )


async def read_creds(path: str) -> RawCredentials:
    """nats-py 2.16.0 would loop for ever, on the event loop, over a file that holds no JWT; and
    again at every reconnect: so read and checked once, here."""
    try:
        text = await asyncio.to_thread(Path(path).read_text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PermissionDenied(
            f"cannot read the credentials file {path}: {error}", subject=path
        ) from error
    if "BEGIN NATS USER JWT" not in text or "BEGIN USER NKEY SEED" not in text:
        raise PermissionDenied(
            f"{path} is not a NATS credentials file",
            subject=path,
            hint="`nsc generate creds` writes one",
        )
    try:
        import nkeys  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError as error:
        raise StoreUnavailable(
            "credentials files need the package nkeys", hint="pip install 'runfold[creds]'"
        ) from error
    return RawCredentials(text)

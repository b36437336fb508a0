"""Shell: talking to runs on a NATS server: a bridge is asked first, which knows by the subject who
asks; where none answers, whoever may write the journal does (R66).

A request id is made before anything is sent. So what a bridge did although its answer was lost is
a repeat when it is appended from here.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec

from journal import ids
from journal.doors import Receipt
from journal.errors import PermissionDenied, StaleSignal
from journal.fleet import Fleet
from journal.ids import RunId, subject_token
from journal.inputs import InputState, input_body
from journal.messages import JSON
from journal.records import Mode
from journal.signal_address import user as checked_user
from journal.signals import parse_request_id, parse_signal
from journal.stores.nats_connection import Connection
from journal.stores.nats_waiting import NoReply
from journal.values import normalise

from .options import Target, opened, user
from .remote_errors import BridgeFailed, refusal_error

T = TypeVar("T")

ANSWER_S: Final = 10.0
NATS_USER: Final = "RUNFOLD_NATS_USER"
"""Whose subjects these credentials may use: `ns.api.as.<user>.>`."""

_USER: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)


class NatsTalk:
    """`async with NatsTalk(target) as talk:`; a Talk."""

    def __init__(self, target: Target) -> None:
        assert target.server is not None
        ids.namespace(target.namespace)
        self._target = target
        self._connection = Connection(target.server, namespace=target.namespace, creds=target.creds)
        self._said = _users(target.server)
        self._allowed = self._said[0]

    async def __aenter__(self) -> Self:
        await self._connection.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()

    # ---- talking ------------------------------------------------------------------------------

    async def signal(
        self, run_id: str, name: str, payload: dict[str, Any], *, request_id: str | None = None
    ) -> Receipt:
        run = ids.run_id(run_id)
        parse_signal(name, payload)
        request = parse_request_id(request_id) or f"{name}:{secrets.token_hex(8)}"
        body = payload | {"request_id": request}
        answer = await self._ask(f"signals.{subject_token(run)}.{name}", body)
        if answer is not None:
            return _converted(answer, Receipt)
        return await self._directly(
            lambda fleet: fleet.signal(run, name, payload, request_id=request),
            self._published(run, name, body),
        )

    async def send(
        self, run_id: str, content: JSON, *, mode: Mode = "steer", request_id: str | None = None
    ) -> InputState:
        run = ids.run_id(run_id)
        request = parse_request_id(request_id) or f"input:{secrets.token_hex(8)}"
        value = input_body(request, mode, normalise(content, "the input")).content
        body: dict[str, Any] = {"content": value, "mode": mode, "request_id": request}
        # The answer does not tell a repeat from the first: an id of the caller's is looked up.
        known = request_id is not None and await self._known(run, request)
        answer = await self._ask("inputs.submit", body | {"run": run})
        if answer is not None:
            return msgspec.structs.replace(_converted(answer, InputState), created=not known)
        return await self._directly(
            lambda fleet: fleet.send(run, value, mode=mode, request_id=request),
            self._published(run, "input", body),
        )

    async def _known(self, run: RunId, request: str) -> bool:
        try:
            return await self._ask("inputs.get", {"run": run, "request_id": request}) is not None
        except StaleSignal:
            return False

    async def input(self, run_id: str, request_id: str, *, wait_s: float = 0) -> InputState:
        body = {"run": ids.run_id(run_id), "request_id": parse_request_id(request_id)}
        waiting: dict[str, Any] = {"wait": wait_s} if wait_s else {}
        answer = await self._ask("inputs.get", body | waiting, ANSWER_S + wait_s)
        if answer is not None:
            return _converted(answer, InputState)
        return await self._directly(lambda fleet: fleet.input(run_id, request_id, wait_s=wait_s))

    async def withdraw(self, run_id: str, request_id: str) -> InputState:
        body = {"run": ids.run_id(run_id), "request_id": parse_request_id(request_id)}
        answer = await self._ask("inputs.withdraw", body)
        if answer is not None:
            return _converted(answer, InputState)
        return await self._directly(lambda fleet: fleet.withdraw(run_id, request_id))

    # ---- the two ways -------------------------------------------------------------------------

    async def _ask(
        self, rest: str, body: dict[str, Any], wait_s: float = ANSWER_S
    ) -> dict[str, Any] | None:
        """A bridge's answer; None where none came, or this user may not ask. Raises what the bridge
        refuses with."""
        payload = msgspec.json.encode(body)
        for said in self._said:
            subject = f"{self._target.namespace}.api.{said}{rest}"
            try:
                reply = await self._connection.request(subject, payload, timeout_s=wait_s)
            except PermissionDenied:
                continue
            self._allowed = said
            if isinstance(reply, NoReply):
                return None
            found = _converted(reply.data, dict[str, Any])
            if "error" in found:
                raise refusal_error(found["error"])
            return found
        return None

    async def _directly(
        self, append: Callable[[Fleet], Awaitable[T]], published: str | None = None
    ) -> T:
        try:
            async with opened(self._target) as store:
                return await append(Fleet(store, by=user()))
        except PermissionDenied as error:
            if error.subject.startswith("_INBOX"):  # then it hears nobody's answers
                raise
            kept = "" if published is None else f", or publish it, which is kept: {published}"
            raise PermissionDenied(
                "no bridge answers, and the NATS server denies this user the journal "
                f"({error.subject})",
                subject=error.subject,
                hint=f"start a bridge (`runfold bridge`){kept}",
            ) from error

    def _published(self, run: RunId, name: str, body: dict[str, Any]) -> str:
        """The command that leaves it with the server for the next bridge."""
        subject = f"{self._target.namespace}.signal.{self._allowed}{subject_token(run)}.{name}"
        words = ["nats", "pub", subject, msgspec.json.encode(body).decode()]
        return " ".join(shlex.quote(word) for word in words)


def _users(url: str) -> tuple[str, ...]:
    """What may stand before a request's address: the user whose subjects the environment says are
    ours; else nobody's, and then those of the user that the URL names."""
    named = os.environ.get(NATS_USER, "")
    if named:
        return (f"as.{checked_user(named)}.",)
    names: set[str] = set()
    for part in url.split(","):
        parts = urlsplit(part.strip())
        # A user without a password is a token: it stands in no subject.
        names.add(unquote(parts.username or "") if parts.password else "")
    name = names.pop() if len(names) == 1 else ""
    return ("", f"as.{name}.") if _USER.fullmatch(name) else ("",)


def _converted(answer: dict[str, Any] | bytes, shape: type[T]) -> T:
    try:
        if isinstance(answer, bytes):
            return msgspec.json.decode(answer, type=shape)
        return msgspec.convert(answer, shape)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BridgeFailed(f"the bridge's answer can't be read: {error}") from error

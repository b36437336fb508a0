"""What people and programs say to us: ids, values, signals, requests. As targets_journal.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import re
from json import loads as json_of
from typing import Any

import msgspec
from fuzz.at_once import at_once
from fuzz.draw import Draw, forged
from fuzz.honest import MARKER, PAY, journals
from kit.build import AGENT, RUN, BridgedStore

from bridge.app import App
from bridge.auth import NoAuth
from bridge.call import converted
from bridge.desk import Desk, Health
from bridge.metrics import Metrics
from bridge.operation import Operation
from bridge.pages import Pages
from bridge.service import operations
from journal import ids
from journal.audit import audit
from journal.doors import signal
from journal.errors import BadPayload, InvalidId, NotEncodable, RunfoldError
from journal.escape import visible
from journal.fleet import Fleet
from journal.signal_address import SignalAddress, kept_address, run_filters
from journal.signals import parse_request_id, parse_signal
from journal.stores.memory import MemoryStore
from journal.values import BadJSON, canonical, normalise, parse_strict

SIGNALS = ("approve", "reject", "reconcile", "cancel", "resume", "late", "child")
PAYLOADS: tuple[dict[str, Any], ...] = (
    {"marker": MARKER},
    {"marker": MARKER, "reason": "no", "request_id": "r1"},
    {"step": PAY, "outcome": "done", "result": {"a": 1}, "start": 4},
    {"step": PAY, "outcome": "retry", "start": 6},
    {"step": "1/1", "outcome": "done", "result": None},
    {"reason": "enough"},
    {"step": PAY, "start": 7, "result": "L"},
    {"run": "a1.child", "outcome": {"status": "completed"}},
    {},
)
_encode = msgspec.json.Encoder().encode


def _can_be_shown(error: RunfoldError) -> None:
    """Whatever was refused, what is said of it moves no cursor and hides nothing."""
    assert visible(error.message) == error.message, ascii(error.message)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


# ---- ids --------------------------------------------------------------------------------------


def ids_of(data: bytes) -> None:
    """Any text is an id and comes back from each of its encodings, or is refused."""
    text = _text(data)
    for read in (ids.tool_name, ids.step_name, ids.namespace, ids.marker_run):
        with contextlib.suppress(InvalidId):
            assert ids.shown(read(text)).isprintable()
    with contextlib.suppress(InvalidId):
        ids.name(text, "an agent")
    with contextlib.suppress(InvalidId):
        run = ids.from_subject_token(text)
        assert ids.subject_token(run) == text
    stem_of = ids.from_file_stem(text)
    assert stem_of is None or ids.file_stem(stem_of) == text
    try:
        run = ids.run_id(text)
    except InvalidId as error:
        _can_be_shown(error)
        return
    stem = ids.file_stem(run)
    assert (ids.from_file_stem(stem) == run and stem == stem.lower()) or "~" in stem
    assert re.fullmatch(r"[A-Za-z0-9_.~-]+", stem)
    assert ids.from_subject_token(ids.subject_token(run)) == run
    marker = ids.marker(run, PAY, 1, "0123456789abcdef")
    assert ids.marker_run(marker) == run


# ---- values -----------------------------------------------------------------------------------


def values(data: bytes) -> None:
    """Any value is JSON as a replay will see it, or refused."""
    try:
        found = normalise(Draw(data).value(), "the value")
    except NotEncodable as error:
        _can_be_shown(error)
        return
    _check_value(found)


def json(data: bytes) -> None:
    """Any text is strict JSON, and no key of it was dropped, or it is refused."""
    try:
        found = parse_strict(data)
    except BadJSON:
        return
    _check_value(found)
    assert _keys(json_of(data, object_pairs_hook=list)) == _keys(found)
    assert parse_strict(data.decode()) == found


def _keys(value: Any) -> int:
    """How many keys stand in it; objects are dictionaries, or lists of pairs."""
    if isinstance(value, dict):
        return len(value) + sum(_keys(part) for part in value.values())
    if isinstance(value, tuple):
        return 1 + _keys(value[1])
    return sum(_keys(part) for part in value) if isinstance(value, list) else 0


def _check_value(found: Any) -> None:
    again = parse_strict(canonical(found))
    assert _encode(normalise(found, "it")) == _encode(found)
    assert canonical(again) == canonical(found)


# ---- signals ----------------------------------------------------------------------------------


def payload(data: bytes) -> None:
    """Any text is a signal's payload, which says the same once more, or refused."""
    draw = Draw(data)
    name, worker = draw.pick([*SIGNALS, "input", draw.text()]), bool(draw.below(2))
    given = _payload(draw)
    with contextlib.suppress(BadPayload):
        parse_request_id(draw.text())
    try:
        found = parse_signal(name, given, worker=worker)
    except BadPayload as error:
        _can_be_shown(error)
        return
    assert parse_signal(name, found, worker=worker) == found
    assert parse_signal(name, msgspec.json.encode(found), worker=worker) == found


def _payload(draw: Draw) -> Any:
    """Bytes, text or a mapping."""
    match draw.below(4):
        case 0:
            return draw.take(draw.below(200))
        case 1:
            return draw.text()
        case _:
            value = draw.pick(PAYLOADS)
            for _ in range(draw.below(3)):
                value = forged(draw, value)
            return value if isinstance(value, dict) else _encode(value)


def address(data: bytes) -> None:
    """Any subject names a run and a signal, and is found by that run's filters, or is refused."""
    text = _text(data)
    try:
        found = kept_address(text)
    except InvalidId as error:
        _can_be_shown(error)
        return
    assert isinstance(found, SignalAddress) and ids.valid_run_id(found.run) and found.by
    tokens = text.split(".")
    if all(re.fullmatch(r"[!-~]+", token) for token in tokens):  # a subject that can be published
        assert any(_matches(tokens, one.split(".")) for one in run_filters(found.run)), text


def _matches(tokens: list[str], wanted: list[str]) -> bool:
    return len(tokens) == len(wanted) and all(
        mine in ("*", given) for given, mine in zip(tokens, wanted, strict=True)
    )


def door(data: bytes) -> None:
    """Whatever is said to a run, in whatever order: applied, repeated or refused; its journal stays
    one that the audit lets pass."""
    draw = Draw(data)
    store = _filled(draw)
    for _ in range(1 + draw.below(4)):
        with contextlib.suppress(RunfoldError):
            at_once(_said(store, draw))
    entries = at_once(store.load(RUN)).entries
    assert audit(RUN, entries) == ()


async def _said(store: MemoryStore, draw: Draw) -> None:
    fleet = Fleet(store, by="fuzz")
    request = draw.pick([None, "r1", "i1", "i2", draw.text()])
    match draw.below(8):
        case 0:
            content = draw.value()
            mode = draw.pick(["steer", "follow_up", "x"])
            await fleet.send(RUN, content, mode=mode, request_id=request)  # type: ignore[arg-type]
        case 1:
            await fleet.withdraw(RUN, request or "i1")
        case 2:
            await fleet.start(AGENT, draw.value(), run_id=RUN, key=request)
        case _:
            name, given = draw.pick(SIGNALS), _payload(draw)
            worker = bool(draw.below(2))
            await signal(store, RUN, name, given, request_id=request, by="fuzz", worker=worker)


def _filled(draw: Draw) -> BridgedStore:
    """A store with the beginning of an honest journal, or nothing."""
    store = BridgedStore()
    entries = draw.pick(journals())
    entries = entries[: len(entries) - draw.below(len(entries) + 1)]
    store._journals[RUN] = {n: entry.raw for n, entry in enumerate(entries, 1)}
    return store


# ---- HTTP -------------------------------------------------------------------------------------


@functools.cache
def _table() -> tuple[Operation, ...]:
    return tuple(operations(None, None))  # type: ignore[arg-type]


def body(data: bytes) -> None:
    """Any body is what some operation takes, or refused with a reason that can be shown."""
    draw = Draw(data)
    operation = draw.pick([one for one in _table() if one.body is not None])
    raw = draw.rest()
    try:
        found = converted(parse_strict(raw), operation.body)
    except BadJSON:
        return
    except BadPayload as error:
        _can_be_shown(error)
        return
    assert converted(parse_strict(_encode(found)), operation.body) == found


class _Findings(logging.Handler):
    """What the application calls a bug of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self.found.append(record.exc_info[1])
        else:
            self.found.append(AssertionError(record.getMessage()))


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def http(data: bytes) -> None:
    """Any request to a run is answered, and never with a bug."""
    draw = Draw(data)
    findings = _Findings()
    log = logging.getLogger("runfold")
    log.addHandler(findings)
    try:
        _loop().run_until_complete(_requested(draw))
    finally:
        log.removeHandler(findings)
    for bug in findings.found:
        raise bug


@functools.cache
def _bridge() -> tuple[Desk, App, tuple[Operation, ...]]:
    """An application, and those of its operations that need no server."""
    desk = Desk(BridgedStore(), NoAuth(), Metrics(), *[lambda: Health(ok=True)] * 2)  # type: ignore[arg-type]
    known = [one for one in _table() if one.path.startswith(("/runs/{", "/decisions"))]
    return desk, App(desk, known), tuple(known)


async def _requested(draw: Draw) -> None:
    desk, app, known = _bridge()
    desk.store = store = _filled(draw)  # type: ignore[assignment]
    desk.pages = Pages(store)  # type: ignore[arg-type]
    operation = draw.pick(known)
    parts: list[bytes] = []
    for part in operation.path.encode().split(b"/"):
        parts.append(draw.pick([b"a1", b"i1", draw.take(8)]) if part.startswith(b"{") else part)
    names = [*sorted(operation.query_names - {"follow"}), "x"]  # what follows needs a server
    query = b"&".join(
        draw.pick(names).encode() + b"=" + draw.pick([b"1", b"1s", b"a1", draw.take(6)])
        for _ in range(draw.below(3))
    )
    value = forged(draw, {**draw.pick(PAYLOADS), "decision": "approve"})
    sent = draw.pick([_encode(value), _encode({"content": value}), draw.rest()])
    messages = [{"type": "http.request", "body": sent}, {"type": "http.disconnect"}]
    answers: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if len(messages) > 1 else messages[0]

    async def send(message: Any) -> None:
        answers.append(message)

    scope = {
        "type": "http",
        "method": operation.method,
        "raw_path": b"/".join(parts),
        "path": "",
        "query_string": query,
        "headers": [(b"host", b"localhost")],
    }
    await app(scope, receive, send)
    status = answers[0]["status"] if answers else 0
    documented = {*operation.answers, *operation.problems, 400, 404, 405, 413, 503, 0}
    assert status in documented, (status, answers)

"""Reading a stream: MSG.GET of its leader, DIRECT.GET singly and in batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .index import Index
from .messages import BAD_REQUEST, NO_MESSAGE, ApiError, Message, api_refusal, rfc3339, status

if TYPE_CHECKING:
    from .server import ModelServer
    from .streams import Stream

_GOT = b'{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","message":%b}'
_MULTI_MAX = 1024


class Get(msgspec.Struct, frozen=True):
    """Of either request."""

    seq: int = 0
    last_by_subj: str = ""
    next_by_subj: str = ""
    batch: int = 0
    max_bytes: int = 0
    multi_last: list[str] = []
    up_to_seq: int = 0


_decode = msgspec.json.Decoder(Get).decode


def message_get(stream: Stream, data: bytes, moment: int | None) -> bytes:
    """The leader's answer."""
    try:
        asked = _decode(data or b"{}")
    except msgspec.DecodeError as error:
        return api_refusal("stream_msg_get", ApiError(400, 10025, f"invalid JSON: {error}"))
    index = stream.view(moment)
    if asked.next_by_subj:
        found = index.after(asked.next_by_subj, asked.seq)
        message = found[0] if found else None
    elif asked.last_by_subj and not asked.seq:
        message = index.last(asked.last_by_subj)
    elif asked.seq and not asked.last_by_subj:
        message = index.messages.get(asked.seq)
    else:
        return api_refusal("stream_msg_get", BAD_REQUEST)
    if message is None:
        return api_refusal("stream_msg_get", NO_MESSAGE)
    return _GOT % message.as_json()


def direct_get(
    server: ModelServer, stream: Stream, subject: str, data: bytes, reply: str, moment: int | None
) -> None:
    """The answers, of any server that has the stream. `subject`: whose last is asked for by the
    subject of the request alone."""

    def end(code: str, text: str, **more: str) -> None:
        server.send(reply, reply, b"", status(code, text, **more), "", "read")

    try:
        asked = Get(last_by_subj=subject) if subject else _decode(data or b"{}")
    except msgspec.DecodeError:
        end("408", "Malformed Request")
        return
    index = stream.view(moment)
    if asked.multi_last:
        found = _last_of_each(index, asked)
        if len(found) > _MULTI_MAX:
            end("413", "Too Many Results")
        elif not found:
            end("404", "No Results")
        else:
            up_to = asked.up_to_seq or max(index.messages)
            _batch(server, stream, reply, found, asked, str(up_to))
    elif asked.batch:
        found = index.after(asked.next_by_subj, asked.seq)
        if found:
            _batch(server, stream, reply, found, asked, "")
        else:
            end("404", "Message Not Found")
    else:
        _one(server, stream, index, asked, reply)


def _one(server: ModelServer, stream: Stream, index: Index, asked: Get, reply: str) -> None:
    message: Message | None
    if asked.next_by_subj:
        message = next(iter(index.after(asked.next_by_subj, asked.seq)), None)
    elif asked.last_by_subj:
        message = index.last(asked.last_by_subj)
    elif asked.seq:
        message = index.messages.get(asked.seq)
    else:
        server.send(reply, reply, b"", status("408", "Empty Request"), "", "read")
        return
    if message is None:
        server.send(reply, reply, b"", status("404", "Message Not Found"), "", "read")
    else:
        server.send(reply, reply, message.data, _about(stream, message), "", "read")


def _last_of_each(index: Index, asked: Get) -> list[Message]:
    subjects = dict.fromkeys(
        subject for pattern in asked.multi_last for subject in _named(index, pattern)
    )
    if asked.up_to_seq:
        last = [index.last_up_to(subject, asked.up_to_seq) for subject in subjects]
    else:
        last = [index.last(subject) for subject in subjects]
    return sorted((one for one in last if one is not None), key=lambda one: one.seq)


def _named(index: Index, pattern: str) -> list[str]:
    if "*" in pattern or ">" in pattern:
        return index.subjects(pattern)
    return [pattern] if pattern in index.by_subject else []


def _batch(
    server: ModelServer, stream: Stream, reply: str, found: list[Message], asked: Get, up_to: str
) -> None:
    """Each names the one before it in the batch; a status ends it, also where bytes ran out."""
    last, size, left = 0, 0, len(found)
    for message in found[: asked.batch or len(found)]:
        if asked.max_bytes and size and size + message.size > asked.max_bytes:
            break
        size += message.size
        left -= 1
        headers = _about(stream, message)
        headers["Nats-Num-Pending"] = str(left)
        headers["Nats-Last-Sequence"] = str(last)
        server.send(reply, reply, message.data, headers, "", "read")
        last = message.seq
    headers = status(
        "204", "EOB", **{"Nats-Num-Pending": str(left), "Nats-Last-Sequence": str(last)}
    )
    if up_to:
        headers["Nats-UpTo-Sequence"] = up_to
    server.send(reply, reply, b"", headers, "", "read")


def _about(stream: Stream, message: Message) -> dict[str, str]:
    return {
        **message.headers,
        "Nats-Stream": stream.name,
        "Nats-Subject": message.subject,
        "Nats-Sequence": str(message.seq),
        "Nats-Time-Stamp": rfc3339(message.stamp),
    }

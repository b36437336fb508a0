"""JetStream's API: `$JS.API.…` and `$JS.ACK.…`, as nats-server 2.15.1 answers, R1."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from . import consumers, reads, streams
from .consumers import Consumer, Next
from .messages import (
    BAD_REQUEST,
    NO_CONSUMER,
    NO_STREAM,
    UNAVAILABLE,
    ApiError,
    api_answer,
    api_refusal,
    rfc3339,
    status,
)
from .streams import Stream
from .subjects import overlap

if TYPE_CHECKING:
    from .server import ModelServer
    from .sessions import Session

_next = msgspec.json.Decoder(Next).decode
_decode = msgspec.json.Decoder(dict[str, Any]).decode

_API = "$JS.API."
_ACK = "$JS.ACK."
_MSG_NEXT = f"{_API}CONSUMER.MSG.NEXT."
_DIRECT = f"{_API}DIRECT.GET."

Request: TypeAlias = dict[str, Any]


class Api:
    """Of one server."""

    def __init__(self, server: ModelServer) -> None:
        self._server = server
        self._of_stream: dict[str, Callable[[Stream, Request], bytes]] = {
            "STREAM.UPDATE": self._update,
            "STREAM.DELETE": self._delete,
            "STREAM.PURGE": self._purge,
            "STREAM.MSG.DELETE": self._delete_message,
            "CONSUMER.NAMES": self._consumer_names,
        }

    def take(self, session: Session, subject: str, data: bytes, reply: str) -> bool:
        """False: nobody listens there."""
        if subject.startswith(_ACK):
            return self._settle(subject, data, reply)
        if subject.startswith(_MSG_NEXT):
            return self._pull(subject, data, reply)
        if subject.startswith(_DIRECT):
            return self._direct_get(session, subject, data, reply)
        if not subject.startswith(_API):
            return False
        answer = self._answer(session, subject, data)
        if answer is not None and reply:
            self._server.send(reply, reply, answer, {}, "", "answer")
        return True

    # ---- consumers' own subjects ------------------------------------------------------------

    def _settle(self, subject: str, data: bytes, reply: str) -> bool:
        tokens = subject.split(".")
        consumer = self._consumer(tokens[2], tokens[3]) if len(tokens) == 9 else None
        if consumer is None:
            return False
        if consumer.stream.away:
            return consumer.stream.away == "silent"
        if consumer.settle(int(tokens[5]), data) and reply:
            self._server.send(reply, reply, b"", {}, "", "settled")
        return True

    def _pull(self, subject: str, data: bytes, reply: str) -> bool:
        stream, _, name = subject[len(_MSG_NEXT) :].partition(".")
        consumer = self._consumer(stream, name)
        if consumer is None:
            return False
        if consumer.stream.away:
            return consumer.stream.away == "silent"
        try:
            asked = _next(data or b"{}")
        except msgspec.DecodeError as error:
            text = f"Bad Request - {error}"
            self._server.send(reply, reply, b"", status("400", text), "", "status")
            return True
        consumer.pulls.add(asked, reply)
        return True

    def _consumer(self, stream: str, name: str) -> Consumer | None:
        found = self._server.streams.get(stream)
        return found.consumers.get(name) if found is not None else None

    def _direct_get(self, session: Session, subject: str, data: bytes, reply: str) -> bool:
        name, _, of = subject[len(_DIRECT) :].partition(".")
        stream = self._server.streams.get(name)
        if stream is None or not stream.config["allow_direct"]:
            return False
        moment = self._server.moment_for(session, stream, subject)
        reads.direct_get(self._server, stream, of, data, reply, moment)
        return True

    # ---- the API ----------------------------------------------------------------------------

    def _answer(self, session: Session, subject: str, data: bytes) -> bytes | None:
        """None: there is none."""
        words = subject[len(_API) :].split(".")
        if words[0] == "CONSUMER":
            return self._consumer_call(words, data)
        if words[:2] == ["STREAM", "NAMES"]:
            return self._page("stream_names", "streams", sorted(self._server.streams))
        if words[0] == "INFO":
            return api_answer("account_info", streams=len(self._server.streams))
        if words[0] != "STREAM" or len(words) < 3:
            return None
        verb = ".".join(words[:-1])
        if verb == "STREAM.CREATE":
            return self._create(_decode(data))
        kind = verb.lower().replace(".", "_")
        stream = self._server.streams.get(words[-1])
        if stream is None:
            return api_refusal(kind, NO_STREAM)
        if stream.away:
            return api_refusal(kind, UNAVAILABLE) if stream.away == "unavailable" else None
        if verb == "STREAM.MSG.GET":
            moment = self._server.moment_for(session, stream, subject)
            return reads.message_get(stream, data, moment)
        if verb == "STREAM.INFO":
            moment = self._server.moment_for(session, stream, subject)
            return stream_info(stream, _decode(data) if data else {}, moment)
        call = self._of_stream.get(verb)
        return call(stream, _decode(data) if data else {}) if call is not None else None

    def _page(self, kind: str, what: str, names: list[str]) -> bytes:
        more = {what: names}
        return api_answer(kind, total=len(names), offset=0, limit=1024, **more)

    def _create(self, given: Request) -> bytes:
        config = streams.full_config(given)
        there = self._server.streams.get(config["name"])
        if there is not None and there.config != config:
            text = "stream name already in use with a different configuration"
            return api_refusal("stream_create", ApiError(400, 10058, text))
        wrong = streams.wrong_config(config, self._server.streams)
        if wrong is not None:
            return api_refusal("stream_create", wrong)
        if there is None:
            there = self._server.add_stream(config)
        return stream_info(there, {}, None, kind="stream_create")

    def _update(self, stream: Stream, given: Request) -> bytes:
        config = streams.full_config(given)
        wrong = streams.wrong_config(config, self._server.streams)
        if wrong is not None:
            return api_refusal("stream_update", wrong)
        stream.configure(config)
        self._server.forget_captures()
        return stream_info(stream, {}, None, kind="stream_update")

    def _delete(self, stream: Stream, given: Request) -> bytes:
        self._server.remove_stream(stream)
        return api_answer("stream_delete", success=True)

    def _purge(self, stream: Stream, given: Request) -> bytes:
        before, keep = given.get("seq", 0), given.get("keep", 0)
        if before and keep:
            return api_refusal("stream_purge", BAD_REQUEST, purged=0)
        purged = stream.purge(given.get("filter", ""), before, keep)
        return api_answer("stream_purge", success=True, purged=purged)

    def _delete_message(self, stream: Stream, given: Request) -> bytes:
        kind = "stream_msg_delete"
        if stream.config["deny_delete"]:
            return api_refusal(kind, ApiError(500, 10057, "message delete not permitted"))
        message = stream.messages.get(given.get("seq", 0))
        if message is None:
            return api_refusal(kind, ApiError(500, 10057, "stream store EOF"))
        stream.drop(message)
        return api_answer(kind, success=True)

    def _consumer_names(self, stream: Stream, given: Request) -> bytes:
        return self._page("consumer_names", "consumers", sorted(stream.consumers))

    # ---- consumers --------------------------------------------------------------------------

    def _consumer_call(self, words: list[str], data: bytes) -> bytes | None:
        verb = words[1]
        if verb == "DURABLE":
            words = words[1:]
        kind = f"consumer_{words[1].lower()}"
        stream = self._server.streams.get(words[2])
        if stream is None:
            return api_refusal(kind, NO_STREAM)
        if stream.away:
            return api_refusal(kind, UNAVAILABLE) if stream.away == "unavailable" else None
        if words[1] == "CREATE":
            return _ensure(stream, words[3], _decode(data))
        if words[1] == "NAMES":
            return self._consumer_names(stream, {})
        consumer = stream.consumers.get(words[3]) if len(words) > 3 else None
        if consumer is None:
            return api_refusal(kind, NO_CONSUMER)
        if words[1] == "INFO":
            return api_answer(kind, **consumer.info())
        if words[1] == "DELETE":
            del stream.consumers[consumer.name]
            consumer.end()
            return api_answer(kind, success=True)
        return None


def _ensure(stream: Stream, name: str, request: Request) -> bytes:
    """Make or change a consumer, as the action of the request permits."""
    kind, action = "consumer_create", request.get("action", "")
    config = consumers.full_config(request["config"])
    there = stream.consumers.get(name)
    if config["name"] != name:
        text = "consumer name in subject does not match durable name in request"
        return api_refusal(kind, ApiError(400, 10017, text))
    if there is None and action == "update":
        return api_refusal(kind, ApiError(400, 10149, "consumer does not exist"))
    if there is not None and action == "create" and there.config != config:
        return api_refusal(kind, ApiError(400, 10148, "consumer already exists"))
    wrong = _wrong_consumer(stream, config) if stream.work_queue else None
    if wrong is not None:
        return api_refusal(kind, wrong)
    if there is None:
        there = stream.consumers[name] = Consumer(stream, config)
    elif there.config != config:
        there.configure(config)
    return api_answer(kind, **there.info())


def _wrong_consumer(stream: Stream, config: Request) -> ApiError | None:
    """Each message of a work queue is one consumer's."""
    if config["ack_policy"] != "explicit":
        text = "consumer in pull mode requires explicit ack policy on workqueue stream"
        return ApiError(400, 10084, text)
    others = [one for one in stream.consumers.values() if one.name != config["name"]]
    if "filter_subject" not in config and others:
        text = "multiple non-filtered consumers not allowed on workqueue stream"
        return ApiError(400, 10099, text)
    wanted = config.get("filter_subject", ">")
    if any(overlap(wanted, other.config.get("filter_subject", ">")) for other in others):
        return ApiError(400, 10100, "filtered consumer not unique on workqueue stream")
    if config["deliver_policy"] != "all":
        return ApiError(400, 10101, "consumer must be deliver all on workqueue stream")
    return None


def stream_info(
    stream: Stream, asked: Request, moment: int | None, *, kind: str = "stream_info"
) -> bytes:
    pattern, offset = asked.get("subjects_filter", ""), asked.get("offset", 0)
    index = stream.view(moment)
    total = len(index.subjects(pattern)) if pattern else 0
    return api_answer(
        kind,
        total=total,
        offset=offset,
        limit=100_000 if total else 0,
        config=msgspec.Raw(stream.config_json),
        created=stream.created_text,
        state=stream.state(index, pattern, offset),
        cluster={"leader": stream.server.name},
        ts=rfc3339(stream.server.clock.now()),
    )

"""OpenAIModel (R36-R38, R45): a reply is whole or none; what is sent; what is never shown."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from kit.build import RUN, types_of
from kit.fake_openai import (
    DONE,
    Answer,
    FakeOpenAI,
    calls,
    chunk,
    event,
    refuses,
    speaks,
    stream,
    usage,
)
from kit.waiting import eventually

from journal.errors import StepFailed
from journal.messages import Message, Reply, ToolRequest, ToolSpec, Usage
from journal.stores.memory import MemoryStore
from journal.views import Completed
from runfold.models import ModelFailed, OpenAIModel
from worker.agent import Agent
from worker.models import openai as module
from worker.models.openai_request import request_body, wire_names
from worker.models.openai_stream import EVENT_BYTES_MAX, REPLY_BYTES_MAX, Assembly, Events
from worker.runner import run
from worker.tools import read

KEY = "sk-Very/Secret-123"
HI = (Message(role="user", content="hi"),)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


class Asking:
    """A model before a fake server; `previews` is what it showed while it answered."""

    def __init__(self, server: FakeOpenAI, **options: Any) -> None:
        self.server = server
        options = {"base_url": server.url, "api_key": KEY, **options}
        self.model = OpenAIModel("m-1", **options)
        self.previews: list[str] = []

    async def __call__(
        self, messages: Sequence[Message] = HI, tools: Sequence[ToolSpec] = ()
    ) -> Reply:
        return await self.model.reply(messages, tools, preview=self.preview)

    async def preview(self, text: str) -> None:
        self.previews.append(text)


async def answer_to(script: Answer, tools: Sequence[ToolSpec] = (), **options: Any) -> Reply:
    async with FakeOpenAI([script]) as server:
        return await Asking(server, **options)(tools=tools)


async def failure_of(script: Answer, **options: Any) -> ModelFailed:
    """How the call fails, with nothing of the key in it or in what it says of its causes."""
    with pytest.raises(ModelFailed) as raised:
        await answer_to(script, **options)
    told = "".join(traceback.format_exception(raised.value)) + repr(raised.value)
    assert "Secret" not in told
    return raised.value


def spec(name: str, description: str = "") -> ToolSpec:
    return ToolSpec(name=name, description=description, schema={"type": "object"}, write=False)


def added(*values: Any) -> Assembly:
    assembly = Assembly({}, KEY)
    for value in values:
        assembly.add(json.dumps(value).encode())
    return assembly


# ---- a whole reply ----------------------------------------------------------------------------


async def test_the_previews_are_the_text_piece_by_piece():
    async with FakeOpenAI([speaks("Tick", "et ", "filed.")]) as server:
        ask = Asking(server)
        reply = await ask()
    assert ask.previews == ["Tick", "et ", "filed."]
    assert reply == Reply(text="Ticket filed.")


@pytest.mark.parametrize("piece", [1, 2, 3, 7])
@pytest.mark.parametrize("chunked", [True, False])
async def test_text_is_whole_however_its_bytes_are_split(piece: int, chunked: bool):
    text = "naïve – 日本語 🎉\u2028\u2029\x85 \r\n end"
    async with FakeOpenAI([speaks(*text, piece=piece, chunked=chunked)]) as server:
        ask = Asking(server)
        assert (await ask()).text == text
    assert "".join(ask.previews) == text


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_events_are_found_whatever_ends_their_lines(end: bytes, size: int):
    raw = end.join([b": hello", b"event: x", b"data: one", b"", b"", b"data:two", b"data: 3", b""])
    raw += end + b"data: last" + end + end + b": x"
    events = Events()
    found = [e for at in range(0, len(raw), size) for e in events.feed(raw[at : at + size])]
    assert found == [b"one", b"two\n3", b"last"]


async def test_argument_text_is_passed_on_verbatim_from_its_fragments():
    wanted = ('{"q": "a",\n "q": 1e999, ', "not JSON at all \u2028 {", "", '{"ü": "\\ud83d"}')
    script = calls(*((f"c{n}", "find", text) for n, text in enumerate(wanted)), size=3)
    reply = await answer_to(script)
    assert [call.arguments for call in reply.calls] == list(wanted)
    assert [call.id for call in reply.calls] == ["c0", "c1", "c2", "c3"]
    assert reply.finish == "tool_calls"


def test_interleaved_fragments_go_to_the_call_of_their_index():
    def part(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        function = {"name": f"t{index}", "arguments": arguments}
        return chunk(tool_calls=[{"index": index, "function": function, **more}])

    parts = (part(1, "{", id="b"), part(0, "[", id="a"), part(1, "}"), part(0, "]", id="a"))
    assembly = added(*parts, chunk("tool_calls"))
    assembly.add(b"[DONE]")
    assert assembly.reply().calls == (
        ToolRequest(id="a", name="t0", arguments="[]"),
        ToolRequest(id="b", name="t1", arguments="{}"),
    )


@pytest.mark.parametrize(
    ("said", "meant"),
    [("stop", "stop"), ("length", "length"), ("content_filter", "refusal")],
)
async def test_the_finish_reason_is_kept(said: str, meant: str):
    assert (await answer_to(speaks("so", finish=said))).finish == meant


async def test_a_refusal_is_one_with_the_models_words():
    reply = await answer_to(stream(chunk(refusal="I "), chunk(refusal="won't."), chunk("stop")))
    assert (reply.finish, reply.text) == ("refusal", "I won't.")


async def test_usage_is_asked_for_and_kept():
    async with FakeOpenAI([stream(chunk("stop", content="x"), usage(12, 3))]) as server:
        reply = await Asking(server)()
    assert reply.usage == Usage(input_tokens=12, output_tokens=3)
    assert server.asked[0].body["stream_options"] == {"include_usage": True}


async def test_what_servers_add_or_leave_out_does_no_harm():
    body = b": PROCESSING\n\n" + event({"choices": [], "prompt_filter_results": [{}]})
    body += event({"choices": [{"delta": {"content": "x", "reasoning": "hm"}}], "error": None})
    body += b"event: message\nid: 3\ndata:" + json.dumps(chunk("stop")).encode() + b"\n\n" + DONE
    assert await answer_to(Answer(body=body + b"data: after the end\n\n")) == Reply(text="x")


async def test_a_final_done_needs_no_blank_line():
    for done in (b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r", b"data:[DONE]\r\n"):
        assert (await answer_to(speaks("x", done=done, chunked=False))).text == "x"


# ---- no whole reply ---------------------------------------------------------------------------


BROKEN = {
    "no finish_reason": stream(chunk(content="x")),
    "no [DONE]": speaks("x", done=b""),
    "nothing": Answer(body=b""),
    "JSON cut off": Answer(body=b'data: {"choices": [{"del\n\n' + DONE),
    "no chunk": stream({"object": "error", "message": "overloaded"}),
    "a list": Answer(body=b"data: []\n\n" + DONE),
    "not UTF-8": Answer(body=event(chunk(content="x")).replace(b'"x"', b'"\xff"') + DONE),
    "half a surrogate": Answer(body=event(chunk(content="x")).replace(b'"x"', b'"\\ud83d"') + DONE),
    "an unknown finish_reason": speaks("x", finish="exhausted"),
    "two finish_reasons": stream(chunk("stop"), chunk("length")),
    "a second choice": stream({"choices": [{"index": 1, "delta": {"content": "y"}}]}),
    "a call without index": stream(chunk(tool_calls=[{"id": "a"}])),
    "two ids in one call": stream(
        chunk(tool_calls=[{"index": 0, "id": "a"}, {"index": 0, "id": "b"}])
    ),
    "two names in one call": stream(
        chunk(tool_calls=[{"index": 0, "function": {"name": n}} for n in ("pay", "payout")])
    ),
    "an error object": stream(chunk(content="x"), {"error": {"message": f"bad key {KEY}"}}),
    "an error text": stream(chunk(content="x"), {"error": "out of memory"}),
    "not a stream": Answer(body=b'{"choices": []}', kind="application/json; charset=utf-8"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("chunked", [True, False])
async def test_what_is_no_whole_stream_is_no_reply(case: str, chunked: bool):
    error = await failure_of(BROKEN[case].but(chunked=chunked))
    assert len(str(error)) < 1000


@pytest.mark.parametrize("missing", ["a finish_reason", "[DONE]"])
async def test_what_a_cut_off_stream_lacks_is_said(missing: str):
    error = await failure_of(BROKEN[f"no {missing.removeprefix('a ')}"])
    assert f"ended without {missing}: the reply was cut off" in str(error)


async def test_an_error_in_the_stream_is_told_without_the_key():
    error = await failure_of(BROKEN["an error object"])
    assert "bad key [key]" in str(error)


async def test_a_stream_cut_at_any_byte_is_never_a_reply():
    """Where a cut can't be told from the end, only the finished text before it counts."""
    whole = stream(chunk(content="né"), chunk("stop"), usage(1, 2), chunked=False)
    last = len(whole.body) - len(DONE) + len(b"data: [DONE]")
    cuts = range(len(whole.body) + 1)
    async with FakeOpenAI([whole.but(cut=cut) for cut in cuts]) as server:
        ask = Asking(server)
        for cut in cuts:
            if cut < last:
                with pytest.raises(ModelFailed, match="cut off"):
                    await ask()
            else:
                assert (await ask()).usage == Usage(input_tokens=1, output_tokens=2)


async def test_a_run_records_no_reply_of_a_stream_that_was_cut_at_any_byte():
    whole = calls(("c1", "look", '{"q": "ü"}'))
    cuts = range(len(whole.body) - len(b"\n\n"))
    async with FakeOpenAI([whole.but(cut=cut) for cut in cuts]) as server:
        agent = desk(server)
        for cut in cuts:
            store = MemoryStore()
            with pytest.raises(StepFailed, match="llm/1 failed"):
                await run(store, agent, RUN, "hi")
            assert await types_of(store) == ["run.started", "step.started"], cut


@pytest.mark.parametrize("status", [301, 400, 401, 404, 429, 500, 503])
async def test_an_http_error_has_its_status_and_a_bounded_harmless_text(status: int):
    words = f"no \x1b[2J\u202e {KEY} {'x' * 100_000}"
    error = await failure_of(refuses(status, words))
    assert error.status == status
    assert f"answered {status}: " in str(error)
    assert "[key]" in str(error) and "\\u202e" in str(error)
    assert str(error).isprintable() and len(str(error)) < 1000
    assert (await failure_of(refuses(status, words, cut=10))).status == status


async def test_a_key_with_escaped_slashes_is_not_shown_either():
    body = json.dumps(f"wrong: {KEY}").replace("/", "\\/").encode()
    error = await failure_of(Answer(body=body, status=401))
    assert "wrong: [key]" in str(error)


async def test_a_server_that_is_not_there_is_a_failure_that_names_it():
    async with FakeOpenAI([]) as server:
        pass
    with pytest.raises(ModelFailed, match=r"127\.0\.0\.1:\d+/v1/chat/completions: ConnectError"):
        await Asking(server)()


async def test_a_silent_server_is_given_up():
    error = await failure_of(speaks("x").but(cut=40, hold=True), timeout_s=0.05)
    assert "silent for 0.05 s" in str(error)


async def test_a_server_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CALL_S_MAX", 0.05)
    error = await failure_of(speaks("x").but(cut=40, hold=True))
    assert "no reply in 0.05 s" in str(error)


async def test_a_whole_reply_does_not_wait_for_the_end_of_the_connection():
    whole = speaks("x")
    reply = await answer_to(whole.but(body=whole.body + b": x\n", cut=len(whole.body), hold=True))
    assert reply.text == "x"


async def test_nothing_is_tried_twice():
    async with FakeOpenAI([refuses(429, "slow down"), speaks("x")]) as server:
        ask = Asking(server)
        with pytest.raises(ModelFailed):
            await ask()
        assert len(server.asked) == 1
        assert (await ask()).text == "x"


def test_an_event_and_a_reply_are_bounded():
    events = Events()
    events.feed(b"x" * EVENT_BYTES_MAX)
    with pytest.raises(ModelFailed, match="an event"):
        events.feed(b"x")
    for delta in ("content", "refusal"):
        assembly = added(chunk(**{delta: "ü" * (REPLY_BYTES_MAX // 2)}))
        with pytest.raises(ModelFailed, match="the reply"):
            assembly.add(json.dumps(chunk(**{delta: "y"})).encode())
    assembly = added(chunk(tool_calls=[{"index": 0, "id": "x" * REPLY_BYTES_MAX}]))
    with pytest.raises(ModelFailed, match="the reply"):
        assembly.add(b'{"choices":[{"delta":{"tool_calls":[{"index":1,"id":"y"}]}}]}')


async def test_an_exception_of_the_preview_ends_the_call():
    async def broken(text: str) -> None:
        raise RuntimeError("no listener")

    async with FakeOpenAI([speaks("x", "y")]) as server:
        with pytest.raises(RuntimeError, match="no listener"):
            await Asking(server).model.reply(HI, (), preview=broken)


async def test_a_cancelled_call_leaves_no_connection():
    async with FakeOpenAI([speaks("x").but(cut=60, hold=True)]) as server:
        task = asyncio.create_task(Asking(server)())
        await eventually(lambda: server.asked)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: server.gone)


# ---- what is sent -----------------------------------------------------------------------------


def sent(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Any:
    return json.loads(request_body("m", messages, tools, wire_names(tools), None, {}))


def test_a_conversation_is_sent_in_the_apis_words():
    call = ToolRequest(id="c1", name="files.read", arguments='{"p": 1 }')
    body = sent(
        [
            Message(role="system", content="Be kind."),
            Message(role="user", content={"b": [1, None], "a": "ü"}),
            Message(role="assistant", content="", calls=(call,)),
            Message(role="tool", content={"rows": [1]}, call_id="c1"),
            Message(role="tool", content="text", call_id="c2"),
            Message(role="assistant", content="Done."),
        ],
        [spec("files.read", "Reads.")],
    )
    function = {"name": "files__read", "arguments": '{"p": 1 }'}
    assert body["messages"] == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": '{"a":"ü","b":[1,null]}'},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "content": '{"rows":[1]}', "tool_call_id": "c1"},
        {"role": "tool", "content": "text", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Done."},
    ]
    declared = {"name": "files__read", "description": "Reads.", "parameters": {"type": "object"}}
    assert body["tools"] == [{"type": "function", "function": declared}]
    assert "tools" not in sent(HI)
    assert "temperature" not in body


async def test_a_tool_with_dots_is_asked_for_by_its_own_name():
    tools = [spec("files.read"), spec("files_read")]
    reply = await answer_to(calls(("a", "files__read", "{}"), ("b", "files_read", "{}")), tools)
    assert [call.name for call in reply.calls] == ["files.read", "files_read"]


def test_tools_that_would_share_a_name_are_refused():
    for pair in (("a.b", "a__b"), ("a_.b", "a._b")):
        with pytest.raises(ValueError, match="rename one"):
            wire_names([spec(name) for name in pair])


def test_every_name_that_is_sent_is_one_that_the_api_takes():
    long = [f"{'a.' * 31}{end}" for end in ("xy", "xz")]
    names = wire_names([spec(name) for name in (*long, "a.b", "c-d")])
    assert len(set(names.values())) == 4
    invented = ["", "a b", "x" * 500, "a__b", "日本", "\x00", "a.c"]
    call = [ToolRequest(id="i", name=name, arguments="") for name in invented]
    body = sent([Message(role="assistant", content="", calls=tuple(call))], [spec("a.b")])
    past = [c["function"]["name"] for c in body["messages"][0]["tool_calls"]]
    assert len(set(past)) == len(past) and "a__b" not in past
    for name in (*names.values(), *past):
        assert 1 <= len(name) <= 64
        assert name.isascii() and name.replace("_", "").replace("-", "").isalnum()


async def test_options_key_and_address_are_sent():
    async with FakeOpenAI([speaks("x")]) as server:
        extra = {"seed": 7, "stream_options": None}
        await Asking(server, base_url=server.url + "/?v=2", temperature=0.0, extra=extra)()
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions?v=2"
    assert asked.headers["authorization"] == f"Bearer {KEY}"
    assert (asked.body["model"], asked.body["stream"]) == ("m-1", True)
    assert (asked.body["temperature"], asked.body["seed"]) == (0.0, 7)
    assert "stream_options" not in asked.body


@pytest.mark.parametrize("field", ["model", "messages", "tools", "stream", "n", "temperature"])
def test_extra_fields_can_not_change_what_the_adapter_relies_on(field: str):
    with pytest.raises(ValueError, match=field):
        OpenAIModel("m", extra={field: 1})


# ---- address and key --------------------------------------------------------------------------


async def test_address_and_key_come_from_the_environment_at_each_call(
    monkeypatch: pytest.MonkeyPatch,
):
    model = OpenAIModel("m")
    with pytest.raises(ModelFailed, match="OPENAI_API_KEY"):
        await model.reply(HI, (), preview=nothing)
    async with FakeOpenAI([speaks("x"), speaks("y")]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        await model.reply(HI, (), preview=nothing)
        monkeypatch.setenv("OPENAI_API_KEY", "other")
        await model.reply(HI, (), preview=nothing)
    assert "authorization" not in server.asked[0].headers
    assert server.asked[1].headers["authorization"] == "Bearer other"


async def nothing(text: str) -> None:
    pass


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY}", f"{KEY}é", f"{KEY}\x00"])
async def test_a_key_that_no_header_can_carry_is_refused_unseen(
    key: str, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(ValueError) as given:
        OpenAIModel("m", api_key=key)
    if "\x00" in key:
        return  # no environment can hold it
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError) as found:
        await OpenAIModel("m").reply(HI, (), preview=nothing)
    for raised in (given, found):
        assert "Secret" not in "".join(traceback.format_exception(raised.value))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host/v1",
        "ftp://h",
        "http://",
        "http://u:Secret@h/v1",
        "http://u:Secret@h:x",
        "http://h:70000",
    ],
)
def test_an_address_that_is_none_is_refused_without_its_password(url: str):
    with pytest.raises(ValueError) as raised:
        OpenAIModel("m", base_url=url)
    assert "Secret" not in "".join(traceback.format_exception(raised.value))


def test_a_model_is_shown_without_its_key():
    model = OpenAIModel("m", base_url="https://h/v1?key=Secret", api_key=KEY)
    assert repr(model) == "OpenAIModel('m', base_url='https://h/v1/chat/completions')"
    assert repr(OpenAIModel("m")) == "OpenAIModel('m')"


def test_without_httpx_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    found = importlib.util.spec_from_file_location("worker.models.again", module.__file__)
    assert found is not None and found.loader is not None
    with pytest.raises(ImportError, match=r"pip install 'runfold\[openai\]'"):
        found.loader.exec_module(importlib.util.module_from_spec(found))


# ---- connections ------------------------------------------------------------------------------


async def test_one_connection_serves_one_call_after_the_other():
    async with FakeOpenAI([speaks("x")] * 3) as server:
        ask = Asking(server)
        for _ in range(3):
            await ask()
        assert (server.connections, server.gone) == (1, 0)


@pytest.mark.filterwarnings("error")
def test_a_model_leaves_nothing_open_in_any_of_its_loops(recwarn: pytest.WarningsRecorder):
    model = OpenAIModel("m", base_url="http://unused", api_key=KEY)
    clients: list[httpx.AsyncClient] = []

    async def once() -> None:
        async with FakeOpenAI([speaks("x")]) as server:
            model._url = module._endpoint(server.url)
            assert (await model.reply(HI, (), preview=nothing)).text == "x"
            clients.extend(kept.client for kept in model._clients.values())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            asyncio.run(once())
        gc.collect()
    assert [str(warning.message) for warning in caught] == []
    assert len(set(clients)) == 3 and all(client.is_closed for client in clients)


async def test_a_model_that_is_gone_leaves_no_connection():
    async with FakeOpenAI([speaks("x")]) as server:
        ask = Asking(server)
        await ask()
        assert server.gone == 0
        del ask
        gc.collect()
        await eventually(lambda: server.gone)


# ---- whole runs -------------------------------------------------------------------------------


def desk(server: FakeOpenAI) -> Agent:
    @read(name="desk.look")
    async def look(q: str) -> Any:
        return {"found": q}

    model = OpenAIModel("m", base_url=server.url, api_key=KEY)
    return Agent("desk", model=model, tools=[look], system="Be kind.")


async def test_a_run_with_a_tool_call_goes_to_its_answer_and_records_no_key():
    script = [calls(("c1", "desk__look", '{"q": "VPN"}')), speaks("It is ", "down.")]
    async with FakeOpenAI(script) as server:
        store = MemoryStore()
        outcome = await run(store, desk(server), RUN, "VPN?")
        assert outcome == Completed(Message(role="assistant", content="It is down."))
        assert await run(store, desk(server), RUN) == outcome
    assert len(server.asked) == 2
    assert [message["role"] for message in server.asked[1].body["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
    ]
    assert server.asked[1].body["messages"][-1] == {
        "role": "tool",
        "content": '{"found":"VPN"}',
        "tool_call_id": "c1",
    }
    assert "Secret" not in repr((await store.load(RUN)).entries)


async def test_a_run_goes_on_after_failed_requests():
    script = [refuses(503, f"busy, {KEY}"), speaks("x", "y").but(cut=200), speaks("Fine.")]
    async with FakeOpenAI(script) as server:
        store, agent = MemoryStore(), desk(server)
        for _ in range(2):
            with pytest.raises(StepFailed) as raised:
                await run(store, agent, RUN, "hi")
            assert "Secret" not in "".join(traceback.format_exception(raised.value))
        outcome = await run(store, agent, RUN)
    assert outcome == Completed(Message(role="assistant", content="Fine."))


async def test_many_runs_share_a_model():
    async with FakeOpenAI([speaks("ok")] * 20) as server:
        ask = Asking(server)
        replies = await asyncio.gather(*(ask() for _ in range(20)))
    assert [reply.text for reply in replies] == ["ok"] * 20
    assert len(server.asked) == 20

"""Store: a model behind any OpenAI-compatible Chat Completions endpoint, over HTTP, streaming.

It makes one request and tries nothing twice: retrying is the engine's (R26).
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Final, cast
from weakref import WeakKeyDictionary

from journal import values
from journal.messages import JSON, Message, Preview, Reply, ToolSpec

from .openai_request import OURS, request_body, wire_names
from .openai_stream import Assembly, Events, ModelFailed, shown

try:
    import httpx
except ModuleNotFoundError as _missing:
    raise ImportError("OpenAIModel needs httpx: pip install 'runfold[openai]'") from _missing

__all__ = ["ModelFailed", "OpenAIModel"]

DEFAULT_URL: Final = "https://api.openai.com/v1"

CONNECT_S_MAX: Final = 10.0
CALL_S_MAX: Final = 3600.0
"""A whole call: a server that keeps sending comments is never silent."""

KEEP_S: Final = 4.0
"""How long an idle connection is kept: common servers close theirs after 5 s, and a request that
meets the closing fails."""

DRAIN_S: Final = 0.25
"""From `[DONE]` to the end of the response; a connection that was read to the end is used again."""

ERROR_BYTES_MAX: Final = 64 * 1024


class OpenAIModel:
    """`model` as served at `base_url`.

    `base_url` and `api_key`, where not given, are read from OPENAI_BASE_URL and OPENAI_API_KEY at
    each call, so that a module that declares an agent can be imported without them. `timeout_s` is
    the longest silence of the server, not the length of a reply. `extra` are more fields of the
    request; `extra={"stream_options": None}` is for servers that refuse it (usage is unknown then).
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        temperature: float | None = None,
        extra: Mapping[str, JSON] | None = None,
    ) -> None:
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s is above 0 and finite, not {timeout_s}")
        if taken := sorted(OURS.intersection(extra or {})):
            raise ValueError(f"extra can't set {', '.join(taken)}")
        self.model = model
        self._url = None if base_url is None else _endpoint(base_url)
        self._key = None if api_key is None else _checked_key(api_key)
        self._timeout_s = timeout_s
        self._temperature = temperature
        self._extra: dict[str, JSON] = values.normalise(dict(extra or {}), "extra")
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Kept] = WeakKeyDictionary()

    def __repr__(self) -> str:
        at = "" if self._url is None else f", base_url={_place(self._url)!r}"
        return f"OpenAIModel({self.model!r}{at})"

    async def reply(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, preview: Preview
    ) -> Reply:
        """Ask once. Raises ModelFailed for whatever is no whole reply."""
        url, key = self._address()
        names = wire_names(tools)
        body = request_body(self.model, messages, tools, names, self._temperature, self._extra)
        headers = {
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",  # sizes are counted as they arrive
        }
        if key:
            headers["authorization"] = f"Bearer {key}"
        assembly = Assembly(names, key)
        client = await self._client()
        limit = asyncio.timeout(CALL_S_MAX)
        try:
            async with (
                limit,
                client.stream("POST", url, content=body, headers=headers) as response,
            ):
                if (problem := await _refusal(response, key)) is not None:
                    raise problem
                await _read(response, assembly, preview)
        except httpx.HTTPError as error:
            silent = isinstance(error, httpx.TimeoutException)
            what = f"silent for {self._timeout_s:g} s" if silent else shown(str(error), key)
            raise ModelFailed(f"{_place(url)}: {type(error).__name__}: {what}") from error
        except TimeoutError as error:
            if limit.expired():
                raise ModelFailed(f"{_place(url)}: no reply in {CALL_S_MAX:g} s") from error
            raise
        return assembly.reply()

    def _address(self) -> tuple[httpx.URL, str]:
        """Where to ask, and with which key; "" is none."""
        named = os.environ.get("OPENAI_BASE_URL", "")
        url = _endpoint(named or DEFAULT_URL) if self._url is None else self._url
        key = self._key
        if key is None:
            key = _checked_key(os.environ.get("OPENAI_API_KEY", ""))
        if not key and self._url is None and not named:  # a server of one's own may need none
            raise ModelFailed("no API key: set OPENAI_API_KEY, or give OpenAIModel an api_key")
        return url, key

    async def _client(self) -> httpx.AsyncClient:
        """The running loop's client; connections belong to a loop."""
        loop = asyncio.get_running_loop()
        kept = self._clients.get(loop)
        if kept is None or kept.client.is_closed:
            kept = self._clients[loop] = _Kept(self._timeout_s)
            await kept.open()  # does not wait, so that no second task comes between
        return kept.client


class _Kept:
    """A client that is closed with its loop, or when its model is gone, whichever is first.

    A model has no close. What a loop does close at its end (`shutdown_asyncgens`, in asyncio.run
    and every Runner) are async generators; those that are collected earlier it closes then.
    """

    def __init__(self, timeout_s: float) -> None:
        self.client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S_MAX)),
            # How many calls run at once is the caller's to bound.
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_S),
        )
        self._open = _until_closed(self.client)

    async def open(self) -> None:
        await anext(self._open)


async def _until_closed(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await client.aclose()


async def _read(response: httpx.Response, assembly: Assembly, preview: Preview) -> None:
    events = Events()
    async with aclosing(_pieces(response)) as pieces:
        async for piece in pieces:
            for event in events.feed(piece):
                if not assembly.done and (text := assembly.add(event)):
                    await preview(text)
            if assembly.done:
                break
        else:
            # Of what no blank line completes, only this can't be the beginning of something else.
            if events.end() == b"[DONE]":
                assembly.add(b"[DONE]")
            return
        try:
            async with asyncio.timeout(DRAIN_S):
                async for _ in pieces:
                    pass
        except (httpx.HTTPError, TimeoutError):
            pass  # the reply is whole; only the connection is of no more use


def _pieces(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    return cast("AsyncGenerator[bytes, None]", response.aiter_bytes())  # httpx 0.28 tells less


async def _refusal(response: httpx.Response, key: str) -> ModelFailed | None:
    """What a response that is no stream of events says."""
    kind = response.headers.get("content-type", "")
    if response.status_code == 200 and not kind.startswith("application/json"):
        return None
    body = bytearray()
    try:
        async with aclosing(_pieces(response)) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > ERROR_BYTES_MAX:
                    break
    except httpx.HTTPError:
        pass  # the status says more than how its explanation was lost
    text = shown(body.decode("utf-8", "replace"), key)
    status = response.status_code
    what = "200 but no stream of events" if status == 200 else f"{status}"
    return ModelFailed(f"{_place(response.request.url)} answered {what}: {text}", status)


def _endpoint(base_url: str) -> httpx.URL:
    """The address of chat completions under a base URL; its query stays."""
    # What stands before an @ is a password: it is not shown, neither here nor by who asks later.
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise ValueError(f"the base URL is none: {error}") from None
    whole = url.scheme in ("http", "https") and url.host and (url.port or 80) < 65536
    if not whole or url.userinfo:
        raise ValueError("the base URL is http(s)://host[:port]/path, without a user or password")
    return url.copy_with(path=f"{url.path.rstrip('/')}/chat/completions", fragment=None)


def _place(url: httpx.URL) -> str:
    """An address for messages: without its query, where some servers want a key."""
    return f"{url.scheme}://{url.netloc.decode('ascii')}{url.path}"


def _checked_key(key: str) -> str:
    # The HTTP library would quote a header that it refuses.
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError(
            "the API key holds a blank, a line break or another character that no key has"
        )
    return key

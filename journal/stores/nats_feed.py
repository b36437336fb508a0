"""Store: what comes from a NATS server, on its way to those who listen.

nats-py (2.16.0) lets bytes wait for a task, matches them against seven patterns one after another,
and awaits a coroutine a message. Here the socket hands them on as they come: messages of our own
takers, whole and in the server's one form, are given to them at once; from the first byte of
anything else on, all goes to nats-py in its order, until nats-py has none of it left.

So a taker's messages keep their order among themselves and against what was sent before a pong.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from nats.aio.client import Client
from nats.protocol.parser import AWAITING_CONTROL_LINE

Take: TypeAlias = Callable[[bytes, bytes, bytes, bytes], None]
"""Subject, reply, payload, headers as they came. Must not raise."""

# As nats-server 2.15.1 writes them: one space between words, and none in them, nor a tab.
_WORD: Final = rb"[^ \t\r\n]+"
_MSG: Final = re.compile(rb"MSG (%b) (\d{1,9}) (?:(%b) )?(\d{1,9})\r\n" % (_WORD, _WORD))
_HMSG: Final = re.compile(
    rb"HMSG (%b) (\d{1,9}) (?:(%b) )?(\d{1,9}) (\d{1,9})\r\n" % (_WORD, _WORD)
)
_M: Final = ord("M")


class Feed:
    """Of one connection, in place of its reader's `feed_data`."""

    def __init__(
        self, client: Client, reader: asyncio.StreamReader, takers: Mapping[int, Take]
    ) -> None:
        self._client: Any = client
        self._reader: Any = reader
        self._to_nats_py: Callable[[bytes], None] = reader.feed_data
        self._takers = takers
        self._behind = True  # nats-py may have read more than the greeting already
        self._held: list[bytes] = []
        """The beginning of something, of `_size` bytes; more makes sense from `_wanted` on."""
        self._size = self._wanted = 0

    def __call__(self, data: bytes) -> None:
        if self._behind and self._is_behind():
            self._to_nats_py(data)
            return
        if self._held:
            self._held.append(data)
            self._size += len(data)
            if self._size < self._wanted:
                return
            data = b"".join(self._held)
            self._held.clear()
        if self._client._status != Client.CONNECTED:  # left: its reading task reads no more
            self._give_up(data)
        else:
            self._take_from(data)

    def _take_from(self, data: bytes) -> None:
        takers = self._takers
        at, end = 0, len(data)
        while at < end:
            line = (_MSG if data[at] == _M else _HMSG).match(data, at)
            if line is None:
                if data.find(b"\r\n", at) < 0:
                    self._hold(data[at:], 0)
                else:
                    self._give_up(data[at:])
                return
            start = line.end()
            if data[at] == _M:
                subject, sid, reply, total = line.groups()
                head = start
            else:
                subject, sid, reply, headers, total = line.groups()
                head = start + int(headers)
            stop = start + int(total)
            take = takers.get(int(sid))
            if take is None:
                self._give_up(data[at:])
                return
            if end < stop + 2:
                self._hold(data[at:], stop + 2 - at)
                return
            at = stop + 2
            take(subject, reply or b"", data[head:stop], data[start:head])

    def _is_behind(self) -> bool:
        """Whether nats-py has something to parse before what comes now."""
        parser = self._client._ps
        idle = parser.state == AWAITING_CONTROL_LINE and not parser.buf and not self._reader._buffer
        self._behind = not idle
        return self._behind

    def _hold(self, data: bytes, wanted: int) -> None:
        self._held.append(data)
        self._size, self._wanted = len(data), wanted

    def _give_up(self, data: bytes) -> None:
        self._behind = True
        self._to_nats_py(data)

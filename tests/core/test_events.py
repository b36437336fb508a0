"""Server-Sent Events are read whole, whatever the pieces they come in."""

from __future__ import annotations

import pytest

from runfold.events import Event, Events

STREAM = (
    b": here\n\n"
    b'id: 1\nevent: record\ndata: {"a":"\xe2\x80\xa8\x0b"}\n\n'
    b"event: preview\r\ndata: one\r\ndata:two\r\n\r\n"
    b"retry: 5\n\n"
    b"data\r\rid: 9\ndata: cut"
)
WHOLE = [
    Event("record", '{"a":"\u2028\x0b"}', "1"),
    Event("preview", "one\ntwo", ""),
    Event("message", "", ""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_in_any_pieces(size: int) -> None:
    events = Events()
    found: list[Event] = []
    for place in range(0, len(STREAM), size):
        found += events.feed(STREAM[place : place + size])
    assert found == WHOLE
    assert events.kept_bytes > 0

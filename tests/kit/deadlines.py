"""A later time, for who asks whether the call of a cut-off write may still be running (R22)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Any, Self
from unittest import mock

import journal.unknown


class LongAfter(datetime):
    """When every deadline has passed."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return cls(9000, 1, 1, tzinfo=tz)


@contextmanager
def deadlines_passed() -> Generator[None]:
    """While inside, it is long after any deadline."""
    with mock.patch.object(journal.unknown, "datetime", LongAfter):
        yield


def pass_deadlines() -> None:
    """From now on in this process, it is."""
    asks: Any = journal.unknown
    asks.datetime = LongAfter

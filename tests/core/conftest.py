"""What core tests share: time that only a test moves."""

from __future__ import annotations

import pytest
from kit.build import VirtualTime


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """The clock and the sleep of the journal handle. No core test ever waits."""
    time = VirtualTime()
    for module in ("journal.log", "journal.stepping", "journal.ownership"):
        monkeypatch.setattr(f"{module}.asyncio", time)
    for module in ("journal.log", "journal.stepping"):
        monkeypatch.setattr(f"{module}.time", time)
    return time


@pytest.fixture
def no_waiting(time: VirtualTime) -> None:
    """As `time`, for tests that do not look at it."""

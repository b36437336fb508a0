"""What core tests share: time that only a test moves, and properties that know no deadline."""

from __future__ import annotations

import asyncio
import sys
import time as real_time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from kit.audited import watching
from kit.build import VirtualTime

settings.register_profile("core", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("core")


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """The clock and the sleep of the journal's shells. No core test ever waits."""
    virtual = VirtualTime()
    for name, module in list(sys.modules.items()):
        if name.startswith("journal.") and not name.startswith("journal.stores."):
            for real in (asyncio, real_time):
                if vars(module).get(real.__name__) is real:
                    monkeypatch.setattr(module, real.__name__, virtual)
    return virtual


@pytest.fixture(autouse=True)
def audited(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever journals a test leaves in its memory stores break no rule of the audit (R70), unless
    it is marked `dishonest`: it makes what no writer does."""
    with watching() as seen:
        yield
    if request.node.get_closest_marker("dishonest") is None:
        assert seen.violations() == [], "the audit of what the test leaves in its stores"


@pytest.fixture
def no_waiting(time: VirtualTime) -> None:
    """As `time`, for tests that do not look at it."""

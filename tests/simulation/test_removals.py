"""With a guard of the product taken out, the simulation finds a violation: it can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kit.simulated.streams import LAST_SUBJECT, Stream
from simulation.schedule import play
from simulation.world import World

from bridge.settling import Settler
from journal.errors import Fenced
from journal.log import Log
from journal.sealing import sealed

SEEDS = 200
Patch = Callable[[pytest.MonkeyPatch], None]


def no_expected_sequence(patch: pytest.MonkeyPatch) -> None:
    """An append lands wherever the tail is."""
    refused: Any = Stream._refused

    def anywhere(self: Stream, subject: str, headers: dict[str, str]) -> bytes | None:
        rest = {name: text for name, text in headers.items() if name != LAST_SUBJECT}
        return refused(self, subject, rest)

    patch.setattr(Stream, "_refused", anywhere)


def no_read_back(patch: pytest.MonkeyPatch) -> None:
    """What follows an unknown append is not looked through for the own record."""
    take: Any = Log._take
    patch.setattr(Log, "_take", lambda self, loaded, record_id: take(self, loaded, ""))


def ack_first(patch: pytest.MonkeyPatch) -> None:
    """A signal leaves the stream before it is in the journal."""
    applied: Any = Settler._applied

    async def after_the_ack(self: Any, signal: Any, *rest: Any) -> Any:
        await self._queue.ack(signal)
        return await applied(self, signal, *rest)

    patch.setattr(Settler, "_applied", after_the_ack)


def goes_on_fenced(patch: pytest.MonkeyPatch) -> None:
    """A holder that reads a newer claim goes on under its own."""
    take: Any = Log._take

    def blind(self: Any, loaded: Any, record_id: str) -> Any:
        try:
            return take(self, loaded, record_id)
        except Fenced:
            self._stopped = False
            return None

    def seal(log: Any, body: Any, record_id: str, trace: str) -> Any:
        claim, log.fold.claim = log.fold.claim, log.fold.claims.get(log.claim)
        try:
            return sealed(log, body, record_id, trace)
        finally:
            log.fold.claim = claim

    patch.setattr(Log, "_take", blind)
    patch.setattr("journal.log.sealed", seal)


def calls_twice(patch: pytest.MonkeyPatch) -> None:
    """Every write is made twice."""
    act: Any = World.act

    async def twice(self: World, call: Any, text: str) -> str:
        await act(self, call, text)
        return await act(self, call, text)

    patch.setattr(World, "act", twice)


def test_a_trace_ends_at_a_call_that_nothing_permits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    calls_twice(monkeypatch)
    broken = play(2, profile="calm", show=True)
    assert any("is called, call 2, start 1" in text for text in broken.violations)
    lines = capsys.readouterr().out.splitlines()
    assert "journals" in lines[-1] and any(" call " in line for line in lines[-8:])


def test_a_world_that_never_rests_is_a_violation(monkeypatch: pytest.MonkeyPatch):
    """The schedule raised what it should have told: its end had no callback left."""
    monkeypatch.setattr("simulation.loop.HANDLES_MAX", 100)
    restless = play(0, profile="calm")
    assert any(" callbacks\n" in text for text in restless.violations)


@pytest.mark.parametrize(
    ("remove", "profile"),
    [
        (no_expected_sequence, "stalling"),
        (no_read_back, "acks"),
        (ack_first, "killing"),
        (goes_on_fenced, "stalling"),
    ],
)
def test_a_guard_that_is_gone_is_missed(
    remove: Patch, profile: str, monkeypatch: pytest.MonkeyPatch
):
    remove(monkeypatch)
    assert any(play(seed, profile=profile).violations for seed in range(SEEDS))

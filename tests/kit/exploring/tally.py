"""What the searches of a test file saw in all, printed for the reader and the documentation."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest

from .bounds import Bounds, Found, Rules
from .search import Explorer


class Tally:
    """Counts over the searches that found nothing."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._capture = request.config.pluginmanager.getplugin("capturemanager")
        self.states = 0
        self.transitions = 0
        self.searches = 0

    def explored(self, bounds: Bounds, rules: Rules | None = None) -> Found:
        """What the search within these bounds saw; how much that was is printed."""
        found = Explorer(bounds, rules).run()
        self.states += found.states
        self.transitions += found.transitions
        self.searches += 1
        ends = ", ".join(sorted("/".join(end) if end != "cancelled" else end for end in found.ends))
        self.say(
            f"\n  {bounds.name()}: {found.states} states, {found.transitions} transitions, "
            f"{found.journals} journals audited; ends {ends}"
        )
        assert found.deepest == bounds.records
        gc.collect()  # the world of a search is large, and knows itself
        return found

    def say(self, text: str) -> None:
        with self._shown():
            print(text)

    def _shown(self) -> AbstractContextManager[None]:
        return self._capture.global_and_fixture_disabled() if self._capture else nullcontext()


def tallied(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Body of a module's fixture."""
    tally = Tally(request)
    yield tally
    tally.say(
        f"\n  explored: {tally.states} states, {tally.transitions} transitions, "
        f"{tally.searches} searches"
    )

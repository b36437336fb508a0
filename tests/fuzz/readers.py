"""Everything that looks at a run: what is accepted must be shown by all of it."""

from __future__ import annotations

import contextlib
import io

import msgspec

from journal import waits
from journal.codec import Entry
from journal.fold import Fold
from journal.inbox import FOR_PEOPLE
from journal.views import run_json, run_state, waiting_since, waiting_until
from journal.waits import instant_text
from runfold.terminal import print_run, timeline

NOW = "2026-06-01T00:00:00.000Z"


def look(fold: Fold) -> None:
    """What every reader asks of a state."""
    fold.runnable(NOW)
    fold.copy().status(held=True, now=NOW)
    waits.wakes_at(fold)
    if fold.started is None or fold.purged is not None:
        return
    msgspec.json.encode(run_state(fold, now=NOW))
    msgspec.json.encode(run_json(fold, now=NOW))
    if fold.status(now=NOW) in FOR_PEOPLE:
        for instant in (waiting_since(fold), waiting_until(fold)):
            if instant is not None:
                instant_text(instant)
    if fold.newer is None:
        with contextlib.redirect_stdout(io.StringIO()):
            print_run(fold, "", now=NOW)


def told(entry: Entry) -> None:
    """A record as a person is shown it."""
    assert timeline(entry)

"""Shell: taking a run on a shared store: ask, wait, claim (PROTOCOL 4). claims.py decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, assert_never

from .claims import Answer, AskHolder, HeldBy, Rest, Take, decide_claim, live_claim
from .errors import StoreLocked
from .fold import Fold
from .records import RELEASE, Claim
from .waits import instant_text

if TYPE_CHECKING:
    from .handle import Journal


async def take(journal: Journal, revision: str, on_wait: Callable[[str], None]) -> None:
    """Claim the run, or leave `journal.claim` 0 where nothing is to be done.

    Raises StoreLocked where a live holder has it. Bounded: two asks per claim met, at most the ack
    wait apart; each further round needs somebody else's new claim.
    """
    answers: list[Answer] = []
    while True:
        now = instant_text(datetime.now(UTC))
        match decide_claim(journal.fold, answers, ack_wait_s=journal.ack_wait_s, now=now):
            case Rest():
                return
            case HeldBy(worker, silent):
                raise _held(journal, worker, silent)
            case AskHolder(worker, claim, after_s):
                if after_s:
                    on_wait(f"worker {worker} does not answer; asking again in {after_s:g} s")
                    await asyncio.sleep(after_s)
                answers.append(await journal.store.ask(worker, journal.run_id, claim))
                await journal.refresh()
                if live_claim(journal.fold) != claim:
                    answers = []
            case Take():
                about = live_claim(journal.fold)

                def due(
                    fold: Fold,
                    about: int = about,
                    known: list[Answer] = answers,
                    now: str = now,
                ) -> Claim | None:
                    heard = known if live_claim(fold) == about else []
                    take = decide_claim(fold, heard, ack_wait_s=journal.ack_wait_s, now=now)
                    if not isinstance(take, Take):
                        return None
                    return Claim(
                        worker=journal.worker,
                        revision=revision,
                        reason=take.reason,
                        attempt=fold.attempt,
                        runfold=RELEASE,
                    )

                claim = await journal.append(due)
                if claim is not None and live_claim(journal.fold) == claim.n:
                    journal.claim = claim.n
                    return
                if claim is not None:
                    journal.store.observer.let_go(journal.run_id, claim.n)
                answers = []
            case other:
                assert_never(other)


def _held(journal: Journal, worker: str, silent: bool) -> StoreLocked:
    how = ", which is connected but does not answer" if silent else ""
    return StoreLocked(
        f"run {journal.run_id} is being worked on by worker {worker}{how}",
        holder=worker,
        run_id=journal.run_id,
        hint="wait for it to end, or stop that process; then run again",
    )

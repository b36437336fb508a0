"""Shell: one signal of the SIGNALS stream: applied, or refused, and only then acknowledged.

Why none is lost and none applied twice: a message leaves the stream only by our ack, which follows
the record and its task (doors.signal returned), or the refusal in REJECTED (its publish
acknowledged). A crash anywhere before it means another delivery, and that carries the same request
id, by which the journal knows a repeat: doors.signal then appends nothing and publishes the task
again. A refusal found in REJECTED at a later delivery stands: it is not judged anew. A bridge that
was frozen and goes on while another one works on the same message does the same, in whatever order:
what it acks stands in the journal or in REJECTED, and what it puts off comes back as a repeat.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from journal.errors import (
    BadPayload,
    DecisionConflict,
    InvalidId,
    JournalDamaged,
    NotEncodable,
    RunFinished,
    RunfoldError,
    RunNotFound,
    StaleSignal,
    TooLarge,
)
from journal.escape import visible
from journal.limits import SIGNAL_BYTES_MAX
from journal.signal_address import NOBODY, SignalAddress
from journal.stores.jetstream import JetStreamStore
from journal.stores.rejected import refusal
from journal.stores.signals_queue import KeptSignal

from .saying import say

log = logging.getLogger("runfold")

HANDLE_S: Final = 120.0
"""Above what reading, appending and waking take at most (limits.py): after it, once more."""

EARLIER_S: Final = 2.0
EARLIER_PAUSE_S: Final = 0.01
"""So long another bridge is waited for that has the run's earlier signal in hand."""

BUGS_MAX: Final = 5
"""Deliveries after which what we fail at ourselves is refused: it would stop its run's others."""

TROUBLE_S: Final = 60.0

REFUSALS: Final = (
    BadPayload,
    DecisionConflict,
    InvalidId,
    JournalDamaged,
    NotEncodable,
    RunFinished,
    RunNotFound,
    StaleSignal,
    TooLarge,
)
"""What no retry changes. A journal that a newer version writes is not among them: the bridge that
comes with that version takes what is for it."""


Turn: TypeAlias = Literal["now", "earlier", "later", "gone"]
Outcome: TypeAlias = Literal["settled", "failed", "earlier", "later", "gone"]
"""`earlier`: one that came meanwhile goes first; `later`: another bridge has the one that does, or
it was put off; `gone`: it is settled, by another bridge."""


class Settler:
    """`trouble`: why the last signal could not be settled; "" where it could."""

    def __init__(self, store: JetStreamStore, count: Callable[[str, str], None]) -> None:
        self._store = store
        self._queue = store.signals
        self._count = count
        self._trouble, self._since = "", 0.0

    @property
    def trouble(self) -> str:
        """Of the last minute: another bridge may have settled since what failed here."""
        return self._trouble if time.monotonic() - self._since < TROUBLE_S else ""

    async def settle(self, signal: KeptSignal, after: int, ahead: Callable[[], bool]) -> Outcome:
        """Applied or refused, and acked; or why not now. `after`: up to this one the run's earlier
        signals are settled; `ahead`: an earlier one has come here meanwhile."""
        address: SignalAddress | None = None
        try:
            async with asyncio.timeout(HANDLE_S):
                try:
                    address = signal.address()
                    turn = await self._turn(signal, address, after, ahead)
                    if turn != "now":
                        return turn
                    word = await self._applied(signal, address)
                except REFUSALS as error:
                    await self._put(signal, address, error.code, _reason(error))
                    word = error.code
                self._count(address.name if address else "", word)
                if await self._queue.ack(signal) or await self._queue.ack(signal):
                    self._trouble = ""
                    return "settled"
        except (RunfoldError, TimeoutError) as error:
            self._trouble, self._since = visible(str(error)) or "too slow", time.monotonic()
            log.warning("signal %d is put off: %s", signal.sequence, self._trouble)
        except Exception as error:  # the edge of one signal: it must not end the others
            log.exception("signal %d: a bug", signal.sequence)
            if signal.delivery >= BUGS_MAX and await self._give_up(signal, address, error):
                return "settled"
        self._count(address.name if address else "", "put_off")
        return "failed"

    async def _turn(
        self, signal: KeptSignal, address: SignalAddress, after: int, ahead: Callable[[], bool]
    ) -> Turn:
        """Whether no earlier signal of the run is left. A leader that was deposed, and answers from
        before, can't miss an earlier one without missing this one, too: then it looks gone."""
        pause_s, waited_s = EARLIER_PAUSE_S, 0.0
        while True:
            first = await self._queue.first(address.run, after)
            if first == signal.sequence:
                return "now"
            if first == 0 or first > signal.sequence:
                return "gone"
            if ahead():
                return "earlier"
            if waited_s >= EARLIER_S:
                return "later"
            await asyncio.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(2 * pause_s, 10 * EARLIER_PAUSE_S)

    async def _applied(self, signal: KeptSignal, address: SignalAddress) -> str:
        if signal.delivery > 1:
            refused = refusal(
                subject="", run=address.run, name=address.name, code="", reason="", data=b"", by=""
            )
            if await self._store.rejected.holds(refused, signal.key):
                return "repeated"
        if signal.size > SIGNAL_BYTES_MAX:
            raise TooLarge(
                f"a signal's payload is at most {SIGNAL_BYTES_MAX} bytes, not {signal.size}",
                run_id=address.run,
            )
        number = f"sig:{signal.sequence}"
        said = await say(self._store, address, signal.data, header=signal.request_id, number=number)
        return said.result

    async def _give_up(
        self, signal: KeptSignal, address: SignalAddress | None, error: Exception
    ) -> bool:
        try:
            async with asyncio.timeout(HANDLE_S):
                reason = f"the bridge failed at it: {type(error).__name__}; its log says more"
                await self._put(signal, address, "internal", reason)
                self._count(address.name if address else "", "internal")
                return await self._queue.ack(signal)
        except (RunfoldError, TimeoutError):
            return False

    async def _put(
        self, signal: KeptSignal, address: SignalAddress | None, code: str, reason: str
    ) -> None:
        refused = refusal(
            subject=f"{self._store.namespace}.signal.{signal.subject}",
            run=address.run if address else None,
            name=address.name if address else None,
            code=code,
            reason=reason,
            data=signal.data,
            size=signal.size,
            by=address.by if address else NOBODY,
        )
        await self._store.rejected.put(refused, signal.key)


def _reason(error: RunfoldError) -> str:
    return f"{error.message} ({error.hint})" if error.hint else error.message

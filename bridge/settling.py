"""Shell: one signal of the SIGNALS stream: applied, or refused, and only then acknowledged.

Why none is lost and none applied twice: a message leaves the stream only by our ack, which follows
the record and its task (doors.signal returned), or the refusal in REJECTED (its publish
acknowledged). A crash anywhere before it means another delivery, and that carries the same request
id, by which the journal knows a repeat: doors.signal then appends nothing and publishes the task
again. A refusal found in REJECTED at a later delivery stands: it is not judged anew. A bridge that
was frozen and goes on while another one works on the same message does the same, in whatever order:
what it acks stands in the journal or in REJECTED, and what it puts off comes back as a repeat. It
may stand in both: a bridge that froze between its look at the run and the append, for longer than
the ack wait, may apply what another one has refused since (the explorer finds it; nothing orders a
journal and REJECTED).

Why none is refused over an old journal: a refusal stands for ever, and an append that would lose to
a newer record is not made. nats-server 2.15.1: a leader that was stopped, and deposed meanwhile,
answers reads from before when it goes on, until it hears of its successor, who speaks every second.
A write tells nothing of a read that follows it, over one connection or not: it is the true leader
that acknowledges the one, and whoever takes himself for it may answer the other. So a refusal that
rests on the journal takes two looks at it, SURE_S apart, both after the signal came, and the second
one, which it rests on, ends no earlier than the first. Was the first one true, then the second has
all that was acknowledged before the signal came. Was it a deposed leader's, then that one has heard
of its successor by the second. (One look alone, however late, may be the one that a leader answers
who just goes on.) So it takes two leaders deposed within SURE_S, or one stopped twice. Until then
the signal is put off, and those of its run behind it; one first look is for all that have come.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from journal.errors import (
    BadPayload,
    DecisionConflict,
    InvalidId,
    JournalDamaged,
    NotEncodable,
    NotProvisioned,
    PermissionDenied,
    RunFinished,
    RunfoldError,
    RunNotFound,
    StaleSignal,
    StoreUnavailable,
    TooLarge,
)
from journal.escape import visible
from journal.ids import RunId
from journal.limits import SIGNAL_BYTES_MAX
from journal.signal_address import NOBODY, SignalAddress
from journal.stores.jetstream import JetStreamStore
from journal.stores.jetstream_headers import TRACE
from journal.stores.rejected import refusal
from journal.stores.signals_queue import ACK_PENDING_MAX, KeptSignal, header_of

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

SICK_RUNS: Final = 2

SURE_S: Final = 5.0
"""Longer than a leader answers that was deposed (see above), and short for who looks for what
became of a signal."""

DOUBTS_MAX: Final = ACK_PENDING_MAX

MALFORMED: Final = (BadPayload, InvalidId, NotEncodable, TooLarge)
AT_ODDS: Final = (DecisionConflict, JournalDamaged, RunFinished, RunNotFound, StaleSignal)
"""Refused for what the signal says, or for what the journal says. A journal that a newer version
writes is not among them: the bridge that comes with that version takes what is for it."""

Turn: TypeAlias = Literal["now", "earlier", "later", "gone"]
Outcome: TypeAlias = Literal["settled", "failed", "doubtful", "earlier", "later", "gone"]
"""`doubtful`: to be refused, if it still is SURE_S after it came; `earlier`: one that came since
goes first; `later`: another bridge has the one that does, or it was put off; `gone`: it is settled,
by another bridge."""


class Doubt(Struct, frozen=True):
    """A first look at a run's journal: when it began, monotonic, and the tail it found."""

    at: float
    tail: int


class Settler:
    """`trouble`: why signals can't be settled, of whatever run; "" where they can."""

    def __init__(self, store: JetStreamStore, count: Callable[[str, str], None]) -> None:
        self._store = store
        self._queue = store.signals
        self._count = count
        self._trouble, self._since = "", 0.0
        self._sick: set[str] = set()
        self._doubts: dict[str, Doubt] = {}

    @property
    def trouble(self) -> str:
        """Of the last minute: another bridge may have settled since what failed here."""
        return self._trouble if time.monotonic() - self._since < TROUBLE_S else ""

    async def settle(
        self, signal: KeptSignal, came: float, after: int, ahead: Callable[[], bool]
    ) -> Outcome:
        """Applied or refused, and acked; or why not now. `came`: when it first did, monotonic;
        `after`: up to this one the run's earlier signals are settled; `ahead`: an earlier one has
        come here meanwhile."""
        address: SignalAddress | None = None
        sure = False
        try:
            async with asyncio.timeout(HANDLE_S):
                try:
                    address = signal.address()
                    turn = await self._turn(signal, address, after, ahead)
                    if turn != "now":
                        return turn
                    doubt = self._doubts.get(address.run, Doubt(math.inf, 0))
                    sure = came <= doubt.at <= time.monotonic() - SURE_S
                    word = await self._applied(signal, address, doubt.tail)
                except (*MALFORMED, *AT_ODDS) as error:
                    if address is not None and isinstance(error, AT_ODDS) and not sure:
                        await self._look(address.run, came)
                        return "doubtful"
                    await self._put(signal, address, error.code, _reason(error))
                    word = error.code
                self._count(address.name if address else "", word)
                if await self._queue.ack(signal) or await self._queue.ack(signal):
                    self._trouble = ""
                    self._sick.clear()
                    return "settled"
        except (RunfoldError, TimeoutError) as error:
            if address is not None:  # what was known may be of a journal that is no more
                self._doubts.pop(address.run, None)
            why = visible(str(error)) or "too slow"
            log.warning(
                "signal %d is put off: %s",
                signal.sequence,
                why,
                extra={"run": address and address.run},
            )
            if isinstance(error, RunfoldError) and self._is_the_stores(error, address):
                # The code alone: health is for everybody, and `why` may name a run.
                self._trouble, self._since = error.code, time.monotonic()
        except Exception as error:  # the edge of one signal: it must not end the others
            log.exception("signal %d: a bug", signal.sequence)
            if signal.delivery >= BUGS_MAX and await self._give_up(signal, address, error):
                return "settled"
        self._count(address.name if address else "", "put_off")
        return "failed"

    async def _look(self, run: RunId, came: float) -> None:
        """The first look, for a signal that came then and all before it, unless there was one."""
        known = self._doubts.get(run)
        if known is not None and came <= known.at:
            return
        if len(self._doubts) >= DOUBTS_MAX:
            self._doubts.clear()
        at = time.monotonic()
        tail = await self._store.tail(run)
        self._doubts[run] = Doubt(at, max(tail, known.tail if known else 0))

    def doubt_s(self, run: str) -> float:
        """How long until the run's signals that have come can be refused; 0 where none is to be."""
        doubt = self._doubts.get(run)
        return 0.0 if doubt is None else max(doubt.at + SURE_S - time.monotonic(), 0.0)

    def _is_the_stores(self, error: RunfoldError, address: SignalAddress | None) -> bool:
        """Not one run's trouble: over a journal that is too long, or of a newer version, load
        balancers would take all bridges from all runs. What could be either is the store's where
        it met a second run, and nothing was settled between."""
        if isinstance(error, StoreUnavailable) and address is not None:
            if len(self._sick) < SICK_RUNS:
                self._sick.add(address.run)
            return len(self._sick) >= SICK_RUNS
        return isinstance(error, NotProvisioned | PermissionDenied | StoreUnavailable)

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

    async def _applied(self, signal: KeptSignal, address: SignalAddress, known: int) -> str:
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
        trace = header_of(signal.headers, TRACE)
        with self._store.observer.door("signal", trace, signal.at):
            said = await say(
                self._store,
                address,
                signal.data,
                header=signal.request_id,
                kept_id=signal.key,
                known=known,
            )
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

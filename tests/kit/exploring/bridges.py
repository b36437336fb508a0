"""Signals through the SIGNALS stream, and the bridges that settle them (bridge/settling.py).

A message leaves the stream only by an acknowledgement. Two bridges may have the same one in hand:
one was frozen, and the message was delivered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .bounds import Bounds, Rules, Violation
from .journals import REPEAT, Journals, View
from .states import Label

BOTH = "refused, then applied"
"""Only of two bridges with one signal in hand: one was frozen behind its last look whether the
signal is still its own, for longer than the ack wait; the other one refused it, and the run came to
where it counts. There are two places then, and no order between them."""


class Kept(NamedTuple):
    """A signal in the stream, its sequence and what it says; `tried`: it was delivered before."""

    sequence: int
    said: Label
    tried: bool = False


class Bridge(NamedTuple):
    """A bridge with a signal in hand. `pc`: apply, wake (a task is owed), ack, and where the rule
    is removed, acked. `again`: this was not its first delivery."""

    pc: str
    signal: Kept


class Queue(NamedTuple):
    """`sent`: how many were sent; `told`: what became of each, by sequence: applied, repeated,
    refused: the world's memory of what bridges wrote."""

    sent: int = 0
    stream: tuple[Kept, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    told: tuple[tuple[int, str], ...] = ()

    def check(self, view: View) -> None:
        """No signal is lost, and each is applied once, or refused. Raises Violation."""
        left = {one.sequence for one in self.stream} | {
            bridge.signal.sequence for bridge in self.bridges
        }
        fates = dict(self.told)
        for sequence in range(self.sent):
            if sequence not in left and sequence not in fates:
                raise Violation(f"signal {sequence} is lost: neither recorded nor refused")
            recorded = _id(sequence) in view.fold.requests
            if recorded != (fates.get(sequence) in ("applied", BOTH)):
                raise Violation(f"signal {sequence} is {fates.get(sequence)}, recorded: {recorded}")
        order = [
            view.fold.requests[_id(sequence)].n
            for sequence in range(self.sent)
            if fates.get(sequence) == "applied"
        ]
        if order != sorted(order):
            raise Violation("signals of one run are recorded out of their order")


def _id(sequence: int) -> str:
    return f"sig:{sequence}"


class Step(NamedTuple):
    """An event of the queue. `sends`: a person sent one; `wakes`: a task is published."""

    event: str
    view: View
    queue: Queue
    sends: bool = False
    wakes: bool = False


class Bridges:
    """All bridges of a fleet."""

    def __init__(self, journals: Journals, bounds: Bounds, rules: Rules) -> None:
        self.journals = journals
        self.bounds = bounds
        self.rules = rules

    def steps(self, view: View, queue: Queue, *, may_send: bool) -> Iterator[Step]:
        if may_send and not view.finished:
            waiting = {one.said for one in queue.stream}
            for said in self.journals.sayings(view):
                if said not in waiting:
                    kept = (*queue.stream, Kept(queue.sent, said))
                    sent = queue._replace(sent=queue.sent + 1, stream=kept)
                    yield Step(f"person sends {said}", view, sent, sends=True)
        if len(queue.bridges) < self.bounds.bridges:
            yield from self._take(view, queue)
        for index, bridge in enumerate(queue.bridges):
            if index and bridge == queue.bridges[0]:
                continue
            rest = queue._replace(bridges=queue.bridges[:index] + queue.bridges[index + 1 :])
            what = f"bridge with signal {bridge.signal.sequence}"
            yield Step(f"x a {what} dies ({bridge.pc})", view, rest)
            yield from self._work(view, rest, bridge, f"a {what}")

    def _take(self, view: View, queue: Queue) -> Iterator[Step]:
        for index, one in enumerate(queue.stream):
            if index and self.rules.in_order:
                return
            held = any(bridge.signal.sequence == one.sequence for bridge in queue.bridges)
            stream = list(queue.stream)
            stream[index] = one._replace(tried=True)
            pc = "apply" if self.rules.acks_last else "ack first"
            taken = queue._replace(
                stream=tuple(stream), bridges=tuple(sorted((*queue.bridges, Bridge(pc, one))))
            )
            yield Step(f"{'x ' * held}a bridge takes up signal {one.sequence}", view, taken)

    def _work(self, view: View, rest: Queue, bridge: Bridge, who: str) -> Iterator[Step]:
        signal = bridge.signal
        match bridge.pc:
            case "apply":
                yield from self._apply(view, rest, signal, who)
            case "wake":
                acking = _with(rest, Bridge("ack", signal))
                yield Step(f"{who} publishes a task", view, acking, wakes=True)
            case "ack" | "ack first":
                stream = tuple(one for one in rest.stream if one.sequence != signal.sequence)
                done = rest._replace(stream=stream)
                if bridge.pc == "ack first":
                    done = _with(done, Bridge("apply", signal))
                yield Step(f"{who} acknowledges it", view, done)
            case _:
                raise AssertionError(bridge)

    def _apply(self, view: View, rest: Queue, signal: Kept, who: str) -> Iterator[Step]:
        fates = dict(rest.told)
        sequence = signal.sequence
        first = rest.stream[0].sequence if rest.stream else -1
        if self.rules.acks_last and self.rules.in_order and first != sequence:
            yield Step(f"{who} finds it gone", view, rest)  # another bridge has settled it
            return
        if signal.tried and fates.get(sequence) == "refused":
            yield Step(f"{who} finds it refused", view, _with(rest, Bridge("ack", signal)))
            return
        label = self.journals.signal(view, signal.said, held=False, request_id=_id(sequence))
        if label and label != REPEAT:
            if view.n >= self.bounds.records:
                return
            after = self.journals.append(view, label, 0)
            told = _told(rest, sequence, "applied")
            yield Step(f"{who} appends {signal.said}", after, self._waking(after, told, signal))
            return
        fate = "repeated" if label else "refused"
        told = _told(rest, sequence, fate)
        if label and self.rules.wakes_again:
            told = self._waking(view, told, signal)
        else:
            told = _with(told, Bridge("ack", signal))
        yield Step(f"{who}: {signal.said} is {fate}", view, told)

    def _waking(self, view: View, queue: Queue, signal: Kept) -> Queue:
        """A task is owed where a holder has something to do and there is none (doors.announce)."""
        owed = self.rules.wakes and view.runnable and not view.live
        pc = "wake" if owed else "ack"
        if not self.rules.acks_last:
            return _with(queue, Bridge("wake", signal)) if owed else queue
        return _with(queue, Bridge(pc, signal))


def _with(queue: Queue, bridge: Bridge) -> Queue:
    return queue._replace(bridges=tuple(sorted((*queue.bridges, bridge))))


def _told(queue: Queue, sequence: int, fate: str) -> Queue:
    """A later delivery finds a repeat of what was applied. What repeats another signal may be
    refused at a later one: the run has ended meanwhile, and nobody was told of the first."""
    known = dict(queue.told)
    before = known.get(sequence, "repeated")
    if before in ("applied", BOTH) and fate == "repeated":
        return queue
    if before == "refused" and fate == "applied":
        fate = BOTH
    elif before not in ("repeated", fate):
        raise Violation(f"signal {sequence} is {before}, and then {fate}")
    return queue._replace(told=tuple(sorted({**known, sequence: fate}.items())))

"""Core: the audit of claims, turns, inputs and the run's end (PROTOCOL 2-5)."""

from __future__ import annotations

from .audit_book import Ask, Book, Findings, instant
from .audit_steps import marked
from .records import (
    HOLDER_RECORDS,
    NO_WAITS,
    Claim,
    Commit,
    Input,
    InputPlaced,
    InputWithdrawn,
    Park,
    Record,
    Release,
    RunCompleted,
    RunPurged,
    RunStarted,
    Signal,
    VerdictAsk,
)
from .steps import input_digest
from .values import call_digest

# ---- the run ----------------------------------------------------------------------------------


def run_started(book: Book, record: RunStarted) -> Findings:
    if record.run != book.run:
        yield "run_id", f"it is the journal of run {record.run}, not {book.run}"
    if record.digest != input_digest(record.agent, record.input):
        yield "digest", "the digest of the run is not that of its agent and input"


def ended(book: Book, record: Record) -> bool:
    """Whether the record stands where nothing may: behind the run's end, or a purge."""
    if isinstance(record, RunPurged):
        return book.purged
    reopens = isinstance(record, Signal) and record.name == "resume" and book.can_reopen
    return book.purged or (book.end is not None and not reopens)


def purged(book: Book) -> Findings:
    if book.end is None:
        yield "purge", "a run is purged that has not ended"
    book.purged = True


# ---- claims -----------------------------------------------------------------------------------


def held(book: Book, record: Record) -> Findings:
    """A holder's record is of the live claim; nobody else's is of any (R49)."""
    book.fenced = False
    if not isinstance(record, HOLDER_RECORDS):
        if record.claim:
            yield "claim", f"no holder writes it, and it names claim {record.claim}"
        return
    if record.claim == book.claim:
        if isinstance(record, Release) and not record.claim:
            yield "claim", "a release gives up no claim"
        elif not record.claim and (book.shared or record.by in book.claimers):
            yield "claim", "its writer goes by claims, and it names none"
        elif record.claim and not book.remote and book.holder not in ("", record.by):
            yield "claim", f"claim {record.claim} is by {book.holder}, and it is not"
        return
    book.fenced = True
    live = f"claim {book.claim} is live" if book.claim else "no claim is live"
    yield "claim", f"it was written under claim {record.claim}, and {live}"
    if record.claim > book.claim:  # that claim is not seen here, or ended too soon: once is enough
        book.claim = record.claim


def claimed(book: Book, record: Claim) -> Findings:
    """A run that waits is left alone until something is said, or its instant comes; one whose code
    changed may be tried by another revision (PROTOCOL 4, 5)."""
    wait = book.wait
    until = "" if wait is None else wait.until if isinstance(wait, Park) else wait.waits.until
    tried = isinstance(wait, Park) and wait.why == "pause"
    if wait is not None and not until and not tried and not book.claim and book.heard < wait.n:
        yield "idle", f"it is claimed, and nothing has ended the wait since record {wait.n}"
    book.claim = record.n
    book.remote = record.remote
    book.holder = record.by
    book.claimers.add(record.by)
    book.goes_on()


def released(book: Book, record: Release) -> Findings:
    yield from ()
    gives_up(book, record)


def gives_up(book: Book, record: Record) -> None:
    """The record ends its claim; a fenced writer's ends nobody else's."""
    if not book.fenced or record.claim == book.claim:
        book.claim = 0


# ---- turns ------------------------------------------------------------------------------------


def parked(book: Book, record: Park) -> Findings:
    """What a park breaks: the end of a claim, not of the iteration."""
    yield from _numbered(book, record.iteration, "parks")
    if record.attempt != book.attempt:
        yield "attempt", f"it parks attempt {record.attempt}, not {book.attempt}"
        book.attempt = record.attempt
    yield from _instant(record.until)
    open_ = set(book.open)
    if record.why == "retry":
        open_ |= {step.name for steps in book.earlier.values() for step in steps if step.open}
    if strangers := [name for name in record.steps if name not in open_]:
        yield "park", f"it parks for {strangers[0]}, which is not open"
    new_attempt = record.why == "retry" and not record.steps
    if new_attempt and (unknown := book.unknown()):
        yield "unknown_write", f"an attempt ends while {unknown[0].name} is unknown"
    for ask in record.asks:
        digest = call_digest(ask.tool, ask.input)
        yield from marked(book, ask.marker, ask.step, digest, attempt=record.attempt)
    gives_up(book, record)
    book.asks |= {
        ask.marker: Ask(ask.step, call_digest(ask.tool, ask.input)) for ask in record.asks
    }
    if record.why == "reconcile":
        for name in record.steps:
            if name in book.open:
                book.open[name].doubted = True
        for step in book.open.values():
            step.asked = record.n
    yield from _sleeps(book, record)
    book.wait = record
    if new_attempt:
        book.next_attempt(afresh=record.afresh)


def committed(book: Book, record: Commit | RunCompleted) -> Findings:
    """What the end of an iteration breaks."""
    yield from _numbered(book, record.iteration, "commits")
    if unknown := book.unknown():
        yield "unknown_write", f"an iteration ends while {unknown[0].name} is unknown"
    action = record.action if isinstance(record, Commit) else "complete"
    if isinstance(record, Commit):
        yield from _instant(record.waits.until)
    queued = list(book.queue)
    if action == "complete" and queued and book.model_calls:
        yield "queued", f"the conversation ends while {queued[0]} is queued"
    open_ = [step.name for step in book.open.values() if not step.unknown]
    left = open_[0] if open_ else book.unanswered()
    if action in ("continue", "complete") and left and not unknown and not book.remote:
        yield "unfinished", f"the turn ends, and {left} has no result"
    if action == "cancel" and not book.cancel:
        yield "cancel", "a run is cancelled, and nobody asked for it"
    elif action != "cancel" and book.cancel:
        yield "cancel", f"the run does not end as the cancel in {book.cancel} has it"
    if isinstance(record, Commit) and record.action == "continue":
        if record.waits != NO_WAITS:
            if not book.cancel:
                yield from _sleeps(book, record)
            gives_up(book, record)
        book.next_iteration()
        book.wait = record if record.waits != NO_WAITS else None
        book.forget_before(record.at)
        return
    book.end = record
    book.claim = 0
    book.wait = None
    book.told = book.placed
    book.answer_placed()
    for known in book.queue.values():
        known.status = "unanswered"
    book.queue = {}


def _numbered(book: Book, iteration: int, what: str) -> Findings:
    if iteration != book.iteration:
        yield "iteration", f"it {what} iteration {iteration}, not {book.iteration}"
        book.iteration = iteration


def _instant(until: str) -> Findings:
    if until and instant(until) is None:
        yield "instant", f"it waits until {until[:40]!r}, which is no instant"


def _sleeps(book: Book, record: Park | Commit) -> Findings:
    """A wait begins only while nothing that would end it is there (R61). What became of a write is
    waited for even on a cancelled run."""
    doubts = isinstance(record, Park) and record.why == "reconcile" and record.steps
    if book.cancel and not book.unknown() and not doubts:
        yield "wake", f"a wait begins behind the cancel in {book.cancel}"
    elif isinstance(record, Commit):
        waits = record.waits
        if waits.until_input and book.queue:
            yield "wake", "it waits for an input, and one is queued"
        if waits.until_child and book.children.get(waits.until_child):
            yield "wake", f"it waits for child {waits.until_child}, which has ended"
        if waits.until_child and waits.until_child not in book.children:
            yield "child", f"it waits for {waits.until_child}, which is no child of it"
    elif record.why == "approval":
        yield from _asked(book, record)
    elif record.why == "reconcile" and not record.steps and not book.unknown():
        yield "wake", "a person is asked what became of a write, and none is unknown"
    elif record.why == "retry":
        told = [name for name in record.steps if name in book.steps and book.steps[name].told]
        if told:
            yield "wake", f"it waits to call {told[0]} again, whose result is there"


def _asked(book: Book, record: Park) -> Findings:
    decided = [ask.marker for ask in record.asks if ask.marker in book.decided]
    waiting = [
        step
        for step, call in book.calls.items()
        if isinstance(call.verdict, VerdictAsk)
        and call.verdict.marker not in book.decided
        and step not in book.steps
    ]
    if decided:
        yield "wake", f"it waits for a decision that is there: {decided[0]}"
    elif not record.asks and not waiting and not book.unknown():
        yield "wake", "it waits for a decision, and no call waits for one"


# ---- inputs -----------------------------------------------------------------------------------


def submitted(book: Book, record: Input) -> Findings:
    book.heard = record.n
    if record.request_id in book.inputs:
        yield "input", f"the input {record.request_id} is submitted twice"
        return
    book.input(record.request_id, record.n, record.mode, record.at)


def withdrawn(book: Book, record: InputWithdrawn) -> Findings:
    yield from _queued(book, record.request_id, "withdrawn")
    if record.request_id in book.inputs:
        book.inputs[record.request_id].status = "withdrawn"
        book.queue.pop(record.request_id, None)


def placed(book: Book, record: InputPlaced) -> Findings:
    """Placed once, in order, in front of calls that were not made yet (R62)."""
    yield from _numbered(book, record.iteration, "places in")
    yield from _queued(book, record.request_id, "placed")
    known = book.inputs.get(record.request_id)
    if known is not None and known.status == "queued":
        before = [
            name
            for name, other in book.queue.items()
            if other.mode == known.mode and other.n < known.n
        ]
        if before:
            yield "input_order", f"{record.request_id} is placed in front of {before[0]}"
        known.status = "placed"
        del book.queue[record.request_id]
        book.placed.append(record.request_id)
    if record.position in book.steps:
        yield "input_order", f"it is placed in front of {record.position}, which was called"
    book.goes_on()


def _queued(book: Book, request_id: str, what: str) -> Findings:
    known = book.inputs.get(request_id)
    if known is None:
        yield "input", f"the input {request_id} is {what} and was never submitted"
    elif known.status != "queued":
        yield "input", f"the input {request_id} is {what} and was {known.status} before"

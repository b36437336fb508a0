"""What must hold in every state."""

from __future__ import annotations

from journal.records import Commit, RunCompleted

from .bounds import Found, Violation
from .journals import View
from .states import CALLS, LEFT, QUEUE, QUEUED, VIEW, State
from .world import World

DECISIONS = ("approve", "reject")


class Invariants:
    """`check` raises Violation. What depends on the journal and on the calls alone is looked at
    once; so is what a person could do about a journal."""

    def __init__(self, world: World, found: Found) -> None:
        self.world = world
        self.found = found
        self.bounds = world.bounds
        self._seen: set[tuple[int, int]] = set()
        self._queues: set[tuple[int, int]] = set()
        self._persons: dict[int, bool] = {}
        self._views = 0

    def check(self, state: State) -> None:
        views = self.world.journals.views
        while self._views < len(views):
            self._check_view(views[self._views])
            self._views += 1
        key = (state[VIEW], state[CALLS])
        if key not in self._seen:
            self._seen.add(key)
            self._check_calls(views[key[0]], self.world.calls.values[key[1]])
        if self.bounds.queued:
            key = (state[VIEW], state[QUEUE])
            if key not in self._queues:
                self._queues.add(key)
                queue = self.world.queues.values[state[QUEUE]]
                queue.check(views[key[0]])
                self.found.signals |= {fate for _, fate in queue.told}

    # ---- the journal --------------------------------------------------------------------------

    def _check_view(self, view: View) -> None:
        fold, found = view.fold, self.found
        found.deepest = max(found.deepest, view.n)
        found.lates += any(step.late for step in fold.steps.values())
        for known in fold.inputs.values():
            found.inputs.add(known.status)
            if fold.end is not None and known.status in ("queued", "placed"):
                raise Violation(f"the run has ended and its input is {known.status}")
        if isinstance(fold.end, Commit):
            found.ends.add("cancelled")
            if fold.cancel is None:
                raise Violation("the run ends as cancelled, and nobody cancelled it")

    def _check_calls(self, view: View, calls: tuple[int, ...]) -> None:
        fold = view.fold
        self.found.calls_max = max(self.found.calls_max, len(calls))
        if len(set(calls)) < len(calls):
            raise Violation("one start let the write be called twice")
        if len(calls) > view.past.permits:
            raise Violation(
                f"{len(calls)} calls of the write with {view.past.permits - 1} retries permitted"
            )
        if self.bounds.plot == "reply":
            decided = [said.name for said in fold.requests.values() if said.name in DECISIONS]
            if len(decided) > 1:
                raise Violation(f"two decisions on one marker are recorded: {decided}")
            if calls and decided != ["approve"]:
                raise Violation(f"the write was called, and the decision is {decided}")
        if isinstance(fold.end, RunCompleted):
            if fold.cancel is not None:
                raise Violation("the run was cancelled, and completes all the same")
            self._check_answer(view, tuple(fold.end.message["content"]), calls)

    def _check_answer(self, view: View, answer: tuple[str, ...], calls: tuple[int, ...]) -> None:
        """The crash-free answer, or what a person said of the write."""
        fold = view.fold
        self.found.ends.add(answer)
        read, write = answer if self.bounds.plot == "reply" else answer[::-1]
        rejected = any(known.name == "reject" for known in fold.requests.values())
        allowed = {"rejected"} if rejected else {"W"}
        if view.past.done:
            allowed.add("D")
        if self.bounds.policy == "interrupt" and view.past.starts:
            allowed.add("interrupted")
        if read != "R" or write not in allowed:
            raise Violation(f"the answer is {answer}; allowed are {sorted(allowed)}")
        if write == "W" and not calls:
            raise Violation("the answer holds a result of a write that was never called")

    # ---- the next actor -----------------------------------------------------------------------

    def moved_on(self, state: State) -> bool:
        """Whether somebody moves an unfinished run on without any fault: a process, a message, a
        timer, a door, a bridge, the sweep; or a person whose word it waits for."""
        world = self.world
        view = world.journals.views[state[VIEW]]
        if view.finished or world.hints.acts(state):
            return True
        if self.bounds.sweep and (world.hints.stranded(state) or view.runnable_late):
            return True
        if view.live or view.runnable_late:
            return False
        known = self._persons.get(view.id)
        if known is None:
            known = self._persons[view.id] = self._person_can(view)
        return known

    def _person_can(self, view: View) -> bool:
        journals = self.world.journals
        for said in journals.sayings(view):
            label = journals.signal(view, said, held=False)
            if len(label) > 1:
                after = journals.append(view, label, 0)
                if after.runnable or after.finished:
                    return True
        return False

    def may_be_cut_off(self, state: State) -> bool:
        """Whether the bounds are why an end is out of reach: too few records are left, or signals
        to send."""
        view = self.world.journals.views[state[VIEW]]
        if view.n > self.bounds.records - self.bounds.room:
            return True
        left = self.world.left.values[state[LEFT]]
        return self.bounds.queued > 0 and left[QUEUED] < self.bounds.queued

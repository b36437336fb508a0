"""Core: the terms a run is worked on: an agent's bounds and retries, and how a turn of it ends."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Protocol, TypeAlias

from msgspec import Struct

from . import limits
from .ids import RunId
from .messages import JSON


class Bounds(Struct, frozen=True, kw_only=True):
    """Limits of one run; reaching one ends it with a recorded reason (R36, R47).

    `iterations`: model calls of the built-in loop, turns of a handler · `calls_per_iteration`:
    durable calls in one turn of a handler · `calls_per_reply`: tool calls in one reply ·
    `bad_replies`: rounds in a row with nothing usable · `turn_timeout_s`: a turn that takes longer
    has failed · `duration_s`: of the whole run since its start; it keeps counting while the run
    waits.
    """

    iterations: int = limits.ITERATIONS_MAX
    calls_per_iteration: int = limits.CALLS_PER_ITERATION_MAX
    calls_per_reply: int = limits.CALLS_PER_REPLY_MAX
    bad_replies: int = limits.BAD_REPLIES_MAX
    turn_timeout_s: float | None = None
    duration_s: float | None = None


class Retry(Struct, frozen=True, kw_only=True):
    """What a worker does about a failure: `attempts` in all, the next one after `backoff_s`,
    doubled each time up to `backoff_max_s`. Then the run has failed (R44, R52)."""

    attempts: int = limits.RETRY_ATTEMPTS
    backoff_s: float = limits.RETRY_BACKOFF_S
    backoff_max_s: float = limits.RETRY_BACKOFF_MAX_S

    def delay_s(self, failures: int) -> float:
        """How long to wait after this many failures in a row."""
        return min(self.backoff_s * 2.0 ** min(failures - 1, 60), self.backoff_max_s)


class Continue(Struct, frozen=True, kw_only=True):
    """Another turn, from `state`: at once, or when the first of these waits ends (R63).

    `delay` from now, or `until` an aware instant · `until_input` an input is queued, of either
    mode (one that this turn left queued ends the wait at once: place both before) ·
    `until_child` the child run has ended.
    """

    state: JSON = None
    delay: timedelta | None = None
    until: datetime | None = None
    until_input: bool = False
    until_child: RunId | None = None


class Complete(Struct, frozen=True):
    """The run's answer: a Message, or any JSON as the content of one."""

    message: JSON


class Fail(Struct, frozen=True, kw_only=True):
    """The run fails; `retriable`: the retry policy applies first. `detail` is for people."""

    reason: str
    retriable: bool = False
    detail: str = ""


class Pause(Struct, frozen=True, kw_only=True):
    """An operator must act: `runfold resume` or `until` begins the next turn, from `state`."""

    reason: str
    state: JSON = None
    until: datetime | None = None


Next: TypeAlias = Continue | Complete | Fail | Pause


class Terms(Protocol):
    """What a worker says of an agent it works for. `accepts`: the revisions it may run, its own
    first. `loop`: the conversation of the built-in loop, not a turn handler's calls."""

    @property
    def revision(self) -> str: ...
    @property
    def accepts(self) -> Sequence[str]: ...
    @property
    def bounds(self) -> Bounds: ...
    @property
    def retry(self) -> Retry: ...
    @property
    def loop(self) -> bool: ...

"""Core: the one exception tree. Fields, not formatted text; `code` is the same word everywhere.

An error says what happened, in which run and record, and (`hint`) what to do next.
"""

from __future__ import annotations

from typing import Any, ClassVar


class RunfoldError(Exception):
    """Base of everything Runfold raises on purpose. `code` is stable over releases (PROTOCOL 8)."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, run_id: str | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.run_id = run_id
        self.hint = hint


class IndeterminateError(RunfoldError):
    """A write was started and nobody knows whether it happened (R23). A person reconciles it."""

    code = "indeterminate"

    def __init__(
        self, message: str, *, step: str, run_id: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, run_id=run_id, hint=hint)
        self.step = step


class InvalidId(RunfoldError):
    """A run id, name, namespace or marker that is not one (R1, R2). Nothing was touched."""

    code = "invalid_id"


class RunNotFound(RunfoldError):
    """No run has this id (R4)."""

    code = "run_not_found"


class InputMismatch(RunfoldError):
    """The id is taken by a run with another input or agent (R3). Nothing was written."""

    code = "input_mismatch"


class RunFinished(RunfoldError):
    """The run has ended; nothing changes it any more."""

    code = "run_finished"


class BadPayload(RunfoldError):
    """A signal's payload or name is not of its shape (R59). Nothing was applied."""

    code = "bad_payload"


class DecisionConflict(RunfoldError):
    """Another decision won (R60). `winner` is the ordinal of its record."""

    code = "decision_conflict"

    def __init__(
        self, message: str, *, winner: int, run_id: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, run_id=run_id, hint=hint)
        self.winner = winner


class StaleSignal(RunfoldError):
    """The signal is about something that is not pending or not unknown (any more) (R60)."""

    code = "stale_signal"


class Fenced(RunfoldError):
    """A newer claim owns the run (R49). This process stops the run at once and settles nothing."""

    code = "fenced"


class RunCancelled(RunfoldError):
    """A person cancelled the run (R56). Nothing new is started; the holder commits its end."""

    code = "cancelled"


class ChildFailed(RunfoldError):
    """The child run ended without an answer: it failed or was cancelled (R57)."""

    code = "child_failed"


class ReplayMismatch(RunfoldError):
    """The code asks for another call than the journal holds at this position (R43)."""

    code = "replay_mismatch"

    def __init__(
        self,
        message: str,
        *,
        position: str,
        recorded: str,
        attempted: str,
        run_id: str | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(message, run_id=run_id, hint=hint)
        self.position = position
        self.recorded = recorded
        self.attempted = attempted


DAMAGED_HINT = (
    "nothing was executed; restore the journal from an export that has all of it: with an older "
    "one, writes made since may be made again"
)


class JournalDamaged(RunfoldError):
    """The journal does not chain, or holds what no writer writes (R11, R13). Nothing runs on it.

    `where` is the place; `good` the entries read before it, for looking at.
    """

    code = "journal_damaged"

    def __init__(
        self,
        message: str,
        *,
        where: str,
        run_id: str | None = None,
        hint: str = "",
        good: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(message, run_id=run_id, hint=hint)
        self.where = where
        self.good = good


class NewerVersion(RunfoldError):
    """A newer Runfold wrote to this run (R18). This one leaves it alone."""

    code = "newer_version"


class NotProvisioned(RunfoldError):
    """The server has no journal stream, or not one this version can use: `runfold init`."""

    code = "not_provisioned"


class ShardsFixed(RunfoldError):
    """Over how many journal streams runs are spread is decided once, by `runfold init` (R74)."""

    code = "shards_fixed"


class StoreUnavailable(RunfoldError):
    """The store did not answer in time, or failed. What was acknowledged is kept."""

    code = "store_unavailable"


class StoreLocked(RunfoldError):
    """Somebody else holds the run. `holder` names the process or worker."""

    code = "store_locked"

    def __init__(
        self, message: str, *, holder: str, run_id: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, run_id=run_id, hint=hint)
        self.holder = holder


class PermissionDenied(RunfoldError):
    """The server or the file system refuses. `subject` is what was refused: a subject or a path."""

    code = "permission_denied"

    def __init__(
        self, message: str, *, subject: str, run_id: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, run_id=run_id, hint=hint)
        self.subject = subject


class TooLarge(RunfoldError):
    """A value exceeds the store's record limit (R17). Checked before anything is sent."""

    code = "too_large"


class NotEncodable(RunfoldError):
    """A value is not strict JSON (R16); the message names where and the type."""

    code = "not_encodable"


class ConcurrentUse(RunfoldError):
    """Two tasks used one journal handle at once (R46)."""

    code = "concurrent_use"


class StepFailed(RunfoldError):
    """A model call, or a read that raised `Transient`, failed; no result was recorded (R26, R45).

    The run goes on from here when it is next taken up. `__cause__` is the original exception.
    """

    code = "step_failed"

    def __init__(
        self, message: str, *, step: str, run_id: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, run_id=run_id, hint=hint)
        self.step = step


class ToolError(Exception):
    """A tool's declared failure: recorded as its result and shown to the model (R26)."""

    def __init__(self, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.data = data


class Transient(Exception):
    """Raised out of a read tool: not recorded, ends the attempt; the run can be taken up again."""

"""runfold: the public face. Everything users import; what it stands on is in journal/ and worker/.

The three packages beside it have plain names, so a file of yours called `worker.py` can shadow one:
that is said here, clearly, instead of failing somewhere inside.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def _check_not_shadowed() -> None:
    home = Path(__file__).resolve().parent.parent
    for name in ("journal", "worker"):
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin != home / name / "__init__.py":
            raise ImportError(
                f"runfold needs its own package {name!r}, but {origin or 'nothing'} is found "
                f"first: rename that file or start Python from another folder"
            )


_check_not_shadowed()

from journal.doors import Receipt, Started, signal, start, state  # noqa: E402
from journal.errors import (  # noqa: E402
    BadPayload,
    ChildFailed,
    ConcurrentUse,
    DecisionConflict,
    Fenced,
    IndeterminateError,
    InputMismatch,
    InvalidId,
    JournalDamaged,
    NewerVersion,
    NotEncodable,
    NotProvisioned,
    PermissionDenied,
    ReplayMismatch,
    RunCancelled,
    RunFinished,
    RunfoldError,
    RunNotFound,
    StaleSignal,
    StepFailed,
    StoreLocked,
    StoreUnavailable,
    TooLarge,
    ToolError,
    Transient,
)
from journal.fleet import Fleet  # noqa: E402
from journal.handle import Journal  # noqa: E402
from journal.ids import Marker, RunId, new_run_id, valid_run_id  # noqa: E402
from journal.inputs import InputState  # noqa: E402
from journal.messages import (  # noqa: E402
    JSON,
    Message,
    Model,
    Reply,
    ToolRequest,
    ToolSpec,
    Usage,
)
from journal.purging import purge  # noqa: E402
from journal.records import RELEASE, Mode, Record  # noqa: E402
from journal.signals import Approve, Cancel, Reconcile, Reject, Resume  # noqa: E402
from journal.steps import CannotTell, DidNotHappen, Happened, Probe  # noqa: E402
from journal.store import Appended, Conflict, Loaded, Store  # noqa: E402
from journal.stores.file import FileStore  # noqa: E402
from journal.stores.jetstream import JetStreamStore  # noqa: E402
from journal.stores.memory import MemoryStore  # noqa: E402
from journal.terms import (  # noqa: E402
    Bounds,
    Complete,
    Continue,
    Fail,
    Next,
    Pause,
    Retry,
)
from journal.views import (  # noqa: E402
    AwaitingApproval,
    Cancelled,
    Completed,
    Failed,
    Indeterminate,
    Outcome,
    Pending,
    RunState,
    UnknownStep,
    Waiting,
    WaitingOn,
)
from worker.agent import Agent, Turn, turn  # noqa: E402
from worker.context import Call, Context, Input, ToolResult  # noqa: E402
from worker.gate import Allow, Deny, Gate, NeedsApproval, PolicyGate  # noqa: E402
from worker.opening import connect  # noqa: E402
from worker.runner import run  # noqa: E402
from worker.server import EmbeddedServer  # noqa: E402
from worker.service import Worker  # noqa: E402
from worker.tools import (  # noqa: E402
    SAFE,
    UNSAFE,
    OnUnknown,
    Replay,
    Tool,
    ToolCall,
    read,
    write,
)

from .store import open_store  # noqa: E402

__version__ = RELEASE

__all__ = [
    "JSON",
    "SAFE",
    "UNSAFE",
    "Agent",
    "Allow",
    "Appended",
    "Approve",
    "AwaitingApproval",
    "BadPayload",
    "Bounds",
    "Call",
    "Cancel",
    "Cancelled",
    "CannotTell",
    "ChildFailed",
    "Complete",
    "Completed",
    "ConcurrentUse",
    "Conflict",
    "Context",
    "Continue",
    "DecisionConflict",
    "Deny",
    "DidNotHappen",
    "EmbeddedServer",
    "Fail",
    "Failed",
    "Fenced",
    "FileStore",
    "Fleet",
    "Gate",
    "Happened",
    "Indeterminate",
    "IndeterminateError",
    "Input",
    "InputMismatch",
    "InputState",
    "InvalidId",
    "JetStreamStore",
    "Journal",
    "JournalDamaged",
    "Loaded",
    "Marker",
    "MemoryStore",
    "Message",
    "Mode",
    "Model",
    "NeedsApproval",
    "NewerVersion",
    "Next",
    "NotEncodable",
    "NotProvisioned",
    "OnUnknown",
    "Outcome",
    "Pause",
    "Pending",
    "PermissionDenied",
    "PolicyGate",
    "Probe",
    "Receipt",
    "Reconcile",
    "Record",
    "Reject",
    "Replay",
    "ReplayMismatch",
    "Reply",
    "Resume",
    "Retry",
    "RunCancelled",
    "RunFinished",
    "RunId",
    "RunNotFound",
    "RunState",
    "RunfoldError",
    "StaleSignal",
    "Started",
    "StepFailed",
    "Store",
    "StoreLocked",
    "StoreUnavailable",
    "TooLarge",
    "Tool",
    "ToolCall",
    "ToolError",
    "ToolRequest",
    "ToolResult",
    "ToolSpec",
    "Transient",
    "Turn",
    "UnknownStep",
    "Usage",
    "Waiting",
    "WaitingOn",
    "Worker",
    "connect",
    "new_run_id",
    "open_store",
    "purge",
    "read",
    "run",
    "signal",
    "start",
    "state",
    "turn",
    "valid_run_id",
    "write",
]

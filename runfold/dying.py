"""Shell: a worker under `runfold dev` never outlives it, however dev ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from signal import SIGKILL

PARENT = "RUNFOLD_DEV_PID"
"""In the environment of a worker that `runfold dev` started."""

POLL_S = 0.5


def die_with_parent() -> None:
    """Under dev: killed when dev ends."""
    parent = int(os.environ.pop(PARENT, "0"))  # not for what it starts itself
    if not parent:
        return
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, SIGKILL)  # PR_SET_PDEATHSIG
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before the death signal was set
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os._exit(1)

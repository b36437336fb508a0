"""The demo's agent (deploy/demo/agent.py), whose payments wait for a file, not for a time.

While `DEMO_HOLD` exists, a payment that is being made stays as it is: an odd invoice's before the
money moves, an even one's after. Each that stays is a line in `DEMO_HELD`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

POLL_S = 0.02


async def _stay(seconds: float) -> None:
    if not seconds:
        return
    held = os.open(os.environ["DEMO_HELD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(held, f"{os.getpid()}\n".encode())
    os.close(held)
    while os.path.exists(os.environ["DEMO_HOLD"]):  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(POLL_S)


_FILE = Path(__file__).resolve().parents[2] / "deploy" / "demo" / "agent.py"
_spec = spec_from_file_location("demo_agent", _FILE)
assert _spec is not None
assert _spec.loader is not None
_module = module_from_spec(_spec)
sys.modules["demo_agent"] = _module
os.environ.setdefault("DEMO_PAY_S", "1")
os.environ.setdefault("DEMO_SPARE_S", "14")
_spec.loader.exec_module(_module)
_module.asyncio = SimpleNamespace(sleep=_stay)  # type: ignore[attr-defined]
agent = _module.agent

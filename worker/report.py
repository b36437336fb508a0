"""Shell: what a worker says of itself, for `runfold workers`."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

import msgspec

from journal.ids import RunId
from journal.records import RELEASE

from .agent import Agent
from .held import Held


def report_of(
    worker: str,
    agents: Iterable[Agent],
    held: Mapping[RunId, Held],
    *,
    concurrency: int,
    ack_wait_s: float,
    draining: bool,
) -> bytes:
    """The JSON object that `Fleet.workers` reads. `held`: the runs it holds now."""
    return msgspec.json.encode(
        {
            "worker": worker,
            "runfold": RELEASE,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "agents": [
                {"name": agent.name, "revision": agent.revision, "accepts": agent.accepts}
                for agent in agents
            ],
            "concurrency": concurrency,
            "ack_wait_s": ack_wait_s,
            "draining": draining,
            "active": [
                {"run": run_id, "claim": one.journal.claim, "agent": one.agent.name}
                for run_id, one in list(held.items())
            ],
        }
    )

"""`run()` in a process of its own, as somebody's script does it."""

from __future__ import annotations

import os
from typing import Any

from runfold import RunfoldError, open_store, run


async def drive(
    url: str, run_id: str, agent: str, given: dict[str, Any], ledgers: str, ack_wait_s: float
) -> str:
    """Starts the run, takes it as far as it goes, and says how far that was."""
    os.environ["CHAOS_LEDGERS"] = ledgers
    from chaos.agents import AGENTS

    try:
        async with open_store(url) as store:
            end = await run(store, AGENTS[agent], run_id, given, ack_wait_s=ack_wait_s)
    except RunfoldError as error:
        return f"refused: {error.code}"
    return f"ended: {type(end).__name__}"

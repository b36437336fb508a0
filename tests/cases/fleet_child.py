"""A worker in a process of its own, as `runfold worker` will be: SIGTERM and SIGINT stop it, a
second one at once; it exits even where a task ignores everything. `crash` is where it dies."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from cases.fleet_agents import build
from cases.pay import die
from kit.deadlines import pass_deadlines

from journal import taking
from journal.stores.jetstream import JetStreamStore
from journal.stores.tasks import TaskQueue
from runfold import RunfoldError, Worker


async def work(
    home: str,
    url: str,
    namespace: str,
    agents: list[dict[str, Any]],
    options: dict[str, Any],
    tag: str,
    crash: str = "",
    zone: str = "",
    revisit_s: float = 0.3,
    long_after: bool = False,
) -> NoReturn:
    """Serve until stopped. Leaves `ready-<tag>` in the home once it works. `revisit_s`: how soon
    what it may not take is offered to others again (the product: 5 s). `long_after`: to it the
    deadline of every call that was cut off has passed."""
    if long_after:
        pass_deadlines()
    assert taking.REVISIT_S > 0
    taking.REVISIT_S = revisit_s  # type: ignore[attr-defined]
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    if zone:
        os.environ["TZ"] = zone
        time.tzset()
    if crash:
        die_at(crash)
    made = [build(Path(home), **agent) for agent in agents]
    ready = Path(home) / f"ready-{tag}"
    worker = Worker(url, made, namespace=namespace, on_ready=ready.touch, **options)
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            stopping.append(asyncio.ensure_future(worker.stop()))
        else:
            worker.force()

    stopping: list[asyncio.Future[None]] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    code = 0
    try:
        await worker.serve()
    except RunfoldError as error:
        logging.error("%s", error)
        code = 9
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_at(where: str) -> None:
    """`<record type>:before`, `:after`, or `ack:before`, `:after`: by SIGKILL, like a power cut."""
    what, _, phase = where.partition(":")
    if what == "ack":
        ack = TaskQueue.ack

        async def dying_ack(self: TaskQueue, task: Any) -> bool:
            if phase == "before":
                die()
            done = await ack(self, task)
            die()
            return done

        TaskQueue.ack = dying_ack  # type: ignore[method-assign]
        return
    append = JetStreamStore.append

    async def dying_append(self: JetStreamStore, run_id: Any, entry: Any, *, expected: int) -> Any:
        here = entry.type == what
        if here and phase == "before":
            die()
        answer = await append(self, run_id, entry, expected=expected)
        if here:
            die()
        return answer

    JetStreamStore.append = dying_append  # type: ignore[method-assign]

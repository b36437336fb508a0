"""R76 for workers over HTTP: wherever a worker or its bridge is lost, or stops and comes back, the
run ends with the same answer, and each unsafe call is started at most once a permit.

Cells (`kit.matrix_http_cells`) run many at a time, in the background; each test waits for its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from kit.matrix_http import Ground, Play
from kit.matrix_http_cells import Cell, cells
from kit.matrix_http_worker import PreparedZygote
from kit.servers import NatsServer

from journal.stores.provision import provision

pytestmark = pytest.mark.real

CELLS = cells()
AT_ONCE = int(os.environ.get("RUNFOLD_MATRIX_AT_ONCE", "16"))
FAILED_MAX = 30
"""Something is wrong with everything: no need to wait for each."""


class Matrix:
    """Plays cells in a thread of its own, `AT_ONCE` at a time."""

    def __init__(self, wanted: list[Cell], folder: Path) -> None:
        self.outcomes = {cell: Future[float]() for cell in wanted}
        self._left = list(reversed(wanted))
        self._failed = 0
        self._folder = folder
        self._thread = threading.Thread(target=lambda: asyncio.run(self._play_all()), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._left.clear()
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _play_all(self) -> None:
        try:
            server = await NatsServer.start(self._folder / "nats")
            namespace = f"m{uuid.uuid4().hex[:16]}"
            try:
                await provision(server.url, namespace=namespace)
                with PreparedZygote() as zygote:
                    async with Ground(server.url, namespace, zygote, self._folder) as ground:
                        await asyncio.gather(*(self._play_some(ground) for _ in range(AT_ONCE)))
            finally:
                await server.kill()
        except BaseException as error:
            for outcome in self.outcomes.values():
                if not outcome.done():
                    outcome.set_exception(error)
            raise

    async def _play_some(self, ground: Ground) -> None:
        while self._left:
            cell = self._left.pop()
            if self._failed >= FAILED_MAX:
                self.outcomes[cell].set_exception(AssertionError("too many cells failed before"))
                continue
            began = time.monotonic()
            try:
                await Play(ground, cell).play()
            except Exception as error:
                self._failed += 1
                self.outcomes[cell].set_exception(error)
            else:
                self.outcomes[cell].set_result(time.monotonic() - began)


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    wanted: list[Cell] = []
    for item in request.session.items:  # this file's tests are one process's (loadfile)
        params = getattr(item, "callspec", None)
        if item.path == request.path and params is not None:
            wanted.append(params.params["cell"])
    matrix = Matrix(wanted, tmp_path_factory.mktemp("matrix"))
    yield matrix
    matrix.end()


@pytest.fixture(scope="module")
def played() -> dict[Cell, float]:
    return {}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_the_run_ends_as_without_the_fault(
    cell: Cell, matrix: Matrix, played: dict[Cell, float]
) -> None:
    played[cell] = matrix.outcomes[cell].result(200)


def test_how_many_cells_there_were(
    played: dict[Cell, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len({cell.id for cell in CELLS}) == len(CELLS)
    by_whom = {who: sum(cell.who == who for cell in CELLS) for who in ("worker", "bridge", "tool")}
    with capsys.disabled():
        print(
            f"\ncrash matrix over HTTP: {len(CELLS)} cells, by who meets the fault {by_whom}; "
            f"{len(played)} passed here, the longest took {max(played.values(), default=0):.1f} s"
        )

"""R76: wherever a worker or a signaller is lost, or stops and comes back writing, its run ends with
the same answer, each unsafe call is started at most once a permit, and nobody is left waiting.

Cells (`kit.matrix_cells`) run many at a time, in the background; each test waits for its own.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from cases.zygote import Zygote
from kit.matrix import Ground, Play
from kit.matrix_cells import Cell, cells
from kit.servers import NatsServer

from journal.stores.provision import provision

pytestmark = pytest.mark.real

CELLS = cells()
AT_ONCE = int(os.environ.get("RUNFOLD_MATRIX_AT_ONCE", "8"))
FAILED_MAX = 40
"""Something is wrong with everything: no need to wait for each."""

ROOT = Path(__file__).parents[2]


class Matrix:
    """Plays cells in a thread of its own, `AT_ONCE` at a time."""

    def __init__(self, url: str, zygote: Zygote, folder: Path) -> None:
        self._url = url
        self._zygote = zygote
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[Cell | None] = asyncio.Queue()
        self._outcomes = {cell: Future[float]() for cell in CELLS}
        self._failed = 0
        self._asked: set[Cell] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def ask(self, cell: Cell) -> Future[float]:
        if cell not in self._asked:
            self._asked.add(cell)
            self._loop.call_soon_threadsafe(self._queue.put_nowait, cell)
        return self._outcomes[cell]

    def end(self) -> None:
        for _ in range(AT_ONCE):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        self._loop.run_until_complete(self._play_all())
        self._loop.close()

    async def _play_all(self) -> None:
        try:
            namespace = f"m{uuid.uuid4().hex[:16]}"
            await provision(self._url, namespace=namespace)
            async with Ground(self._url, namespace, self._zygote, self._folder) as ground:
                await asyncio.gather(*(self._play_some(ground) for _ in range(AT_ONCE)))
        except BaseException as error:
            for outcome in self._outcomes.values():
                if not outcome.done():
                    outcome.set_exception(error)
            raise

    async def _play_some(self, ground: Ground) -> None:
        while (cell := await self._queue.get()) is not None:
            if self._failed >= FAILED_MAX:
                self._outcomes[cell].set_exception(AssertionError("too many cells failed before"))
                continue
            began = time.monotonic()
            try:
                await Play(ground, cell).play()
            except Exception as error:
                self._failed += 1
                self._outcomes[cell].set_exception(error)
            else:
                self._outcomes[cell].set_result(time.monotonic() - began)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Its own: killed at the end, as stopping one with so many consumers in order takes long."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(NatsServer.start(tmp_path_factory.mktemp("nats")))
    yield server
    loop.run_until_complete(server.kill())
    loop.close()


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest,
    server: NatsServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Matrix]:
    with Zygote() as zygote:
        matrix = Matrix(server.url, zygote, tmp_path_factory.mktemp("matrix"))
        for item in request.session.items:  # this file's tests are one process's (loadfile)
            params = getattr(item, "callspec", None)
            if item.path == request.path and params is not None:
                matrix.ask(params.params["cell"])
        yield matrix
        matrix.end()


@pytest.fixture(scope="module")
def played() -> dict[Cell, float]:
    return {}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_the_run_ends_as_without_the_fault(
    cell: Cell, matrix: Matrix, played: dict[Cell, float]
) -> None:
    played[cell] = matrix.ask(cell).result(200)


def test_the_product_has_no_places_for_faults() -> None:
    """Nothing of the matrix is known to it: no name of a seam, no switch in the environment. (The
    bench stops and kills workers of its own.)"""
    sources = [
        path
        for part in ("journal", "worker", "runfold")
        for path in (ROOT / part).rglob("*.py")
        if "benchmark" not in path.parts
    ]
    assert sources
    for path in sources:
        found = re.search(
            r"crash_point|\bseam\b|SIGSTOP|RUNFOLD_(TEST|CRASH|FAULT)", path.read_text()
        )
        assert found is None, f"{path}: {found}"


def test_how_many_cells_there_were(
    played: dict[Cell, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert len({cell.id for cell in CELLS}) == len(CELLS)
    seams = sorted({cell.seam for cell in CELLS} - {"none"})
    faulty = sum(cell.fault != "none" for cell in CELLS)
    with capsys.disabled():
        print(
            f"\ncrash matrix: {len(CELLS)} cells, {faulty} with a fault, over {len(seams)} seams; "
            f"{len(played)} passed here, the longest took {max(played.values(), default=0):.1f} s"
        )

"""Runfold, by its own command line: in a directory, on the embedded server, with a fleet."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from drive import DIED, PROGRAMS, Scene, Wrong, free_port, here, listens
from outcome import Outcome

from worker.server import find_nats_server

RUNFOLD = here("runfold")
AGENT = f"{PROGRAMS / 'runfold_program.py'}:agent"
ID, STEP = "order-1", "tool/1/0/charge"
COMPLETED, APPROVAL, INDETERMINATE = 0, 3, 4
QUICK = ("--ack-wait", "1")
"""A lost worker is noticed after a second, not after 30: only so that the suite is quick."""


def directory() -> Outcome:
    with Scene() as scene:
        return _alone(scene, "Runfold, in a directory", "--store", "runs")


def server() -> Outcome:
    """No --store: the embedded nats-server, which syncs every write."""
    with Scene() as scene:
        return _alone(scene, "Runfold, embedded nats-server")


def _alone(scene: Scene, system: str, *store: str) -> Outcome:
    def run(code: int, *more: str) -> Any:
        wait = () if store else QUICK
        line = ("run", AGENT, "--id", ID, *more, *wait, *store)
        return scene.run(RUNFOLD, *line, code=code)

    asked = json.loads(run(APPROVAL, "--input", "charge 10", "--json").out)
    scene.run(RUNFOLD, "approve", asked["pending"][0]["marker"], *store)
    run(DIED)
    told = run(INDETERMINATE)
    charges = scene.charges
    _, line = told.out.splitlines()[:2]
    scene.run(RUNFOLD, "reconcile", ID, STEP, "--done-text", "receipt-1", *store)
    end = json.loads(run(COMPLETED, "--json").out)
    return Outcome(
        system=system,
        version=version("runfold"),
        charges=charges,
        state="indeterminate",
        seen=f"exit code 4: {line.strip()}",
        way_on="reconcile --done",
        charges_in_the_end=scene.charges,
        state_in_the_end=end["status"],
    )


def fleet() -> Outcome:
    """A nats-server with fsync, two workers: one dies in the write, the other takes it over."""
    with Scene() as scene:
        said, port = scene.said_by, free_port()
        (scene.folder / "nats.conf").write_text(
            f"host: 127.0.0.1\nport: {port}\n"
            'jetstream { store_dir: "js", sync_interval: always }\n'
        )
        scene.start(find_nats_server(), "-c", "nats.conf")
        scene.until("nats-server listens", lambda: listens(port))
        store = ("--store", f"nats://127.0.0.1:{port}")
        scene.run(RUNFOLD, "init", *store)
        scene.run(RUNFOLD, "start", "till", "--id", ID, "--input", "charge 10", *store)
        followed = scene.start(RUNFOLD, "follow", ID, *store)
        workers = [scene.start(RUNFOLD, "worker", AGENT, *QUICK, *store) for _ in range(2)]
        scene.until("a person is asked to approve", lambda: "asks for approval" in said(followed))
        (asked,) = _inbox(scene, store)
        scene.run(RUNFOLD, "approve", asked["marker"], *store)
        scene.until(
            "a worker dies in the write",
            lambda: any(worker.poll() is not None for worker in workers),
        )
        (dead,) = [worker for worker in workers if worker.poll() is not None]
        scene.until_dead(dead)
        scene.until("a person is asked", lambda: "park      for reconcile" in said(followed))
        (asked,) = _inbox(scene, store)
        charges = scene.charges
        scene.run(RUNFOLD, "reconcile", ID, STEP, "--done-text", "receipt-1", *store)
        scene.until("the run ends", lambda: followed.poll() is not None)
        if followed.returncode != COMPLETED:
            raise Wrong(f"the run ended with {followed.returncode}: {said(followed)}")
        return Outcome(
            system="Runfold, two workers, nats-server",
            version=version("runfold"),
            charges=charges,
            state=asked["status"],
            seen=f"inbox: {asked['kind']} {asked['step']}: {asked['text']}",
            way_on="reconcile --done",
            charges_in_the_end=scene.charges,
            state_in_the_end="completed",
        )


def _inbox(scene: Scene, store: tuple[str, ...]) -> list[Any]:
    """What waits for a person."""
    found: list[Any] = json.loads(scene.run(RUNFOLD, "inbox", "--json", *store).out)
    return found

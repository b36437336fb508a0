"""Metrics of a real worker and a real bridge, scraped by HTTP as Prometheus does it: what they say
is what the journals say, also of a run whose worker was killed (R73)."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kit.bridge_process import BridgeProcess, bearer, bridge_process
from kit.cli import AGENTS, RUNFOLD, Cli, Executed
from kit.fleet import zygote
from kit.measured import Samples, by, parsed, samples, total, types
from kit.waiting import eventually

from bridge.fleet_metrics import FleetLook
from journal.errors import NotProvisioned, StoreUnavailable
from journal.families import OTHER
from journal.fleet import Fleet
from journal.ids import RunId
from journal.log import Log
from journal.records import Claim, Park
from journal.stores.jetstream import JetStreamStore

pytestmark = pytest.mark.real

DESK, QUICK, CLOCK = (f"{AGENTS}:{name}" for name in ("desk", "quick", "clock"))
LOOK = {"bridge.fleet_metrics:LOOK_S": 0.1}


class Worked:
    """`runfold worker` with a health port, and what it counts."""

    def __init__(self, child: Executed, err: Path) -> None:
        self.child = child
        self._err = err

    async def begun(self) -> None:
        await eventually(lambda: "is ready" in self._err.read_text(), 30, what="it is ready")
        found = re.search(r"metrics: (http://\S+)\n", self._err.read_text())
        assert found is not None, self._err.read_text()
        self.url = found[1]

    async def samples(self) -> Samples:
        return await scraped(self.url)


async def scraped(url: str, **options: Any) -> Samples:
    async with httpx.AsyncClient(timeout=30) as client:
        response = await client.get(url, **options)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return parsed(response.text)


def together(one: Samples, other: Samples) -> Samples:
    return {key: one.get(key, 0) + other.get(key, 0) for key in one | other}


async def worker(cli: Cli, *agents: str) -> Worked:
    err = f"worker-{len(list(cli.folder.glob('worker-*')))}"
    words = ("worker", *agents, "--health", "127.0.0.1:0", "--ack-wait", "1")
    child = await cli.execute("bash", "-c", f'exec "$0" "$@" 2> {err}', RUNFOLD, *words)
    found = Worked(child, cli.folder / err)
    await eventually((cli.folder / err).exists)
    await found.begun()
    return found


@pytest.fixture
def cli(on_jetstream: Cli) -> Cli:
    return on_jetstream


@pytest.fixture
async def bridge(cli: Cli, tmp_path: Path) -> AsyncIterator[BridgeProcess]:
    assert cli.store is not None
    async with bridge_process(
        zygote(), cli.store, cli.namespace, tmp_path / "bridge", knobs=LOOK
    ) as found:
        yield found


async def of_bridge(bridge: BridgeProcess) -> Samples:
    return await scraped(f"{bridge.address}/metrics", headers=bearer("rita"))


async def post(bridge: BridgeProcess, path: str, body: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(headers=bearer("alice"), timeout=30) as client:
        response = await client.post(f"{bridge.address}{path}", json=body)
    assert response.is_success, response.text
    found: dict[str, Any] = response.json()
    return found


async def status(bridge: BridgeProcess, run: str, *words: str) -> dict[str, Any]:
    async def there() -> dict[str, Any] | None:
        async with httpx.AsyncClient(headers=bearer("rita"), timeout=30) as client:
            found: dict[str, Any] = (await client.get(f"{bridge.address}/runs/{run}")).json()
        return found if found["status"] in words else None

    return await eventually(there, 30, what=f"{run} is {words}")


async def test_worker_and_bridge_count_what_the_journals_have(
    cli: Cli, bridge: BridgeProcess
) -> None:
    one = await worker(cli, DESK)
    for run in ("a1", "a2"):
        await post(bridge, "/runs", {"agent": "desk", "input": "hello", "run": run})
        found = await status(bridge, run, "awaiting_approval")
        await waits_for_a_person(bridge, 1)
        marker = found["pending"][0]["marker"]
        if run == "a1":
            await post(bridge, "/decisions", {"marker": marker, "decision": "approve"})
        else:
            async with cli.client() as client:
                said = f'{{"marker": "{marker}"}}'.encode()
                await client.publish(f"{cli.namespace}.signal.{run}.approve", said)
        await status(bridge, run, "completed")
    journals = [entry for run in ("a1", "a2") for entry in await cli.entries(run)]
    work, doors = await one.samples(), await of_bridge(bridge)
    both = together(work, doors)
    assert by(both, "runfold_records_total", "type") == types(journals)
    assert by(work, "runfold_claims_total", "reason") == {"new": 2, "wake": 2}
    assert by(work, "runfold_steps_total", "kind") == {"model": 6, "tool": 4}
    assert by(work, "runfold_parks_total", "why") == {"approval": 2}
    assert by(work, "runfold_runs_ended_total", "status") == {"completed": 2}
    assert by(doors, "runfold_runs_started_total", "agent") == {"desk": 2}
    assert work["runfold_wake_seconds_count"] == 2
    assert work['runfold_step_seconds_count{kind="model"}'] == 6
    assert doors["runfold_signal_seconds_count"] == 2
    assert work["runfold_steps_replayed_total"] == 6
    assert work["runfold_fenced_total"] == 0
    assert work["runfold_worker_connected"] == work["runfold_worker_healthy"] == 1
    assert work["runfold_worker_concurrency"] == 64
    assert work['runfold_worker_backlog{agent="desk"}'] == 0


async def waits_for_a_person(bridge: BridgeProcess, count: int) -> None:
    """In the background it is looked up, too."""

    async def seen() -> bool:
        found = await of_bridge(bridge)
        waiting = found.get('runfold_waiting_oldest_seconds{kind="approval"}', 0)
        return (
            found.get('runfold_runs{status="awaiting_approval"}') == count
            and waiting > 0
            and found["runfold_fleet_looked_at_seconds"] > 0
            and found["runfold_signals_waiting"] == 0
        )

    await eventually(seen, 30, what="the fleet is looked up")


async def killed_at(cli: Cli, place: str, count: str) -> tuple[Samples, Samples]:
    """What a worker counted until it was killed at that place of the run k1, and its successor
    until it has some of these."""
    cli.hold(place)
    first = await worker(cli, QUICK)
    await cli("start", "quick", "--input", "hello", "--id", "k1")
    await cli.reached(place)
    counted = await first.samples()
    await first.child.kill()
    cli.let_go(place)
    second = await worker(cli, QUICK)

    async def over() -> Samples | None:
        found = await second.samples()
        return found if found.get(count) else None

    after = await eventually(over, 40, what=f"there is some {count}")
    records = types(await cli.entries("k1"))
    del records["run.started"]  # by `runfold start`
    assert by(together(counted, after), "runfold_records_total", "type") == records
    return counted, after


async def test_what_a_killed_worker_did_is_not_counted_again_by_who_goes_on(cli: Cli) -> None:
    ended = 'runfold_runs_ended_total{agent="quick",status="completed"}'
    first, second = await killed_at(cli, "lookup", ended)
    assert by(first, "runfold_steps_total", "kind") == {"model": 1}
    assert by(second, "runfold_steps_total", "kind") == {"model": 2, "tool": 2}
    assert first["runfold_steps_replayed_total"] == 0
    assert second["runfold_steps_replayed_total"] == 1
    both = together(first, second)
    assert total(both, "runfold_unknown_writes_total") == 0
    assert both['runfold_step_seconds_count{kind="model"}'] == 3


async def test_a_write_that_a_kill_cut_off_is_counted_as_unknown(cli: Cli) -> None:
    first, second = await killed_at(cli, "create_ticket", 'runfold_parks_total{why="reconcile"}')
    assert by(first, "runfold_steps_total", "kind") == {"model": 2, "tool": 1}
    assert by(second, "runfold_steps_total", "kind") == {}
    assert total(first, "runfold_unknown_writes_total") == 0
    assert by(second, "runfold_unknown_writes_total", "policy") == {"reconcile": 1}


async def test_a_worker_whose_run_was_taken_over_in_the_middle_of_a_call_counts_one_fence(
    cli: Cli,
) -> None:
    """It is its heartbeat that finds out: the call goes on."""
    cli.hold("tick")
    first = await worker(cli, CLOCK)
    await cli("start", "clock", "--input", "x", "--id", "z1")
    await cli.reached("tick")
    await first.child.stop()
    second = await worker(cli, CLOCK)
    await cli.reached("tick", 2)
    first.child.go_on()

    async def fenced() -> bool:
        return (await first.samples())["runfold_fenced_total"] == 1

    await eventually(fenced, 30, what="the first one has found out")
    cli.let_go("tick")

    async def ended() -> bool:
        return by(await second.samples(), "runfold_runs_ended_total", "status") == {"completed": 1}

    await eventually(ended, 30, what="the second one ends the run")
    both = together(await first.samples(), await second.samples())
    records = types(await cli.entries("z1"))
    del records["run.started"]
    assert by(both, "runfold_records_total", "type") == records
    assert both["runfold_fenced_total"] == 1


# ---- the look at the fleet ----------------------------------------------------------------------


async def test_a_look_that_fails_leaves_the_numbers_and_its_time_as_they_were(
    cli: Cli,
) -> None:
    async with JetStreamStore(cli.store or "", namespace=cli.namespace) as store:
        await Fleet(store).start("nobody", 1, run_id="f1")
        look = FleetLook(store)
        shown = samples(look.families())
        assert [key for key in shown if not key.startswith("runfold_storage_safe")] == []
        await look.look()
        shown = samples(look.families())
        assert shown['runfold_runs{status="running"}'] == 1
        assert shown['runfold_tasks_waiting{agent="nobody"}'] == 1
        assert shown["runfold_fleet_looked_at_seconds"] > 0
        async with cli.client() as client:
            await client.jetstream().delete_stream(f"{cli.namespace.upper()}_TASKS")
        with pytest.raises(NotProvisioned):
            await look.look()
        assert samples(look.families()) == shown
        assert look.problem() == ""


async def test_no_look_ends_the_bridge_whatever_befalls_it(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bridge.fleet_metrics.LOOK_S", 0.001)
    looks = [StoreUnavailable("gone"), KeyError("a slip of ours"), TimeoutError(), None]

    async def looking() -> None:
        error = looks.pop(0)
        if error is not None:
            raise error
        done.set()

    async with JetStreamStore(cli.store or "", namespace=cli.namespace) as store:
        look, done = FleetLook(store), asyncio.Event()
        monkeypatch.setattr(look, "look", looking)
        task = asyncio.create_task(look.run())
        async with asyncio.timeout(20):
            await done.wait()
        task.cancel()
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]


async def test_of_many_runs_that_wait_a_bounded_number_is_read_at_a_time_and_each_has_its_turn(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bridge.fleet_metrics.READS_MAX", 2)
    read: list[str] = []

    async with JetStreamStore(cli.store or "", namespace=cli.namespace) as store:
        for run in ("w1", "w2", "w3", "w4", "w5"):
            await waiting_for_an_operator(store, run)
        resume = store.resume

        async def resumed(run_id: RunId) -> Any:
            read.append(run_id)
            return await resume(run_id)

        monkeypatch.setattr(store, "resume", resumed)
        look = FleetLook(store)
        for expected in (["w1", "w2"], ["w3", "w4"], ["w5", "w1"], ["w2", "w3"]):
            read.clear()
            await look.look()
            assert read == expected
        shown = samples(look.families())
        assert shown['runfold_runs{status="paused"}'] == 5
        assert shown['runfold_waiting_oldest_seconds{kind="operator"}'] > 0
        for run in ("w1", "w2", "w3", "w4", "w5"):
            await Fleet(store).resume(run)
        await look.look()
        assert 'runfold_waiting_oldest_seconds{kind="operator"}' not in samples(look.families())


async def test_agents_beyond_a_bound_share_one_number_of_tasks(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("journal.families.LABEL_VALUES_MAX", 2)
    async with JetStreamStore(cli.store or "", namespace=cli.namespace) as store:
        for n, agent in enumerate(("a.1", "a.1", "a.1", "b", "b", "c", "d")):
            await Fleet(store).start(agent, 1, run_id=f"r{n}")
        look = FleetLook(store)
        for _ in range(2):
            await look.look()
            waiting = by(samples(look.families()), "runfold_tasks_waiting", "agent")
            assert waiting == {"a.1": 3, "b": 2, OTHER: 2}
        async with cli.client() as client:
            await client.jetstream().purge_stream(f"{cli.namespace.upper()}_TASKS")
        await look.look()
        assert by(samples(look.families()), "runfold_tasks_waiting", "agent") == {}


async def waiting_for_an_operator(store: JetStreamStore, run: str) -> None:
    await Fleet(store).start("nobody", 1, run_id=run)
    log = await Log.read(store, run, by="w1")
    claim = await log.append(lambda fold: Claim(worker="w1", revision="1", reason="new"))
    assert claim is not None
    log.claim = claim.n
    assert await log.append(lambda fold: Park(why="pause", reason="look at it")) is not None

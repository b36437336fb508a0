"""UR-05, UR-06, UR-09: crashes at every boundary, and acknowledgements that never arrive.

Processes are real and die by SIGKILL (zygote.py). Nothing here waits for a time.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cases.child import DyingStore
from cases.pay import ANSWER
from cases.world import World, check_store, named
from cases.zygote import Done, Zygote
from kit.proxy import Proxy
from kit.servers import NatsServer

from journal.doors import signal
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision
from runfold import AwaitingApproval, Completed, open_store, run

pytestmark = pytest.mark.real

CHARGE = "tool/1/0/charge"
FULL_CHARGE = "tool/2/0/charge"
STEPS = ["llm/1", "tool/1/0/lookup", "llm/2", FULL_CHARGE, "llm/3"]
RECORDS = [f"step.{what} {step}" for step in STEPS for what in ("started", "completed")]


async def checked(place: str, namespace: str, run_id: str) -> list[dict[str, Any]]:
    async with open_store(place, namespace=namespace) as store:
        return await check_store(store, run_id)


# ---- UR-05 ------------------------------------------------------------------------------------


def test_ur05_charge_succeeds_bookkeeping_fails(
    world: World, zygote: Zygote, place: str, namespace: str, run_sync: Callable[..., Any]
) -> None:
    """UR-05: SIGKILL after the ledger line, before the result. 15 restarts, three at a time: never
    charged again, Indeterminate each time; then reconcile done goes on with exactly that result."""
    where = ["--store", place, "--namespace", namespace]
    start = [*world.run_args("r1", input="pay")[:4], *where, "--ack-wait", "1"]

    def command(*args: str, at: str = "") -> Done:
        return zygote.cli(*args, *where, env=world.env(at=at)).wait()

    first = zygote.cli(*start, "--input", "pay", env=world.env(at="tool:after")).wait()
    assert first.code == -9
    assert len(world.ledger.lines()) == 1
    for _ in range(5):
        three = [zygote.cli(*start, "--json", env=world.env()) for _ in range(3)]
        ends = [child.wait() for child in three]
        assert 4 in [end.code for end in ends]
        for end in ends:  # 8: one of the others has the run at this moment, and is named
            assert end.code in (4, 8), end
            assert end.code == 4 or end.json["error"]["code"] in ("store_locked", "fenced"), end
            assert end.code == 8 or end.json["status"] == "indeterminate"
        shown = command("show", "r1", "--json")
        assert (shown.code, shown.json["status"]) == (4, "indeterminate")
        assert [step["step"] for step in shown.json["unknown"]] == [CHARGE]
        listed = command("list", "--json").json["runs"]
        assert [run["status"] for run in listed] == ["indeterminate"]
    assert len(world.ledger.lines()) == 1
    assert world.asked() == ["llm/1"]

    done = command("reconcile", "r1", CHARGE, "--done", '{"receipt":"by hand","n":0.10}')
    assert done.code == 0
    end = zygote.cli(*start, env=world.env()).wait()
    assert (end.code, end.out) == (0, f"{ANSWER}\n")
    assert (len(world.ledger.lines()), world.asked()) == (1, ["llm/1", "llm/2"])
    records = run_sync(checked(place, namespace, "r1"))
    (result,) = [r for r in records if (r["type"], r.get("step")) == ("step.completed", CHARGE)]
    assert (result["result"], result["via"]) == ({"receipt": "by hand", "n": 0.1}, "reconcile")


# ---- UR-06 ------------------------------------------------------------------------------------


class Kill(NamedTuple):
    """Where the first process dies; the second dies at its own first append, same phase."""

    when: str
    at: str
    name: str
    unknown: bool
    effects: int


def kills(appends: list[str], *, shared: bool) -> list[Kill]:
    """Every append, before and after; inside the model call and the tool."""
    found: list[Kill] = []
    for number, name in enumerate(appends, 1):
        for phase in ("before", "after"):
            started = f"step.started {FULL_CHARGE}"
            unknown = (name, phase) in (
                (started, "after"),
                (f"step.completed {FULL_CHARGE}", "before"),
            )
            effects = int(appends.index(started) + 1 < number)
            if not shared and (name, phase) == ("step.completed llm/2", "after"):
                unknown = True  # the second process's first append is the charge's start
            found.append(Kill(f"{number}:{phase}", "", f"{phase} {name}", unknown, effects))
    found.append(Kill("", "model:1", "in llm/1", False, 0))
    found.append(Kill("", "model:3", "in llm/3", False, 1))
    found.append(Kill("", "tool:before", "in charge, before its effect", True, 0))
    found.append(Kill("", "tool:after", "in charge, after its effect", True, 1))
    return found


def test_ur06_kill_matrix_over_all_boundaries(
    tmp_path: Path, zygote: Zygote, place: str, namespace: str, run_sync: Callable[..., Any]
) -> None:
    """UR-06: killed at each boundary, and again in the recovery; the third process finishes alone.
    Between the charge's start and its result: Indeterminate; nowhere else."""
    shared = place.startswith("nats://")
    appends = ["run.started", *(["claim"] if shared else []), *RECORDS, "run.completed"]
    matrix = kills(appends, shared=shared)

    def cell(index: int, kill: Kill) -> None:
        home = tmp_path / f"cell-{index}"
        home.mkdir()
        run_id = f"r{index}"
        about: dict[str, Any] = {
            "home": str(home),
            "store": place,
            "run_id": run_id,
            "input": "pay",
            "script": "full",
            "namespace": namespace,
        }
        entry = "cases.child:run_pay"
        first = zygote.call(entry, **about, when=kill.when, at=kill.at).wait()
        assert first.code == -9, (kill, first)
        again = f"1:{kill.when.partition(':')[2] or 'after'}"
        second = zygote.call(entry, **about, when=again).wait()
        assert second.code in (-9, 0), (kill, second)
        third = zygote.call(entry, **about).wait()
        assert third.code == 0, (kill, third)
        assert third.json["outcome"]["type"] == (
            "indeterminate" if kill.unknown else "completed"
        ), (kill, third)

        world = World(home)
        effects = len(world.ledger.lines())
        assert effects == (kill.effects if kill.unknown else 1), kill
        kill_count = 1 + (second.code == -9)
        assert max(Counter(world.asked()).values()) <= 1 + kill_count, kill
        records = run_sync_checked(run_id)
        assert ("run.completed" in named(records)) != kill.unknown

    def run_sync_checked(run_id: str) -> list[dict[str, Any]]:
        return asyncio.run(checked(place, namespace, run_id))

    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda item: cell(*item), enumerate(matrix)):
            pass
    assert len(matrix) == 2 * len(appends) + 4
    assert sum(kill.unknown for kill in matrix) == (4 if shared else 5)


def test_ur06_a_retry_killed_in_the_write_asks_again(
    world: World, zygote: Zygote, place: str, namespace: str, run_sync: Callable[..., Any]
) -> None:
    """UR-06: the second kill inside the permitted retry is an unknown of its own: two effects at
    most, and the permit covers no third."""
    about: dict[str, Any] = {
        "home": str(world.home),
        "store": place,
        "run_id": "r1",
        "namespace": namespace,
    }
    go = "cases.child:run_pay"
    assert zygote.call(go, **about, input="pay", at="tool:after").wait().code == -9
    assert zygote.call(go, **about).wait().json["outcome"]["type"] == "indeterminate"
    retry = {"step": CHARGE, "outcome": "retry"}
    say: dict[str, Any] = {"store": place, "run_id": "r1", "name": "reconcile"}
    said = zygote.call("cases.child:decide", **say, payload=retry, namespace=namespace).wait()
    assert said.json["result"] == "applied"
    assert zygote.call(go, **about, at="tool:after", long_after=True).wait().code == -9
    for _ in range(2):
        end = zygote.call(go, **about).wait().json["outcome"]
        assert (end["type"], end["step"]) == ("indeterminate", CHARGE)
    assert len(world.ledger.lines()) == 2
    again = zygote.call("cases.child:decide", **say, payload=retry, namespace=namespace).wait()
    assert again.json["error"] == "stale_signal"  # two starts: it must be said which
    run_sync(checked(place, namespace, "r1"))


# ---- UR-09 ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def provisioned(nats: NatsServer, run_sync: Callable[..., Any]) -> tuple[NatsServer, str]:
    run_sync(provision(nats.url, namespace="lostacks"))
    return nats, "lostacks"


async def test_ur09_the_acknowledgement_of_any_one_record_is_lost(
    provisioned: tuple[NatsServer, str], tmp_path: Path
) -> None:
    """UR-09: for every record of a run with a read, an approved write and an answer, the server's
    answer is lost: read back by id, one copy each, one effect, the outcome as without a fault."""
    server, namespace = provisioned
    plain = await _worked_run(server, namespace, tmp_path, 0)
    assert len(plain) == 16
    assert Counter(plain)["claim"] == 2  # before the approval and after it
    runs = (_worked_run(server, namespace, tmp_path, n) for n in range(1, len(plain) + 1))
    for found in await asyncio.gather(*runs):
        assert found == plain


async def _worked_run(server: NatsServer, namespace: str, home: Path, lost: int) -> list[str]:
    """The names of the run's records, `lost` being the append whose answer is lost (0: none)."""
    world = World(home / f"lost-{lost}")
    world.home.mkdir()
    run_id = f"run-{lost}"
    proxy = await Proxy.start(server.url)
    try:
        gone = proxy.drop_nth_ack(lost) if lost else None
        async with JetStreamStore(proxy.url, namespace=namespace) as store:
            counting = DyingStore(store, "")
            agent = _gated(world)
            end = await run(counting, agent, run_id, "pay")  # type: ignore[arg-type]
            assert isinstance(end, AwaitingApproval)
            await signal(counting, run_id, "approve", {"marker": end.pending[0].marker})  # type: ignore[arg-type]
            end = await run(counting, agent, run_id)  # type: ignore[arg-type]
            assert isinstance(end, Completed)
            assert end.message.content == ANSWER
            records = await check_store(store, run_id)
    finally:
        await proxy.stop()
    assert gone is None or gone.is_set()
    assert len(world.ledger.lines()) == 1
    assert world.asked() == ["llm/1", "llm/2", "llm/3"]
    assert [re.sub("^park .*", "park", name) for name in named(records)] == counting.appends
    return counting.appends


def _gated(world: World) -> Any:
    """`full` with an approval: 16 records on a shared store."""
    agent = world.agent("full")
    gated = world.agent("gated")
    gated.model = agent.model
    return gated

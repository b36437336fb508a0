"""deploy/kubernetes with the real parts: nats-server takes the configuration that NATS' chart makes
of nats-values.yaml and roles.conf; the autoscaler finds an agent's backlog where it is told to."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.bridge import bridge_on
from kit.guarded import WAIT_S, Guarded, environ
from kit.manifests import DEPLOY, KUBERNETES, documents
from kit.servers import NatsServer, monitor
from kit.waiting import eventually

from journal.fleet import Fleet
from journal.stores.provision import provision
from journal.terms import Complete, Next
from worker.agent import turn
from worker.context import Context
from worker.service import Worker

BRIDGE = KUBERNETES / "base" / "bridge.yaml"

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


def configuration() -> str:
    """As the chart renders its values: JSON, but for includes and what stands in << >>."""
    config = yaml.safe_load((KUBERNETES / "nats-values.yaml").read_text())["config"]
    found: dict[str, Any] = {
        "jetstream": {"store_dir": "data"} | config["jetstream"]["merge"],
        "logfile": "nats-server.log",
    }
    found |= {key: value for key, value in config["merge"].items() if "$include" not in key}
    included = [value for key, value in config["merge"].items() if "$include" in key]
    text = json.dumps(found).replace('"<< ', "").replace(' >>"', "")
    return "{" + "".join(f"include {one};\n" for one in included) + text[1:]


@pytest.fixture
async def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Guarded]:
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    server = NatsServer(tmp_path)
    shutil.copy(DEPLOY / "nats" / "roles.conf", tmp_path)
    (tmp_path / "nats-server.conf").write_text(configuration())
    await server._launch()
    yield Guarded(server)
    await server.stop()


async def lag(server: NatsServer, trigger: dict[str, str]) -> int | None:
    """As KEDA's nats-jetstream scaler counts; None where it would take the stream's last sequence
    for want of the consumer."""
    page = await monitor(
        server.monitor_url, f"jsz?acc={trigger['account']}&consumers=true&config=true"
    )
    for account in page["account_details"]:
        for stream in account["stream_detail"]:
            for consumer in stream.get("consumer_detail", ()):
                names = (account["name"], stream["name"], consumer["name"])
                if names == (trigger["account"], trigger["stream"], trigger["consumer"]):
                    return consumer["num_pending"] + consumer["num_ack_pending"]
    return None


async def test_the_autoscaler_counts_what_waits_and_what_is_at_work_in_every_priority(
    guarded: Guarded,
) -> None:
    (scaled,) = documents(KUBERNETES / "components" / "keda" / "scaledobject.yaml")
    triggers = [one["metadata"] for one in scaled["spec"]["triggers"]]
    go = asyncio.Event()

    @turn(triggers[0]["consumer"])
    async def support(ctx: Context) -> Next:
        await go.wait()
        return Complete("done")

    await provision(guarded.url("admin"))
    ready = asyncio.Event()
    worker = Worker(guarded.url("worker"), [support], concurrency=1, on_ready=ready.set)
    serving = asyncio.create_task(worker.serve())
    try:
        await ready.wait()
        assert await lags(guarded.server, triggers) == [0, 0, 0]
        async with guarded.store("bridge") as store:
            fleet = Fleet(store)
            for number, priority in enumerate((0, 0, 0, 1, 1, -1)):
                await fleet.start(support.name, None, run_id=f"run-{number}", priority=priority)

            async def counted() -> bool:
                return await lags(guarded.server, triggers) == [3, 2, 1]

            await eventually(counted, WAIT_S, what="all six are counted")
            go.set()

            async def over() -> bool:
                return await lags(guarded.server, triggers) == [0, 0, 0]

            await eventually(over, WAIT_S, what="none is left")
    finally:
        go.set()
        await worker.stop()
        await serving


async def lags(server: NatsServer, triggers: list[dict[str, str]]) -> list[int | None]:
    return [await lag(server, trigger) for trigger in triggers]


async def test_while_nats_is_away_a_bridge_takes_no_requests_and_is_not_killed_for_it(
    tmp_path: Path, namespace: str
) -> None:
    """By the probes of the manifest, which bring no token."""
    found = next(one for one in documents(BRIDGE) if one["kind"] == "Deployment")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    paths = {
        name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("liveness", "readiness")
    }
    server = await NatsServer.start(tmp_path, fsync=True)
    await provision(server.url, namespace=namespace)
    async with bridge_on(server.url, namespace) as site:

        async def probed(name: str) -> int:
            return (await site.client(None).get(paths[name])).status_code

        assert [await probed(name) for name in paths] == [200, 200]
        await server.kill()

        async def red() -> bool:
            return await probed("readiness") == 503

        await eventually(red, WAIT_S, what="it is taken off the proxies' lists")
        assert await probed("liveness") == 200
        await server.restart()

        async def green() -> bool:
            return await probed("readiness") == 200

        await eventually(green, WAIT_S, what="it is back on them")
    await server.stop()


async def test_the_charts_configuration_syncs_every_write_and_knows_the_roles(
    guarded: Guarded,
) -> None:
    varz = await monitor(guarded.server.monitor_url, "varz")
    assert varz["jetstream"]["config"]["sync_always"] is True
    assert varz["max_payload"] == 1024 * 1024
    accounts = (await monitor(guarded.server.monitor_url, "accountz"))["accounts"]
    assert {"RUNFOLD", "RUNFOLD_WORK", "RUNFOLD_PEOPLE"} <= set(accounts)

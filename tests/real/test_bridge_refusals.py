"""What is refused for good, and on what grounds; what is nobody's to claim; who is told of it
(R59, R60, R66)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import nats
import pytest
from kit.servers import NatsServer
from kit.waiting import eventually
from real.test_bridge_signals import WAIT_S, Site

from bridge import nats_api, settling, signals
from bridge.nats_api import NO_INBOX
from journal.codec import Entry, decode, record_hash
from journal.errors import (
    BadPayload,
    PermissionDenied,
    RunNotFound,
    StaleSignal,
    StoreUnavailable,
)
from journal.ids import RunId
from journal.records import Input
from journal.store import Loaded
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
async def site(nats_server: NatsServer, namespace: str) -> AsyncIterator[Site]:
    await provision(nats_server.url, namespace=namespace)
    plain = await nats.connect(nats_server.url)
    async with JetStreamStore(nats_server.url, namespace=namespace) as store:
        found = Site(nats_server.url, namespace, store, plain)
        async with found.stack:
            yield found
    await plain.close()


# ---- old journals --------------------------------------------------------------------------------


async def test_a_kept_signal_is_not_refused_for_good_over_the_old_tail_of_a_deposed_leader(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was stopped and deposed answers a read, when it goes on, with an old tail, here
    of before the run. An append on it would lose and read again; a refusal on it stands."""
    monkeypatch.setattr(settling, "SURE_S", 0.5)
    await site.worker(site.asker())
    marker = await site.asked("r")
    resume, stale = JetStreamStore.resume, 1

    async def old(self: JetStreamStore, run_id: RunId) -> Loaded:
        nonlocal stale
        stale -= 1
        return Loaded((), 0) if stale >= 0 else await resume(self, run_id)

    monkeypatch.setattr(JetStreamStore, "resume", old)
    await site.publish("r.approve", {"marker": marker})
    async with site.bridge():
        await site.settled()
    assert [one.code for one in await site.rejected()] == []
    await site.until("r", "completed")


async def test_a_refusal_rests_on_a_journal_read_long_enough_after_the_signal_came(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever bridge. What is malformed is refused at once, and a run's order is kept."""
    monkeypatch.setattr(settling, "SURE_S", 0.5)
    say, asked = settling.say, list[tuple[str, float]]()

    async def asks(store: Any, address: Any, data: bytes, **rest: Any) -> Any:
        asked.append((data.decode(), time.monotonic()))
        return await say(store, address, data, **rest)

    monkeypatch.setattr(settling, "say", asks)
    await site.fleet.start("nobody", None, run_id="r")
    async with site.bridge(), site.bridge():
        began = time.monotonic()
        await site.publish("r.resume", {})
        await site.publish("r.input", {"content": 1})
        await site.publish("r.input", {"content": 2})
        await site.publish("other.cancel", b"{")
        await site.settled()
    codes = sorted((one.name, one.code) for one in await site.rejected())
    assert codes == [("cancel", "bad_payload"), ("resume", "stale_signal")]
    assert [getattr(one, "content", None) for one in await site.said("r")] == [1, 2]
    judged = [at - began for data, at in asked if data == "{}"]
    assert judged[-1] >= 0.5
    assert len([data for data, _ in asked if data == "{"]) == 1


async def test_what_is_judged_again_is_judged_on_no_older_journal_than_before(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader that answers the second look has just been let go on."""
    monkeypatch.setattr(settling, "SURE_S", 0.3)
    await site.fleet.start("nobody", None, run_id="r")
    resume, reads = JetStreamStore.resume, 0

    async def old(self: JetStreamStore, run_id: RunId) -> Loaded:
        nonlocal reads
        reads += 1
        return Loaded((), 0) if reads == 2 else await resume(self, run_id)

    monkeypatch.setattr(JetStreamStore, "resume", old)
    await site.publish("r.resume", {})
    async with site.bridge():
        await site.settled()
    assert [one.code for one in await site.rejected()] == ["stale_signal"] and reads > 3


async def test_a_first_look_is_not_for_a_signal_that_came_after_it(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "SURE_S", 0.3)
    say, refused = settling.say, list[str]()

    async def old(store: Any, address: Any, data: bytes, **rest: Any) -> Any:
        if address.name == "input" and refused.count("resume") == 2 and "input" not in refused:
            refused.append("input")
            raise RunNotFound("as it was before")
        try:
            return await say(store, address, data, **rest)
        except StaleSignal:
            refused.append(address.name)
            raise

    monkeypatch.setattr(settling, "say", old)
    await site.fleet.start("nobody", None, run_id="r")
    async with site.bridge() as door:
        look = door._settler._look

        async def looks(run: RunId, came: float) -> None:
            await look(run, came)
            if refused == ["resume"]:
                await site.publish("r.input", {"content": 1})
                await eventually(lambda: len(door._came) == 2)

        monkeypatch.setattr(door._settler, "_look", looks)
        await site.publish("r.resume", {})
        await site.settled()
    assert [one.name for one in await site.rejected()] == ["resume"]
    assert len(await site.said("r")) == 1 and refused == ["resume", "resume", "input"]


async def test_who_waits_to_be_refused_keeps_no_other_run_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "SURE_S", 3600.0)
    monkeypatch.setattr(signals, "HELD_MAX", 4)
    await site.fleet.start("nobody", None, run_id="r")
    for number in range(40):
        await site.publish(f"none{number % 20}.cancel", {})
    await site.publish("r.cancel", {})
    async with site.bridge():

        async def served() -> bool:
            return len(await site.said("r")) == 1

        await eventually(served, WAIT_S)
        assert (await site.store.signals.backlog()).waiting == 40
    assert await site.rejected() == []


# ---- request ids ---------------------------------------------------------------------------------


async def test_the_id_of_a_kept_signal_is_nobodys_to_claim(site: Site) -> None:
    """At no door: the signal that comes to have it would be a repeat."""
    await site.fleet.start("nobody", None, run_id="r")
    claimed = {"request_id": "sig:1:1"}
    with pytest.raises(BadPayload):
        await site.fleet.send("r", "pay 5", request_id="sig:1:1")
    with pytest.raises(BadPayload):
        await site.fleet.cancel("r", request_id="sig:1:1")
    async with site.api(), site.bridge():
        for rest, payload in (
            ("signals.r.cancel", claimed),
            ("signals.r.input", claimed | {"content": "pay 5"}),
            ("inputs.submit", claimed | {"content": "pay 5", "run": "r"}),
        ):
            reply = await site.request(rest, payload)
            assert json.loads(reply.data)["error"]["code"] == "bad_payload"
        await site.publish("r.cancel", {}, **{"Runfold-Request": "sig:1:1"})
        await site.publish("r.input", claimed | {"content": "pay 5"})
        await site.publish("r.input", {"content": "pay 5"})
        await site.settled()
        (kept,) = await site.said("r")
        body = {"run": "r", "request_id": kept.request_id}
        found = json.loads((await site.request("inputs.withdraw", body)).data)
    assert kept.request_id.startswith("sig:3:") and found["status"] == "withdrawn"
    assert [one.code for one in await site.rejected()] == ["bad_payload"] * 2


async def test_a_published_input_is_not_taken_for_one_of_a_stream_before_this_one(
    site: Site,
) -> None:
    """The stream was made anew and counts from 1 again; its words are the same."""
    await site.fleet.start("nobody", None, run_id="r")
    await site.publish("r.input", {"content": "go on"})
    async with site.bridge():
        await site.settled()
    await site.plain.jetstream().delete_stream(site.store.signals.stream)
    await provision(site.url, namespace=site.namespace)
    await site.publish("r.input", {"content": "go on"})
    async with site.bridge():
        await site.settled()
    inputs = [one for one in await site.said("r") if isinstance(one, Input)]
    assert [one.content for one in inputs] == ["go on", "go on"]


# ---- who is told ---------------------------------------------------------------------------------


async def test_what_went_wrong_for_one_is_not_told_to_all_by_the_services_statistics(
    site: Site,
) -> None:
    """`ops` may not read anything, and may ask `$SRV.STATS`."""
    async with site.api():
        await site.request("as.bob.signals.merger-with-acme.cancel", {})
        reply = await site.plain.request(f"$SRV.STATS.runfold-api-{site.namespace}", b"", 5)
    assert b"merger-with-acme" not in reply.data
    assert b'"last_error": "run_not_found"' in reply.data.replace(b'":"', b'": "')


async def test_a_request_that_wants_its_answer_elsewhere_than_in_an_inbox_is_not_done(
    site: Site,
) -> None:
    """The bridge may publish to journals, and who asks may not."""
    await site.fleet.start("nobody", None, run_id="r")
    subject = f"{site.namespace}.api.signals.r.cancel"
    async with site.api():
        for reply in ("", f"{site.namespace}.journal.0.r", "_INBOXES.x", "$JS.API.INFO"):
            await site.plain.publish(subject, b"{}", reply=reply)
        await eventually(lambda: site.counted.count(("cancel", NO_INBOX)) == 4)
        reply = await site.plain.request(f"$SRV.STATS.runfold-api-{site.namespace}", b"", 5)
        assert NO_INBOX.encode() in reply.data
        assert (await site.fleet.get("r")).records == 1
        assert json.loads((await site.request("signals.r.cancel", {})).data)["n"] == 2


async def test_who_waits_for_inputs_by_nats_keeps_no_decision_out(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nats_api, "AT_ONCE", 2)
    await site.fleet.start("nobody", None, run_id="r")
    await site.fleet.send("r", "x", request_id="q")
    payload = {"run": "r", "request_id": "q", "wait": 30}
    async with site.api() as api:
        waits = [asyncio.create_task(site.request("inputs.get", payload)) for _ in range(2)]
        await eventually(lambda: len(api._looking) == 2)
        more = json.loads((await site.request("inputs.get", payload)).data)
        assert more["error"]["code"] == "busy"
        reply = json.loads((await site.request("signals.r.cancel", {})).data)
        assert reply["result"] == "applied"
        await site.request("inputs.withdraw", {"run": "r", "request_id": "q"})
        await asyncio.gather(*waits)


# ---- health --------------------------------------------------------------------------------------


async def test_one_run_of_a_newer_version_does_not_turn_the_health_of_all_bridges_red(
    site: Site,
) -> None:
    """A signal for it waits in the stream for the bridge that comes with that version."""
    for run in ("newer", "other"):
        await site.fleet.start("nobody", None, run_id=run)
    loaded = await site.store.load(RunId("newer"))
    record = {"v": 2, "n": 2, "id": "0123456789ab-1", "at": "", "by": "", "type": "dream"}
    raw = json.dumps(record | {"prev": record_hash(loaded.entries[-1].raw)}).encode()
    await site.store.append(RunId("newer"), Entry(decode(raw), raw), expected=loaded.tail)
    async with site.bridge() as door:
        await site.publish("newer.cancel", {})
        await eventually(lambda: ("cancel", "put_off") in site.counted, WAIT_S)
        assert door.problem() == ""
        await site.publish("other.cancel", {})
        await eventually(lambda: ("cancel", "applied") in site.counted, WAIT_S)
        assert door.problem() == ""
    assert (await site.store.signals.backlog()).waiting == 1 and await site.rejected() == []


def _thrice(tried: list[str], run: str) -> bool:
    return tried.count(run) >= 3


@pytest.mark.parametrize(
    ("error", "runs_until_red"),
    [
        (TimeoutError(), 100),
        (StoreUnavailable("its tail was removed"), 2),
        (PermissionDenied("the NATS server denies this user x", subject="x"), 1),
    ],
)
async def test_health_is_red_for_trouble_that_is_the_stores(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception, runs_until_red: int
) -> None:
    sick, say, tried = True, settling.say, list[str]()

    async def fails(store: Any, address: Any, data: bytes, **rest: Any) -> Any:
        if sick:
            tried.append(address.run)
            raise error
        return await say(store, address, data, **rest)

    monkeypatch.setattr(settling, "say", fails)
    monkeypatch.setattr(signals, "PAUSE_MAX_S", 0.2)
    async with site.bridge() as door:
        for number, run in ((1, "r1"), (2, "r2")):
            await site.fleet.start("nobody", None, run_id=run)
            await site.publish(f"{run}.cancel", {})
            await eventually(partial(_thrice, tried, run), WAIT_S)
            assert ("put off" in door.problem()) is (number >= runs_until_red)
        sick = False
        await site.settled()
        assert door.problem() == ""

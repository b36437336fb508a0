"""The bridge with `curl` alone (R64): start, look, follow, decide, talk, cancel; a worker works.

Each test is a page of a manual: what is typed, and what comes back. `$BRIDGE` is the address of a
`runfold bridge --tokens FILE`, `$ALICE` the header with a token of scope `signal`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kit.bridge_process import BridgeProcess, Event, Events, bridge_process
from kit.cli import RUNFOLD, Cli
from kit.fleet import zygote
from kit.servers import NatsServer
from kit.waiting import eventually

from journal.ids import RunId
from journal.stores.jetstream import JetStreamStore
from journal.stores.provision import provision

if shutil.which("curl") is None:
    print("no test of the bridge with curl: it is not installed", file=sys.__stderr__)
    pytest.skip("curl is not installed", allow_module_level=True)

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROBLEM = "application/problem+json"
WAIT_S = 30.0


class Answer(NamedTuple):
    """`status`: the number; `type`: the content type; `body`: its JSON."""

    status: int
    type: str
    location: str
    body: Any


class Desk:
    """A terminal with curl in it, and the helpdesk and the chat of examples/ at work."""

    def __init__(self, folder: Path, bridge: BridgeProcess, store: JetStreamStore) -> None:
        self.folder = folder
        self.bridge = bridge
        self.store = store
        (folder / ".curlrc").write_text("silent\nshow-error\nno-buffer\n")
        self.env = {
            "PATH": os.environ["PATH"],
            "CURL_HOME": str(folder),
            "BRIDGE": bridge.address,
            **{
                name.upper(): f"Authorization: Bearer rf_{name}"
                for name in ("rita", "alice", "wanda", "nobody")
            },
        }

    async def type(self, line: str) -> Answer:
        """What curl prints, read."""
        out = await self.plainly(line.replace("curl ", "curl --include ", 1))
        head, _, body = out.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (one.partition(": ") for one in rest)}
        status = int(first.split()[1])
        if status >= 400:
            problem = json.loads(body)
            assert headers["content-type"] == PROBLEM
            assert problem["status"] == status and problem["type"] == "about:blank"
            assert problem["title"] and problem["detail"]
        return Answer(
            status,
            headers.get("content-type", ""),
            headers.get("location", ""),
            json.loads(body) if body else None,
        )

    async def plainly(self, line: str) -> bytes:
        process = await self._begun(line)
        out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
        assert process.returncode == 0, (line, err)
        return out

    async def _begun(self, line: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_shell(
            f"exec {line}",
            cwd=self.folder,
            env=self.env,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def follow(self, line: str, seen: list[Event]) -> int:
        """Adds each event as it comes; curl's exit code when the stream is over."""
        process = await self._begun(line)
        assert process.stdout is not None
        events = Events()
        while data := await process.stdout.read(65536):
            seen += events.feed(data)
        return await process.wait()

    async def journal(self, run: str) -> list[bytes]:
        return [entry.raw for entry in (await self.store.load(RunId(run))).entries]

    async def asks(self, run: str) -> str:
        """The marker that the run waits for, once it does."""
        line = f'curl "$BRIDGE/runs/{run}?wait=30s" -H "$RITA"'
        found = await self.type(line)
        assert found.body["status"] == "awaiting_approval", found
        return found.body["pending"][0]["marker"]


@pytest.fixture
async def desk(tmp_path: Path, nats_server: NatsServer, namespace: str) -> AsyncIterator[Desk]:
    await provision(nats_server.url, namespace=namespace)
    cli = Cli(tmp_path / "work", nats_server.url, namespace)
    agents = [f"{EXAMPLES / 'helpdesk.py'}:agent", f"{EXAMPLES / 'turn_agent.py'}:agent"]
    worker = await cli.execute(RUNFOLD, "worker", *agents)
    try:
        async with (
            JetStreamStore(nats_server.url, namespace=namespace) as store,
            bridge_process(zygote(), nats_server.url, namespace, tmp_path / "bridge") as bridge,
        ):
            yield Desk(cli.folder, bridge, store)
    finally:
        await cli.end()
        assert not worker.running


async def test_a_run_is_started_looked_at_and_approved_by_its_marker_alone(desk: Desk) -> None:
    # ---- start: 201; the same again: 200, nothing happens; another input under its id: 409
    start = """curl "$BRIDGE/runs" -H "$ALICE" \
        -d '{"agent": "helpdesk", "input": "VPN is down", "run": "vpn-1"}'"""
    started = await desk.type(start)
    assert (started.status, started.body) == (201, {"run": "vpn-1", "created": True})
    assert started.location == "/runs/vpn-1"
    again = await desk.type(start)
    assert (again.status, again.body) == (200, {"run": "vpn-1", "created": False})
    other = await desk.type(start.replace("VPN is down", "mail is down"))
    assert (other.status, other.body["code"], other.body["run"]) == (409, "input_mismatch", "vpn-1")

    # ---- look: it waits for a person; so does the inbox say
    marker = await desk.asks("vpn-1")
    listed = await desk.type("""curl "$BRIDGE/runs?agent=helpdesk" -H "$RITA" """)
    assert [(run["run"], run["status"]) for run in listed.body["runs"]] == [
        ("vpn-1", "awaiting_approval")
    ]
    assert listed.body["next"] is None
    inbox = await desk.type("""curl "$BRIDGE/inbox" -H "$RITA" """)
    (item,) = inbox.body["items"]
    assert item["run"] == "vpn-1" and marker in json.dumps(item)
    assert not (desk.folder / "tickets.txt").exists()

    # ---- decide: the marker names the run and the call. A second time: said, not done again
    approve = f"""curl "$BRIDGE/decisions" -H "$ALICE" \
        -d '{{"marker": "{marker}", "decision": "approve"}}'"""
    receipt = await desk.type(approve)
    assert (receipt.status, receipt.body["run"], receipt.body["result"]) == (
        200,
        "vpn-1",
        "applied",
    )
    ended = await desk.type("""curl "$BRIDGE/runs/vpn-1?wait=30s" -H "$RITA" """)
    assert (ended.body["status"], ended.body["message"]) == ("completed", "Ticket filed.")
    assert (desk.folder / "tickets.txt").read_text() == "VPN is down\n"
    late = await desk.type(approve.replace('"approve"', '"reject"'))
    assert late.status == 409 and late.body["code"] in ("run_finished", "decision_conflict")

    # ---- the journal: the records as they are stored; who decided is whose token it was
    page = await desk.plainly("""curl "$BRIDGE/runs/vpn-1/journal" -H "$RITA" """)
    stored = await desk.journal("vpn-1")
    assert page == b'{"run":"vpn-1","records":[%s],"next":null}' % b",".join(stored)
    (decision,) = [one for one in map(json.loads, stored) if one["type"] == "signal"]
    assert decision["by"] == "alice" and decision["n"] == receipt.body["n"]


async def test_a_follower_misses_and_doubles_nothing_when_the_bridge_is_killed(desk: Desk) -> None:
    """Killed with SIGKILL while it streams, restarted at its address; curl goes on behind the last
    whole event it has."""
    await desk.type(
        """curl "$BRIDGE/runs" -H "$ALICE" \
        -d '{"agent": "chat", "input": "the VPN", "run": "talk"}'"""
    )
    seen: list[Event] = []
    codes: list[int] = []

    async def follow() -> None:
        last = next((event.id for event in reversed(seen) if event.id), "")
        here = f'-H "Last-Event-ID: {last}"' if last else ""
        line = f'curl --fail "$BRIDGE/runs/talk/journal?follow=1" {here} -H "$RITA"'
        codes.append(await desk.follow(line, seen))

    async def say(text: str) -> None:
        sent = await desk.type(
            f"""curl "$BRIDGE/runs/talk/inputs" -H "$ALICE" \
            -d '{{"content": "{text}", "request_id": "{text}"}}'"""
        )
        assert sent.status == 201, sent
        done = await desk.type(f'curl "$BRIDGE/runs/talk/inputs/{text}?wait=30s" -H "$RITA"')
        assert done.body["status"] == "done", done

    for text in ("printer", "mail"):
        following = asyncio.create_task(follow())
        await say(text)
        await eventually(
            lambda text=text: any(
                b"input.placed" in e.data and text.encode() in e.data for e in seen
            )
        )
        await desk.bridge.kill()
        await asyncio.wait_for(following, WAIT_S)
        assert codes.pop() != 0, "curl says that the stream broke off"
        await desk.bridge.start()
    following = asyncio.create_task(follow())
    await say("bye")
    await asyncio.wait_for(following, WAIT_S)
    assert codes == [0]

    *records, end = [event for event in seen if event.event != "preview"]
    assert (end.event, end.id, end.json) == ("end", "", {"status": "completed"})
    assert {event.event for event in records} == {"record"}
    stored = await desk.journal("talk")
    assert [event.data for event in records] == stored
    assert [event.id for event in records] == [str(n + 1) for n in range(len(stored))]

    # ---- nothing more will come: 204, so that an EventSource stops asking
    over = await desk.type(
        f"""curl "$BRIDGE/runs/talk/journal" -H "Accept: text/event-stream" \
        -H "Last-Event-ID: {len(stored)}" -H "$RITA" """
    )
    assert (over.status, over.body) == (204, None)


async def test_a_message_is_sent_waited_for_and_taken_back(desk: Desk) -> None:
    # ---- to an agent that works: sent (201), repeated (200, the original), waited for
    await desk.type(
        """curl "$BRIDGE/runs" -H "$ALICE" \
        -d '{"agent": "chat", "input": "the VPN", "run": "talk"}'"""
    )
    send = """curl "$BRIDGE/runs/talk/inputs" -H "$ALICE" \
        -d '{"content": "bye, and thank you", "mode": "follow_up", "request_id": "m1"}'"""
    sent = await desk.type(send)
    assert sent.status == 201 and sent.location == "/runs/talk/inputs/m1"
    assert sent.body["content"] == "bye, and thank you"
    again = await desk.type(send.replace("bye, and thank you", "another text"))
    assert again.status == 200 and again.body["content"] == "bye, and thank you"
    done = await desk.type("""curl "$BRIDGE/runs/talk/inputs/m1?wait=30s" -H "$RITA" """)
    assert done.body == {
        "run": "talk",
        "request_id": "m1",
        "mode": "follow_up",
        "content": "bye, and thank you",
        "status": "done",
    }

    # ---- what the agent has heard can't be taken back
    heard = await desk.type("""curl -X DELETE "$BRIDGE/runs/talk/inputs/m1" -H "$ALICE" """)
    assert (heard.status, heard.body["code"]) == (409, "stale_signal")
    none = await desk.type("""curl -X DELETE "$BRIDGE/runs/talk/inputs/m2" -H "$ALICE" """)
    assert (none.status, none.body["code"]) == (404, "not_found")
    end = await desk.type(send.replace("m1", "m3"))
    assert (end.status, end.body["code"]) == (409, "run_finished")

    # ---- what it has not heard can: this agent has no worker
    await desk.type(
        """curl "$BRIDGE/runs" -H "$ALICE" -d '{"agent": "nobody", "input": 1, "run": "idle"}'"""
    )
    sent = await desk.type(
        """curl "$BRIDGE/runs/idle/inputs" -H "$ALICE" \
        -d '{"content": {"amount": 12345678901234567890}, "request_id": "m1"}'"""
    )
    assert (sent.status, sent.body["status"]) == (201, "queued")
    taken = await desk.type("""curl -X DELETE "$BRIDGE/runs/idle/inputs/m1" -H "$ALICE" """)
    assert (taken.status, taken.body) == (204, None)
    read = await desk.type("""curl "$BRIDGE/runs/idle/inputs/m1" -H "$RITA" """)
    assert (read.status, read.body["status"]) == (200, "withdrawn")
    assert read.body["content"] == {"amount": 12345678901234567890}


async def test_a_run_is_cancelled_and_hears_no_more(desk: Desk) -> None:
    await desk.type(
        """curl "$BRIDGE/runs" -H "$ALICE" \
        -d '{"agent": "helpdesk", "input": "VPN is down", "run": "vpn-1"}'"""
    )
    marker = await desk.asks("vpn-1")
    cancelled = await desk.type(
        """curl "$BRIDGE/runs/vpn-1/signals/cancel" -H "$ALICE" -d '{"reason": "works again"}'"""
    )
    assert (cancelled.status, cancelled.body["result"]) == (200, "applied")
    # Its worker writes the end: the stream tells it.
    await desk.plainly("""curl "$BRIDGE/runs/vpn-1/journal?follow=1" -H "$RITA" """)
    ended = await desk.type("""curl "$BRIDGE/runs/vpn-1" -H "$RITA" """)
    assert ended.body["status"] == "cancelled"
    late = await desk.type(
        f"""curl "$BRIDGE/runs/vpn-1/signals/approve" -H "$ALICE" -d '{{"marker": "{marker}"}}'"""
    )
    assert (late.status, late.body["code"]) == (409, "run_finished")
    assert not (desk.folder / "tickets.txt").exists()


async def test_every_refusal_is_a_problem_that_says_what_to_do(desk: Desk) -> None:
    """`type` checks each of them: problem+json with its status, a title and a detail."""
    refused = {
        """curl "$BRIDGE/runs" """: (401, "unauthorized"),
        """curl "$BRIDGE/runs" -H "$NOBODY" """: (401, "unauthorized"),
        """curl "$BRIDGE/runs" -H "$RITA" -d '{"agent": "chat", "input": 1}'""": (403, "forbidden"),
        """curl "$BRIDGE/runs" -H "$WANDA" """: (403, "forbidden"),
        """curl "$BRIDGE/runs/none" -H "$RITA" """: (404, "run_not_found"),
        """curl "$BRIDGE/nowhere" -H "$RITA" """: (404, "not_found"),
        """curl "$BRIDGE/runs/a%2Fb" -H "$RITA" """: (400, "invalid_id"),
        """curl -X DELETE "$BRIDGE/runs" -H "$ALICE" """: (405, "method_not_allowed"),
        """curl "$BRIDGE/runs?stauts=failed" -H "$RITA" """: (400, "bad_request"),
        """curl "$BRIDGE/runs" -H "$ALICE" -d '{"agent": "chat"'""": (400, "bad_request"),
        """curl "$BRIDGE/runs" -H "$ALICE" -d '{"agent": "chat"}'""": (400, "bad_payload"),
        """curl "$BRIDGE/decisions" -H "$ALICE" -d '{"marker": "a/tool/1/0/b@1.0123456789abcdef",
            "decision": "approve"}'""": (404, "run_not_found"),
    }
    for line, (status, code) in refused.items():
        found = await desk.type(line)
        assert (found.status, found.body["code"]) == (status, code), line
    with (desk.folder / "large").open("w") as file:
        json.dump({"agent": "chat", "input": "x" * 1_100_000}, file)
    large = await desk.type("""curl "$BRIDGE/runs" -H "$ALICE" -d @large""")
    assert (large.status, large.body["code"]) == (413, "too_large")

    # ---- these need no token
    for path in ("healthz", "readyz"):
        well = await desk.type(f'curl "$BRIDGE/{path}"')
        assert (well.status, well.body) == (200, {"ok": True, "problems": []})

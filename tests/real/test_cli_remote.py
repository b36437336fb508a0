"""The CLI through a bridge: by HTTP with tokens, and by NATS where a user may not open the store
(R64, R66, R69). The same output, shapes and exit codes as on the store."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.cli import AGENTS, RUNFOLD, Child, Cli, Done, is_refused
from kit.servers import NatsServer
from kit.waiting import eventually

from bridge.auth import digest_of
from journal.records import Signal
from journal.stores.provision import provision
from runfold.remote_journal import DAMAGED_HINT

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]

DESK, CLOCK = (f"{AGENTS}:{name}" for name in ("desk", "clock"))
SCOPES = {"alice": "signal", "bob": "read", "eve": "work"}
NOTHING_LISTENS = "http://127.0.0.1:1"


class Site:
    """A namespace of the server, its bridge, and the CLI on both of them."""

    def __init__(self, on_nats: Cli) -> None:
        self.nats = on_nats
        self.port = 0
        self.bridge: Child | None = None
        listed = [
            {"name": name, "scopes": [scope], "sha256": digest_of(f"token-of-{name}")}
            for name, scope in SCOPES.items()
        ]
        on_nats.folder.joinpath("tokens.json").write_text(json.dumps({"tokens": listed}))

    async def begin(self) -> None:
        """The bridge, at the address it had."""
        err = self.nats.folder / "bridge.err"
        err.unlink(missing_ok=True)
        line = f'exec "$0" bridge --tokens tokens.json --listen {self.port} 2> bridge.err'
        self.bridge = child = await self.nats.execute("bash", "-c", line, RUNFOLD)

        def port() -> int:
            text = err.read_text() if err.exists() else ""
            assert child.running, text
            found = re.search(r"bridge: http://127\.0\.0\.1:([0-9]+)\n", text)
            return int(found[1]) if found else 0

        self.port = await eventually(port, 30)

    async def kill(self) -> None:
        assert self.bridge is not None
        await self.bridge.kill()

    def cli(self, user: str | None = "alice", address: str | None = None) -> Cli:
        found = Cli(self.nats.folder, address or f"http://127.0.0.1:{self.port}")
        found._children = self.nats._children
        if user is not None:
            found.env["RUNFOLD_TOKEN"] = f"token-of-{user}"
        return found

    async def worker(self, *agents: str) -> None:
        line = 'exec "$0" worker "$@" 2> worker.err'
        child = await self.nats.execute("bash", "-c", line, RUNFOLD, *agents)
        err = self.nats.folder / "worker.err"
        await eventually(
            lambda: not child.running or (err.exists() and "is ready" in err.read_text()), 30
        )
        assert child.running, err.read_text()


@pytest.fixture
async def site(on_jetstream: Cli) -> Site:
    found = Site(on_jetstream)
    await found.begin()
    return found


async def alike(site: Site, *lines: list[str]) -> list[Done]:
    """Each line by HTTP and on the server, where it answers the same, but for the address. The
    first one's answers."""
    by_http, on_nats = site.cli(), site.nats
    found = await by_http.forked(lines, at_once=4)
    others = await on_nats.forked(lines, at_once=4)
    there = f" --store {on_nats.store} --namespace {on_nats.namespace}"
    for line, one, other in zip(lines, found, others, strict=True):
        # That nothing ran is said of some damage only by a store, of all by a bridge.
        said = one.out.replace(f" --store {by_http.store}", there).replace(DAMAGED_HINT, "")
        told = other.out.replace(DAMAGED_HINT, "")
        if "--json" not in line:  # a bridge runs nothing, and the command does not say it does
            told = re.sub(r" or `runfold run [^`]*`", "", told)
        assert (one.code, said) == (other.code, told), (line, one, other)
    return found


# -- by HTTP ------------------------------------------------------------------------------------


async def test_a_run_is_started_approved_and_followed_through_a_bridge(site: Site) -> None:
    cli = site.cli()
    await site.worker(DESK)
    start = ("start", "desk", "--input", "hello", "--id", "a.1", "--wait", "30", "--json")
    first = await cli(*start)
    assert (first.code, first.json["created"]) == (3, True), first
    marker = first.json["pending"][0]["marker"]
    shown, inbox, *_ = await alike(
        site,
        ["show", "a.1", "--json"],
        ["inbox", "--json"],
        ["show", "a.1"],
        ["list", "--json"],
        ["list"],
        ["list", "--status", "failed", "--agent", "desk", "--json"],
        ["workers", "--json"],
    )
    assert first.json == shown.json | {"created": True}
    assert [item["marker"] for item in inbox.json] == [marker]
    assert f"runfold approve {marker} --store {cli.store}\n" in (await cli("inbox")).out
    follower = await cli.start("follow", "a.1", "--after", "3", "--json")
    told = await cli("approve", marker, "--comment", "fine", "--json", "--request-id", "r1")
    assert (told.code, told.json["result"]) == (0, "applied"), told
    again = await cli("approve", marker, "--comment", "fine", "--json", "--request-id", "r1")
    assert again.json == told.json | {"result": "repeated"}
    followed = await follower.done()
    entries = await site.nats.entries("a.1")
    assert followed.code == 0
    assert followed.out.encode() == b"".join(entry.raw + b"\n" for entry in entries[3:])
    (signal,) = [entry.record for entry in entries if isinstance(entry.record, Signal)]
    assert (signal.by, signal.payload.get("comment")) == ("alice", "fine")
    await alike(site, ["follow", "a.1"], ["show", "a.1"], ["follow", "a.1", "--after", "99"])
    assert (await cli(*start)).json["created"] is False
    assert len(site.nats.effects("create_ticket")) == 1


async def test_a_message_is_sent_read_and_withdrawn_through_a_bridge(site: Site) -> None:
    cli = site.cli()
    assert (await cli("start", "nobody", "--input", "x", "--id", "r1")).out == "r1\n"
    line = ["send", "r1", "hello", "--request-id", "../i 1.?", "--json"]
    sent, again, read, *_ = await cli.forked(
        [line, line, ["input", "r1", "../i 1.?", "--json"]], at_once=1
    )
    shape = {"run": "r1", "request_id": "../i 1.?", "mode": "steer", "content": "hello"}
    assert sent.json == shape | {"status": "queued", "created": True}
    assert again.json == read.json == shape | {"status": "queued", "created": False}
    await cli("send", "r1", "..", "--request-id", "..", "--mode", "follow-up")
    for id in ("../i 1.?", ".."):
        done = await cli("withdraw", "r1", id, "--json")
        assert (done.code, done.json["status"]) == (0, "withdrawn"), done
    cancelled = await cli("cancel", "r1", "--reason", "enough", "--json")
    assert (cancelled.code, cancelled.json["result"]) == (0, "applied")


async def test_what_can_not_be_read_looks_the_same(site: Site) -> None:
    for run in ("broken", "modern", "future"):
        await site.nats("start", "nobody", "--input", "x", "--id", run)
    await site.nats.append_raw("broken", b'{"nothing": "of ours"}')
    await site.nats.append_chained("modern", "run.teleported", where="\x1b[2J")
    runs = ("broken", "modern", "future")
    shown = await alike(
        site,
        *(["show", run] for run in runs),
        *(["show", run, "--json"] for run in runs),
        *(["follow", run, "--json"] for run in runs[:2]),
        *(["list", "--json"], ["inbox", "--json"], ["inbox"]),
    )
    assert [done.code for done in shown] == [1, 1, 0, 1, 1, 0, 1, 1, 0, 0, 0]


async def test_what_is_refused_has_the_same_code_as_on_the_server(site: Site) -> None:
    await site.nats("start", "nobody", "--input", "x", "--id", "r1")
    await site.nats.run("s1")
    marker = (await site.nats("show", "s1", "--json")).json["pending"][0]["marker"]
    await site.nats("approve", marker, "--request-id", "q")
    cases: list[tuple[list[str], int, str]] = [
        (["show", "nobody"], 8, "run_not_found"),
        (["follow", "nobody"], 8, "run_not_found"),
        (["show", "no id"], 2, "invalid_id"),
        (["start", "nobody", "--input", "y", "--id", "r1"], 8, "input_mismatch"),
        (["start", "no name", "--input", "y"], 2, "invalid_id"),
        (["start", "nobody", "--input", "y", "--priority", "2"], 2, "bad_payload"),
        (["start", "nobody", "--input", "y", "--key", ""], 2, "bad_payload"),
        (["reject", marker], 8, "decision_conflict"),
        (["approve", marker, "--request-id", "q", "--comment", "x"], 8, "decision_conflict"),
        (["approve", "nothing"], 2, "invalid_id"),
        (["reconcile", "s1", "tool/2/0/create_ticket", "--retry"], 8, "stale_signal"),
        (["resume", "r1"], 8, "stale_signal"),
        (["input", "r1", "i1"], 8, "stale_signal"),
        (["withdraw", "r1", "i1"], 8, "stale_signal"),
        (["input", "r1", "i1", "--wait", "61"], 2, "bad_payload"),
        (["send", "r1", "x", "--request-id", ""], 2, "bad_payload"),
        (["send", "r1", "--input-json", json.dumps("x" * 70_000)], 2, "too_large"),
        (["send", "nobody", "x"], 8, "run_not_found"),
        (["list", "--after", "no id"], 2, "invalid_id"),
    ]
    lines = [[*words, "--json"] for words, _, _ in cases]
    found = [await cli.forked(lines, at_once=6) for cli in (site.cli(), site.nats)]
    for (words, code, word), by_http, on_nats in zip(cases, *found, strict=True):
        assert (by_http.code, by_http.json["error"]["code"]) == (code, word), (words[:4], by_http)
        assert (on_nats.code, on_nats.json["error"]["code"]) == (code, word), (words[:4], on_nats)


async def test_who_may_not_gets_9_and_hears_why(site: Site) -> None:
    read, say = ["list", "--json"], ["cancel", "r1", "--json"]
    await site.nats("start", "nobody", "--input", "x", "--id", "r1")
    cases: list[tuple[str | None, list[str], str, str]] = [
        (None, read, "unauthorized", "RUNFOLD_TOKEN"),
        ("mallory", read, "unauthorized", "does not know the token"),
        ("mallory", ["follow", "r1", "--json"], "unauthorized", "does not know the token"),
        ("bob", say, "forbidden", "signal"),
        ("eve", read, "forbidden", "read"),
    ]
    for user, line, word, text in cases:
        done = await site.cli(user)(*line)
        is_refused(done, 9, word)
        assert text in done.err and "token-of" not in done.err, done
    garbled = site.cli()
    garbled.env["RUNFOLD_TOKEN"] = "token-of-alice\nx: y"
    is_refused(await garbled(*read), 2, "usage")
    assert (await site.cli("bob")(*read)).code == 0
    assert len(await site.nats.records("r1")) == 1


async def test_what_is_no_bridge_is_said_at_once(site: Site) -> None:
    cases = [
        (NOTHING_LISTENS, ["list"], 9, "store_unavailable", "refused"),
        (NOTHING_LISTENS, ["follow", "r1"], 9, "store_unavailable", "runfold bridge"),
        (NOTHING_LISTENS, ["approve", "a/b@1.0123456789abcdef"], 9, "store_unavailable", "refused"),
        (f"http://127.0.0.1:{site.port}/else", ["list"], 9, "not_found", "address"),
        (str(site.nats.store).replace("nats", "http"), ["list"], 9, "store_unavailable", "not the"),
        ("http://", ["list"], 2, "invalid_id", "http://host:port"),
        ("https://u:hunter2@host", ["list"], 2, "usage", "RUNFOLD_TOKEN"),
        ("https://u:hunter2@host:x", ["list"], 2, "invalid_id", "http://host:port"),
        *(
            (NOTHING_LISTENS, words, 2, "usage", f"runfold {words[0]}")
            for words in (
                ["run", DESK, "--id", "x", "--input", "y"],
                *(["init"], ["doctor"], ["sweep"], ["queue"]),
            )
        ),
    ]
    for address, words, code, word, text in cases:
        done = await site.cli(address=address)(*words, "--json")
        is_refused(done, code, word)
        assert text in done.err and "hunter2" not in done.err, done
    worker = await site.cli(address=NOTHING_LISTENS)("worker", DESK)
    assert worker.code == 2 and "NATS server itself" in worker.err


async def test_followers_and_waiters_sit_out_a_restart_and_miss_nothing(site: Site) -> None:
    cli = site.cli()
    cli.hold("tick")
    await site.worker(CLOCK)
    await cli("start", "clock", "--input", "x", "--id", "c1")
    await cli.reached("tick")
    out = cli.folder / "out"
    line = 'exec "$0" "$@" > out'
    follower = await cli.execute("bash", "-c", line, RUNFOLD, "follow", "c1", "--json")
    waiter = await cli.start("start", "clock", "--input", "x", "--id", "c1", "--wait", "60")
    known = len(await site.nats.entries("c1"))
    await eventually(lambda: out.exists() and out.read_text().count("\n") == known, 30)
    await site.kill()
    cli.let_go("tick")  # what comes now comes while nobody tells
    await eventually_completed(site.nats, "c1")
    await site.begin()
    followed, waited = await follower.done(), await waiter.done()
    assert (followed.code, waited.code) == (0, 0), (followed, waited)
    assert "asking again" in followed.err and "It ticks." in waited.out
    entries = await site.nats.entries("c1")
    assert out.read_bytes() == b"".join(entry.raw + b"\n" for entry in entries)
    assert len(entries) > known


async def eventually_completed(cli: Cli, run: str) -> None:
    async def completed() -> bool:
        return (await cli("show", run, "--json")).json["status"] == "completed"

    await eventually(completed, 30)


class Forgetful:
    """A proxy that loses the answers to POSTs and DELETEs, each the first time: what was asked for
    is done by then."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._asked: set[bytes] = set()
        self.lost = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = re.search(rb"content-length: ([0-9]+)", head, re.I)
                body = await reader.readexactly(int(size[1])) if size else b""
                there[1].write(head + body)
                answer = await there[0].readuntil(b"\r\n\r\n")
                size = re.search(rb"content-length: ([0-9]+)", answer, re.I)
                answer += await there[0].readexactly(int(size[1])) if size else b""
                asked = head.split(b"\r\n")[0] + body
                if not head.startswith(b"GET") and asked not in self._asked:
                    self._asked.add(asked)
                    self.lost += 1
                    return
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            there[1].close()


async def test_a_lost_answer_is_asked_for_again_and_nothing_happens_twice(site: Site) -> None:
    proxy = Forgetful(site.port)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        cli = site.cli(address=f"http://127.0.0.1:{port}")
        started = await cli("start", "nobody", "--input", "x", "--json")
        run = started.json["run"]
        assert (started.code, started.json["created"]) == (0, True), started
        sent = await cli("send", run, "hello", "--json")
        assert (sent.code, sent.json["created"]) == (0, True), sent
        withdrawn = await cli("withdraw", run, sent.json["request_id"], "--json")
        assert (withdrawn.code, withdrawn.json["status"]) == (0, "withdrawn"), withdrawn
        cancelled = await cli("cancel", run, "--json")
        assert (cancelled.code, cancelled.json["result"]) == (0, "repeated"), cancelled
        assert proxy.lost == 4
    assert [entry.type for entry in await site.nats.entries(run)] == [
        *("run.started", "input", "input.withdrawn", "signal")
    ]


# -- by NATS, as a user of deploy/nats ------------------------------------------------------------

DEPLOY = Path(__file__).parents[2] / "deploy" / "nats"
ROLES = ("worker", "bridge", "ops", "alice", "auditor", "keeper", "admin")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("guarded")
    shutil.copy(DEPLOY / "roles.conf", folder)
    loop = asyncio.new_event_loop()
    with pytest.MonkeyPatch.context() as patch:
        for role in (*ROLES, "sys"):
            patch.setitem(os.environ, f"RUNFOLD_{role.upper()}_PASSWORD", f"secret-of-{role}")
        made = NatsServer.start(folder, extra_conf='include "roles.conf"')
        server = loop.run_until_complete(made)
    loop.run_until_complete(provision(url_of(server, "admin")))
    yield server
    loop.run_until_complete(server.stop())
    loop.close()


def url_of(server: NatsServer, role: str) -> str:
    return server.url.replace("://", f"://{role}:secret-of-{role}@")


class Roles:
    def __init__(self, admin: Cli, server: NatsServer) -> None:
        self.admin = admin
        self._server = server

    def cli(self, role: str) -> Cli:
        return self.admin.on(url_of(self._server, role))

    async def asking(self, run: str) -> str:
        """A run that waits for approval; its marker."""
        done = await self.cli("worker").run(run)
        assert done.code == 3, done
        return done.json["pending"][0]["marker"]

    async def bridge(self) -> Child:
        cli, err = self.cli("bridge"), self.admin.folder / "bridge.err"
        line = 'exec "$0" bridge --no-auth --listen 0 2> bridge.err'
        child = await cli.execute("bash", "-c", line, RUNFOLD)
        await eventually(
            lambda: not child.running or (err.exists() and "bridge: http" in err.read_text()), 30
        )
        assert child.running, err.read_text()
        return child

    async def signals(self, run: str) -> list[tuple[str, str]]:
        found = await self.admin.records(run)
        return [(one.name, one.by) for one in found if isinstance(one, Signal)]


@pytest.fixture
async def roles(tmp_path: Path, guarded: NatsServer) -> AsyncIterator[Roles]:
    admin = Cli(tmp_path / "work", url_of(guarded, "admin"))
    yield Roles(admin, guarded)
    await admin.end()


async def test_who_may_not_open_the_store_decides_through_a_bridge(roles: Roles) -> None:
    first, second = await roles.asking("p.1"), await roles.asking("p2")
    await roles.bridge()
    ops, alice = roles.cli("ops"), roles.cli("alice")
    told = await ops("approve", first, "--json", "--request-id", "r1")
    assert told.code == 0 and told.json["result"] == "applied", told
    again = await ops("approve", first, "--json", "--request-id", "r1")
    assert again.json == told.json | {"result": "repeated"}
    assert (await alice("reject", second, "--reason", "no")).code == 0
    assert await roles.signals("p.1") == [("approve", "nats")]
    assert await roles.signals("p2") == [("reject", "alice")]
    is_refused(await ops("approve", second, "--json"), 8, "decision_conflict")
    is_refused(await ops("cancel", "nobody", "--json"), 8, "run_not_found")

    line = ["send", "p2", "hello", "--request-id", "i1", "--json"]
    sent, repeat, read, taken = await alice.forked(
        [line, line, ["input", "p2", "i1", "--json"], ["withdraw", "p2", "i1", "--json"]], at_once=1
    )
    assert [done.code for done in (sent, repeat, read, taken)] == [0, 0, 0, 0], sent
    assert (sent.json["created"], repeat.json["created"], read.json["status"]) == (
        *(True, False),
        "queued",
    )
    assert taken.json["status"] == "withdrawn"
    named = roles.cli("admin")
    named.env["RUNFOLD_NATS_USER"] = "carol"
    assert (await named("cancel", "p2")).code == 0
    assert (await roles.signals("p2"))[-1] == ("cancel", "carol")


async def test_without_a_bridge_the_owner_appends_and_others_hear_what_to_do(
    roles: Roles,
) -> None:
    first, second = await roles.asking("w1"), await roles.asking("w.2")
    assert (await roles.admin("approve", first)).code == 0
    ((_, by),) = await roles.signals("w1")
    assert by.startswith("cli:")
    kept: list[list[str]] = []
    for role, subject in (("ops", "runfold.signal."), ("alice", "runfold.signal.as.alice.")):
        done = await roles.cli(role)("approve", second, "--json")
        is_refused(done, 9, "permission_denied")
        hint: str = done.json["error"]["hint"]
        assert "runfold bridge" in hint
        kept.append(shlex.split(hint.partition("kept: ")[2]))
        assert kept[-1][:3] == ["nats", "pub", f"{subject}w~2.approve"], done
    is_refused(await roles.cli("ops")("withdraw", "w1", "i1", "--json"), 9, "permission_denied")
    assert await roles.signals("w.2") == []
    await publish(roles.cli("alice"), *kept[1][2:])
    await roles.bridge()

    async def applied() -> list[Any]:
        return await roles.signals("w.2")

    assert await eventually(applied, 30) == [("approve", "alice")]


async def publish(cli: Cli, subject: str, payload: str) -> None:
    """As `nats pub` does."""
    async with cli.client() as client:
        await client.publish(subject, payload.encode())
        await client.flush()

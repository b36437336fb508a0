"""The nats-server that deploy/nats configures: TLS, and what is said where a limit is met (R14,
R66). With those very files. Roles and the cluster: test_nats_roles.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kit.guarded import DEPLOY, WITH_TLS, Guarded, certificates, environ, guarded_server
from kit.waiting import eventually

from journal import doors
from journal.errors import StoreUnavailable, TooLarge
from journal.stores import nats_connection
from journal.stores.nats_connection import Connection
from journal.stores.provision import inspect, provision

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path


async def refusal(url: str) -> StoreUnavailable:
    with pytest.raises(StoreUnavailable) as caught:
        await Connection(url, namespace="runfold").open()
    return caught.value


# ---- TLS -----------------------------------------------------------------------------------------


async def test_with_tls_a_client_trusts_no_unknown_authority_and_says_which_it_would(
    configured: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nats_connection, "CONNECT_BUDGET_S", 1.0)
    for name, value in certificates(configured / "certs").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    server = await guarded_server(configured / "nats", edits=WITH_TLS)
    plain = Guarded(server).url("admin")
    try:
        insisting = plain.replace("nats://", "tls://")
        for url in (plain, ",".join([plain] * 3)):  # it is out of time before the third is tried
            error = await refusal(url)
            assert "certificate verify failed" in str(error) and "SSL_CERT_FILE" in error.hint
        monkeypatch.setenv("SSL_CERT_FILE", os.environ["RUNFOLD_TLS_CA"])
        for url in (plain, insisting, insisting.replace("127.0.0.1", "localhost")):
            await provision(url)
        elsewhere = await refusal(insisting.replace("127.0.0.1", "127.0.0.2"))
        assert "not valid for '127.0.0.2'" in str(elsewhere)
        assert b"PONG" not in await answer_without_tls(server.url)
        assert [record for record in caplog.records if record.name == "asyncio"] == []
    finally:
        await server.stop()


async def answer_without_tls(url: str) -> bytes:
    """What the server says to a client that sends its password as it is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    assert json.loads((await reader.readline()).removeprefix(b"INFO "))["tls_required"]
    writer.write(b'CONNECT {"user": "admin", "pass": "secret-of-admin"}\r\nPING\r\n')
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return answer


async def test_an_address_that_insists_on_tls_tells_a_server_without_it_nothing() -> None:
    """nats-py 2.16.0 goes on in the clear, with the password."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"version": "2.15.1", "max_payload": 1048576, "headers": true}\r\n')
        heard.append(await reader.read())
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        error = await refusal(f"tls://admin:secret@127.0.0.1:{port}")
        assert "the server has no TLS" in str(error) and "tls.conf" in error.hint
        also = await refusal(f"127.0.0.1:{port},tls://admin:secret@127.0.0.1:{port}")
        assert "the server has no TLS" in str(also)
        await eventually(lambda: len(heard) >= 3)
    assert set(heard) == {b""}


# ---- limits --------------------------------------------------------------------------------------


@pytest.fixture
async def small(configured: Path) -> AsyncIterator[Guarded]:
    """Settings below an include of server.conf, and in place of those of the account."""
    edits = {"max_file: 100GB": "max_file: 300KB"}
    server = await guarded_server(configured / "nats", edits=edits, below="max_payload: 32KB")
    found = Guarded(server)
    await provision(found.url("admin"))
    yield found
    await server.stop()


async def fill(guarded: Guarded) -> None:
    """Runs until the account takes no more."""
    async with guarded.store("bridge") as store:

        async def starts() -> None:
            for number in range(100):
                await doors.start(store, "nobody", "x" * 20_000, run_id=f"r{number}")

        with pytest.raises(StoreUnavailable, match="resource limits exceeded for account") as full:
            await starts()
        assert "`runfold doctor`" in full.value.hint
        assert (await doors.state(store, "r5")).status == "running"


def nearly_full(findings: object) -> bool:
    return "max_file" in str(findings)


async def test_a_full_account_refuses_clearly_is_seen_by_each_role_and_goes_on_after_a_purge(
    small: Guarded,
) -> None:
    assert not nearly_full((await inspect(small.url("worker"))).findings)
    await fill(small)
    for role in ("admin", "worker", "bridge", "auditor", "keeper"):
        safety = await inspect(small.url(role))
        assert safety.level == "degraded" and nearly_full(safety.findings), role
    async with small.plain("keeper") as keeper:  # by hand: a tombstone needs room of its own
        for number in range(3):
            request = json.dumps({"filter": f"runfold.journal.0.r{number}"}).encode()
            await keeper.client.request("$JS.API.STREAM.PURGE.RUNFOLD_JOURNAL_0", request)
    async with small.store("bridge") as store:
        assert (await doors.start(store, "nobody", None, run_id="again")).created
    assert not nearly_full((await inspect(small.url("worker"))).findings)


async def test_a_full_account_goes_on_after_a_reload_with_a_higher_limit(
    small: Guarded,
) -> None:
    await fill(small)
    roles = small.server._dir / "roles.conf"
    roles.write_text(roles.read_text().replace("max_file: 300KB", "max_file: 600KB"))
    os.kill(small.server.pid, signal.SIGHUP)
    await eventually(lambda: "Reloaded server configuration" in small.server.log())
    async with small.store("bridge") as store:
        assert (await doors.start(store, "nobody", "x" * 20_000, run_id="again")).created
    assert not nearly_full((await inspect(small.url("worker"))).findings)


async def test_what_is_larger_than_max_payload_is_refused_by_its_size(small: Guarded) -> None:
    async with small.store("bridge") as store:
        with pytest.raises(TooLarge, match="max_payload of 32768"):
            await doors.start(store, "nobody", "x" * 40_000, run_id="large")
        assert (await doors.start(store, "nobody", "x", run_id="small")).created


async def test_who_is_one_connection_too_many_is_told_so_and_takes_none_of_the_workers(
    configured: Path,
) -> None:
    edits = {"max_connections: 500": "max_connections: 1"}
    server = await guarded_server(configured / "nats", edits=edits, below="max_connections: 4")
    guarded = Guarded(server)
    held: list[Connection] = []

    async def one_more(role: str) -> bool:
        connection = Connection(guarded.url(role), namespace="runfold")
        try:
            await connection.open()
        except StoreUnavailable:  # the server still counts one that was refused or closed
            return False
        held.append(connection)
        return True

    try:
        assert await one_more("alice")
        people = await refusal(guarded.url("ops"))
        assert "connections exceeded" in str(people) and "max_connections" in people.hint
        for _ in range(3):
            await eventually(lambda: one_more("worker"))
        everybody = await refusal(guarded.url("worker"))
        assert "max_connections" in everybody.hint, str(everybody)
        await held.pop().close()
        await eventually(lambda: one_more("bridge"))
    finally:
        for connection in held:
            await connection.close()
        await server.stop()


async def test_an_account_that_may_have_too_few_streams_is_told_how_many_it_needs(
    configured: Path,
) -> None:
    edits = {"max_streams: 100": "max_streams: 4"}
    server = await guarded_server(configured / "nats", edits=edits)
    try:
        with pytest.raises(StoreUnavailable, match="maximum number of streams") as caught:
            await provision(Guarded(server).url("admin"), shards=2)
        assert "max_streams" in caught.value.hint
    finally:
        await server.stop()


async def test_a_role_that_may_not_ask_how_full_the_account_is_works_without(
    configured: Path,
) -> None:
    """With permissions of before 0.5."""
    server = await guarded_server(configured / "nats", edits={'"streams.$JS.API.INFO", ': ""})
    try:
        guarded = Guarded(server)
        await provision(guarded.url("admin"))
        found = await inspect(guarded.url("worker"), monitor_url=server.monitor_url)
        assert found.level == "safe"
    finally:
        await server.stop()


def test_the_script_overwrites_no_certificate(tmp_path: Path) -> None:
    certificates(tmp_path / "certs", "n1", "10.0.0.3", "::1")
    before = (tmp_path / "certs" / "ca-key.pem").read_bytes()
    with pytest.raises(subprocess.CalledProcessError):
        certificates(tmp_path / "certs")
    assert (tmp_path / "certs" / "ca-key.pem").read_bytes() == before
    assert (tmp_path / "certs" / "ca-key.pem").stat().st_mode & 0o077 == 0
    assert os.access(DEPLOY / "make-certs.sh", os.X_OK)

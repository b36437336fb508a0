"""`runfold bridge` and `runfold token` as commands: what they refuse, say, and how they end."""

from __future__ import annotations

import json
import re
import signal
import socket
import stat
from pathlib import Path

import httpx
import pytest
from kit.cli import RUNFOLD, Child, Cli, is_refused
from kit.waiting import eventually

pytestmark = [pytest.mark.real, pytest.mark.timeout(90)]


@pytest.fixture
def cli(on_jetstream: Cli) -> Cli:
    return on_jetstream


async def begin(cli: Cli, *words: str) -> tuple[Child, str, Path]:
    """A bridge that is ready, its address, and its stderr."""
    err = cli.folder / "bridge.err"
    line = f'exec "$0" "$@" 2> {err}'
    child = await cli.execute("bash", "-c", line, RUNFOLD, "bridge", "--listen", "0", *words)

    def address() -> str | None:
        text = err.read_text() if err.exists() else ""
        assert child.running, text
        found = re.search(r"^runfold: bridge: (http://127\.0\.0\.1:[0-9]+)$", text, re.M)
        return found[1] if found else None

    return child, await eventually(address, 30), err


async def test_a_token_made_here_opens_the_bridge_that_runs(cli: Cli) -> None:
    made = await cli("token", "alice", "--scope", "read", "--tokens", "tokens.json")
    assert made.code == 0 and re.fullmatch(r"rf_[A-Za-z0-9_-]{43}\n", made.out)
    assert made.out.strip() not in made.err
    path = cli.folder / "tokens.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    child, address, err = await begin(cli, "--tokens", "tokens.json")
    line = ("token", "bob", "--scope", "signal", "--scope", "work", "--tokens", "tokens.json")
    second = (await cli(*line, "--json")).json
    assert second["entry"]["scopes"] == ["signal", "work"]
    async with httpx.AsyncClient(base_url=address) as client:
        for token, status in ((made.out.strip(), 403), (second["token"], 201), ("rf_x", 401)):
            response = await client.post(
                "/runs",
                json={"agent": "a", "input": 1},
                headers={"authorization": f"Bearer {token}"},
            )
            assert response.status_code == status
    child.send(signal.SIGTERM)
    assert (await child.done()).code == 0
    assert "is stopping" in err.read_text() and "Traceback" not in err.read_text()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=1)


async def test_without_a_file_the_entry_is_for_the_environment(cli: Cli) -> None:
    made = await cli("token", "alice", "--scope", "admin")
    assert made.code == 0
    entry = json.loads(made.line.partition("RUNFOLD_TOKENS: ")[2])
    assert entry["name"] == "alice" and made.out.strip() not in made.err


async def test_what_is_no_bridge_is_refused_with_the_reason(cli: Cli) -> None:
    (cli.folder / "bad.json").write_text("{")
    for words in (
        (),
        ("--no-auth", "--tokens", "tokens.json"),
        ("--no-auth", "--listen", "0.0.0.0:0"),
        ("--no-auth", "--listen", "[::]:0"),
        ("--no-auth", "--listen", "nowhere"),
        ("--no-auth", "--listen", "127.0.0.1:99999"),
        ("--no-auth", "--store", "directory"),
        ("--tokens", "none.json"),
        ("--tokens", "bad.json"),
    ):
        done = await cli("bridge", *words)
        assert (done.code, done.out) == (2, ""), (words, done)
        assert done.line.isprintable()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = await cli("bridge", "--no-auth", "--listen", str(port))
        assert done.code == 2 and str(port) in done.line
    for words in (("Alice", "--scope", "read"), ("nats", "--scope", "read"), ("a", "--scope", "x")):
        is_refused(await cli("token", *words, "--json"), 2, "usage")


async def test_a_second_signal_waits_for_nothing(cli: Cli) -> None:
    child, address, _ = await begin(cli, "--no-auth")
    async with httpx.AsyncClient(base_url=address) as client:
        assert (await client.get("/healthz")).status_code in (200, 503)
    child.send(signal.SIGINT)
    child.send(signal.SIGINT)
    assert (await child.done()).code in (0, 130)


async def test_what_is_wrong_with_a_bridge_stands_once_on_stderr(cli: Cli) -> None:
    child, address, err = await begin(cli, "--no-auth")
    async with cli.client() as nats:
        await nats.jetstream().delete_stream(f"{cli.namespace.upper()}_TASKS")
    line = "runfold: health: the stream of tasks can't be read: it is not there\n"
    await eventually(lambda: line in err.read_text(), 30)
    async with httpx.AsyncClient(base_url=address) as client:
        assert (await client.get("/readyz")).status_code == 503
    child.send(signal.SIGTERM)
    assert (await child.done()).code == 0
    assert err.read_text().count(line) == 1


async def test_a_bridge_says_where_it_cannot_see_whether_writes_are_synced(cli: Cli) -> None:
    child, _, err = await begin(cli, "--no-auth")
    await eventually(lambda: "storage UNVERIFIED" in err.read_text(), 20)
    child.send(signal.SIGTERM)
    assert (await child.done()).code == 0

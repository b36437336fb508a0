"""Stands in for the `nats` command, of which there is no package: what docs/operations.md says of
it (natscli 0.4), by JetStream's own snapshots, with the server of NATS_URL.

    account backup FOLDER --force · stream backup STREAM FOLDER · stream restore FOLDER ·
    stream rm STREAM --force
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nats
from nats.aio.msg import Msg

CHUNK_BYTES = 64 * 1024
ANSWER_S = 10.0


def installed(folder: Path) -> Path:
    """A folder for PATH that has it."""
    folder.mkdir(parents=True, exist_ok=True)
    command = folder / "nats"
    words = shlex.join([sys.executable, "-P", str(Path(__file__).resolve())])
    command.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    command.chmod(0o755)
    return folder


async def nats_command(url: str, *words: str) -> None:
    """Raises AssertionError where the server refuses."""
    client: Any = await nats.connect(url)
    try:
        match words:
            case ["account", "backup", folder, "--force"]:
                for stream in (await _asked(client, "$JS.API.STREAM.NAMES"))["streams"]:
                    await _back_up(client, stream, Path(folder, stream))
            case ["stream", "backup", stream, folder]:
                await _back_up(client, stream, Path(folder))
            case ["stream", "restore", folder]:
                await _restore(client, Path(folder))
            case ["stream", "rm", stream, "--force"]:
                await _asked(client, f"$JS.API.STREAM.DELETE.{stream}")
            case _:
                raise AssertionError(f"not stood in for: {words}")
    finally:
        await client.close()


async def _back_up(client: Any, stream: str, folder: Path) -> None:
    """With its consumers, as natscli does."""
    chunks: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = client.new_inbox()
    await client.subscribe(inbox, cb=chunks.put)
    wanted = {"deliver_subject": inbox, "chunk_size": CHUNK_BYTES}
    about = await _asked(client, f"$JS.API.STREAM.SNAPSHOT.{stream}", wanted)
    data = bytearray()
    while True:
        chunk = await asyncio.wait_for(chunks.get(), ANSWER_S)
        if not chunk.data:  # the end, whose status tells how it went
            assert (chunk.header or {}).get("Status") in (None, "204"), chunk.header
            break
        data += chunk.data
        if chunk.reply:  # the server sends so many ahead, and no more
            await client.publish(chunk.reply)
    _write(folder, about, bytes(data))


def _write(folder: Path, about: dict[str, Any], data: bytes) -> None:
    folder.mkdir(parents=True)
    folder.joinpath("backup.json").write_text(json.dumps(about))
    folder.joinpath("stream.tar.s2").write_bytes(data)


async def _restore(client: Any, folder: Path) -> None:
    about = json.loads(folder.joinpath("backup.json").read_text())
    data = folder.joinpath("stream.tar.s2").read_bytes()
    wanted = {"config": about["config"], "state": about["state"]}
    subject = f"$JS.API.STREAM.RESTORE.{about['config']['name']}"
    to = (await _asked(client, subject, wanted))["deliver_subject"]
    for start in range(0, len(data), CHUNK_BYTES):
        taken = await client.request(to, data[start : start + CHUNK_BYTES], timeout=ANSWER_S)
        assert b"error" not in taken.data, taken.data
    done = await _asked(client, to)
    assert done["state"]["messages"] == about["state"]["messages"], done


async def _asked(
    client: Any, subject: str, request: dict[str, Any] | None = None
) -> dict[str, Any]:
    payload = b"" if request is None else json.dumps(request).encode()
    answer = await client.request(subject, payload, timeout=ANSWER_S)
    found: dict[str, Any] = json.loads(answer.data)
    assert "error" not in found, (subject, found)
    return found


def main(words: Sequence[str]) -> None:
    try:
        asyncio.run(nats_command(os.environ["NATS_URL"], *words))
    except AssertionError as error:
        sys.exit(f"nats: error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])

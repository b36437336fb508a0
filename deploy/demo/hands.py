"""What demo.sh has done in the `ops` container: short lines out of Runfold's JSON, and plain NATS.

hands.py approvals < `runfold inbox --json`     RUN MARKER
hands.py unknown   < `runfold inbox --json`     RUN STEP START KEY: a write that was cut off
hands.py holders   < `runfold workers --json`   HOST RUN..., of each worker
hands.py ended     < `runfold list --json`      RUN STATUS
hands.py leader STREAM                          the server that leads it
hands.py publish SUBJECT PAYLOAD...             each pair as one message, and no more
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import nats


def approvals(inbox: list[dict[str, Any]]) -> Iterator[str]:
    for one in inbox:
        if one["kind"] == "approval":
            yield f"{one['run']} {one['marker']}"


def unknown(inbox: list[dict[str, Any]]) -> Iterator[str]:
    for one in inbox:
        if one["kind"] == "reconcile":
            yield f"{one['run']} {one['step']} {one['start']} {one['key']}"


def holders(found: dict[str, Any]) -> Iterator[str]:
    for one in found["workers"]:
        yield " ".join([one["host"], *sorted(held["run"] for held in one["active"])])


def ended(found: dict[str, Any]) -> Iterator[str]:
    for one in found["runs"]:
        yield f"{one['run']} {one['status']}"


def leader(stream: str) -> Iterator[str]:
    """Nothing while there is none, or nobody answers."""
    with urllib.request.urlopen("http://nats:8222/jsz?accounts=1&streams=1", timeout=5) as answer:
        for account in json.load(answer)["account_details"]:
            for one in account.get("stream_detail") or ():
                if one["name"] == stream and one["cluster"].get("leader"):
                    yield one["cluster"]["leader"]


async def publish(*words: str) -> None:
    """What `nats pub` does: no answer is waited for, nothing of Runfold's is used."""
    user = urlsplit(os.environ["OPS_NATS"]).username
    client = await nats.connect(  # pyright: ignore[reportUnknownMemberType]
        os.environ["OPS_NATS"], inbox_prefix=f"_INBOX.runfold.{user}".encode()
    )
    for subject, payload in zip(words[::2], words[1::2], strict=True):
        await client.publish(subject, payload.encode())
    await client.flush()
    await client.close()


def main(what: str, *words: str) -> None:
    if what == "publish":
        asyncio.run(publish(*words))
        return
    readers = {"approvals": approvals, "unknown": unknown, "holders": holders, "ended": ended}
    found = leader(*words) if what == "leader" else readers[what](json.load(sys.stdin))
    for line in found:
        print(line)


if __name__ == "__main__":
    main(*sys.argv[1:])

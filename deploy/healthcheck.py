"""The image's health check: asks whatever of Runfold serves in this container.

A worker (`--health 0.0.0.0:8081`) or a bridge (8787) is asked for /healthz, an audit
(`--metrics-port 0.0.0.0:8082`) for /metrics. Exit code 1: none of them is there, or one says no.
"""

from __future__ import annotations

import http.client
import sys

DOORS = {8081: "/healthz", 8787: "/healthz", 8082: "/metrics"}
TIMEOUT_S = 4.0


def status(port: int, path: str) -> int | None:
    """None where nothing listens. Raises OSError, HTTPException."""
    asking = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        asking.request("GET", path)
    except ConnectionRefusedError:
        return None
    return asking.getresponse().status


def main() -> int:
    """Raises what `status` does: the traceback is what `docker inspect` then shows."""
    answers = {port: status(port, path) for port, path in DOORS.items()}
    there = {port: code for port, code in answers.items() if code is not None}
    print(there or f"nothing listens at {', '.join(map(str, DOORS))}")
    return 0 if there and set(there.values()) == {200} else 1


if __name__ == "__main__":
    sys.exit(main())

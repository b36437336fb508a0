"""On which servers a contract test runs: a real one and the model (kit/simulated), or one."""

from __future__ import annotations

import pytest

REAL_ONLY = pytest.mark.parametrize("server", ["nats-server"], indirect=True)
"""For what the model has not: ports, permissions, bytes on the wire, nats-py's own insides."""

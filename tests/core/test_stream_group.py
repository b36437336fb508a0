"""Whether who answers for a stream can be its leader: else runs would be missing from a list."""

from __future__ import annotations

import pytest

from journal.stores.jetstream_answers import HEARD_MAX_NS, Group, Replica

NOW, LONG_AGO = Replica(active=900_000_000), Replica(active=HEARD_MAX_NS)


@pytest.mark.parametrize(
    ("group", "led"),
    [
        (Group(leader="n1"), True),
        (Group(leader="n1", replicas=(NOW, NOW)), True),
        (Group(leader="n1", replicas=(NOW, LONG_AGO)), True),
        (Group(leader="n1", replicas=(LONG_AGO, LONG_AGO)), False),
        (Group(leader="n1", replicas=(NOW, LONG_AGO, LONG_AGO)), False),
        (Group(leader="n1", replicas=(NOW, NOW, LONG_AGO, LONG_AGO)), True),
        (Group(replicas=(NOW, NOW, NOW)), False),
    ],
)
def test_a_leader_has_heard_of_a_majority_lately(group: Group, led: bool):
    assert group.led is led

"""The workers that a worker knows of, and which of them it watches (R51)."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from kit.build import (
    Log,
    answered,
    claimed,
    model_start,
    placed,
    released,
    reply_of,
    result_of,
    start_of,
    started,
    submitted,
)

from journal.limits import HELLO_S, PEERS_MAX, PEERS_WATCHED
from journal.peers import Peer, Peers, hello, holder_after, hurried, read_hello
from runfold.testing import say


def peer(name: str, *agents: str) -> Peer:
    return Peer(name, agents or ("desk",))


def fleet(count: int) -> list[Peers]:
    found = [peer(f"host{number // 8}-{number}-abc") for number in range(count)]
    each = [Peers(one) for one in found]
    for one in each:
        for other in found:
            one.hear(other)
    return each


@pytest.mark.parametrize("count", [1, 2, 3, 5, 40])
def test_each_worker_is_watched_by_as_many_as_it_watches(count: int) -> None:
    watched = Counter(one.worker for each in fleet(count) for one in each.watched())
    assert set(watched.values()) == ({min(PEERS_WATCHED, count - 1)} if count > 1 else set())
    assert len(watched) == (count if count > 1 else 0)


def test_nobody_watches_himself_and_the_order_heard_makes_no_difference() -> None:
    others = [peer(f"w{number}") for number in range(20)]
    orders: set[tuple[Peer, ...]] = set()
    for seed in range(5):
        peers = Peers(peer("me"))
        peers.hear(peer("me"))
        for one in random.Random(seed).sample(others, len(others)):
            peers.hear(one)
        assert len(peers) == 20 and peer("me") not in peers.watched()
        orders.add(tuple(peers.watched()))
    assert len(orders) == 1


def test_few_workers_are_watched_from_their_own_machine_alone() -> None:
    """Those of one machine go together: watched by each other only, they would be found late."""
    alone = [
        one.me
        for one in fleet(40)
        if all(host_of(other) == host_of(one.me) for other in one.watched())
    ]
    assert len(alone) < 8


def host_of(one: Peer) -> str:
    return one.worker.partition("-")[0]


def test_the_ring_closes_over_who_is_gone_or_suspected() -> None:
    first, *_ = fleet(6)
    one, other = first.watched()
    first.suspects.add(one.worker)
    assert first.watched()[0] == other and one not in first.watched()
    first.suspects.clear()
    first.forget(one.worker)
    assert first.watched()[0] == other and len(first) == 4
    first.hear(one)
    assert first.watched() == [one, other]


def test_what_is_kept_of_hellos_is_bounded() -> None:
    peers = Peers(peer("me"))
    for number in range(PEERS_MAX + 50):
        peers.hear(peer(f"w{number}"))
    assert len(peers) == PEERS_MAX
    peers.hear(peer("w1", "another"))  # known: what it says anew counts
    assert len(peers) == PEERS_MAX
    assert peers.hello_every_s == PEERS_MAX / 10 > HELLO_S


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"worker":"w"}',
        b'{"worker":"","agents":[]}',
        b'{"worker":">","agents":["desk"]}',
        b'{"worker":"w","agents":["a.*.>","desk"]}',
        b'{"worker":"w","agents":["a b"]}',
        b'{"worker":"' + b"w" * 5000 + b'","agents":[]}',
        hello(Peer("w", ("desk",) * 1000)),
    ],
)
def test_what_is_no_hello_is_nobody(payload: bytes) -> None:
    assert read_hello(payload) is None


def test_a_hello_says_who_and_for_which_agents() -> None:
    one = peer("host-1-abc", "desk", "desk.v2")
    assert read_hello(hello(one)) == one


# ---- whose run it is -----------------------------------------------------------------------------


def test_the_last_record_alone_tells_the_holder_of_a_run_at_work_or_nobody() -> None:
    log = Log(started())
    bodies = [
        claimed("w1"),
        model_start(),
        submitted(),
        reply_of(1, say("hi")),
        placed(),
        released(),
        claimed("w2"),
        answered(),
    ]
    for body in bodies:
        log.add(body, by="w2" if log.fold.claims and body is bodies[-1] else "w1")
    told = [holder_after(entry.record) for entry in log.entries]
    assert told == ["", "w1", "w1", "", "w1", "w1", "", "w2", ""]


def test_a_record_without_a_claim_tells_no_holder() -> None:
    """`run()` on a store whose lock makes it the only one."""
    log = Log(started(), model_start())
    assert holder_after(log.entries[-1].record) == ""


def test_a_run_is_hurried_unless_waiting_is_better() -> None:
    assert hurried(Log(started(), claimed()).fold)
    assert hurried(Log(started(), claimed(), start_of("s", unsafe=False)).fold)
    assert not hurried(Log(started(), claimed(), start_of("s")).fold)  # a person is asked, later
    assert hurried(Log(started(), claimed(), start_of("s"), result_of("s")).fold)
    assert not hurried(Log(started(), claimed(remote=True)).fold)  # its worker is elsewhere


def test_a_run_that_kills_its_workers_does_not_go_round_the_fleet_in_seconds() -> None:
    log = Log(started(), claimed("w1"))
    hurry = [hurried(log.fold)]
    for name in ("w2", "w3", "w4"):
        log.add(claimed(name, reason="adopted"))
        hurry.append(hurried(log.fold))
    assert hurry == [True, True, False, False]
    log.add(start_of("s", unsafe=False))  # it has moved on
    log.add(claimed("w5", reason="adopted"))
    assert hurried(log.fold)

"""A server that is cut off from its cluster is left once it has said so for long enough."""

from __future__ import annotations

from journal.stores.nats_quorum import LEADERLESS_S, Quorum

READ = "$JS.API.STREAM.MSG.GET.RUNFOLD_JOURNAL_0"
CONSUMER = "$JS.API.CONSUMER.INFO.RUNFOLD_TASKS.desk"
NO_LEADER = (
    b'{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","error":{"code":503,'
    b'"err_code":10008,"description":"JetStream system temporarily unavailable"}}'
)
ANSWER = b'{"type":"io.nats.jetstream.api.v1.stream_msg_get_response","message":{"seq":7}}'


def test_a_server_whose_jetstream_has_no_leader_for_long_has_lost_its_quorum():
    quorum = Quorum()
    assert not quorum.lost(READ, NO_LEADER, 100.0)
    assert not quorum.lost(CONSUMER, NO_LEADER, 100.0 + LEADERLESS_S - 0.1)
    assert quorum.lost(READ, NO_LEADER, 100.0 + LEADERLESS_S)


def test_the_next_server_is_given_as_long():
    quorum = Quorum()
    quorum.lost(READ, NO_LEADER, 0.0)
    assert quorum.lost(READ, NO_LEADER, LEADERLESS_S)
    assert not quorum.lost(READ, NO_LEADER, LEADERLESS_S + 1)
    assert quorum.lost(READ, NO_LEADER, 2 * LEADERLESS_S + 1)


def test_an_answer_that_takes_a_leader_shows_that_there_is_one():
    quorum = Quorum()
    quorum.lost(READ, NO_LEADER, 0.0)
    assert not quorum.lost(CONSUMER, ANSWER, LEADERLESS_S - 1)
    assert not quorum.lost(READ, NO_LEADER, LEADERLESS_S)


def test_what_a_server_answers_from_what_it_has_shows_nothing():
    quorum = Quorum()
    quorum.lost(READ, NO_LEADER, 0.0)
    for subject in ("$JS.API.STREAM.INFO.RUNFOLD_SIGNALS", "$JS.API.DIRECT.GET.RUNFOLD_JOURNAL_0"):
        assert not quorum.lost(subject, ANSWER, LEADERLESS_S - 1)
    assert not quorum.lost("runfold.worker.w1", b"yes", LEADERLESS_S - 1)
    assert quorum.lost(READ, NO_LEADER, LEADERLESS_S)

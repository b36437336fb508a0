"""Core: a bound on everything, each with its reason (PROTOCOL 8)."""

from __future__ import annotations

RUN_ID_CHARS_MAX = 128
"""R1. Fits a file name with its mask and suffix, and a subject token."""

NAME_CHARS_MAX = 64
"""Agent, tool and worker names; model providers allow 64 for a tool."""

VALUE_DEPTH_MAX = 100
"""Nesting of a recorded value: far above any honest one, far below a decoder's recursion limit."""

RECORD_BYTES_MAX = 16 * 1024 * 1024
"""File and memory store: a bound on one line, so that a reader's memory is bounded (R17)."""

SIGNAL_BYTES_MAX = 64 * 1024
"""Payload of a signal (R59)."""

ITERATIONS_MAX = 200
"""Model calls of a run of the built-in loop."""

CALLS_PER_REPLY_MAX = 32
BAD_REPLIES_MAX = 3
"""Rounds in a row in which the model produced nothing usable (R36)."""

ARGUMENTS_BYTES_MAX = 256 * 1024
"""Raw argument text of one tool call: larger is answered as an error, not parsed."""

TOOL_TIMEOUT_S = 300.0
"""Every write has a deadline, recorded in its start; a permitted retry may rely on it (R22)."""

TOOL_TIMEOUT_MAX_S = 7 * 86400.0
"""A deadline must be a date; a longer task is a run of its own."""

ACK_WAIT_S = 30.0
ACK_WAIT_MIN_S = 1.0
ACK_WAIT_MAX_S = 600.0
"""A holder that is silent for this long is presumed gone."""

HOLDER_GRACE_S = 0.5
"""Two asks without a responder are at least this far apart: clients reconnect within 0.2 s."""

PEER_PROBE_S = 0.2
"""A worker asks the next ones in the ring whether they are there. With the grace above, and what a
look takes, a run of a killed worker is claimed within a second (R83)."""

PEERS_WATCHED = 2
"""By each worker: so each is watched by two, and a fleet asks ten questions a worker and second."""

PEERS_MAX = 1000
PEER_AGENTS_MAX = 256
"""A hello is no more than a claim to exist: what is kept of them is bounded."""

HELLO_S = 10.0
HELLOS_PER_S = 10.0
"""Of a worker, and of all together: each of N workers hears them."""

PEER_MEET_S = 0.5
"""Workers answer a new one's hello from memory."""

PEER_TRUST_S = 2.0
"""A worker that was itself cut off suspects nobody for so long: others come back as it did."""

SUSPECTS_MAX = 4
"""Looks at once by one worker, about as many peers that nobody answers for."""

ADOPTED_AT_ONCE = 16
"""Runs read at once by a look: some hundred a tenth of a second, beside the fleet's own work."""

HURRIED_RESTARTS = 2
"""Holders in a row lost by a run before its next one waits for the ack wait."""

FLIGHT_MAX = 10_000
"""Runs at work that a look goes through."""

APPEND_TRY_S = 3.0
APPEND_BUDGET_S = 30.0
"""NATS.md: R3 elections take 4-9 s; a try 2-3 s, the whole append 30 s."""

RESULT_PATIENCE_S = 3600.0
"""A write that happened: its result is nowhere but in its worker, and lost it is a question to a
person. So it is tried for as long as an outage of the store may take to be mended."""

LOCK_WAIT_S = 10.0
"""An append holds the file's lock for one write and fsync; longer means something is stuck."""

LIST_PAGE = 500
READ_BATCH = 256
"""Batched direct gets: 64-256; larger ones stall appends (NATS.md)."""

READ_BATCH_BYTES = 4 * 1024 * 1024
"""A batch of large records must not hold up the acknowledgements behind it on the connection."""

READ_TRY_S = 3.0
READ_BUDGET_S = 20.0
"""Without a new record for the budget a load gives up: an election takes 4-9 s (NATS.md), noticing
a silent server 15 s."""

READ_PAUSE_S = 0.05
READ_PAUSE_MAX_S = 0.5
"""Between tries of a read: doubled each time without progress."""

CONNECT_TRY_S = 2
CONNECT_BUDGET_S = 10.0
"""First connect: one try per named server, then StoreUnavailable; waiting longer is for callers."""

UNSENT_BYTES_MAX = 64 * 1024 * 1024
"""What a connection keeps for a server that reads nothing, in the 15 s until it is left."""

RECONNECT_WAIT_S = 0.2
"""Below HOLDER_GRACE_S: between two asks a connected holder is back (PROTOCOL 4)."""

PING_INTERVAL_S = 5.0
"""Two pings without an answer: a frozen server is left after 15 s."""

CLOSE_WAIT_S = 2.0
"""A frozen server must not keep a process from ending."""

ASK_TRY_S = 1.0
"""A worker answers from memory; longer is silence (PROTOCOL 4)."""

REPEATS_KEPT_S = 8 * 86400.0
"""Repeats of a signal or input are recognised for at least seven days (R62)."""

REASON_CHARS_MAX = 4000
"""Of a reason, what the model and people are told; the record holds all of it."""

SUMMARY_BYTES_MAX = 256 * 1024
"""A commit must fit a message beside its state."""

INPUT_BYTES_MAX = 64 * 1024
INPUTS_QUEUED_MAX = 256
"""An agent that places none must not make its journal grow without end (R62)."""

RESTART_LIMIT = 5
RESTART_LIMIT_MAX = 1000
HELD_BACK_DELIVERIES = 300
"""After so many, each up to a second apart, a run on its last chance shares a worker after all."""
GRACE_S = 25.0
CONCURRENCY = 64
CONCURRENCY_MAX = 4096
RETRY_ATTEMPTS = 3
RETRY_BACKOFF_S = 1.0
RETRY_BACKOFF_MAX_S = 60.0
CALLS_PER_ITERATION_MAX = 256
CHILD_DEPTH_MAX = 3
COMMIT_STEPS = 32
"""The built-in loop commits after this many steps, so that resuming stays flat (R41)."""

PROBE_RETRIES_MAX = 2
"""A write that fails and did not happen, again and again, is a person's to look at."""

PROBE_TIMEOUT_S = 30.0
"""A probe that takes longer can't tell."""

PROGRESS_BYTES_MAX = 64 * 1024
"""The partial output of a call that a person or the model is shown (R27)."""

SWEEP_S = 30.0
SWEEP_RUNS = 100
"""Each sweep re-dispatches at most this many runs."""

RETENTION_S = 30 * 86400.0
"""A finished run's journal is kept for so long (R15)."""

RETENTION_MAX_S = 100 * 365 * 86400.0
"""What can be taken off a date."""

RETAIN_S = 300.0
RETAIN_RUNS = 100
"""A pass over finished runs looks at so many of those whose time is over; one that found as many
goes on after the time of a sweep."""

REVISIT_S = 5.0
"""A run that this worker may not take is offered again after this."""

STALE_READS = 5
STALE_PAUSE_S = 0.1
"""A leader that was deposed answers old tails for a moment (NATS.md)."""

WAIT_MAX_S = 60.0
"""An `input` call waits at most this long (PROTOCOL 8)."""

"""Remove each guard once and show which test notices (R79).

    python tests/mutants.py             all; exit code 1 if one survives
    python tests/mutants.py NAME …      these
    python tests/mutants.py --table     the table of docs/guards.md

A mutant is one piece of text in one file, replaced in a copy of the tree. Its test passes on the
untouched copy and must fail on the mutant.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("journal", "worker", "bridge", "runfold", "tests", "examples", "pyproject.toml")
TREES = 2
"""So many copies are worked on at once."""
PYTEST = [
    *(sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no"),
    *("-p", "no:cacheprovider", "-p", "pytest_asyncio.plugin", "-p", "pytest_timeout"),
    *("-o", "addopts=--import-mode=importlib"),
]
BARE = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Without the plugins that no test here needs, pytest starts in less than half the time."""


class Mutant(NamedTuple):
    name: str
    guard: str
    file: str
    old: str
    new: str
    test: str


DAMAGED_FILES = "tests/cases/test_damaged_files.py::"
STORE_CONFORMANCE = "tests/contract/test_store_conformance.py::"
ATTEMPTS = "tests/core/test_attempts.py::"
CHILDREN = "tests/core/test_children.py::"
CLAIMS = "tests/core/test_claims.py::"
FINDINGS = "tests/core/test_findings.py::"
FOLD = "tests/core/test_fold.py::"
GUARDS = "tests/core/test_guards.py::"
HANDLE = "tests/core/test_handle.py::"
IDS = "tests/core/test_ids.py::"
INPUTS = "tests/core/test_inputs.py::"
LOOP = "tests/core/test_loop.py::"
LOOP_INPUTS = "tests/core/test_loop_inputs.py::"
ORDER = "tests/core/test_order.py::"
BRIDGE_FINDINGS = "tests/real/test_bridge_tasks_findings.py::"
BRIDGE_REFUSALS = "tests/real/test_bridge_refusals.py::"
BRIDGE_SIGNALS = "tests/real/test_bridge_signals.py::"
BRIDGE_TASKS = "tests/real/test_bridge_tasks.py::"
POLICIES = "tests/core/test_policies.py::"
REPLIES = "tests/core/test_replies.py::"
SIGNALS = "tests/core/test_signals.py::"
START = "tests/core/test_start.py::"
STEP_TABLE = "tests/core/test_step_table.py::"
SUMMARY = "tests/core/test_summary.py::"
TURNS = "tests/core/test_turns.py::"
TURNS_ATTEMPTS = "tests/core/test_turns_attempts.py::"
VALUES = "tests/core/test_values.py::"
WAITS = "tests/core/test_waits.py::"
FSYNC_ORDER = "tests/real/test_fsync_order.py::"
TWO_AT_ONCE = "tests/real/test_two_at_once.py::"

START_THEN_CALL = """\
            start = await _start(journal, call, decision, earlier_over, ways)
            return None if start is None else await _call(journal, start, perform)
"""
CALL_THEN_START = """\
            replay = "unsafe" if decision.unsafe else "safe"
            early = await perform(StepStarted(step=call.step, kind=call.kind, tool=call.tool,
                input=call.input, digest=call.digest, replay=replay, key=decision.key))
            start = await _start(journal, call, decision, earlier_over, ways)
            return None if start is None else await _complete(journal, early)
"""

MUTANTS = [
    Mutant(
        "no-expected-sequence",
        "every append names the sequence it follows",
        "journal/stores/jetstream.py",
        "headers = {EXPECTED: str(expected), RECORD_TYPE: entry.type}",
        "headers = {RECORD_TYPE: entry.type}",
        STORE_CONFORMANCE + "test_of_twenty_writers_at_one_tail_exactly_one_wins",
    ),
    Mutant(
        "call-before-start",
        "a write is called only after its start is acknowledged",
        "journal/stepping.py",
        START_THEN_CALL,
        CALL_THEN_START,
        LOOP + "test_a_crash_at_any_append_changes_no_answer_and_repeats_no_write",
    ),
    Mutant(
        "no-torn-tail-cut",
        "a torn tail is cut off before the next line",
        "journal/stores/file.py",
        "os.ftruncate(fd, expected)\n                    log.warning(",
        "log.warning(",
        DAMAGED_FILES + "test_a_torn_tail_is_dropped_and_said_and_the_run_goes_on",
    ),
    Mutant(
        "no-input-comparison",
        "a start with another input is refused",
        "journal/steps.py",
        "if fold.started.digest != body.digest or fold.started.agent != body.agent:",
        "if fold.started.agent != body.agent:",
        START + "test_another_start_under_the_id_is_refused",
    ),
    Mutant(
        "no-marker-digest",
        "a marker is bound to arguments, question and tool revision",
        "journal/values.py",
        "return digest(run, step, call, text, tool_revision)[:16]",
        "return digest(run, step)[:16]",
        REPLIES + "test_an_approval_does_not_cover_a_call_that_changed_since",
    ),
    Mutant(
        "no-id-validation",
        "an id is validated at every door",
        "journal/ids.py",
        "if not valid_run_id(value):\n        raise",
        "if False:\n        raise",
        IDS + "test_any_other_run_id_is_refused_with_a_bounded_printable_message",
    ),
    Mutant(
        "no-read-back",
        "an unknown append is settled by looking for its own id",
        "journal/log.py",
        "if entry.record.id == record_id:",
        "if False:",
        HANDLE + "test_an_append_of_unknown_outcome_is_settled_by_reading_back",
    ),
    Mutant(
        "no-fence",
        "a newer claim stops the holder",
        "journal/log.py",
        "if self.claim and newest > self.claim:",
        "if False:",
        HANDLE + "test_a_newer_claim_stops_the_holder_at_its_next_append",
    ),
    Mutant(
        "newer-goes-on",
        "a record of a newer version stops its holder",
        "journal/log.py",
        "if self.fold.newer is not None:\n            self._stopped = True",
        "if False:\n            self._stopped = True",
        HANDLE + "test_a_journal_of_a_newer_version_runs_nothing",
    ),
    Mutant(
        "no-replay",
        "a completed step is never called again",
        "journal/steps.py",
        "if step.completed is not None:\n        return Reuse",
        "if False:\n        return Reuse",
        STEP_TABLE + "test_a_step_after_a_crash",
    ),
    Mutant(
        "recorded-unsafe-ignored",
        "what was recorded unsafe stays so, whatever the declaration is now",
        "journal/steps.py",
        "if not step.unsafe and not call.unsafe:",
        "if not call.unsafe:",
        STEP_TABLE + "test_a_step_after_a_crash",
    ),
    Mutant(
        "declared-unsafe-ignored",
        "what is declared unsafe now is not repeated because it was recorded safe",
        "journal/steps.py",
        "if not step.unsafe and not call.unsafe:",
        "if not step.unsafe:",
        STEP_TABLE + "test_a_step_after_a_crash",
    ),
    Mutant(
        "done-runs",
        "`done` records the person's result and never runs the write",
        "journal/steps.py",
        'return Settle(answer.payload["result"], answer.n, "reconcile")',
        "return Run(answer.n, last.key, unsafe=True)",
        STEP_TABLE + "test_a_step_after_a_crash",
    ),
    Mutant(
        "any-permit",
        "a permit covers only the start it names",
        "journal/steps.py",
        "answer = step.reconciled.get(last.n)",
        "answer = next(iter(step.reconciled.values()), None)",
        STEP_TABLE + "test_a_permit_covers_only_the_start_it_names",
    ),
    Mutant(
        "retry-beside",
        "a permitted retry waits until the earlier call is over",
        "journal/steps.py",
        "return Run(answer.n, last.key, unsafe=True) if earlier_over else Wait(last)",
        "return Run(answer.n, last.key, unsafe=True)",
        STEP_TABLE + "test_a_step_after_a_crash",
    ),
    Mutant(
        "attempted-ignored",
        "a call this process made is not made again on what the journal lacks",
        "journal/steps.py",
        "if answer is None or last.n in attempted:",
        "if answer is None:",
        STEP_TABLE + "test_an_unknown_write_runs_again_only_by_permit_when_it_is_over_and_"
        "not_in_this_process",
    ),
    Mutant(
        "mismatch-ignored",
        "another call at a recorded position is refused",
        "journal/steps.py",
        "if step.starts and (step.last.kind, step.last.digest) != (call.kind, call.digest):",
        "if False:",
        STEP_TABLE + "test_another_call_at_a_recorded_position_is_refused_naming_both",
    ),
    Mutant(
        "approval-of-then",
        "the gate is asked again: an old approval covers no changed tool or policy",
        "worker/replies.py",
        "if isinstance(today, VerdictAsk) and today != recorded:",
        "if False:",
        REPLIES + "test_an_approval_does_not_cover_a_call_that_changed_since",
    ),
    Mutant(
        "last-decision-wins",
        "the first decision on a marker wins",
        "journal/signal_rules.py",
        "winner = fold.decisions.get(signal.marker)",
        "winner = None",
        SIGNALS + "test_the_first_decision_wins_and_the_other_is_told_who_won",
    ),
    Mutant(
        "reconcile-running",
        "a write under a live claim is running, not unknown",
        "journal/signal_rules.py",
        "if fold.claim is not None and fold.claim.n == last.claim:",
        "if False:",
        SIGNALS + "test_what_is_not_unknown_cannot_be_reconciled",
    ),
    Mutant(
        "reconcile-held",
        "a write under a held lock is running, not unknown",
        "journal/signal_rules.py",
        'if held:\n        return "the run',
        'if False:\n        return "the run',
        SIGNALS + "test_a_write_that_runs_under_a_lock_cannot_be_reconciled",
    ),
    Mutant(
        "one-nobody",
        "a holder is gone only if nobody answered twice",
        "journal/claims.py",
        'case [*_, "no"] | [*_, "nobody", "nobody"]:\n            return Take("adopted")',
        'case [*_, "no"] | [*_, "nobody"]:\n            return Take("adopted")',
        CLAIMS + "test_a_live_claim_is_taken_over_only_if_its_holder_says_no_or_is_twice_not_there",
    ),
    Mutant(
        "park-blind",
        "a park competes with the signal that ends its wait",
        "journal/ends.py",
        "asks=asks,\n            )\n            return None if would_go_on(fold, park) else park",
        "asks=asks,\n            )\n            return park",
        LOOP + "test_an_approval_that_comes_as_the_run_stops_is_acted_on",
    ),
    Mutant(
        "late-call",
        "after a slow acknowledgement the tail is read before the call",
        "journal/stepping.py",
        "if took_s > journal.ack_wait_s / 3:",
        "if False:",
        HANDLE + "test_a_late_call_reads_the_tail_first",
    ),
    Mutant(
        "unknown-beside",
        "nothing is started beside an unknown write",
        "journal/stepping.py",
        "if step.name != call.step and step.last.n not in journal.writing:",
        "if False:",
        HANDLE + "test_nothing_is_started_beside_an_unknown_write",
    ),
    Mutant(
        "not-recordable-unknown",
        "a write that returned what can't be recorded did happen",
        "journal/stepping.py",
        'if start.replay == "unsafe":\n        problem',
        "if False:\n        problem",
        HANDLE + "test_a_write_whose_result_cannot_be_recorded_did_happen_and_never_runs_again",
    ),
    Mutant(
        "no-chain",
        "each record names the hash of the one before",
        "journal/order.py",
        "if record.prev != fold.head:",
        "if False:",
        FOLD + "test_an_edited_record_is_found_by_the_hash_in_its_successor",
    ),
    Mutant(
        "no-claim-check",
        "a reader refuses what a fenced claim wrote",
        "journal/order.py",
        "if isinstance(record, HOLDER_RECORDS) and record.claim != live:",
        "if False:",
        FOLD + "test_a_holders_record_under_a_fenced_claim_is_damage",
    ),
    Mutant(
        "duplicate-keys",
        "a payload with a key that stands twice is refused",
        "journal/values.py",
        "if len(found) != len(pairs):",
        "if False:",
        VALUES + "test_text_that_is_not_strict_json_is_refused_saying_why",
    ),
    Mutant(
        "no-tail-check",
        "the file store compares the end of the file under its lock",
        "journal/stores/file.py",
        'if b"\\n" in behind.lstrip(b"\\n"):',
        "if False:",
        STORE_CONFORMANCE + "test_expecting_nothing_creates_a_run_once",
    ),
    Mutant(
        "no-fsync",
        "a line is synced before the append answers",
        "journal/stores/file.py",
        "        os.fsync(fd)\n    except OSError:",
        "    except OSError:",
        FSYNC_ORDER + "test_an_intent_is_on_disk_before_its_tool_is_called",
    ),
    Mutant(
        "no-run-lock",
        "one process holds a run in a directory",
        "journal/stores/run_lock.py",
        "return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "return None",
        TWO_AT_ONCE + "test_of_two_runs_at_once_one_goes_on_and_one_effect_happens",
    ),
    # ---- claims --------------------------------------------------------------------------------
    Mutant(
        "stale-read",
        "a task is not settled on a read that ends before its cause",
        "journal/claims.py",
        "if fold.n < task.cause:",
        "if False:",
        CLAIMS + "test_what_a_worker_does_about_a_task_of_a_run_that_nobody_holds",
    ),
    Mutant(
        "newer-claimed",
        "a run that a newer version wrote to is not claimed",
        "journal/claims.py",
        "if fold.newer is not None:\n        return NotMine",
        "if False:\n        return NotMine",
        CLAIMS + "test_a_run_of_a_newer_version_is_somebody_elses",
    ),
    Mutant(
        "any-revision",
        "a run is claimed only by its revision or a compatible one",
        "journal/claims.py",
        "if fold.revision and fold.revision not in accepts:",
        "if False:",
        CLAIMS + "test_what_a_worker_does_about_a_task_of_a_run_that_nobody_holds",
    ),
    Mutant(
        "revision-rebound",
        "the first worker's claim binds the run to its revision, no later one's",
        "journal/fold.py",
        "self.revision = self.revision or record.revision",
        "self.revision = record.revision or self.revision",
        GUARDS + "test_a_later_claim_binds_the_run_to_no_other_revision",
    ),
    Mutant(
        "parked-claimed",
        "a worker claims no run that waits",
        "journal/claims.py",
        "if not fold.runnable(now) and not other_code_may(fold, accepts[0]):",
        "if False:",
        CLAIMS + "test_what_a_worker_does_about_a_task_of_a_run_that_nobody_holds",
    ),
    Mutant(
        "parked-opened",
        "`run` claims no run that waits",
        "journal/claims.py",
        "if not fold.runnable(now):\n            return Rest()",
        "if False:\n            return Rest()",
        CLAIMS + "test_a_run_that_nobody_claims_is_taken_if_there_is_something_to_do",
    ),
    Mutant(
        "no-restart-limit",
        "so many lost holders in a row end the run",
        "journal/claims.py",
        "lost = fold.restarts + 1 >= restart_limit",
        "lost = False",
        CLAIMS + "test_so_many_claims_in_a_row_without_progress_and_the_next_one_ends_the_run",
    ),
    Mutant(
        "no-restart-limit-free",
        "that limit counts for a run that is free by now, too",
        "journal/claims.py",
        "lost=fold.restarts >= restart_limit",
        "lost=False",
        CLAIMS + "test_a_release_is_no_loss_and_takes_none_back",
    ),
    Mutant(
        "losses-uncounted",
        "a claim over a live claim is a restart",
        "journal/fold.py",
        "self.restarts += 1",
        "pass",
        ATTEMPTS + "test_each_claim_over_a_live_claim_is_a_restart",
    ),
    Mutant(
        "lost-goes-on",
        "at the limit nothing of the run is called again",
        "journal/stops.py",
        "elif lost:",
        "elif False:",
        TURNS_ATTEMPTS + "test_restarts_over_the_limit_are_a_failed_attempt_and_call_nothing",
    ),
    Mutant(
        "yes-dropped",
        "the owner's own message is left to the owner",
        "journal/claims.py",
        'case [*_, "yes"]:\n            return Leave() if same else Drop()',
        'case [*_, "yes"]:\n            return Drop()',
        CLAIMS + "test_what_a_worker_does_about_a_task_of_a_run_that_somebody_holds",
    ),
    Mutant(
        "silent-any-message",
        "a silent holder is replaced only by a redelivery of its own message",
        "journal/claims.py",
        "came_again = same and task.delivery > live.delivery",
        "came_again = task.delivery > live.delivery",
        CLAIMS + "test_what_a_worker_does_about_a_task_of_a_run_that_somebody_holds",
    ),
    Mutant(
        "silent-not-redelivered",
        "a silent holder is replaced only by a later delivery than it holds",
        "journal/claims.py",
        "came_again = same and task.delivery > live.delivery",
        "came_again = same",
        CLAIMS + "test_what_a_worker_does_about_a_task_of_a_run_that_somebody_holds",
    ),
    Mutant(
        "one-nobody-worker",
        "a worker, too, needs `nobody` twice",
        "journal/claims.py",
        'case [*_, "no"] | [*_, "nobody", "nobody"]:\n            return Take("adopted", lost)',
        'case [*_, "no"] | [*_, "nobody"]:\n            return Take("adopted", lost)',
        CLAIMS + "test_what_a_worker_does_about_a_task_of_a_run_that_somebody_holds",
    ),
    Mutant(
        "old-answers",
        "answers about one claim say nothing about the next",
        "journal/ownership.py",
        "heard = known if live_claim(fold) == about else []",
        "heard = known",
        GUARDS + "test_a_claim_that_loses_to_another_is_decided_anew_without_the_old_answers",
    ),
    Mutant(
        "any-agent",
        "a task of another agent than the run's claims nothing",
        "journal/claims.py",
        "if fold.started is None or fold.started.agent != agent:",
        "if fold.started is None:",
        GUARDS + "test_a_task_of_another_agent_than_the_runs_claims_nothing",
    ),
    Mutant(
        "old-answers-task",
        "a worker, too, drops what it heard about a claim that has ended",
        "journal/taking.py",
        "answers if live_claim(fold) == about else []",
        "answers",
        GUARDS + "test_answers_about_one_claim_claim_no_run_that_another_worker_took_meanwhile",
    ),
    Mutant(
        "draining-claims",
        "a worker that stops claims nothing",
        "journal/taking.py",
        "if self.closed:\n            lease.nak()",
        "if False:\n            lease.nak()",
        GUARDS + "test_a_worker_that_stops_claims_nothing_and_gives_the_task_back",
    ),
    # ---- waits, and the records that begin them ------------------------------------------------
    Mutant(
        "needs-nobody",
        "where a person must settle a write, nobody is called on to go on",
        "journal/waits.py",
        "if needs_person(fold):\n        return False",
        "if False:\n        return False",
        WAITS + "test_a_run_that_waits_is_nobodys_and_says_so",
    ),
    Mutant(
        "cancel-unseen",
        "a cancelled run is due for a holder who ends it",
        "journal/waits.py",
        "if fold.cancel is not None:\n        return True",
        "if False:\n        return True",
        ATTEMPTS + "test_a_cancelled_run_is_due_for_a_holder_who_ends_it",
    ),
    Mutant(
        "old-resume",
        "a resume from before the wait does not end it",
        "journal/waits.py",
        "(wait.resume and fold.resumed > wait.n)",
        "(wait.resume and fold.resumed > 0)",
        WAITS + "test_a_resume_from_before_the_wait_does_not_end_it",
    ),
    Mutant(
        "old-resume-pause",
        "a resume from before a pause does not end it",
        "journal/waits.py",
        'case "pause":\n                return fold.resumed > wait.n',
        'case "pause":\n                return fold.resumed > 0',
        WAITS + "test_a_resume_from_before_the_wait_does_not_end_it",
    ),
    Mutant(
        "early",
        "a wait for a time is over for nobody whose clock is before it",
        "journal/waits.py",
        "bool(now) and parse_instant(until) <= parse_instant(now)",
        "bool(now)",
        WAITS + "test_a_wait_is_ended_by_what_it_is_for_and_by_nothing_else",
    ),
    Mutant(
        "withdrawn-wakes",
        "only a queued input ends a wait for one",
        "journal/waits.py",
        "bool(fold.queued())",
        "bool(fold.inputs)",
        WAITS + "test_an_input_that_is_not_queued_ends_no_wait",
    ),
    Mutant(
        "asked-again",
        "once a holder asked a person, no policy settles the write behind their back",
        "journal/step_state.py",
        'self.last.policy == "reconcile" or self.asked > self.last.n',
        'self.last.policy == "reconcile"',
        STEP_TABLE
        + "test_once_a_holder_asked_a_person_no_policy_settles_the_write_behind_their_back",
    ),
    Mutant(
        "would-go-on",
        "whether a wait would be over at once is asked at the tail it begins at",
        "journal/waits.py",
        "return runnable(after)",
        "return False",
        LOOP + "test_an_approval_that_comes_as_the_run_stops_is_acted_on",
    ),
    Mutant(
        "retry-park-blind",
        "a park for a retry competes with what ends it",
        "journal/ends.py",
        "reason=later.message,\n            )\n"
        "            return None if would_go_on(fold, park) else park",
        "reason=later.message,\n            )\n            return park",
        POLICIES + "test_a_late_result_that_comes_as_the_run_begins_to_wait_is_acted_on",
    ),
    Mutant(
        "commit-blind",
        "a commit that waits competes with what ends the wait",
        "journal/ends.py",
        "(due(wait.until, self._now()) or would_go_on(fold, commit))",
        "due(wait.until, self._now())",
        LOOP_INPUTS + "test_an_input_that_comes_as_the_turn_is_about_to_wait_begins_another_turn",
    ),
    Mutant(
        "complete-cancelled",
        "a cancelled run does not complete",
        "journal/ends.py",
        "if fold.finished or fold.cancel is not None or fold.unknown():\n"
        "                return None\n            if self._unless_queued",
        "if fold.finished or fold.unknown():\n"
        "                return None\n            if self._unless_queued",
        POLICIES + "test_nothing_starts_once_a_cancellation_is_in_the_journal",
    ),
    Mutant(
        "cancel-beside-unknown",
        "a cancelled run does not end before its write is settled",
        "journal/ends.py",
        "if not await self.settled():\n            return await self._park_unknown()\n\n"
        "        def",
        "if False:\n            return await self._park_unknown()\n\n        def",
        POLICIES + "test_an_interrupted_write_does_not_hold_up_a_cancelled_run",
    ),
    Mutant(
        "completed-over-input",
        "a run does not complete while an input is queued",
        "journal/ends.py",
        "if self._unless_queued and fold.queued():",
        "if False:",
        LOOP_INPUTS + "test_an_input_that_comes_as_the_run_ends_makes_it_go_on",
    ),
    # ---- the order every reader holds records to -----------------------------------------------
    Mutant(
        "order-unknown-commit",
        "a reader refuses a commit over an unknown write",
        "journal/order.py",
        'if fold.unknown():\n        raise Damage(f"record {record.n} ends an iteration',
        'if False:\n        raise Damage(f"record {record.n} ends an iteration',
        ORDER + "test_a_record_out_of_its_order_is_damage",
    ),
    Mutant(
        "order-unknown-retry",
        "a reader refuses the end of an attempt over an unknown write",
        "journal/order.py",
        'if record.why == "retry" and not record.steps and fold.unknown():',
        "if False:",
        ORDER + "test_a_record_out_of_its_order_is_damage",
    ),
    Mutant(
        "order-park",
        "a park names the iteration and attempt it ends",
        "journal/order.py",
        "if (record.iteration, record.attempt) != (fold.iteration, fold.attempt):",
        "if False:",
        ORDER + "test_a_record_out_of_its_order_is_damage",
    ),
    Mutant(
        "order-commit",
        "a commit names the iteration it ends",
        "journal/order.py",
        "    if record.iteration != fold.iteration:\n",
        "    if False:\n",
        ORDER + "test_a_record_out_of_its_order_is_damage",
    ),
    Mutant(
        "order-placed",
        "a placing names the iteration it is made in",
        "journal/order.py",
        "isinstance(record, InputPlaced) and record.iteration != fold.iteration",
        "False",
        GUARDS + "test_an_input_is_placed_in_the_iteration_that_it_names",
    ),
    Mutant(
        "order-input-once",
        "a reader refuses a second input of one id",
        "journal/order.py",
        "if known is not None:\n            raise Damage",
        "if False:\n            raise Damage",
        ORDER + "test_a_record_out_of_its_order_is_damage",
    ),
    Mutant(
        "order-input-queued",
        "only a queued input is placed or withdrawn",
        "journal/order.py",
        'elif known is None or known.status != "queued":',
        "elif known is None:",
        ORDER + "test_a_record_out_of_its_order_is_damage",
    ),
    Mutant(
        "order-permit",
        "a start of a write names the permit it spends",
        "journal/order.py",
        "if permit is None or not retry or permit.n != record.permit:",
        "if permit is None or not retry:",
        FOLD + "test_an_unsafe_step_starts_again_only_by_the_retry_of_its_last_start",
    ),
    Mutant(
        "order-late-permit",
        "no start spends a permit that a late result came before",
        "journal/order.py",
        "retry = retry and step.last.n not in step.late  # the truth beats the permit",
        "pass",
        ORDER + "test_a_record_out_of_its_order_is_damage",
    ),
    Mutant(
        "order-end",
        "nothing but a resume or a purge follows an end",
        "journal/order.py",
        'isinstance(record, Signal) and record.name == "resume" and fold.can_reopen',
        "fold.can_reopen",
        ORDER + "test_only_a_resume_and_a_purge_follow_an_end",
    ),
    Mutant(
        "reopened",
        "only a retriable failure is resumed",
        "journal/fold.py",
        'end.action == "fail" and end.retriable',
        'end.action == "fail"',
        ORDER + "test_a_resume_follows_only_a_failure_that_is_retriable",
    ),
    Mutant(
        "purged-reopened",
        "a purged run is not resumed",
        "journal/fold.py",
        "self.end if self.purged is None else None",
        "self.end",
        ORDER + "test_a_purged_run_takes_nothing_not_even_a_resume",
    ),
    # ---- signals -------------------------------------------------------------------------------
    Mutant(
        "resume-anything",
        "only a run that is paused, backs off or failed retriably is resumed",
        "journal/signal_rules.py",
        "if not (fold.can_reopen or resumable):",
        "if False:",
        SIGNALS + "test_a_run_that_no_operator_stopped_is_not_resumed",
    ),
    Mutant(
        "resume-twice",
        "one resume ends one wait",
        "journal/signal_rules.py",
        "and fold.resumed < wait.n\n",
        "and True\n",
        SIGNALS + "test_a_run_that_no_operator_stopped_is_not_resumed",
    ),
    Mutant(
        "ended-signalled",
        "a run that ended takes no signal but a resume",
        "journal/signal_rules.py",
        "if fold.finished and not (fold.can_reopen and isinstance(signal, Resume)):",
        "if fold.finished and not fold.can_reopen:",
        SIGNALS + "test_a_run_that_failed_retriably_takes_nothing_but_a_resume_and_says_so",
    ),
    Mutant(
        "late-any-start",
        "a late result is taken only for the step's last start",
        "journal/signal_rules.py",
        "if step is None or step.last.n != signal.start:",
        "if step is None:",
        SIGNALS + "test_a_late_result_that_comes_too_late_or_too_early_is_refused",
    ),
    Mutant(
        "late-over-done",
        "a person's `done` stands against a late result",
        "journal/signal_rules.py",
        '(answer and answer.payload["outcome"] == "done")',
        "False",
        SIGNALS + "test_a_late_result_that_comes_too_late_or_too_early_is_refused",
    ),
    Mutant(
        "late-held",
        "a late result is refused while its claim is live: the holder records it",
        "journal/signal_rules.py",
        "if fold.claim is not None and fold.claim.n == step.last.claim:\n        raise StaleSignal",
        "if False:\n        raise StaleSignal",
        SIGNALS + "test_a_late_result_that_comes_too_late_or_too_early_is_refused",
    ),
    Mutant(
        "reconcile-after-late",
        "after a late result a person has nothing to say",
        "journal/signal_rules.py",
        "if start in step.late:",
        "if False:",
        SIGNALS + "test_after_a_late_result_a_person_has_nothing_to_say",
    ),
    Mutant(
        "late-loses",
        "a late result beats a retry that nothing has started on",
        "journal/steps.py",
        "if late is not None:",
        "if False:",
        STEP_TABLE + "test_a_step_after_a_crash",
    ),
    Mutant(
        "stranger-child",
        "only the end of its own child is told a run",
        "journal/signal_rules.py",
        "if signal.run not in fold.children:",
        "if False:",
        SIGNALS + "test_a_run_that_is_no_child_is_refused",
    ),
    # ---- inputs --------------------------------------------------------------------------------
    Mutant(
        "input-twice",
        "a repeated request id queues nothing anew",
        "journal/inputs.py",
        "if known is not None:\n        return Known",
        "if False:\n        return Known",
        INPUTS + "test_what_becomes_of_a_submission_a_withdrawal_and_a_placing",
    ),
    Mutant(
        "withdraw-placed",
        "a placed input is not withdrawn",
        "journal/inputs.py",
        'if known.status != "queued":',
        "if False:",
        INPUTS + "test_what_becomes_of_a_submission_a_withdrawal_and_a_placing",
    ),
    Mutant(
        "withdrawn-placed",
        "a withdrawn input is never placed",
        "journal/fold.py",
        'if known.status == "queued" and (not modes or known.mode in modes)',
        "if not modes or known.mode in modes",
        INPUTS + "test_what_becomes_of_a_submission_a_withdrawal_and_a_placing",
    ),
    Mutant(
        "input-after-cancel",
        "a cancelled run takes no input",
        "journal/inputs.py",
        "if fold.cancel is not None:",
        "if False:",
        INPUTS + "test_what_becomes_of_a_submission_a_withdrawal_and_a_placing",
    ),
    Mutant(
        "placed-behind",
        "an input is not placed before a model call that was made without it",
        "worker/loop.py",
        "if not modes or step in fold.steps or fold.cancel is not None:",
        "if not modes or fold.cancel is not None:",
        GUARDS + "test_an_input_is_not_placed_before_a_model_call_that_was_made_without_it",
    ),
    Mutant(
        "placed-behind-turn",
        "an input is not placed before a call of the turn that was made without it",
        "journal/positions.py",
        "if fold.cancel is not None or later(fold, iteration, position + 1):",
        "if fold.cancel is not None:",
        LOOP_INPUTS + "test_a_handler_places_the_mode_it_asks_for_in_order_and_sees_it_again",
    ),
    Mutant(
        "not-superseded",
        "an input that comes before the model call is placed first",
        "worker/loop.py",
        "ways = Ways(unless=to_place) if step not in journal.fold.steps else NO_WAYS",
        "ways = NO_WAYS",
        LOOP_INPUTS + "test_a_steer_that_comes_as_the_model_is_about_to_be_asked_is_placed_first",
    ),
    Mutant(
        "not-superseded-tail",
        "an input that comes as the model call is recorded is placed first",
        "journal/stepping.py",
        " or ways.superseded(fold):\n            return None",
        ":\n            return None",
        LOOP_INPUTS + "test_a_steer_that_comes_as_the_model_is_about_to_be_asked_is_placed_first",
    ),
    # ---- steps, attempts, policies -------------------------------------------------------------
    Mutant(
        "attempt-forgets",
        "a new attempt honours the unsafe steps of the ones before",
        "journal/attempts.py",
        "if step.unsafe:",
        "if False:",
        ATTEMPTS + "test_a_new_attempt_afresh_honours_unsafe_steps_by_tool_input_and_"
        "order_and_drops_the_rest",
    ),
    Mutant(
        "attempt-honours-all",
        "a new attempt honours no safe step",
        "journal/attempts.py",
        "if step.unsafe:",
        "if True:",
        ATTEMPTS + "test_a_new_attempt_afresh_honours_unsafe_steps_by_tool_input_and_"
        "order_and_drops_the_rest",
    ),
    Mutant(
        "permit-unspent",
        "the permit of an earlier attempt's write is spent by one start",
        "journal/attempts.py",
        "earlier[index] = fold.steps[record.step]",
        "pass",
        STEP_TABLE + "test_a_permit_for_a_write_of_an_earlier_attempt_is_spent_by_the_start_"
        "that_names_it",
    ),
    Mutant(
        "honoured-ignored",
        "a write of an earlier attempt is not made again",
        "journal/steps.py",
        "if step is None and honoured is not None:",
        "if False:",
        STEP_TABLE
        + "test_a_write_of_an_earlier_attempt_gives_its_result_wherever_the_call_stands_now",
    ),
    Mutant(
        "honoured-once",
        "the second call alike is another call",
        "worker/context.py",
        "self._seen[what] += made.unsafe and honoured is not None",
        "pass",
        TURNS_ATTEMPTS + "test_an_exception_raises_the_attempt_which_asks_afresh_and_honours_"
        "what_was_written",
    ),
    Mutant(
        "approval-unspent",
        "an approval is consumed by the start it permits",
        "journal/steps.py",
        "        return Ask(last, policy)",
        "        return Run(last.permit, last.key, unsafe=True) if last.permit else "
        "Ask(last, policy)",
        STEP_TABLE + "test_a_permit_covers_only_the_start_it_names",
    ),
    Mutant(
        "unapproved",
        "a call that needs approval waits for it",
        "worker/replies.py",
        "if answer is None:\n                return AwaitDecision(marker)",
        "if answer is None:\n                pass",
        REPLIES + "test_a_call_that_needs_approval_waits_for_its_marker",
    ),
    Mutant(
        "rejected-runs",
        "a rejected call is refused",
        "worker/replies.py",
        'if answer.name == "reject":',
        "if False:",
        REPLIES + "test_a_rejected_call_is_answered_with_the_reason_and_never_started",
    ),
    Mutant(
        "decided-again",
        "only the first decision on a marker counts",
        "journal/heard.py",
        "fold.decisions.setdefault(known.about, known)",
        "fold.decisions[known.about] = known",
        FOLD + "test_only_the_first_decision_on_a_marker_counts",
    ),
    Mutant(
        "unknown-outcome",
        "an outcome of a reconcile that this version does not know is never a permit",
        "journal/heard.py",
        'if said not in (("done", True), ("retry", False)):',
        "if False:",
        FINDINGS + "test_a_reconcile_with_an_unknown_outcome_is_newer_and_never_a_permit",
    ),
    Mutant(
        "settled-behind",
        "a policy settles a write only while it is unknown",
        "journal/unknown.py",
        "step is not None and step.unknown and step.last.n == start.n",
        "step is not None",
        POLICIES + "test_a_late_result_that_comes_as_the_policy_settles_is_the_result",
    ),
    Mutant(
        "policy-of-then",
        "today's policy must be the recorded one, or a person is asked",
        "journal/unknown.py",
        'if ask.policy == "reconcile" or call.policy != ask.policy:',
        'if ask.policy == "reconcile":',
        POLICIES + "test_a_policy_that_changed_since_the_start_leaves_the_write_to_a_person",
    ),
    Mutant(
        "policy-of-now",
        "the policy of the recorded start must allow it, or a person is asked",
        "journal/steps.py",
        'policy = last.policy if by_policy else "reconcile"',
        "policy = call.policy",
        STEP_TABLE + "test_an_unknown_write_is_left_to_the_policy_that_its_start_recorded",
    ),
    Mutant(
        "probe-guesses",
        "a probe that fails says nothing",
        "journal/unknown.py",
        "return CannotTell(type(error).__name__)",
        "return DidNotHappen()",
        POLICIES + "test_a_probe_that_can_not_tell_leaves_the_write_to_a_person",
    ),
    Mutant(
        "cannot-tell",
        "a probe that can't tell leaves it to a person",
        "journal/unknown.py",
        "case CannotTell():\n            return False",
        "case CannotTell():\n            return True",
        POLICIES + "test_a_probe_that_can_not_tell_leaves_the_write_to_a_person",
    ),
    Mutant(
        "adopted-any",
        "that the next holder adopted the run stands for one `nobody`; no later claim does",
        "journal/unknown.py",
        "after = next((claim for n, claim in journal.fold.claims.items() if n > holder.n), None)",
        "after = journal.fold.claims[next(reversed(journal.fold.claims))]",
        FINDINGS + "test_nobody_said_once_is_enough_after_a_claim_that_adopted_the_run",
    ),
    Mutant(
        "woken-is-adopted",
        "a claim that adopted nothing stands for no answer",
        "journal/unknown.py",
        'adopted = after is not None and after.reason == "adopted"',
        "adopted = after is not None",
        FINDINGS + "test_nobody_counts_as_over_when_said_twice_the_ack_wait_apart",
    ),
    Mutant(
        "deadline-beats-yes",
        "a holder that says yes is waited for, whatever the deadline",
        "journal/unknown.py",
        'return answer in ("no", "nobody") or (answer == "silent" and late)',
        'return late or answer in ("no", "nobody")',
        FINDINGS + "test_a_worker_that_says_it_still_runs_is_waited_for_whatever_the_deadline",
    ),
    Mutant(
        "start-cancelled",
        "nothing is started on a cancelled run",
        "journal/stepping.py",
        'if journal.fold.cancel is not None or journal.stop == "cancel":',
        "if False:",
        TURNS + "test_nobody_goes_on_past_an_engine_error",
    ),
    Mutant(
        "start-cancelled-tail",
        "a cancellation that comes as a start is recorded comes first",
        "journal/stepping.py",
        "if fold.finished or fold.cancel is not None or ways",
        "if fold.finished or ways",
        TURNS + "test_nobody_goes_on_past_an_engine_error",
    ),
    Mutant(
        "start-drained",
        "a run that is handed over starts nothing new",
        "journal/stepping.py",
        'if journal.stop == "drain":',
        "if False:",
        GUARDS + "test_a_run_that_is_handed_over_starts_nothing_new",
    ),
    Mutant(
        "start-unclaimed",
        "a run that was not claimed starts nothing",
        "journal/stepping.py",
        "if journal.store.shared and not journal.claim:\n        raise",
        "if False:\n        raise",
        GUARDS + "test_a_run_that_was_not_claimed_starts_nothing",
    ),
    Mutant(
        "past-an-error",
        "nobody makes a step past an engine error",
        "journal/handle.py",
        "self._ended_by = error  # raised",
        "_ = error  # raised",
        FINDINGS + "test_after_an_unknown_write_the_handle_makes_no_further_step",
    ),
    Mutant(
        "turn-past-an-error",
        "what a turn returns after an engine error counts for nothing",
        "worker/turns.py",
        "if ctx.ended is not None:\n        raise ctx.ended\n    if limit",
        "if False:\n        raise ctx.ended\n    if limit",
        TURNS + "test_nobody_goes_on_past_an_engine_error",
    ),
    Mutant(
        "leftover",
        "a turn that ends before a recorded call is a mismatch",
        "worker/turns.py",
        "if (left := ctx.leftover()) is not None:",
        "if (left := ctx.leftover()) is not None and False:",
        TURNS + "test_changed_code_is_stopped_at_the_position_and_nothing_happens",
    ),
    Mutant(
        "late-unsaid",
        "a fenced holder keeps what its write returned, to tell it",
        "journal/stepping.py",
        "journal.late = (start, body.result)  # its",
        "_ = (start, body.result)  # its",
        GUARDS + "test_a_fenced_holder_tells_what_its_own_write_returned",
    ),
    Mutant(
        "interrupted-again",
        "a call that was interrupted is not simply made again",
        "worker/replies.py",
        "if call_digest(request.name, arguments) in interrupted:",
        "if False:",
        POLICIES + "test_the_same_call_again_by_the_model_is_held_for_a_person",
    ),
    Mutant(
        "interrupted-again-turn",
        "an interrupted call is not simply made again by a turn handler",
        "journal/positions.py",
        "if call.digest in fold.interrupted:",
        "if False:",
        POLICIES + "test_the_same_call_again_by_a_handler_is_held_for_a_person",
    ),
    Mutant(
        "approval-of-another-attempt",
        "an approval of a turn's call is for its attempt",
        "journal/positions.py",
        "marker(run, call.step, fold.attempt, digest)",
        "marker(run, call.step, 1, digest)",
        TURNS_ATTEMPTS + "test_a_marker_names_its_attempt",
    ),
    Mutant(
        "parallel-writes",
        "writes are made one by one unless the agent says otherwise",
        "worker/loop.py",
        "not tool.spec.write or agent.parallel_writes",
        "True",
        GUARDS + "test_a_write_of_a_reply_begins_only_when_the_one_before_it_is_over",
    ),
    Mutant(
        "child-forgotten",
        "spawning a child again forgets nothing of its end",
        "journal/fold.py",
        'self.children.setdefault(str(record.input["run"]), None)',
        'self.children[str(record.input["run"])] = None',
        ATTEMPTS + "test_spawning_a_child_again_forgets_nothing_of_its_end",
    ),
    Mutant(
        "child-ends-twice",
        "the first end of a child counts",
        "journal/heard.py",
        'if fold.children.get(payload["run"]) is None:',
        "if True:",
        ATTEMPTS + "test_a_child_is_known_from_its_start_on_and_its_first_end_counts",
    ),
    Mutant(
        "any-depth",
        "children have children only so deep",
        "worker/children.py",
        "if parent.depth >= CHILD_DEPTH_MAX:",
        "if False:",
        CHILDREN + "test_depth_is_bounded_and_the_deepest_run_fails_with_a_recorded_reason",
    ),
    Mutant(
        "child-id",
        "the same spawn is the same child",
        "worker/children.py",
        'child = child_id(journal.run_id, ids.name(name, "a child"))',
        "child = ids.new_run_id()",
        TURNS + "test_the_errand_makes_each_call_once",
    ),
    # ---- the summary in a commit ---------------------------------------------------------------
    Mutant(
        "summary-claim",
        "a summary holds the live claim",
        "journal/summary.py",
        "claim_n=after.claim.n if after.claim else 0",
        "claim_n=0",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-decisions",
        "a summary holds the decisions",
        "journal/summary.py",
        'if known.name in ("approve", "reject"):',
        "if False:",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-requests",
        "a summary holds the requests that may be repeated",
        "journal/summary.py",
        "requests=tuple(after.requests.values())",
        "requests=()",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-inputs",
        "a summary holds the inputs",
        "journal/summary.py",
        "fold.inputs = {known.request_id: known for known in summary.inputs}",
        "",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-content",
        "a summary holds the content of queued inputs",
        "journal/summary.py",
        'known if known.status == "queued" else msgspec.structs.replace(known, content=None)',
        "msgspec.structs.replace(known, content=None)",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-children",
        "a summary holds the children",
        "journal/summary.py",
        "children=dict(after.children)",
        "children={}",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-interrupted",
        "a summary holds what was interrupted",
        "journal/summary.py",
        "interrupted=tuple(sorted(after.interrupted))",
        "interrupted=()",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-cancel",
        "a summary holds the cancellation",
        "journal/summary.py",
        "cancel=after.cancel",
        "cancel=None",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-revision",
        "a summary holds the revision",
        "journal/summary.py",
        "revision=after.revision",
        'revision=""',
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "summary-wait",
        "a restored run waits for what its commit waits for",
        "journal/summary.py",
        "fold.wait = wait_of(record)",
        "",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "restart-anywhere",
        "a fold restarts only at a commit with a summary",
        "journal/summary.py",
        'record.action == "continue" and record.summary is not UNSET',
        'record.action == "continue"',
        SUMMARY + "test_only_a_commit_with_a_summary_that_goes_on_is_a_point_to_restart_at",
    ),
    Mutant(
        "restored-unchained",
        "what follows must chain to the commit",
        "journal/summary.py",
        "fold.mark(commit)",
        "fold.n = commit.record.n",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    Mutant(
        "queued-forgotten",
        "a queued input is never forgotten",
        "journal/heard.py",
        'if known.status == "queued" or known.at >= oldest',
        "if known.at >= oldest",
        SUMMARY + "test_a_queued_input_is_never_forgotten",
    ),
    Mutant(
        "decision-forgotten",
        "a decision that waits for its gate is never forgotten",
        "journal/heard.py",
        'if known.at >= oldest or known.name in ("approve", "reject")',
        "if known.at >= oldest",
        SUMMARY + "test_a_fold_restored_at_any_commit_stays_the_full_fold_record_by_record",
    ),
    # ---- workers over HTTP ---------------------------------------------------------------------
    Mutant(
        "remote-silence",
        "only its deadline says that a remote worker's call is over",
        "journal/unknown.py",
        '    if holder.remote:\n        return late and answer != "yes"\n',
        "",
        FINDINGS + "test_only_the_deadline_says_that_a_call_made_over_http_is_over",
    ),
    Mutant(
        "remote-yes",
        "a remote worker that is heard of is waited for past its deadline",
        "journal/unknown.py",
        'return late and answer != "yes"',
        "return late",
        FINDINGS + "test_only_the_deadline_says_that_a_call_made_over_http_is_over",
    ),
    Mutant(
        "remote-repeat",
        "a repeated request to start a call finds its start",
        "bridge/remote_calls.py",
        "            if repeated:\n                return said_before",
        "            if False:\n                return said_before",
        BRIDGE_TASKS + "test_a_repeated_request_gets_its_first_answer_and_writes_nothing",
    ),
    Mutant(
        "remote-claim-unmarked",
        "a claim says that its worker is remote",
        "bridge/remote.py",
        "restart_limit=restart_limit, remote=True",
        "restart_limit=restart_limit",
        BRIDGE_TASKS + "test_the_claim_of_a_worker_over_http_says_so_and_whose_it_is",
    ),
    Mutant(
        "remote-second-claim",
        "a task whose claim is over is given no second one",
        "bridge/remote.py",
        "        elif mine or claim is not None:",
        "        elif False:",
        BRIDGE_TASKS + "test_a_task_whose_claim_is_over_is_never_given_a_second_one",
    ),
    Mutant(
        "remote-foreign-task",
        "a task is its owner's alone",
        "bridge/task_id.py",
        "if name.owner != owner or ",
        "if ",
        BRIDGE_TASKS + "test_a_task_is_its_owners_alone_and_names_no_other_subject",
    ),
    Mutant(
        "remote-foreign-ack",
        "a task's name makes the bridge acknowledge nothing but a task of its agent",
        "bridge/task_id.py",
        "if (delivery.stream, delivery.consumer) != consumer or ",
        "if ",
        BRIDGE_TASKS + "test_a_task_is_its_owners_alone_and_names_no_other_subject",
    ),
    Mutant(
        "remote-park-under-call",
        "a turn over HTTP does not stop while another write of it is open",
        "bridge/remote_starts.py",
        "    if open_:  # a park",
        "    if False:  # a park",
        BRIDGE_TASKS + "test_a_turn_neither_stops_nor_ends_while_a_write_of_it_is_open",
    ),
    Mutant(
        "remote-end-over-open",
        "a turn over HTTP does not end while a write of it is open",
        "bridge/remote_turns.py",
        '    task.check_none_open("the turn can\'t end")\n',
        "",
        BRIDGE_TASKS + "test_a_turn_neither_stops_nor_ends_while_a_write_of_it_is_open",
    ),
    Mutant(
        "remote-old-start",
        "a result over HTTP is recorded for the start it names only",
        "bridge/remote_calls.py",
        "        or (step.last.n, step.last.claim) != (record.start, journal.claim)\n",
        "",
        BRIDGE_TASKS + "test_a_result_is_recorded_for_the_start_it_names_only",
    ),
    Mutant(
        "remote-late-copy",
        "a copy of a request from an earlier turn does nothing in a later one",
        "bridge/remote_calls.py",
        "    if fold.repeats(task.name.end_id(number)):\n",
        "    if False:\n",
        BRIDGE_FINDINGS + "test_a_late_copy_of_a_placing_places_nothing_in_a_later_turn",
    ),
    Mutant(
        "remote-late-end",
        "a copy of a refused end ends nothing once the turn has gone on",
        "bridge/remote_turns.py",
        "                if task.journal.fold.repeats(task.name.record_id(asked.id)):\n",
        "                if False:\n",
        BRIDGE_FINDINGS + "test_a_late_copy_of_a_refused_end_ends_nothing",
    ),
    Mutant(
        "remote-old-probe",
        "a probe's answer counts for the start it was asked about only",
        "bridge/remote_starts.py",
        "if probe is None or probe.n != asking.n:",
        "if probe is None:",
        BRIDGE_FINDINGS + "test_a_probes_answer_counts_for_the_start_it_was_asked_about_only",
    ),
    Mutant(
        "remote-withdrawn",
        "a repeat lets no call be made that would outlast its deadline",
        "bridge/remote_starts.py",
        "(fold.cancel is not None or _too_late(start, record))",
        "fold.cancel is not None",
        BRIDGE_FINDINGS
        + "test_a_repeat_gets_no_leave_to_call_once_the_recorded_deadline_would_not_hold",
    ),
    Mutant(
        "remote-forgotten",
        "a commit's summary keeps that the holder is remote",
        "journal/summary.py",
        '"delivery", "remote", "at")',
        '"delivery", "at")',
        "tests/core/test_bridge_tasks_findings.py::"
        "test_a_restored_claim_still_says_that_its_worker_is_remote",
    ),
    Mutant(
        "tool-named-as-engine",
        "no tool has the name of the engine's own steps",
        "journal/ids.py",
        'if value.startswith("runfold."):',
        "if False:",
        BRIDGE_FINDINGS + "test_a_worker_without_the_scope_signal_cancels_no_run_of_others",
    ),
    Mutant(
        "child-without-run",
        "a start of a child that names no run is damage",
        "journal/order.py",
        "if record.tool == SPAWN and not _names_run(record.input):",
        "if False:",
        "tests/core/test_order.py::test_a_start_of_a_child_that_names_no_run_is_damage",
    ),
    Mutant(
        "injected-reply",
        "what is written as a subject holds no blank and no line's end",
        "journal/stores/delivery.py",
        '_TOKEN = r"[!-\\-/-~]+"',
        '_TOKEN = r"[^.]+"',
        BRIDGE_FINDINGS + "test_a_forged_task_name_publishes_nothing_of_its_own_to_nats",
    ),
    Mutant(
        "remote-release-over-open",
        "a run is not given back while a write of it is open",
        "bridge/remote_turns.py",
        '        task.check_none_open("it is not given up")\n',
        "",
        BRIDGE_TASKS
        + "test_a_task_that_is_given_back_goes_to_the_next_worker_and_counts_as_no_crash",
    ),
    # ---- the bridge ----------------------------------------------------------------------------
    Mutant(
        "refusal-unkept",
        "a refused signal is acknowledged only once its refusal stands in REJECTED",
        "bridge/settling.py",
        "        await self._store.rejected.put(refused, signal.key)\n",
        "",
        BRIDGE_SIGNALS
        + "test_whatever_is_malformed_is_refused_with_its_reason_and_changes_nothing",
    ),
    Mutant(
        "refusal-judged-anew",
        "a refusal stands, whatever the journal says by the next delivery",
        "bridge/settling.py",
        "            if await self._store.rejected.holds(refused, signal.key):",
        "            if False:",
        BRIDGE_SIGNALS + "test_a_refusal_whose_ack_was_lost_is_one_entry_and_stands",
    ),
    Mutant(
        "signals-out-of-order",
        "a run's signals are applied in their order over all bridges",
        "bridge/settling.py",
        '            if first == signal.sequence:\n                return "now"',
        '            if True:\n                return "now"',
        BRIDGE_SIGNALS + "test_a_bridge_waits_with_a_signal_while_another_has_the_runs_earlier_one",
    ),
    Mutant(
        "signal-without-number",
        "a signal that is delivered again has the same request id",
        "bridge/settling.py",
        "            kept_id=signal.key,\n",
        "",
        BRIDGE_SIGNALS + "test_a_bridge_that_was_frozen_meanwhile_applies_nothing_again",
    ),
    Mutant(
        "refusal-at-first-look",
        "a refusal that rests on the journal takes two looks at it",
        "bridge/settling.py",
        "if address is not None and isinstance(error, AT_ODDS) and not sure:",
        "if False:",
        BRIDGE_REFUSALS + "test_a_kept_signal_is_not_refused_for_good_over_the_old_tail_of_a_"
        "deposed_leader",
    ),
    Mutant(
        "look-before-the-signal",
        "both of them after the signal came",
        "bridge/settling.py",
        "sure = came <= doubt.at <=",
        "sure = doubt.at <=",
        BRIDGE_REFUSALS + "test_a_first_look_is_not_for_a_signal_that_came_after_it",
    ),
    Mutant(
        "second-look-older",
        "the second one ending no earlier than the first",
        "journal/log.py",
        "        if log.tail < known:",
        "        if False:",
        BRIDGE_REFUSALS + "test_what_is_judged_again_is_judged_on_no_older_journal_than_before",
    ),
    Mutant(
        "kept-id-claimed",
        "nobody gives the request id that a kept signal will have",
        "journal/signals.py",
        "    if found is not None and found.startswith(KEPT_ID):",
        "    if False:",
        SIGNALS + "test_a_kept_signals_own_id_is_looked_up_and_given_to_nothing_new",
    ),
    Mutant(
        "kept-id-unstamped",
        "a stream that was made anew repeats no request id",
        "journal/stores/signals_queue.py",
        'return f"sig:{self.sequence}:{self.stamp}"',
        'return f"sig:{self.sequence}"',
        BRIDGE_REFUSALS + "test_a_published_input_is_not_taken_for_one_of_a_stream_before_this_one",
    ),
    Mutant(
        "answer-anywhere",
        "the bridge publishes no answer where who asks might not publish",
        "bridge/nats_api.py",
        "        if not asked.reply.startswith(INBOXES):",
        "        if False:",
        BRIDGE_REFUSALS
        + "test_a_request_that_wants_its_answer_elsewhere_than_in_an_inbox_is_not_done",
    ),
    Mutant(
        "statistics-tell",
        "statistics that everybody reads name no run",
        "journal/stores/nats_service.py",
        "        self.drop(code)\n",
        "        self.drop(text)\n",
        BRIDGE_REFUSALS
        + "test_what_went_wrong_for_one_is_not_told_to_all_by_the_services_statistics",
    ),
    Mutant(
        "decisions-behind-waits",
        "who waits for an input by NATS keeps no decision out",
        "bridge/nats_api.py",
        'self._looking if asked.endpoint.endswith("get") else self._answering',
        "self._answering",
        BRIDGE_REFUSALS + "test_who_waits_for_inputs_by_nats_keeps_no_decision_out",
    ),
    Mutant(
        "one-run-red",
        "one run's trouble does not turn health red",
        "bridge/settling.py",
        "            return len(self._sick) >= SICK_RUNS",
        "            return True",
        BRIDGE_REFUSALS + "test_health_is_red_for_trouble_that_is_the_stores",
    ),
    Mutant(
        "scope-unchecked",
        "a token does what its scopes say and nothing else",
        "bridge/app.py",
        "        if not identity.may(operation.scope):",
        "        if False:",
        "tests/real/test_bridge_http.py::"
        "test_each_operation_takes_the_tokens_of_its_scope_and_no_others",
    ),
    Mutant(
        "foreign-page",
        "without auth no page of another origin reaches the bridge",
        "bridge/app.py",
        "        if auth.open:\n            _check_local(request)\n",
        "",
        "tests/real/test_bridge_http.py::"
        "test_without_auth_only_this_machine_and_its_own_page_are_served",
    ),
    # ---- a run under a claim, and its task message ---------------------------------------------
    Mutant(
        "lapsed-settles",
        "a delivery that may have been superseded is not touched",
        "journal/lease.py",
        "return not self._over and time.monotonic() - self._held_at < self._ack_wait_s / 2",
        "return not self._over",
        GUARDS + "test_a_delivery_is_touched_for_half_the_ack_wait_and_again_once_it_is_renewed",
    ),
    Mutant(
        "left-settles",
        "a message that was left or settled is never touched again",
        "journal/lease.py",
        "return not self._over and time",
        "return time",
        GUARDS + "test_a_message_that_was_left_or_settled_is_never_touched_again",
    ),
    Mutant(
        "fenced-settles",
        "whoever finds the run lost settles nothing",
        "worker/held.py",
        'is told (R29)."""\n        self._leave()',
        'is told (R29)."""\n        await self._settle()',
        GUARDS + "test_a_fenced_holder_settles_nothing",
    ),
    Mutant(
        "fenced-heartbeat",
        "the heartbeat stops at a newer claim",
        "worker/held.py",
        "if isinstance(record, Claim) and record.n > journal.claim:",
        "if False:",
        GUARDS + "test_a_heartbeat_that_reads_a_newer_claim_ends_the_turn_and_touches_nothing",
    ),
    Mutant(
        "unread-heartbeat",
        "a message is held only after the tail was read",
        "worker/held.py",
        "case None:  # not known: the message is not held meanwhile\n                    continue",
        "case None:\n                    self._lease.renew(asked_at)\n"
        "                    self._lease.hold()",
        GUARDS + "test_a_message_is_held_only_once_the_tail_was_read",
    ),
    Mutant(
        "release-beside-call",
        "a run is released only when no call of it runs",
        "worker/held.py",
        "if journal.calls_on() or self.writes or not turn.done():",
        "if False:",
        GUARDS + "test_at_the_end_of_the_grace_a_run_is_released_only_if_no_call_of_it_runs",
    ),
    Mutant(
        "acked-unpaid",
        "a message is acknowledged only after what the end owes is paid",
        "worker/held.py",
        "await pay(self.journal)\n        self.journal.give_up()\n        await self._lease.ack()",
        "self.journal.give_up()\n        await self._lease.ack()\n        await pay(self.journal)",
        GUARDS + "test_a_message_is_acknowledged_only_after_what_the_wait_owes",
    ),
    Mutant(
        "old-handle-writes",
        "what the old handle is still asked to append is not appended",
        "journal/handle.py",
        "other.left = self.left | self.writing\n        self.give_up()",
        "other.left = self.left | self.writing",
        GUARDS + "test_a_handle_that_was_succeeded_writes_nothing",
    ),
    Mutant(
        "mismatch-retried",
        "a run paused over changed code is tried by no code that was tried before",
        "journal/waits.py",
        "and revision not in fold.mismatched\n",
        "and True\n",
        GUARDS + "test_a_run_paused_over_changed_code_is_tried_by_other_code_only",
    ),
]


def copy_tree(where: Path) -> None:
    """Compiled, checked by hash: a mutant of the same length in the same second is noticed."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, where / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, where / part)
    command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash"]
    parts = ("journal", "worker", "bridge", "runfold", "tests/kit")
    subprocess.run([*command, *parts], cwd=where, check=True)


def failing(tree: Path, tests: Sequence[str]) -> str:
    """The first test that fails in the tree, empty if none; SystemExit where none ran at all."""
    done = subprocess.run(
        [*PYTEST, *tests],
        cwd=tree,
        env=os.environ | BARE | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(tests)} did not run:\n{done.stdout}{done.stderr}")
    found = re.search(r"^FAILED (\S+?)(\[| |$)", done.stdout, re.M)
    return found[1] if found else ("?" if done.returncode else "")


def killer(mutant: Mutant, tree: Path) -> str:
    """The test that fails on the mutant, empty if it survives."""
    path = tree / mutant.file
    text = path.read_text()
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return failing(tree, [mutant.test])
    finally:
        path.write_text(text)


def check_texts(mutants: Sequence[Mutant], tree: Path) -> None:
    counts = {m: (tree / m.file).read_text().count(m.old) for m in mutants}
    wrong = [f"{m.name}: {n} × in {m.file}" for m, n in counts.items() if n != 1]
    if wrong:
        raise SystemExit("a text must stand once:\n" + "\n".join(wrong))


def survivors_of(mutants: Sequence[Mutant], trees: Sequence[Path]) -> list[str]:
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def tried(mutant: Mutant) -> str:
        tree = free.get()
        try:
            return killer(mutant, tree)
        finally:
            free.put(tree)

    survivors: list[str] = []
    with ThreadPoolExecutor(len(trees)) as pool:
        for mutant, test in zip(mutants, pool.map(tried, mutants), strict=True):
            print(f"{'killed  ' if test else 'SURVIVED'} {mutant.name:<28} {test}", flush=True)
            if not test:
                survivors.append(mutant.name)
    return survivors


def table() -> str:
    rows = [f"| {m.guard} | `{m.file}` | `{m.test}` |" for m in MUTANTS]
    return "\n".join(["| guard | where | the test that fails without it |", "|---|---|---|", *rows])


def main() -> int:
    if "--table" in sys.argv:
        print(table())
        return 0
    wanted = [m for m in MUTANTS if not sys.argv[1:] or m.name in sys.argv[1:]]
    with tempfile.TemporaryDirectory(prefix="runfold-mutants-") as folder:
        trees = [Path(folder) / str(n) for n in range(TREES)]
        for tree in trees:
            tree.mkdir()
            copy_tree(tree)
        check_texts(wanted, trees[0])
        if test := failing(trees[0], list(dict.fromkeys(m.test for m in wanted))):
            raise SystemExit(f"{test} fails without any mutation")
        survivors = survivors_of(wanted, trees)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} guards: their removal is noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

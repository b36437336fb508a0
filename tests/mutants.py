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
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("journal", "worker", "bridge", "runfold", "tests", "examples", "pyproject.toml")


class Mutant(NamedTuple):
    name: str
    guard: str
    file: str
    old: str
    new: str
    test: str


START_THEN_CALL = """\
                    start = await _start(journal, call, decision, earlier_over)
                    if start is not None:
                        return await _call(journal, start, perform)
"""
CALL_THEN_START = """\
                    replay = "unsafe" if decision.unsafe else "safe"
                    early = await perform(StepStarted(step=call.step, kind=call.kind,
                        tool=call.tool, input=call.input, digest=call.digest, replay=replay,
                        key=decision.key))
                    start = await _start(journal, call, decision, earlier_over)
                    if start is not None:
                        return await _complete(journal, early)
"""

MUTANTS = [
    Mutant(
        "no-expected-sequence",
        "every append names the sequence it follows",
        "journal/stores/jetstream.py",
        "headers = {EXPECTED: str(expected), RECORD_TYPE: entry.type}",
        "headers = {RECORD_TYPE: entry.type}",
        "tests/contract/test_store_conformance.py::"
        "test_of_twenty_writers_at_one_tail_exactly_one_wins",
    ),
    Mutant(
        "call-before-start",
        "a write is called only after its start is acknowledged",
        "journal/stepping.py",
        START_THEN_CALL,
        CALL_THEN_START,
        "tests/core/test_loop.py::"
        "test_a_crash_at_any_append_changes_no_answer_and_repeats_no_write",
    ),
    Mutant(
        "no-torn-tail-cut",
        "a torn tail is cut off before the next line",
        "journal/stores/file.py",
        "os.ftruncate(fd, expected)\n                    log.warning(",
        "log.warning(",
        "tests/cases/test_damaged_files.py::"
        "test_a_torn_tail_is_dropped_and_said_and_the_run_goes_on",
    ),
    Mutant(
        "no-input-comparison",
        "a start with another input is refused",
        "journal/steps.py",
        "if fold.started.digest != body.digest or fold.started.agent != body.agent:",
        "if fold.started.agent != body.agent:",
        "tests/core/test_start.py::test_another_start_under_the_id_is_refused",
    ),
    Mutant(
        "no-marker-digest",
        "a marker is bound to arguments, question and tool revision",
        "journal/values.py",
        "return digest(run, step, call, text, tool_revision)[:16]",
        "return digest(run, step)[:16]",
        "tests/core/test_replies.py::test_an_approval_does_not_cover_a_call_that_changed_since",
    ),
    Mutant(
        "no-id-validation",
        "an id is validated at every door",
        "journal/ids.py",
        "if not valid_run_id(value):\n        raise",
        "if False:\n        raise",
        "tests/core/test_ids.py::test_any_other_run_id_is_refused_with_a_bounded_printable_message",
    ),
    Mutant(
        "no-read-back",
        "an unknown append is settled by looking for its own id",
        "journal/log.py",
        "if entry.record.id == record_id:",
        "if False:",
        "tests/core/test_handle.py::test_an_append_of_unknown_outcome_is_settled_by_reading_back",
    ),
    Mutant(
        "no-fence",
        "a newer claim stops the holder",
        "journal/log.py",
        "if self.claim and newest > self.claim:",
        "if False:",
        "tests/core/test_handle.py::test_a_newer_claim_stops_the_holder_at_its_next_append",
    ),
    Mutant(
        "newer-goes-on",
        "a record of a newer version stops its holder",
        "journal/log.py",
        "if self.fold.newer is not None:\n            self._stopped = True",
        "if False:\n            self._stopped = True",
        "tests/core/test_handle.py::test_a_journal_of_a_newer_version_runs_nothing",
    ),
    Mutant(
        "no-replay",
        "a completed step is never called again",
        "journal/steps.py",
        "if step.completed is not None:\n        return Reuse",
        "if False:\n        return Reuse",
        "tests/core/test_step_table.py::test_a_step_after_a_crash",
    ),
    Mutant(
        "recorded-unsafe-ignored",
        "what was recorded unsafe stays so, whatever the declaration is now",
        "journal/steps.py",
        "if not step.unsafe and not call.unsafe:",
        "if not call.unsafe:",
        "tests/core/test_step_table.py::test_a_step_after_a_crash",
    ),
    Mutant(
        "declared-unsafe-ignored",
        "what is declared unsafe now is not repeated because it was recorded safe",
        "journal/steps.py",
        "if not step.unsafe and not call.unsafe:",
        "if not step.unsafe:",
        "tests/core/test_step_table.py::test_a_step_after_a_crash",
    ),
    Mutant(
        "done-runs",
        "`done` records the person's result and never runs the write",
        "journal/steps.py",
        'return Settle(answer.payload["result"], answer.n)',
        "return Run(answer.n, last.key, unsafe=True)",
        "tests/core/test_step_table.py::test_a_step_after_a_crash",
    ),
    Mutant(
        "any-permit",
        "a permit covers only the start it names",
        "journal/steps.py",
        "answer = step.reconciled.get(last.n)",
        "answer = next(iter(step.reconciled.values()), None)",
        "tests/core/test_step_table.py::test_a_permit_covers_only_the_start_it_names",
    ),
    Mutant(
        "retry-beside",
        "a permitted retry waits until the earlier call is over",
        "journal/steps.py",
        "return Run(answer.n, last.key, unsafe=True) if earlier_over else Wait(last)",
        "return Run(answer.n, last.key, unsafe=True)",
        "tests/core/test_step_table.py::test_a_step_after_a_crash",
    ),
    Mutant(
        "attempted-ignored",
        "a call this process made is not made again on what the journal lacks",
        "journal/steps.py",
        "if answer is None or last.n in attempted:",
        "if answer is None:",
        "tests/core/test_step_table.py::"
        "test_an_unknown_write_runs_again_only_by_permit_when_it_is_over_and_not_in_this_process",
    ),
    Mutant(
        "mismatch-ignored",
        "another call at a recorded position is refused",
        "journal/steps.py",
        "if step.starts and (step.last.kind, step.last.digest) != (call.kind, call.digest):",
        "if False:",
        "tests/core/test_step_table.py::"
        "test_another_call_at_a_recorded_position_is_refused_naming_both",
    ),
    Mutant(
        "approval-of-then",
        "the gate is asked again: an old approval covers no changed tool or policy",
        "worker/replies.py",
        "if isinstance(today, VerdictAsk) and today != recorded:",
        "if False:",
        "tests/core/test_replies.py::test_an_approval_does_not_cover_a_call_that_changed_since",
    ),
    Mutant(
        "last-decision-wins",
        "the first decision on a marker wins",
        "journal/signals.py",
        "winner = fold.decisions.get(signal.marker)",
        "winner = None",
        "tests/core/test_signals.py::test_the_first_decision_wins_and_the_other_is_told_who_won",
    ),
    Mutant(
        "reconcile-running",
        "a write under a live claim is running, not unknown",
        "journal/signals.py",
        "if fold.claim is not None and fold.claim.n == last.claim:",
        "if False:",
        "tests/core/test_signals.py::test_what_is_not_unknown_cannot_be_reconciled",
    ),
    Mutant(
        "reconcile-held",
        "a write under a held lock is running, not unknown",
        "journal/signals.py",
        "    if held:\n        return",
        "    if False:\n        return",
        "tests/core/test_signals.py::test_a_write_that_runs_under_a_lock_cannot_be_reconciled",
    ),
    Mutant(
        "one-nobody",
        "a holder is gone only if nobody answered twice",
        "journal/claims.py",
        'case [*_, "no"] | [*_, "nobody", "nobody"]:',
        'case [*_, "no"] | [*_, "nobody"]:',
        "tests/core/test_claims.py::"
        "test_a_live_claim_is_taken_over_only_if_its_holder_says_no_or_is_twice_not_there",
    ),
    Mutant(
        "park-blind",
        "a park competes with the signal that ends its wait",
        "worker/runner.py",
        "if fold.finished or fold.runnable() or fold.claim is None:",
        "if fold.finished or fold.claim is None:",
        "tests/core/test_loop.py::test_an_approval_that_comes_as_the_run_stops_is_acted_on",
    ),
    Mutant(
        "late-call",
        "after a slow acknowledgement the tail is read before the call",
        "journal/stepping.py",
        "if took_s > journal.ack_wait_s / 3:",
        "if False:",
        "tests/core/test_handle.py::test_a_late_call_reads_the_tail_first",
    ),
    Mutant(
        "unknown-beside",
        "nothing is started beside an unknown write",
        "journal/stepping.py",
        "if step.name != call.step:\n            raise",
        "if False:\n            raise",
        "tests/core/test_handle.py::test_nothing_is_started_beside_an_unknown_write",
    ),
    Mutant(
        "not-recordable-unknown",
        "a write that returned what can't be recorded did happen",
        "journal/stepping.py",
        'if start.replay == "unsafe":\n        problem',
        "if False:\n        problem",
        "tests/core/test_handle.py::"
        "test_a_write_whose_result_cannot_be_recorded_did_happen_and_never_runs_again",
    ),
    Mutant(
        "no-chain",
        "each record names the hash of the one before",
        "journal/fold.py",
        "if record.prev != self.head:",
        "if False:",
        "tests/core/test_fold.py::test_an_edited_record_is_found_by_the_hash_in_its_successor",
    ),
    Mutant(
        "no-claim-check",
        "a reader refuses what a fenced claim wrote",
        "journal/fold.py",
        "if isinstance(record, HOLDER_RECORDS) and record.claim != live:",
        "if False:",
        "tests/core/test_fold.py::test_a_holders_record_under_a_fenced_claim_is_damage",
    ),
    Mutant(
        "duplicate-keys",
        "a payload with a key that stands twice is refused",
        "journal/values.py",
        "if len(found) != len(pairs):",
        "if False:",
        "tests/core/test_values.py::test_text_that_is_not_strict_json_is_refused_saying_why",
    ),
    Mutant(
        "no-tail-check",
        "the file store compares the end of the file under its lock",
        "journal/stores/file.py",
        'if b"\\n" in behind.lstrip(b"\\n"):',
        "if False:",
        "tests/contract/test_store_conformance.py::test_expecting_nothing_creates_a_run_once",
    ),
    Mutant(
        "no-fsync",
        "a line is synced before the append answers",
        "journal/stores/file.py",
        "        os.fsync(fd)\n    except OSError:",
        "    except OSError:",
        "tests/real/test_fsync_order.py::test_an_intent_is_on_disk_before_its_tool_is_called",
    ),
    Mutant(
        "no-run-lock",
        "one process holds a run in a directory",
        "journal/stores/run_lock.py",
        "return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "return None",
        "tests/real/test_two_at_once.py::test_of_two_runs_at_once_one_goes_on_and_one_effect_happens",
    ),
]


def copy_tree(where: Path) -> None:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, where / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, where / part)


def failing(tree: Path, test: str) -> str:
    """The first test that fails in the tree, empty if none; SystemExit where none ran at all."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", test]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=240)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{test} did not run:\n{done.stdout}{done.stderr}")
    found = re.search(r"^FAILED (\S+?)(\[| |$)", done.stdout, re.M)
    return found[1] if found else ("?" if done.returncode else "")


def killer(mutant: Mutant, tree: Path) -> str:
    """The test that fails on the mutant, empty if it survives."""
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text stands {text.count(mutant.old)} × in {path}")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return failing(tree, mutant.test)
    finally:
        path.write_text(text)


def table() -> str:
    rows = [f"| {m.guard} | `{m.file}` | `{m.test}` |" for m in MUTANTS]
    return "\n".join(["| guard | where | the test that fails without it |", "|---|---|---|", *rows])


def main() -> int:
    if "--table" in sys.argv:
        print(table())
        return 0
    wanted = [m for m in MUTANTS if not sys.argv[1:] or m.name in sys.argv[1:]]
    survivors: list[str] = []
    with tempfile.TemporaryDirectory(prefix="runfold-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for test in dict.fromkeys(m.test for m in wanted):
            if failing(tree, test):
                raise SystemExit(f"{test} fails without any mutation")
        for mutant in wanted:
            test = killer(mutant, tree)
            print(f"{'killed  ' if test else 'SURVIVED'} {mutant.name:<26} {test}", flush=True)
            if not test:
                survivors.append(mutant.name)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} guards: their removal is noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

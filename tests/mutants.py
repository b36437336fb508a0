"""Remove each guard once and show which test notices (R79).

    python tests/mutants.py             all; exit code 1 if one survives
    python tests/mutants.py NAME …      these
    python tests/mutants.py --table     the table of docs/guards.md

A mutant is one piece of text in one file, replaced in a copy of the tree. Its test passes on the
untouched copy and must fail on the mutant.
"""

from __future__ import annotations

import os
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
        "tests/contract/test_store_conformance.py::test_of_twenty_writers_at_one_tail_exactly_one_wins",
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
        "tests/cases/test_damaged_files.py",
    ),
    Mutant(
        "no-input-comparison",
        "a start with another input is refused",
        "journal/steps.py",
        "if fold.started.digest != body.digest or fold.started.agent != body.agent:",
        "if fold.started.agent != body.agent:",
        "tests/core/test_start.py",
    ),
    Mutant(
        "no-marker-digest",
        "a marker is bound to arguments, question and tool revision",
        "journal/values.py",
        "return digest(run, step, call, text, tool_revision)[:16]",
        "return digest(run, step)[:16]",
        "tests/core/test_replies.py",
    ),
    Mutant(
        "no-id-validation",
        "an id is validated at every door",
        "journal/ids.py",
        "if not valid_run_id(value):\n        raise",
        "if False:\n        raise",
        "tests/core/test_ids.py",
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
        "tests/core/test_handle.py",
    ),
    Mutant(
        "no-replay",
        "a completed step is never called again",
        "journal/steps.py",
        "if step.completed is not None:\n        return Reuse",
        "if False:\n        return Reuse",
        "tests/core/test_step_table.py",
    ),
    Mutant(
        "recorded-unsafe-ignored",
        "what was recorded unsafe stays so, whatever the declaration is now",
        "journal/steps.py",
        "if not step.unsafe and not call.unsafe:",
        "if not call.unsafe:",
        "tests/core/test_step_table.py",
    ),
    Mutant(
        "declared-unsafe-ignored",
        "what is declared unsafe now is not repeated because it was recorded safe",
        "journal/steps.py",
        "if not step.unsafe and not call.unsafe:",
        "if not step.unsafe:",
        "tests/core/test_step_table.py",
    ),
    Mutant(
        "done-runs",
        "`done` records the person's result and never runs the write",
        "journal/steps.py",
        'return Settle(answer.payload["result"], answer.n)',
        "return Run(answer.n, last.key, unsafe=True)",
        "tests/core/test_step_table.py",
    ),
    Mutant(
        "any-permit",
        "a permit covers only the start it names",
        "journal/steps.py",
        "answer = step.reconciled.get(last.n)",
        "answer = next(iter(step.reconciled.values()), None)",
        "tests/core/test_step_table.py",
    ),
    Mutant(
        "retry-beside",
        "a permitted retry waits until the earlier call is over",
        "journal/steps.py",
        "return Run(answer.n, last.key, unsafe=True) if earlier_over else Wait(last)",
        "return Run(answer.n, last.key, unsafe=True)",
        "tests/core/test_step_table.py",
    ),
    Mutant(
        "attempted-ignored",
        "a call this process made is not made again on what the journal lacks",
        "journal/steps.py",
        "if answer is None or last.n in attempted:",
        "if answer is None:",
        "tests/core/test_step_table.py",
    ),
    Mutant(
        "mismatch-ignored",
        "another call at a recorded position is refused",
        "journal/steps.py",
        "if step.starts and (step.last.kind, step.last.digest) != (call.kind, call.digest):",
        "if False:",
        "tests/core/test_step_table.py",
    ),
    Mutant(
        "approval-of-then",
        "the gate is asked again: an old approval covers no changed tool or policy",
        "worker/replies.py",
        "if isinstance(today, VerdictAsk) and today != recorded:",
        "if False:",
        "tests/core/test_replies.py",
    ),
    Mutant(
        "last-decision-wins",
        "the first decision on a marker wins",
        "journal/signals.py",
        "winner = fold.decisions.get(signal.marker)",
        "winner = None",
        "tests/core/test_signals.py",
    ),
    Mutant(
        "reconcile-running",
        "a write under a live claim is running, not unknown",
        "journal/signals.py",
        "if fold.claim is not None and fold.claim.n == last.claim:",
        "if False:",
        "tests/core/test_signals.py",
    ),
    Mutant(
        "reconcile-held",
        "a write under a held lock is running, not unknown",
        "journal/signals.py",
        "    if held:\n        return",
        "    if False:\n        return",
        "tests/core/test_signals.py",
    ),
    Mutant(
        "one-nobody",
        "a holder is gone only if nobody answered twice",
        "journal/claims.py",
        'case [*_, "no"] | [*_, "nobody", "nobody"]:',
        'case [*_, "no"] | [*_, "nobody"]:',
        "tests/core/test_claims.py",
    ),
    Mutant(
        "park-blind",
        "a park competes with the signal that ends its wait",
        "worker/runner.py",
        "if fold.runnable() or fold.claim is None:",
        "if fold.claim is None:",
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
        "tests/core/test_handle.py::"
        "test_a_call_cancelled_in_the_middle_leaves_a_read_to_run_again_and_a_write_unknown",
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
        "tests/core/test_fold.py",
    ),
    Mutant(
        "no-claim-check",
        "a reader refuses what a fenced claim wrote",
        "journal/fold.py",
        "if isinstance(record, HOLDER_RECORDS) and record.claim != live:",
        "if False:",
        "tests/core/test_fold.py",
    ),
    Mutant(
        "duplicate-keys",
        "a payload with a key that stands twice is refused",
        "journal/values.py",
        "if len(found) != len(pairs):",
        "if False:",
        "tests/core/test_values.py",
    ),
    Mutant(
        "no-tail-check",
        "the file store compares the end of the file under its lock",
        "journal/stores/file.py",
        'if b"\\n" in behind.lstrip(b"\\n"):',
        "if False:",
        "tests/contract/test_store_conformance.py",
    ),
    Mutant(
        "no-fsync",
        "a line is synced before the append answers",
        "journal/stores/file.py",
        "        os.fsync(fd)\n    except OSError:",
        "    except OSError:",
        "tests/real/test_fsync_order.py",
    ),
    Mutant(
        "no-run-lock",
        "one process holds a run in a directory",
        "journal/stores/run_lock.py",
        "fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "tests/real/test_two_at_once.py",
    ),
]


def copy_tree(where: Path) -> None:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, where / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, where / part)


def passes(tree: Path, test: str) -> bool:
    """Whether the test passes in the tree; SystemExit where it did not run at all."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", test]
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=240)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{test} did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def killed(mutant: Mutant, tree: Path) -> bool:
    path = tree / mutant.file
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: its text stands {text.count(mutant.old)} × in {path}")
    path.write_text(text.replace(mutant.old, mutant.new))
    try:
        return not passes(tree, mutant.test)
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
            if not passes(tree, test):
                raise SystemExit(f"{test} fails without any mutation")
        for mutant in wanted:
            dead = killed(mutant, tree)
            print(
                f"{'killed  ' if dead else 'SURVIVED'} {mutant.name:<26} {mutant.test}", flush=True
            )
            if not dead:
                survivors.append(mutant.name)
    print(f"{len(wanted) - len(survivors)} of {len(wanted)} guards: their removal is noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

"""A general mutation of journal/: every small change of its code, and whether a fast test notices.

    python tests/mutation/survey.py                        the core, all mutants
    python tests/mutation/survey.py --shell                the modules that decide nothing
    python tests/mutation/survey.py --fraction 0.1 --seed 7
    python tests/mutation/survey.py journal/steps.py …     these files

A mutant meets the tests that run its line, the cheapest first, for some seconds of CPU time. What
survives is looked up in mutation/survivors.txt; what is not explained there is printed. A report,
not a gate: the guards of mutants.py are that.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mutation.nursery import Nursery
from mutation.operators import Site, mutated, sites
from mutation.session import NOT_IN_PLACE, Ended, Session
from mutation.tree import ROOT, copied_tree, written

LEFT_OUT = {"journal/limits.py"}
"""How large a limit is decides nothing; the tests take its value from here."""
SHELL = ("log", "stepping", "unknown", "taking", "doors", "lease", "ownership")
TESTS = (
    "tests/core",
    "tests/contract/test_store_conformance.py",
    "tests/contract/test_jetstream_answers.py",
    "tests/contract/test_signals_queue.py",
)
ELSEWHERE = (
    "tidy",
    "guarantees_doc",
    "bridge",
    "openai",
    "health",
    "explorer",
    "fleet",
    "events",
)
"""Core tests of other packages, or too slow."""
FIRST_S, REST_S = 0.7, 3.0
"""What the first tests of a mutant, and those that come when it survives them, may cost in CPU
time, traced: without it is about half."""
AT_IMPORT_TESTS = 30
KILLED, OPEN = "killed", "not explained"
KINDS = (KILLED, "equivalent", "text", "elsewhere", OPEN)
"""What became of a mutant: noticed; no other behaviour; other words or sizes for people only;
noticed by tests that are too slow for here; not looked at yet."""
SURVIVORS = Path(__file__).with_name("survivors.txt")


class Verdict(NamedTuple):
    file: str
    site: Site
    killer: str

    @property
    def key(self) -> str:
        return f"{self.file} | {self.site.function} | {self.site.what}"


def seen(session: Session, kept: Path | None) -> Ended:
    """What the tests run; from the file where it is there, else into it."""
    if kept is not None and kept.exists():
        return Ended(**json.loads(kept.read_text(encoding="utf-8")))
    ended = session.seen()
    if kept is not None:
        kept.write_text(json.dumps(ended._asdict()), encoding="utf-8")
    return ended


class Survey:
    """`ended`: what each test costs, and which lines of which file it runs."""

    def __init__(self, tree: Path, session: Session, nursery: Nursery, ended: Ended) -> None:
        self.tree, self.session, self.nursery = tree, session, nursery
        self.cost_s: dict[str, float] = {}
        self.by_line: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for test, (seconds, files) in ended.seen.items():
            self.cost_s[test] = seconds
            for file, lines in files.items():
                for line in lines:
                    self.by_line[file][line].add(test)

    def verdict(self, file: str, site: Site) -> Verdict:
        tests = self._tests(file, site)
        run = self._imported if site.at_import else self._changed
        first, rest = self._split(tests, FIRST_S)
        if site.at_import:  # each file of tests is collected anew
            first, rest = first[:AT_IMPORT_TESTS], []
        rest, _ = self._split(rest, REST_S)
        killer = run(file, site, first) if first else ""
        if not killer and rest:
            killer = run(file, site, rest)
        return Verdict(file, site, killer)

    def _tests(self, file: str, site: Site) -> list[str]:
        """Those that run the lines, or else the module; its own file's first, then the cheapest."""
        lines = self.by_line[file]
        found = {t for line in range(site.lines[0], site.lines[1] + 1) for t in lines.get(line, ())}
        if site.at_import:
            found = {test for tests in lines.values() for test in tests}
        home = f"tests/core/test_{Path(file).stem}.py"
        return sorted(found, key=lambda t: (not t.startswith(home), self.cost_s[t], t))

    def _split(self, tests: Sequence[str], most_s: float) -> tuple[list[str], list[str]]:
        spent = 0.0
        for index, test in enumerate(tests):
            spent += self.cost_s[test]
            if spent > most_s and index:
                return list(tests[:index]), list(tests[index:])
        return list(tests), []

    def _changed(self, file: str, site: Site, tests: Sequence[str]) -> str:
        most_s = 2 + round(2 * sum(self.cost_s[test] for test in tests))  # else it hangs
        failed = self.session.run(file, site.number, tests, cpu_s=most_s).failed
        return failed if failed != NOT_IN_PLACE else self._imported(file, site, tests)

    def _imported(self, file: str, site: Site, tests: Sequence[str]) -> str:
        path = self.tree / file
        source = path.read_text(encoding="utf-8")
        with written(path, ast.unparse(mutated(source, site.number))):
            ran = self.nursery.run(tests, cpu_s=20)
        return "" if ran.code == 0 else ran.failed or "hung, or can't be imported"


def core_files() -> list[str]:
    """The modules that the import contract "the core does no I/O" names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in project["tool"]["importlinter"]["contracts"]:
        if contract["name"] == "the core does no I/O":
            files = [f"{name.replace('.', '/')}.py" for name in contract["source_modules"]]
            return [file for file in files if file not in LEFT_OUT]
    raise SystemExit("pyproject.toml has no contract for the core")


def tests_of(tree: Path) -> list[str]:
    """All fast tests: files, but for those that judge no module of journal/."""
    found: list[str] = []
    for test in TESTS:
        path = tree / test
        files = sorted(path.glob("test_*.py")) if path.is_dir() else [path]
        found += [
            str(f.relative_to(tree))
            for f in files
            if not f.stem.removeprefix("test_").startswith(ELSEWHERE)
        ]
    return found


def mutants(tree: Path, files: Sequence[str], fraction: float, seed: int) -> list[tuple[str, Site]]:
    found = [(f, site) for f in files for site in sites((tree / f).read_text(encoding="utf-8"))]
    if fraction < 1:
        chosen = random.Random(seed).sample(range(len(found)), round(len(found) * fraction))
        found = [found[index] for index in sorted(chosen)]
    return found


def explained() -> dict[str, str]:
    """The class of each survivor that mutation/survivors.txt explains, by key."""
    lines = SURVIVORS.read_text(encoding="utf-8").splitlines()
    parts = [line.rsplit(" | ", 2) for line in lines if line and not line.startswith("#")]
    return {key: kind for key, kind, _ in parts}


def judged(survey: Survey, wanted: Sequence[tuple[str, Site]]) -> Iterator[Verdict]:
    """Prints what survives and is not explained."""
    began, known = time.monotonic(), explained()
    for index, (file, site) in enumerate(wanted, 1):
        verdict = survey.verdict(file, site)
        if not verdict.killer and verdict.key not in known:
            print(f"SURVIVED line {site.lines[0]}: {verdict.key}", flush=True)
        if index % 100 == 0:
            print(f"  {index} of {len(wanted)}, {time.monotonic() - began:.0f} s", flush=True)
        yield verdict


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("files", nargs="*")
    parser.add_argument("--shell", action="store_true")
    parser.add_argument("--fraction", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seen", type=Path, help="keep here what the tests run: a while to find")
    asked = parser.parse_args()
    shell = [f"journal/{name}.py" for name in SHELL]
    files = asked.files or (shell if asked.shell else core_files())
    with copied_tree() as tree:
        tests = tests_of(tree)
        with Session(tree, tests) as session, Nursery(tree, tests) as nursery:
            ended = seen(session, asked.seen)
            if ended.failed:
                raise SystemExit(f"{ended.failed} fails without any mutation")
            survey = Survey(tree, session, nursery, ended)
            wanted = mutants(tree, files, asked.fraction, asked.seed)
            verdicts = list(judged(survey, wanted))
    report(verdicts)


def report(verdicts: Sequence[Verdict]) -> None:
    known = explained()
    by_file: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        by_file[verdict.file][known.get(verdict.key, OPEN) if not verdict.killer else KILLED] += 1
    print("| module | mutants |", " | ".join(KINDS), "|")
    print("|---|---|", "---|" * len(KINDS), sep="")
    total: Counter[str] = sum(by_file.values(), Counter[str]())
    for file, found in [*by_file.items(), ("all", total)]:
        print(f"| {file} | {found.total()} |", " | ".join(str(found[k]) for k in KINDS), "|")


if __name__ == "__main__":
    main()

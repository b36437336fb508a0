"""Coverage-guided fuzzing of one target, in a process of its own: what `__main__` starts.

usage: python tests/fuzz/engine.py TARGET CORPUS [libFuzzer's options]
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import atheris  # noqa: E402

with atheris.instrument_imports(include=["journal", "bridge"]):
    from fuzz.targets import TARGETS, seeds


def main() -> None:
    logging.getLogger("runfold").setLevel(logging.ERROR)  # a torn tail is said each time
    name, corpus, *options = sys.argv[1:]
    folder = Path(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    for at, seed in enumerate(seeds(name)):
        (folder / f"seed-{at:04d}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *options, corpus], TARGETS[name])
    os.chdir(folder.parent)  # where what fails is written to
    atheris.Fuzz()


if __name__ == "__main__":
    main()

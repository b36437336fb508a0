"""A seed says all: the same schedule again, in this process and in others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulation.agents import AGENTS
from simulation.plans import PROFILES, REMOTE, draw
from simulation.schedule import play

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (3, 11, 28, 1_000_054, 1_000_261, 1_001_161, 1_003_294)
"""In the last four a worker that starts asks several holders at once."""


@pytest.mark.parametrize("profile", list(PROFILES))
def test_a_schedule_played_again_is_the_same_to_the_last_message(profile: str):
    first, between, again = (play(seed, profile=profile) for seed in (7, 8, 7))
    assert first == again
    assert first.digest != between.digest


@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_another_process_plays_the_same_schedule(hash_seed: str):
    for seed in SEEDS:
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulation", "--seed", str(seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"digest {play(seed).digest}" in done.stdout, done.stdout + done.stderr


def test_seeds_draw_every_profile_and_every_agent():
    plans = [draw(seed) for seed in range(300)]
    assert {plan.profile for plan in plans} == set(PROFILES)
    assert {run.agent for plan in plans for run in plan.runs} == {*AGENTS, REMOTE}

"""What a run of the soak is to do, drawn from a seed, and what it answers if nothing goes wrong.

A plan is the run's input. Of `desk` (the built-in loop): `rounds`, the calls of each model reply.
Of `clerk` (a turn handler) and `remote` (one over HTTP): `turns`, each with its calls and what the
turn waits for. A call is `[tool, number, milliseconds]`; its result follows from the first two.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

Call = list[Any]

UNSAFE_TOOLS = ("pay", "gated", "note", "book", "blocking")
"""Policy reconcile; the same behind an approval; interrupt; probe; reconcile in a thread."""

WEIGHTS = {"look": 5, "pay": 3, "gated": 1, "note": 2, "book": 2, "blocking": 1}
THEN = ("on", "delay", "input", "delay_or_input", "child", "pause")
_THEN_WEIGHTS = (4, 3, 1, 2, 2, 0.5)


class Plan(NamedTuple):
    """`door`: who starts it; `key`: runs of one key go one at a time."""

    run: str
    agent: str
    input: dict[str, Any]
    door: str
    priority: int
    key: str | None


def result_of(tool: str, number: int) -> dict[str, Any]:
    """What the call comes to where it was made."""
    return {"did": tool, "number": number}


def draw(
    rng: random.Random,
    number: int,
    doors: dict[str, float],
    *,
    agents: tuple[str, ...],
    without: frozenset[str],
) -> Plan:
    """The next run, of one of these agents. `doors`: their weights; `without` these tools."""
    door = rng.choices(list(doors), list(doors.values()))[0]
    agent = "desk" if door == "process" else rng.choice(agents)
    made = _desk(rng, without) if agent == "desk" else _clerk(rng, without, agent)
    run = f"{agent}{rng.choice('.-_')}{number:06}"
    return Plan(
        run=run,
        agent=agent,
        input=made | {"run": run},
        door=door,
        priority=rng.choice((0, 0, 0, 1, -1)),
        key=f"key-{rng.randrange(4)}" if door == "library" and rng.random() < 0.1 else None,
    )


def _call(rng: random.Random, numbers: list[int], without: frozenset[str]) -> Call:
    weights = {tool: weight for tool, weight in WEIGHTS.items() if tool not in without}
    tool = rng.choices(list(weights), list(weights.values()))[0]
    milliseconds = rng.choices((0, rng.randrange(400), rng.randrange(2500)), (3, 4, 3))[0]
    return [tool, numbers.pop(), milliseconds]


def _desk(rng: random.Random, without: frozenset[str]) -> dict[str, Any]:
    numbers = list(range(99, 0, -1))
    rounds = [
        [_call(rng, numbers, without) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
        for _ in range(rng.randint(1, 3))
    ]
    return {"rounds": rounds, "flaky": rng.choice((0, 0, 0, 0, 1))}


def _clerk(rng: random.Random, without: frozenset[str], agent: str) -> dict[str, Any]:
    numbers = list(range(99, 0, -1))
    turns: list[dict[str, Any]] = []
    for _ in range(rng.randint(1, 3)):
        calls = [_call(rng, numbers, without) for _ in range(rng.choice((0, 1, 1, 2)))]
        then = rng.choices(THEN, _THEN_WEIGHTS)[0]
        if agent == "remote" and then == "child":
            then = "on"
        turns.append(
            {
                "calls": calls,
                "parallel": rng.random() < 0.3,
                "boom": rng.choice((0, 0, 0, 0, 1)),
                "then": then,
                "number": numbers.pop(),
                "delay_ms": rng.randrange(50, 2500),
            }
        )
    return {"turns": turns}


def calls_of(agent: str, given: dict[str, Any]) -> list[Call]:
    """All calls of the plan, in the order in which the answer lists them; a child's is one."""
    if agent == "desk":
        return [call for one in given["rounds"] for call in one]
    if agent == "small":
        return [["pay", given["number"], 0]]
    found: list[Call] = []
    for turn in given["turns"]:
        found += turn["calls"]
        if turn["then"] == "child":
            found.append(["child", turn["number"], 0])
    return found

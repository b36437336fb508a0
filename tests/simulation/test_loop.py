"""The loop of the simulation: time that jumps, processes that die, one order for a seed."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from simulation.loop import START_S, Deadlock, Process, Restless, Task, VirtualLoop


def played(main: Any) -> tuple[Any, VirtualLoop]:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main), loop
    finally:
        loop.close()


def test_an_hour_passes_at_once():
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    assert played(main())[0] == pytest.approx(START_S + 3600, abs=1e-4)


def test_timers_are_due_in_the_order_of_their_time_and_then_of_their_making():
    order: list[str] = []

    async def nap(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        order.append(name)

    async def main() -> None:
        await asyncio.gather(nap("b", 2), nap("a", 1), nap("c", 2), nap("d", 2))

    played(main())
    assert order == ["a", "b", "c", "d"]


def test_a_wait_that_nothing_ends_is_a_deadlock_that_names_where_each_task_waits():
    async def stuck() -> None:
        await asyncio.get_running_loop().create_future()

    async def main() -> None:
        await asyncio.gather(stuck(), stuck())

    with pytest.raises(Deadlock, match=r"task 2: test_loop.py:\d+ stuck"):
        played(main())


def test_a_schedule_that_goes_on_for_ever_is_ended():
    async def main() -> None:
        for _ in itertools.count():
            await asyncio.sleep(1)

    loop = VirtualLoop()
    loop.handles_max = 1000
    with pytest.raises(Restless):
        loop.run_until_complete(main())


def test_of_a_killed_process_nothing_runs_any_more_not_even_its_finally():
    left: list[str] = []

    async def life() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                left.append("beat")
        finally:
            left.append("finally")

    async def main() -> None:
        process = Process("p")
        task = process.run(life())
        await asyncio.sleep(3.5)
        process.kill()
        task.cancel()
        await asyncio.sleep(10)
        assert not task.done()
        task.forget()
        beats.extend(left)

    beats: list[str] = []
    played(main())
    assert beats == ["beat", "beat", "beat"]


def test_a_stopped_process_does_at_once_what_became_due_and_goes_on():
    beats: list[float] = []

    async def life() -> None:
        while True:
            await asyncio.sleep(1)
            beats.append(asyncio.get_running_loop().time() - START_S)

    async def main() -> None:
        process = Process("p")
        task = process.run(life())
        await asyncio.sleep(1.5)
        process.stop()
        await asyncio.sleep(10)
        process.go_on()
        await asyncio.sleep(1.2)
        task.cancel()

    played(main())
    assert beats == pytest.approx([1.0, 11.5, 12.5], abs=1e-4)


def test_a_fuse_stops_a_process_at_the_await_point_it_is_set_to():
    reached: list[int] = []

    async def life() -> None:
        for number in range(100):
            reached.append(number)
            await asyncio.sleep(0)

    async def main() -> None:
        process = Process("p")
        process.light(8, process.kill)
        process.run(life()).forget()
        await asyncio.sleep(1)

    played(main())
    assert reached == list(range(7))


def test_sets_of_tasks_are_in_the_same_order_every_time():
    async def main() -> list[str]:
        async def nothing() -> None:
            pass

        made = {asyncio.create_task(nothing()) for _ in range(50)}
        assert all(isinstance(task, Task) for task in made)
        names = [task.get_name() for task in made]
        await asyncio.wait(made)
        return names

    assert played(main())[0] == played(main())[0]


def test_what_a_callback_raises_is_kept():
    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)

    assert "ZeroDivisionError" in played(main())[1].failures[0]

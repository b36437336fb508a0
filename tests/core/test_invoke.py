"""Calling a tool: the loop is never stalled, a deadline and a cancellation always win."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from journal.errors import ToolError
from journal.ids import RunId
from worker.invoke import invoke
from worker.tools import BadArguments, Tool, ToolCall, read, write

NOW_S = 0.01  # a deadline that is meant to pass
STUCK_S = 30.0  # bounds a test that went wrong; no promise is about it
CALL = ToolCall(run_id=RunId("a1"), step="tool/1/0/t", name="t", input={"a": [1]}, key="k1")
where: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")


def call(tool: Tool, input: dict[str, Any] | None = None) -> asyncio.Task[object]:
    """As the loop does it: the threads of writes are kept, those of reads let go."""
    kept: list[Future[Any]] = []
    keep = kept.append if tool.spec.write else None
    return asyncio.ensure_future(invoke(tool, input or {}, CALL, keep=keep))


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, STUCK_S)


async def turns(n: int = 20) -> None:
    """Let everything that is ready run."""
    for _ in range(n):
        await asyncio.sleep(0)


class Gate:
    """A plain function's body: says that it runs, then waits to be let go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()
        self.left = threading.Event()

    def pass_through(self) -> str:
        self.entered.set()
        assert self.go.wait(STUCK_S)
        self.left.set()
        return "passed"


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.go.set()  # a test that failed must not leave a thread that hangs


# ---- the plain case ---------------------------------------------------------------------------


async def test_an_async_tool_runs_in_the_task_that_calls_it():
    @read
    async def add(a: int, b: int = 2) -> tuple[int, object]:
        return a + b, asyncio.current_task()

    task = call(add, {"a": 1})
    assert await task == (3, task)


async def test_a_plain_tool_runs_in_another_thread_with_the_callers_context():
    @read
    def look(a: int) -> tuple[int, bool, str]:
        return a, threading.current_thread() is threading.main_thread(), where.get()

    where.set("here")
    assert await invoke(look, {"a": 1}, CALL) == (1, False, "here")


async def test_arguments_come_typed_and_defaults_are_the_functions_own():
    seen: list[object] = []
    own: list[int] = []

    @read
    def look(a: tuple[int, ...], b: list[int] = own) -> None:
        seen.extend([a, b])

    await invoke(look, {"a": [1, 2]}, CALL)
    assert seen[0] == (1, 2)
    assert seen[1] is own


@pytest.mark.parametrize("plain", [True, False])
async def test_a_tool_gets_its_call_and_cannot_change_what_is_recorded(plain: bool):
    def spoil(a: Any, call: ToolCall) -> str:
        call.input["a"].append(2)
        a.append(3)
        return f"{call.run_id} {call.step} {call.name} {call.key}"

    async def spoil_async(a: Any, call: ToolCall) -> str:
        return spoil(a, call)

    recorded = {"a": [1]}
    tool = write(spoil if plain else spoil_async)
    assert await invoke(tool, recorded, CALL) == "a1 tool/1/0/t t k1"
    assert (recorded, CALL.input) == ({"a": [1]}, {"a": [1]})


async def test_input_that_does_not_fit_is_refused_before_the_call():
    called: list[int] = []

    @write
    def note(a: int) -> None:
        called.append(a)

    with pytest.raises(BadArguments, match="Expected `int`"):
        await invoke(note, {"a": "1"}, CALL)
    assert called == []


@pytest.mark.parametrize("error", [ToolError("no funds"), ValueError("x"), TimeoutError("theirs")])
@pytest.mark.parametrize("plain", [True, False])
async def test_the_functions_own_exception_comes_out_as_it_is(error: Exception, plain: bool):
    def fail() -> None:
        raise error

    async def fail_async() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await invoke(read(fail if plain else fail_async), {}, CALL)
    assert raised.value is error


@pytest.mark.parametrize("plain", [True, False])
async def test_stop_iteration_becomes_an_error_that_a_coroutine_can_raise(plain: bool):
    def fail() -> None:
        raise StopIteration(7)

    async def fail_async() -> None:
        raise StopIteration(7)

    with pytest.raises(RuntimeError, match="StopIteration") as raised:
        await invoke(read(fail if plain else fail_async), {}, CALL)
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.filterwarnings("error")
async def test_a_plain_function_that_returns_an_awaitable_is_an_error():
    async def inner() -> int:
        return 1

    @read
    def forgot_async() -> object:
        return inner()

    with pytest.raises(TypeError, match="forgot_async is a plain function"):
        await invoke(forgot_async, {}, CALL)


# ---- UR-44: a blocking tool does not stall the loop -------------------------------------------


async def test_two_blocking_tools_run_at_once_and_the_loop_goes_on():
    together = threading.Barrier(3)

    @write
    def meet() -> int:
        return together.wait(STUCK_S)

    first, second = call(meet), call(meet)
    # The third party is met by way of the loop: a stalled one would never get here.
    third = await asyncio.to_thread(together.wait, STUCK_S)
    assert {await first, await second, third} == {0, 1, 2}


# ---- deadlines --------------------------------------------------------------------------------


async def test_an_async_tool_is_cancelled_at_its_deadline():
    ended: list[str] = []

    @read(timeout_s=NOW_S)
    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("cancelled")

    with pytest.raises(TimeoutError, match=r"hang did not end within 0\.01 s"):
        await invoke(hang, {}, CALL)
    assert ended == ["cancelled"]


@pytest.mark.parametrize("answer", ["return", "raise"])
async def test_a_tool_that_swallows_its_deadline_still_ends_in_a_timeout(answer: str):
    @write(timeout_s=NOW_S)
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if answer == "raise":
                raise ToolError("it did not happen") from None
        return "ok"

    task = call(stubborn)
    with pytest.raises(TimeoutError, match="stubborn did not end"):
        await task
    assert task.cancelling() == 0  # the run goes on


async def test_a_plain_tool_times_out_at_once_while_its_thread_goes_on(gate: Gate):
    @write(timeout_s=NOW_S)
    def hang() -> None:
        gate.pass_through()

    with pytest.raises(TimeoutError, match="hang did not end"):
        await invoke(hang, {}, CALL)
    assert not gate.left.is_set()
    gate.go.set()
    await until(gate.left)


async def test_what_an_abandoned_thread_raises_later_goes_nowhere(gate: Gate):
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    @write(timeout_s=NOW_S)
    def hang() -> None:
        gate.pass_through()
        raise ValueError("late")

    with pytest.raises(TimeoutError):
        await invoke(hang, {}, CALL)
    gate.go.set()
    await until(gate.left)
    await turns()
    assert reported == []


async def test_a_hung_call_keeps_no_other_call_waiting(gate: Gate):
    """Each call has a thread of its own: a pool's would be used up by what hangs."""
    hung = [call(read(gate.pass_through)) for _ in range(50)]
    await until(gate.entered)

    @read
    def quick() -> str:
        return "at once"

    assert await call(quick) == "at once"
    gate.go.set()
    assert await asyncio.gather(*hung) == ["passed"] * 50


async def test_a_cancelled_read_is_left_to_its_thread(gate: Gate):
    task = call(read(gate.pass_through))
    await until(gate.entered)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not gate.left.is_set()
    gate.go.set()
    await until(gate.left)


async def test_a_write_past_its_time_is_kept_until_its_thread_ends(gate: Gate):
    @write(timeout_s=NOW_S)
    def hang() -> None:
        gate.pass_through()

    kept: list[Future[Any]] = []
    with pytest.raises(TimeoutError):
        await invoke(hang, {}, CALL, keep=kept.append)
    assert [job.done() for job in kept] == [False]
    gate.go.set()
    await asyncio.wait([asyncio.wrap_future(job) for job in kept])
    assert gate.left.is_set()


# ---- cancellation, UR-46 ----------------------------------------------------------------------


async def test_a_cancelled_run_waits_for_its_thread_however_often_it_is_cancelled(gate: Gate):
    task = call(write(gate.pass_through))
    await until(gate.entered)
    for _ in range(3):
        task.cancel()
        await turns()
        assert not task.done()
    gate.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.left.is_set()


@pytest.mark.parametrize("raises", [False, True])
async def test_what_a_thread_ends_with_after_the_cancellation_is_not_used(gate: Gate, raises: bool):
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    @write
    def pay() -> str:
        gate.pass_through()
        if raises:
            raise ToolError("it did not happen")
        return "paid"

    task = call(pay)
    await until(gate.entered)
    task.cancel()
    gate.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await turns()
    assert reported == []


async def _return_ok(entered: asyncio.Event) -> str:
    try:
        entered.set()
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        return "ok"
    return "never"


async def _raise_tool_error(entered: asyncio.Event) -> str:
    try:
        entered.set()
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise ToolError("it did not happen") from None
    return "never"


async def _go_on_for_a_while(entered: asyncio.Event) -> str:
    for _ in range(3):
        try:
            entered.set()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        except BaseException:
            continue
    return "ok"


async def _shield(entered: asyncio.Event) -> str:
    async def inner() -> str:
        await turns(3)
        return "ok"

    task = asyncio.ensure_future(inner())
    entered.set()
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        return await task


@pytest.mark.parametrize(
    "body", [_return_ok, _raise_tool_error, _go_on_for_a_while, _shield], ids=lambda b: b.__name__
)
async def test_ur_46_a_swallowed_cancellation_still_cancels(body: Callable[..., Any]):
    entered = asyncio.Event()

    @write
    async def stubborn() -> str:
        return await body(entered)

    task = call(stubborn)
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("ticks", range(10))
async def test_ur_46_a_cancellation_in_the_tick_in_which_the_tool_ends_is_not_lost(ticks: int):
    done = asyncio.Event()

    @read
    async def quick() -> str:
        await asyncio.wait_for(done.wait(), STUCK_S)
        return "ok"

    task = call(quick)
    await turns()
    done.set()
    await turns(ticks)
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert await task == "ok"


async def test_nothing_is_called_in_a_task_that_is_being_cancelled():
    called: list[str] = []

    @write
    def pay() -> None:
        called.append("pay")

    async def run() -> object:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await invoke(pay, {}, CALL)

    task = asyncio.ensure_future(run())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert called == []


async def test_a_timeout_around_the_call_stays_a_timeout_of_the_caller():
    @write
    async def stubborn() -> str:
        return await _return_ok(asyncio.Event())

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(NOW_S):
            await invoke(stubborn, {}, CALL)


@pytest.mark.parametrize("plain", [True, False])
async def test_a_tool_cancelled_from_inside_does_not_cancel_the_run(plain: bool):
    def fail() -> None:
        raise asyncio.CancelledError

    async def fail_async() -> None:
        inner = asyncio.ensure_future(asyncio.Event().wait())
        inner.cancel()
        await inner

    with pytest.raises(RuntimeError, match="was cancelled from inside"):
        await invoke(read(fail if plain else fail_async), {}, CALL)

"""How a path finds its operation, and what each error is answered with: no server needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge.app import is_loopback
from bridge.call import WAIT_PATTERN
from bridge.operation import Answer, Operation, Table
from bridge.problems import STATUS_BY_CODE, Internal, problem
from journal import errors
from journal.errors import DecisionConflict, RunfoldError, StaleSignal


def operation(method: str, path: str) -> Operation:
    return Operation(
        name=f"{method} {path}",
        method=method,  # type: ignore[arg-type]
        path=path,
        scope="read",
        summary="",
        handle=None,  # type: ignore[arg-type]
        answers={200: Answer(about="")},
    )


TABLE = Table(
    [
        operation("GET", "/runs/{id}"),
        operation("POST", "/runs/{id}/signals/approve"),
        operation("GET", "/runs/{id}/inputs/{request_id}"),
        operation("DELETE", "/runs/{id}/inputs/{request_id}"),
        operation("GET", "/runs/special"),
        operation("GET", "/"),
    ]
)


@pytest.mark.parametrize(
    ("raw", "path", "parameters"),
    [
        (b"/runs/a", "/runs/{id}", {"id": "a"}),
        (b"/runs/special", "/runs/special", {}),
        (b"/runs/a%2Fb", "/runs/{id}", {"id": "a/b"}),
        (b"/runs/%2e%2e", "/runs/{id}", {"id": ".."}),
        (b"/runs/..", "/runs/{id}", {"id": ".."}),
        (b"/runs/a%252Fb", "/runs/{id}", {"id": "a%2Fb"}),
        (b"/runs/%0d%0a%00", "/runs/{id}", {"id": "\r\n\x00"}),
        (b"/runs/%ff", "/runs/{id}", {"id": "\ufffd"}),
        (b"/runs/\xff", "/runs/{id}", {"id": "\xff"}),
        (b"/runs/+", "/runs/{id}", {"id": "+"}),
        (b"/runs/", "/runs/{id}", {"id": ""}),
        (
            b"/runs/a/inputs/x%2Fy%3Fz",
            "/runs/{id}/inputs/{request_id}",
            {"id": "a", "request_id": "x/y?z"},
        ),
        (b"/run%73/a", "/runs/{id}", {"id": "a"}),
        (b"/", "/", {}),
    ],
)
def test_each_part_of_a_path_is_decoded_by_itself(
    raw: bytes, path: str, parameters: dict[str, str]
) -> None:
    found = TABLE.find(raw)
    assert found is not None and found[0].path == path
    assert found[1] == parameters


@pytest.mark.parametrize(
    "raw", [b"", b"runs/a", b"//", b"/runs", b"/runs/a/", b"/runs/a/b", b"/runs%2Fa", b"/RUNS/a"]
)
def test_another_path_is_another_address(raw: bytes) -> None:
    assert TABLE.find(raw) is None


def test_the_methods_of_an_address_are_known() -> None:
    found = TABLE.find(b"/runs/a/inputs/x")
    assert found is not None and found[0].allow == "DELETE, GET, HEAD"
    found = TABLE.find(b"/runs/a/signals/approve")
    assert found is not None and found[0].allow == "POST"


def test_two_operations_never_share_an_address_and_method() -> None:
    with pytest.raises(AssertionError):
        Table([operation("GET", "/a"), operation("GET", "/a")])


# ---- errors -------------------------------------------------------------------------------------

NOT_OF_A_DOOR = {
    "error",
    "child_failed",
    "store_locked",
    "concurrent_use",
    "step_failed",
    "shards_fixed",
}
"""What only a holder of a run, or a directory, raises."""


def classes(base: type[RunfoldError]) -> Iterator[type[RunfoldError]]:
    yield base
    for one in base.__subclasses__():
        yield from classes(one)


def test_every_error_of_the_journal_has_a_status_or_never_comes_to_a_door() -> None:
    codes = {one.code for one in classes(RunfoldError) if one.__module__ == errors.__name__}
    assert codes - NOT_OF_A_DOOR <= set(STATUS_BY_CODE)


def test_a_problem_says_what_the_error_says_and_nothing_that_can_hide() -> None:
    found = problem(StaleSignal("gone\x1b[2J\u202e", run_id="r1", hint="look\n"))
    assert (found.status, found.title, found.code) == (409, "Conflict", "stale_signal")
    assert (found.detail, found.hint, found.run) == ("gone\\x1b[2J\\u202e", "look\\n", "r1")
    assert problem(DecisionConflict("x", winner=7)).winner == 7


def test_of_a_bug_nothing_is_told() -> None:
    found = problem(RunfoldError("the secret", run_id="r1", hint="of it"))
    assert (found.status, found.code) == (500, "internal")
    assert "secret" not in found.detail and found == problem(Internal())


# ---- small words --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil", "127.1", "x"])
def test_another_machine(host: str) -> None:
    assert not is_loopback(host)


def test_the_documented_waits_are_those_that_are_taken() -> None:
    import re

    from bridge.call import Call

    for text in ("0", "5", "30s", "60", "60s", "59.999s", "1.5", "500ms", "60000ms", "0ms", "05"):
        assert re.search(WAIT_PATTERN, text)
        call = object.__new__(Call)
        call.query = {"wait": text}
        assert 0 <= call.wait_s() <= 60
    for text in (
        "",
        "61",
        "60.1",
        "60001ms",
        "1m",
        "-1",
        "1e1",
        " 1",
        "1 s",
        "s",
        "ms",
        "100000ms",
    ):
        assert not re.search(WAIT_PATTERN, text)

"""Health endpoints: they answer while the loop is blocked, and say no where they do not know."""

from __future__ import annotations

import errno
import http.client
import json
import socket
import threading
from typing import Any

import pytest

from worker import health
from worker.health import Health, serve_health

WELL = Health(ok=True, details={"worker": "w-1", "active": 3})


def asked(port: int, path: str = "/healthz", method: str = "GET") -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        assert response.headers["content-type"] == "application/json"
        return response.status, json.loads(body) if body else None
    finally:
        connection.close()


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/healthz?verbose=1"])
def test_a_worker_that_is_well_answers_200_with_its_details(path: str):
    with serve_health(0, lambda: WELL) as server:
        told = {"ok": True, "problems": [], "worker": "w-1", "active": 3}
        assert asked(server.port, path) == (200, told)


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_worker_that_is_not_well_answers_503_with_its_problems(path: str):
    ill = Health(ok=False, problems=("deaf for 3 s",), details={"ok": True, "problems": []})
    with serve_health(0, lambda: ill) as server:
        assert asked(server.port, path) == (503, {"ok": False, "problems": ["deaf for 3 s"]})


def test_a_worker_that_is_not_well_is_to_be_restarted_only_where_it_is_hopeless():
    deaf = Health(ok=False, problems=("deaf for 3 s",))
    with serve_health(0, lambda: deaf) as server:
        told = {"ok": True, "problems": ["deaf for 3 s"]}
        assert asked(server.port, "/livez") == (200, told)
    stuck = Health(ok=False, hopeless=True, problems=("blocked",))
    with serve_health(0, lambda: stuck) as server:
        assert asked(server.port, "/livez") == (503, {"ok": False, "problems": ["blocked"]})


def test_each_answer_is_a_new_report():
    reports = iter([WELL, Health(ok=False), WELL])
    with serve_health(0, lambda: next(reports)) as server:
        assert [asked(server.port)[0] for _ in range(3)] == [200, 503, 200]


async def test_it_answers_while_the_event_loop_is_blocked():
    with serve_health(0, lambda: WELL) as server:
        assert asked(server.port)[0] == 200  # this test's own waiting is what blocks the loop


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/healthz/"), ("GET", "/healthz/../x"), ("HEAD", "/healthz")]
    + [(method, "/readyz") for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS")],
)
def test_anything_else_is_404_and_asks_for_no_report(method: str, path: str):
    with serve_health(0, lambda: pytest.fail("asked")) as server:
        status, body = asked(server.port, path, method)
    assert status == 404
    assert body is None if method == "HEAD" else body["ok"] is False


class Unprintable(Exception):
    def __str__(self) -> str:
        return f"\x1b[2J{'x' * 10_000}"


@pytest.mark.parametrize("error", [LookupError("no\nstate"), Unprintable()])
def test_a_report_that_raises_is_503_with_a_bounded_text(error: Exception):
    def report() -> Health:
        raise error

    with serve_health(0, report) as server:
        assert asked(server.port, "/livez")[0] == 200  # nobody is killed for a slip in a report
        status, body = asked(server.port)
    (problem,) = body["problems"]
    assert (status, body["ok"]) == (503, False)
    assert problem.startswith(f"the health report failed: {type(error).__name__}: ")
    assert problem.isprintable() and len(problem) < 700


def test_a_report_that_is_no_json_is_503():
    with serve_health(0, lambda: Health(ok=True, details={"x": object()})) as server:
        status, body = asked(server.port)
    assert (status, body["ok"]) == (503, False)


def test_a_port_that_is_in_use_is_an_error_that_names_it():
    with (
        serve_health(0, lambda: WELL) as server,
        pytest.raises(
            OSError, match=rf"127\.0\.0\.1 port {server.port}: Address already"
        ) as raised,
        serve_health(server.port, lambda: WELL),
    ):
        pass
    assert raised.value.errno == errno.EADDRINUSE
    with serve_health(server.port, lambda: WELL) as again:  # it was given back
        assert asked(again.port)[0] == 200


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_is_a_port(port: int):
    with pytest.raises(ValueError, match="port"), serve_health(port, lambda: WELL):
        pass


def test_a_client_that_says_nothing_keeps_no_other_waiting_nor_the_end(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    with serve_health(0, lambda: WELL) as server:
        with socket.create_connection(("127.0.0.1", server.port)):
            assert asked(server.port)[0] == 200
        with socket.create_connection(("127.0.0.1", server.port)) as rude:
            rude.sendall(b"GET /heal")
            assert asked(server.port)[0] == 200
    assert not any(thread.name == "runfold-health" for thread in threading.enumerate())
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


def test_a_silent_client_is_hung_up_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health._Handler, "timeout", 0.05)
    with (
        serve_health(0, lambda: WELL) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent,
    ):
        assert silent.recv(1) == b""


def test_requests_at_once_are_bounded_and_their_places_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(health, "REQUESTS_AT_ONCE_MAX", 1)
    inside, go_on = threading.Event(), threading.Event()

    def report() -> Health:
        inside.set()
        assert go_on.wait(10)
        return WELL

    with serve_health(0, report) as server:
        first = threading.Thread(target=asked, args=(server.port,))
        first.start()
        assert inside.wait(10)
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            asked(server.port)
        go_on.set()
        first.join()
        while True:
            try:
                assert asked(server.port)[0] == 200
                break
            except (ConnectionError, http.client.BadStatusLine):
                continue  # the first has its answer a moment before its place is free


def test_a_report_that_hangs_does_not_hold_up_the_end():
    inside, go_on = threading.Event(), threading.Event()

    def report() -> Health:
        inside.set()
        go_on.wait(10)
        return WELL

    with serve_health(0, report) as server:
        hanging = threading.Thread(target=asked, args=(server.port,))
        hanging.start()
        assert inside.wait(10)
    assert hanging.is_alive()
    go_on.set()
    hanging.join()


def test_it_serves_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with serve_health(0, lambda: WELL, "::1") as server:
        connection = http.client.HTTPConnection("::1", server.port, timeout=10)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()


# ---- metrics ------------------------------------------------------------------------------------


def scraped(port: int) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.status, response.headers["content-type"], response.read().decode()
    finally:
        connection.close()


TEXT = "text/plain; version=0.0.4; charset=utf-8"


def test_metrics_are_what_is_made_of_them_at_each_scrape():
    made = iter([b"a 1\n", b"a 2\n"])
    with serve_health(0, lambda: WELL, metrics=lambda: next(made)) as server:
        assert [scraped(server.port) for _ in range(2)] == [
            (200, TEXT, "a 1\n"),
            (200, TEXT, "a 2\n"),
        ]


def test_without_the_extra_metrics_are_501_and_say_what_is_missing():
    with serve_health(0, lambda: pytest.fail("asked")) as server:
        status, kind, text = scraped(server.port)
    assert (status, kind) == (501, TEXT)
    assert "pip install 'runfold[metrics]'" in text


def test_metrics_that_fail_are_500_with_a_bounded_text_and_health_goes_on():
    def fail() -> bytes:
        raise Unprintable

    with serve_health(0, lambda: WELL, metrics=fail) as server:
        status, _, text = scraped(server.port)
        assert asked(server.port)[0] == 200
    assert status == 500 and len(text) < 700
    assert text.rstrip("\n").isprintable()

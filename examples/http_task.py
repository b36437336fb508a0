"""The lower half of examples/http_worker.py: requests that may get lost, and one task's lease.

Everything that makes HTTP harmless is here: what is repeated, under which number, and until when.
"""

import json
import logging
import threading
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

log = logging.getLogger("http_worker")
JSON: TypeAlias = Any
Body: TypeAlias = dict[str, Any]

REQUEST_S = 60.0  # for one try; then the same request is sent again
UNRECORDABLE = ValueError, TypeError, RecursionError  # what json.dumps raises


class Stop(BaseException):
    """The bridge has ended this turn. Not an Exception: no handler's `except` may swallow it."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code


class Refused(Exception):
    """The request was wrong: nothing was done."""


class Unanswered(Exception):
    """Nobody knows whether the bridge did what it was asked. Ask again after `pause_s`."""

    def __init__(self, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.pause_s = pause_s


End: TypeAlias = tuple[str, Body]  # how a turn ends: the request, and its fields


def Complete(message: JSON) -> End:
    return "complete", {"message": message}


def Continue(state: JSON = None, **waits: JSON) -> End:  # delay_s, until, until_input, until_child
    return "continue", {"state": state, **waits}


def Pause(reason: str, state: JSON = None, until: str | None = None) -> End:
    return "pause", {"reason": reason, "state": state, "until": until}


def Fail(reason: str, detail: str = "", retriable: bool = False) -> End:
    return "fail", {"reason": reason, "detail": detail[:4000], "retriable": retriable}


class Bridge:
    def __init__(self, url: str, token: str = "") -> None:
        self._url = urlsplit(url)
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}

    def once(self, path: str, body: Body, timeout_s: float) -> Body:
        """One try. Raises Unanswered, Refused, Stop; PermissionError: this token may not do that;
        UNRECORDABLE: nothing was sent."""
        data = json.dumps(body, allow_nan=False).encode()
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(self._url.netloc, timeout=timeout_s)
        try:
            connection.request("POST", self._url.path.rstrip("/") + path, data, self._headers)
            answer = connection.getresponse()
            found: Any = json.loads(answer.read() or b"{}")
        except (OSError, HTTPException, ValueError) as error:
            # also half an answer, or a page of some proxy: not the bridge's word
            raise Unanswered(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 500 or answer.status in (408, 429) or not isinstance(found, dict):
            wait = answer.getheader("Retry-After", "")
            raise Unanswered(f"status {answer.status}", float(wait) if wait.isdecimal() else 1.0)
        told = cast(Body, found)
        if answer.status in (200, 204):
            return told
        code, detail = told.get("code", ""), told.get("detail", "")
        if answer.status in (404, 409, 410):
            raise Stop(code, detail)
        if answer.status in (401, 403):
            raise PermissionError(f"{code}: {detail}")
        raise Refused(f"{answer.status} {code}: {detail}")

    def ask(self, path: str, body: Body, timeout_s: float = 0.0) -> Body:
        """Until it is answered. The body is the same at each try, its record id too: however often
        it arrives, it is done once."""
        pause_s = 0.05
        while True:
            try:
                return self.once(path, body, timeout_s or REQUEST_S)
            except Unanswered as unanswered:
                log.info("%s: %s; asking again", path.rpartition("/")[2], unanswered)
                time.sleep(unanswered.pause_s or pause_s)
                pause_s = min(2 * pause_s, 2.0)


class Task:
    """A delivery of a run to this process: its claim, its numbers, its lease; for all its turns."""

    def __init__(self, bridge: Bridge, given: Body) -> None:
        self.ack_wait_s: float = given["ack_wait_s"]
        self.stop: Stop | None = None
        self.cancelled = False
        self.over = threading.Event()
        self._bridge = bridge
        self._path = f"/tasks/{given['task']}/"
        self._claim: Body = {}
        self._number = 0

    def read(self) -> Body:
        turn = self.ask("journal.read", {})
        if not self._claim:
            self._claim = {"claim": turn["claim"]}
            threading.Thread(target=self._beat_on, daemon=True).start()
        return turn

    def ask(self, verb: str, body: Body) -> Body:
        return self._bridge.ask(self._path + verb, {**self._claim, **body})

    def ask_once(self, verb: str, body: Body) -> Body:
        """What leaves a record goes under a number of its own. Only the turn's own thread asks: a
        request is answered before the next one is sent."""
        self._number += 1
        return self.ask(verb, {"id": self._number, **body})

    def beat(self) -> None:
        """When it returns the lease holds, by the bridge's word. Raises Stop."""
        self.hear(self.ask("heartbeat", {}))

    def hear(self, answer: Body) -> None:
        """Once cancelled, cancelled: two threads say so."""
        if answer.get("cancelled"):
            self.cancelled = True

    def _beat_on(self) -> None:
        """In a thread of its own, as a tool may take long. It only tells: a write that runs has to
        come to its end, and its result has to be sent."""
        third = self.ack_wait_s / 3
        while not self.over.wait(third):
            try:
                found = self._bridge.once(self._path + "heartbeat", self._claim, third)
                self.hear(found)
            except (Unanswered, Refused, PermissionError) as error:
                log.info("heartbeat: %s", error)  # the next one comes soon
            except Stop as stop:
                log.info("heartbeat: %s", stop)
                self.stop = stop
                return

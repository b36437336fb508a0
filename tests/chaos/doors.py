"""Every way to tell a run something, and what each says back."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
from chaos.processes import BridgeSlot
from kit.bridge_process import bearer
from nats.errors import Error as NatsError

from journal.errors import RunfoldError
from journal.fleet import Fleet
from journal.ids import RunId, subject_token
from journal.stores.jetstream import JetStreamStore

ANSWER_S = 8.0
DOORS = ("http 0", "http 1", "decision", "api", "pub", "raw", "library")
"""`pub` is acknowledged by the stream, `raw` by nobody."""


class Answer(NamedTuple):
    """`code`: why it was not taken; "" where it was. `unknown`: nobody can say whether it was."""

    code: str = ""
    unknown: bool = False
    n: int | None = None
    result: str = ""


TAKEN_BY_STREAM = Answer(result="kept by the stream")
SAID_TO_NOBODY = Answer(code="raw", unknown=True)
_UNKNOWN_CODES = {"store_unavailable", "busy", "internal", "not_provisioned"}


class Doors:
    """The bridges, a plain NATS client, and the library on stores."""

    def __init__(self, bridges: list[BridgeSlot], stores: list[JetStreamStore], plain: Any) -> None:
        self._bridges = bridges
        self._fleets = [Fleet(store, by="person") for store in stores]
        self._plain = plain
        self._js = plain.jetstream(timeout=3)
        self._http = httpx.AsyncClient(headers=bearer("alice"), timeout=ANSWER_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def signal(
        self, door: str, run: str, name: str, payload: dict[str, Any], request: str
    ) -> Answer:
        """By that door; a `decision` that is none goes over HTTP."""
        body = payload | {"request_id": request}
        if name == "input":
            return await self._input(door, run, body)
        try:
            match door.split():
                case ["decision"] if name in ("approve", "reject"):
                    return await self._post("/decisions", {"decision": name} | body)
                case ["http" | "decision", *which]:
                    number = int(which[0]) if which else 0
                    return await self._post(f"/runs/{run}/signals/{name}", body, number)
                case ["api"]:
                    return await self._ask(f"signals.{subject_token(RunId(run))}.{name}", body)
                case ["pub" | "raw"]:
                    return await self._publish(door, f"{subject_token(RunId(run))}.{name}", body)
                case _:
                    fleet = self._fleets[hash(request) % len(self._fleets)]
                    told = await fleet.signal(run, name, payload, request_id=request)
                    return Answer(n=told.n, result=told.result)
        except (RunfoldError, httpx.HTTPError, NatsError, TimeoutError) as error:
            return _failed(error)

    async def _input(self, door: str, run: str, body: dict[str, Any]) -> Answer:
        try:
            match door.split():
                case ["http" | "decision", *which]:
                    number = int(which[0]) if which else 0
                    return await self._post(f"/runs/{run}/inputs", body, number)
                case ["api"]:
                    return await self._ask("inputs.submit", body | {"run": run})
                case ["pub" | "raw"]:
                    return await self._publish(door, f"{subject_token(RunId(run))}.input", body)
                case _:
                    sent = await self._fleets[0].send(
                        run, body["content"], mode=body["mode"], request_id=body["request_id"]
                    )
                    return Answer(result="applied" if sent.created else "repeated")
        except (RunfoldError, httpx.HTTPError, NatsError, TimeoutError) as error:
            return _failed(error)

    async def withdraw(self, door: str, run: str, request: str) -> Answer:
        try:
            match door.split():
                case ["http" | "decision", *which]:
                    number = int(which[0]) if which else 0
                    url = f"{self._bridges[number % len(self._bridges)].health_url}/runs/{run}"
                    answer = await self._http.delete(f"{url}/inputs/{quote(request, safe='')}")
                    return _answered(answer)
                case ["api" | "pub" | "raw"]:
                    return await self._ask("inputs.withdraw", {"run": run, "request_id": request})
                case _:
                    await self._fleets[0].withdraw(run, request)
                    return Answer(result="withdrawn")
        except (RunfoldError, httpx.HTTPError, NatsError, TimeoutError) as error:
            return _failed(error)

    # ---- one of each --------------------------------------------------------------------------

    async def _post(self, path: str, body: dict[str, Any], number: int = 0) -> Answer:
        bridge = self._bridges[number % len(self._bridges)]
        return _answered(await self._http.post(f"{bridge.health_url}{path}", json=body))

    async def _ask(self, rest: str, body: dict[str, Any]) -> Answer:
        data = json.dumps(body).encode()
        reply = await self._plain.request(f"runfold.api.{rest}", data, timeout=ANSWER_S)
        said = json.loads(reply.data)
        if "error" in said:
            code = said["error"]["code"]
            return Answer(code=code, unknown=code in _UNKNOWN_CODES)
        return Answer(n=said.get("n"), result=said.get("result", "applied"))

    async def _publish(self, door: str, rest: str, body: dict[str, Any]) -> Answer:
        data = json.dumps(body).encode()
        if door == "raw":
            await self._plain.publish(f"runfold.signal.{rest}", data)
            return SAID_TO_NOBODY
        await self._js.publish(f"runfold.signal.{rest}", data)
        return TAKEN_BY_STREAM


def _answered(answer: httpx.Response) -> Answer:
    if answer.status_code == 204:
        return Answer(result="withdrawn")
    try:
        said = answer.json()
    except ValueError:
        what = f"no JSON: {answer.status_code} {answer.text[:60]!r}"
        return Answer(code=what, unknown=True)
    if answer.status_code < 300:
        return Answer(n=said.get("n"), result=said.get("result", "applied"))
    code = str(said.get("code", answer.status_code))
    return Answer(code=code, unknown=answer.status_code >= 500)


def _failed(error: Exception) -> Answer:
    if isinstance(error, RunfoldError):
        return Answer(code=error.code, unknown=error.code in _UNKNOWN_CODES)
    return Answer(code=type(error).__name__, unknown=True)

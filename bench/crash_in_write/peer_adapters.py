"""The peers, each by the restart that its docs tell. Settings are theirs by default, but for the
variants, which take the one setting that a peer offers against the second charge."""

from __future__ import annotations

import json
from typing import Any

from drive import DIED, PROGRAMS, Scene, Wrong, free_port, http, listens
from environments import Environment
from outcome import Outcome


def _outcome(
    env: Environment,
    system: str,
    scene: Scene,
    said: dict[str, Any],
    *,
    way_on: str = "",
    charges: int | None = None,
    end: str | None = None,
) -> Outcome:
    return Outcome(
        system=system,
        version=env.version,
        charges=scene.charges if charges is None else charges,
        state=said["state"],
        seen=said["seen"],
        way_on=way_on,
        charges_in_the_end=scene.charges,
        state_in_the_end=said["state"] if end is None else end,
    )


# ---- libraries over SQLite: the same program again is the recovery ------------------------------


def _again(env: Environment, system: str, program: str) -> Outcome:
    with Scene() as scene:
        line = (env.python, PROGRAMS / program)
        scene.run(*line, "begin", scene.folder, code=DIED)
        return _outcome(env, system, scene, scene.say(*line, "recover", scene.folder))


def langgraph(env: Environment) -> Outcome:
    return _again(env, "LangGraph, SqliteSaver, durability=sync", "langgraph_program.py")


def pydantic_ai_dbos(env: Environment) -> Outcome:
    return _again(env, "pydantic-ai on DBOS, tool with approval", "pydantic_ai_dbos_program.py")


def dbos(env: Environment) -> Outcome:
    return _again(env, "DBOS, SQLite", "dbos_program.py")


def dbos_no_recovery(env: Environment) -> Outcome:
    """`max_recovery_attempts=0`: a workflow that met a crash anywhere is set aside."""
    with Scene() as scene:
        line = (env.python, PROGRAMS / "dbos_program.py")
        scene.run(*line, "begin", scene.folder, "0", code=DIED)
        said = scene.say(*line, "recover", scene.folder, "0")
        charges = scene.charges
        end = scene.say(*line, "resume", scene.folder, "0")
        return _outcome(
            env,
            "DBOS, max_recovery_attempts=0",
            scene,
            said,
            way_on="resume_workflow",
            charges=charges,
            end=end["state"],
        )


# ---- Restate -----------------------------------------------------------------------------------


def restate(env: Environment) -> Outcome:
    """Its retries go on by themselves as soon as the worker is back."""
    with Scene() as scene:
        found = _Restate(scene, env)
        found.die_in_the_write()
        found.worker()
        found.until("completed")
        return _outcome(env, "Restate, ctx.run_typed", scene, found.said())


def restate_once(env: Environment) -> Outcome:
    """A retry policy of one attempt: an invocation whose worker died anywhere is paused."""
    with Scene() as scene:
        found = _Restate(scene, env, "once")
        found.die_in_the_write()
        found.worker()
        found.until("paused")
        said, charges = found.said(), scene.charges
        found.resume()
        found.until("completed")
        return _outcome(
            env,
            "Restate, invocation max_attempts=1",
            scene,
            said,
            way_on="resume the invocation",
            charges=charges,
            end=found.said()["state"],
        )


class _Restate:
    """A server of one node with fsync, and one worker."""

    def __init__(self, scene: Scene, env: Environment, *options: str) -> None:
        self._scene, self._env, self._options = scene, env, options
        self._ingress, self._admin, node, self._port = (free_port() for _ in range(4))
        (scene.folder / "restate.toml").write_text(
            f'base-dir = "{scene.folder}/restate"\n'
            f'bind-address = "127.0.0.1:{node}"\n'
            f'advertised-address = "http://127.0.0.1:{node}/"\n'
            "disable-telemetry = true\n"
            f'[ingress]\nbind-address = "127.0.0.1:{self._ingress}"\n'
            f'[admin]\nbind-address = "127.0.0.1:{self._admin}"\n'
            "[bifrost.local]\nrocksdb-disable-wal-fsync = false\n"
        )
        builds = sorted(env.npm.glob("@restatedev/restate-server-*/bin/restate-server"))
        if not builds:
            raise Wrong("the npm package has no server for this machine")
        scene.start(builds[0], "--config-file", "restate.toml", "--node-name", "n1")
        scene.until("restate-server listens", lambda: listens(self._ingress))
        self._first = self.worker()
        deployment = {"uri": f"http://127.0.0.1:{self._port}/"}
        self._ask("the worker is registered", "POST", self._admin, "/deployments", deployment)

    def worker(self) -> Any:
        program = PROGRAMS / "restate_program.py"
        process = self._scene.start(self._env.python, program, str(self._port), *self._options)
        self._scene.until("the worker listens", lambda: listens(self._port))
        return process

    def die_in_the_write(self) -> None:
        path = "/Till/order-1"
        self._ask("it is started", "POST", self._ingress, f"{path}/run/send", "charge 10")
        self._ask("it is approved", "POST", self._ingress, f"{path}/approve")
        self._scene.until_dead(self._first)

    def until(self, status: str) -> None:
        self._scene.until(f"the invocation is {status}", lambda: self._row()["status"] == status)

    def resume(self) -> None:
        path = f"/invocations/{self._row()['id']}/resume"
        self._ask("it is resumed", "PATCH", self._admin, path)

    def said(self) -> dict[str, Any]:
        """From the tables that its console and `restate invocations describe` are made of."""
        row = self._row()
        events = self._select(f"select event_json from sys_journal_events where id = '{row['id']}'")
        told = [json.loads(event["event_json"]) for event in events]
        causes = [event.get("last_failure", event)["error_message"] for event in told]
        kinds = [event["ty"] for event in told]
        commands = self._select(
            f"select name from sys_journal where id = '{row['id']}' "
            "and entry_type = 'Command: Run' order by index"
        )
        names = ", ".join(command["name"] for command in commands)
        seen = "; ".join(f"{kind}: {cause}" for kind, cause in zip(kinds, causes, strict=True))
        return {"state": row["status"], "seen": f"{seen}; runs in the journal: {names}"}

    def _row(self) -> dict[str, Any]:
        query = "select id, status from sys_invocation where target = 'Till/order-1/run'"
        (row,) = self._select(query)
        return row

    def _select(self, query: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{self._admin}/query"
        status, found = http("POST", url, {"query": query})
        if status != 200:
            raise Wrong(f"{query}: {status} {found}")
        rows: list[dict[str, Any]] = found["rows"]
        return rows

    def _ask(self, what: str, method: str, port: int, path: str, body: Any = None) -> None:
        def done() -> bool:
            status, _ = http(method, f"http://127.0.0.1:{port}{path}", body)
            return 200 <= status < 300

        self._scene.until(what, done)


# ---- Temporal ----------------------------------------------------------------------------------


def temporal(env: Environment) -> Outcome:
    with Scene() as scene:
        program = _Temporal(scene, env)
        program.die_in_the_write()
        program.worker()
        return _outcome(env, "Temporal, activity, default retry", scene, program("end"))


def temporal_once(env: Environment) -> Outcome:
    with Scene() as scene:
        program = _Temporal(scene, env)
        program.die_in_the_write("1")
        program.worker()
        said, charges = program("end"), scene.charges
        program.run("reset")
        end = program("end")
        return _outcome(
            env,
            "Temporal, activity, maximum_attempts=1",
            scene,
            said,
            way_on="reset to before the charge",
            charges=charges,
            end=end["state"],
        )


class _Temporal:
    """Its development server with a database file, and one worker."""

    def __init__(self, scene: Scene, env: Environment) -> None:
        self._scene, self._env, port = scene, env, free_port()
        self._address = f"127.0.0.1:{port}"
        start = ("server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port))
        scene.start(env.bin("temporal"), *start, "--db-filename", "temporal.sqlite")
        scene.until("the Temporal server listens", lambda: listens(port))
        cluster = (env.bin("temporal"), "operator", "cluster", "health", "--address", self._address)
        scene.until("it is healthy", lambda: scene.run(*cluster, code=None).code == 0)

    def run(self, *mode: str) -> None:
        self._scene.run(*self._line(*mode))

    def __call__(self, *mode: str) -> dict[str, Any]:
        return self._scene.say(*self._line(*mode))

    def worker(self) -> Any:
        return self._scene.start(*self._line("worker"))

    def die_in_the_write(self, *attempts: str) -> None:
        first = self.worker()
        self.run("begin", *attempts)
        self._scene.until_dead(first)

    def _line(self, *mode: str) -> tuple[Any, ...]:
        return (self._env.python, PROGRAMS / "temporal_program.py", self._address, *mode)

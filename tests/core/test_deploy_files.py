"""What deploy/ says of the image and its compose files is true of the code (R72)."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import shlex
import subprocess
import threading
import tomllib
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from bridge.auth import parse_tokens
from bridge.http_server import DRAIN_S
from journal.limits import GRACE_S
from runfold.commands.work import LEAVE_S

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE = ("compose.yaml", "compose.cluster.yaml")
IMAGES = {"runfold:0.5", "nats:2.15-alpine"}
MARGIN_S = 5.0
NOT_IN_THE_IMAGE = {"bench", "dev", "server"}
"""Extras: nobody plots there; NATS has a container of its own."""

# Of the keys that compose 1.29 knows only those that v2 takes in the same way; `version` and `name`
# of the file itself are each wrong for one of them, and so is `deploy`.
KEYS = {
    *("image", "command", "entrypoint", "environment", "volumes", "ports", "networks", "hostname"),
    *("read_only", "tmpfs", "cap_drop", "security_opt", "stop_grace_period", "restart", "logging"),
    *("healthcheck", "depends_on"),
}


def services(file: str) -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / file).read_text())
    assert {key for key in found if not key.startswith("x-")} == {"services", "volumes"}
    return found["services"]


def variables(text: str) -> set[str]:
    """Those of `${NAME:?…}` and `${NAME}` that have no default in the text."""
    without = re.findall(r"\$\{(\w+)(?::\?[^}]*)?\}", text)
    return set(without) - set(re.findall(r"\$\{(\w+):-", text))


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """What make-env.sh prints."""
    made = subprocess.run(
        ["sh", DEPLOY / "make-env.sh"], capture_output=True, text=True, check=True, cwd="/"
    )
    lines = [line for line in made.stdout.splitlines() if not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


# ---- compose -----------------------------------------------------------------------------------


@pytest.mark.parametrize("file", COMPOSE)
def test_compose_v1_and_v2_know_every_key(file: str) -> None:
    for name, service in services(file).items():
        assert set(service) <= KEYS, name
        assert service["image"] in IMAGES


@pytest.mark.parametrize("file", COMPOSE)
def test_no_container_may_write_to_its_root_or_gain_rights(file: str) -> None:
    for name, service in services(file).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


@pytest.mark.parametrize("file", COMPOSE)
def test_nothing_is_open_beyond_this_machine(file: str) -> None:
    for service in services(file).values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


@pytest.mark.parametrize("file", COMPOSE)
def test_a_container_is_given_longer_than_its_drain_takes(file: str) -> None:
    needed = {"worker": GRACE_S + LEAVE_S + MARGIN_S, "bridge": DRAIN_S + MARGIN_S}
    seen = set()
    for service in services(file).values():
        words = service.get("command") or [""]
        if words[0] in needed:
            given = float(service["stop_grace_period"].removesuffix("s"))
            assert given >= needed[words[0]]
            seen.add(words[0])
    assert seen == set(needed)


@pytest.mark.parametrize("file", COMPOSE)
def test_a_new_env_file_has_every_secret_that_compose_asks_for(
    file: str, environment: dict[str, str]
) -> None:
    text = (DEPLOY / file).read_text()
    assert variables(text)
    assert variables(text) <= set(environment)


@pytest.mark.parametrize(
    ("file", "configurations"),
    [
        ("compose.yaml", ("server.conf", "roles.conf")),
        ("compose.cluster.yaml", ("cluster.conf", "server.conf", "roles.conf")),
    ],
)
def test_nats_servers_are_given_every_variable_of_their_configuration(
    file: str, configurations: tuple[str, ...]
) -> None:
    lines = "\n".join((DEPLOY / "nats" / name).read_text() for name in configurations)
    named = set(re.findall(r"^[^#\n]*?\$(RUNFOLD_\w+)", lines, re.MULTILINE))
    named |= set(re.findall(r"password: \$(RUNFOLD_\w+)", lines))
    for name, service in services(file).items():
        if service["image"].startswith("nats:"):
            assert named <= set(service["environment"]), name


@pytest.mark.parametrize("name", ["server.conf", "cluster.conf"])
def test_compose_changes_nothing_of_nats_but_who_hears_its_monitoring(name: str) -> None:
    text = (DEPLOY / "compose" / name).read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines == [f'include "../nats/{name}"', 'http: "0.0.0.0:8222"']


def test_the_bridge_takes_the_token_of_a_new_env_file(environment: dict[str, str]) -> None:
    (token,) = parse_tokens(environment["RUNFOLD_TOKENS"]).tokens
    assert token.sha256 == sha256(environment["RUNFOLD_TOKEN"].encode()).hexdigest()
    assert set(token.scopes) == {"read", "signal"}
    assert json.loads(environment["RUNFOLD_TOKENS"])  # no quoting that one of the composes undoes


def test_no_two_secrets_are_the_same(environment: dict[str, str]) -> None:
    assert len(set(environment.values())) == len(environment) >= 8


def test_scripts_are_shell_and_may_be_run() -> None:
    for shell, name in [("bash", "demo.sh"), ("sh", "make-env.sh"), ("sh", "lock.sh")]:
        assert os.access(DEPLOY / name, os.X_OK)
        subprocess.run([shell, "-n", DEPLOY / name], check=True)


# ---- the image ---------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile's last stage, continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line]
    found = [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]
    last = max(i for i, (word, _) in enumerate(found) if word == "FROM")
    return found[last:]


def test_the_image_is_nobodys_and_hears_signals() -> None:
    found = dict(instructions())
    user, _, group = found["USER"].partition(":")
    assert int(user) > 0
    assert int(group) > 0
    assert json.loads(found["ENTRYPOINT"])[-1] == "runfold"  # a list: no shell between
    assert "--single-child" in json.loads(found["ENTRYPOINT"])  # not a tool's processes, too
    assert found["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(found["HEALTHCHECK"].split("CMD", 1)[1])


def test_what_the_image_is_made_of_is_all_that_docker_sees() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    shown = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    text = (DEPLOY / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    sources = {word.rstrip("*") for line in copied for word in shlex.split(line)}
    assert sources == shown


def locked(name: str) -> dict[str, tuple[Requirement, int]]:
    """Each package of a lock with the number of its hashes."""
    text = (DEPLOY / name).read_text()
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    found: dict[str, tuple[Requirement, int]] = {}
    for entry in entries:
        one = Requirement(entry.split("\\\n")[0].strip())
        found[one.name] = (one, entry.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize("name", ["requirements.lock", "build.lock"])
def test_a_lock_names_one_version_and_its_hashes_of_each_package(name: str) -> None:
    for one, hashes in locked(name).values():
        assert [part.operator for part in one.specifier] == ["=="], one
        assert hashes >= 1, one


def test_the_image_has_all_extras_of_pyproject_but_bench_dev_and_server() -> None:
    lock = locked("requirements.lock") | locked("build.lock")
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = pyproject["project"]
    wanted = [*project["dependencies"], *pyproject["build-system"]["requires"], "dumb-init"]
    left_out: set[str] = set()
    for extra, listed in project["optional-dependencies"].items():
        if extra in NOT_IN_THE_IMAGE:
            left_out |= {one.name for one in map(Requirement, listed)}
        else:
            wanted += listed
    assert not (left_out - {Requirement(one).name for one in wanted}) & set(lock)
    for requirement in map(Requirement, wanted):
        if requirement.name == project["name"]:  # an extra that takes another one in
            continue
        one, _ = lock[requirement.name]
        (pinned,) = one.specifier
        assert requirement.specifier.contains(pinned.version), f"run deploy/lock.sh: {one}"


# ---- the health check --------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Callable[[int], int]]:
    """Serves a status at a free port, and tells the port."""
    servers: list[http.server.HTTPServer] = []

    def serve(status: int) -> int:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status if self.path == "/healthz" else 404)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return server.server_port

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("statuses", "code"),
    [((200,), 0), ((200, 200), 0), ((503,), 1), ((200, 503), 1), ((), 1)],
)
def test_the_health_check_is_what_the_doors_in_the_container_say(
    statuses: tuple[int, ...], code: int, served: Callable[[int], int]
) -> None:
    spec = importlib.util.spec_from_file_location("_healthcheck", DEPLOY / "healthcheck.py")
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    assert set(check.DOORS) == {8081, 8787, 8082}
    check.DOORS = {served(status): "/healthz" for status in statuses} | {1: "/healthz"}
    assert check.main() == code

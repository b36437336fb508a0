"""deploy/kubernetes (R72): what is there would be taken by a cluster, starts what Runfold has, and
says of graces, probes and consumers what the code says."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import typer.main
import yaml
from kit.manifests import (
    KUBERNETES,
    Document,
    NotTaken,
    documents,
    example,
    judge,
    matches,
    pods,
    rendered,
    sources,
)

from bridge.http_server import DRAIN_S
from journal.limits import CONCURRENCY, GRACE_S
from journal.stores.tasks_message import PRIORITIES, consumer_name
from runfold.cli import app
from runfold.commands.work import LEAVE_S
from worker.health import ALIVE, METRICS, PATHS
from worker.service import CUT_S

MARGIN_S = 5
"""Of a grace: for the kubelet, and for what is neither call nor thread."""

NO_KUBECTL = "no kubectl here: the overlay is not rendered"


def relative(path: Path) -> str:
    return str(path.relative_to(KUBERNETES))


@cache
def written() -> list[Document]:
    return [one for path in sources() for one in documents(path)]


def base(kind: str, name: str) -> Document:
    """A document as it is written; not to be changed."""
    found = written()
    return next(one for one in found if (one["kind"], one["metadata"]["name"]) == (kind, name))


def container(name: str) -> Document:
    kind = "Job" if name == "runfold-init" else "Deployment"
    (found,) = base(kind, name)["spec"]["template"]["spec"]["containers"]
    return found


@pytest.fixture(scope="module")
def applied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Document]]:
    """What `kubectl apply -k example` sends, with secrets that example/secrets/make.sh made."""
    if shutil.which("kubectl") is None:
        pytest.skip(NO_KUBECTL)
    folder = tmp_path_factory.mktemp("deploy")
    yield rendered(example(folder / "deploy"))
    shutil.rmtree(folder)


# ---- a cluster takes it -------------------------------------------------------------------------


@pytest.mark.parametrize("path", sources(), ids=relative)
def test_each_manifest_is_by_the_schema_of_its_kind(path: Path):
    found = documents(path)
    assert found
    for document in found:
        judge(document)


def test_what_kubectl_renders_is_by_the_schema_of_its_kind(applied: list[Document]):
    kinds = {document["kind"] for document in applied}
    assert {"Deployment", "Job", "Secret", "ScaledObject", "PodMonitor", "ConfigMap"} <= kinds
    for document in applied:
        judge(document)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason=NO_KUBECTL)
def test_the_base_alone_needs_neither_operator_nor_overlay():
    found = rendered(KUBERNETES / "base")
    assert all("namespace" not in document["metadata"] for document in found)
    own = ("v1", "apps/", "batch/", "policy/", "networking.k8s.io/")
    assert [one["kind"] for one in found if not one["apiVersion"].startswith(own)] == []


def misspelt(change: Callable[[Any], object], kind: str, name: str = "runfold-worker") -> Document:
    document = copy.deepcopy(base(kind, name))
    change(document["spec"])
    return document


def in_pod(spec: Any) -> Any:
    return spec["template"]["spec"]


@pytest.mark.parametrize(
    ("kind", "name", "change"),
    [
        ("Deployment", "runfold-worker", lambda s: in_pod(s).update(terminationGracePeriod=45)),
        ("Deployment", "runfold-worker", lambda s: s.update(replicas="two")),
        (
            "Deployment",
            "runfold-bridge",
            lambda s: in_pod(s)["containers"][0].update(readinesProbe={}),
        ),
        (
            "Deployment",
            "runfold-bridge",
            lambda s: in_pod(s)["containers"][0]["lifecycle"]["preStop"].update(sleeps=5),
        ),
        ("Job", "runfold-init", lambda s: s.update(ttlSecondsAfterFinish=1)),
        ("PodDisruptionBudget", "runfold-worker", lambda s: s.update(maxUnavailble=1)),
        ("NetworkPolicy", "runfold-worker", lambda s: s["egress"][0].update(port=[])),
        ("ScaledObject", "runfold-worker", lambda s: s.update(minReplicas=1)),
        ("ScaledObject", "runfold-worker", lambda s: s["advanced"].update(scalingModifier={})),
        ("PodMonitor", "runfold-worker", lambda s: s["podMetricsEndpoints"][0].update(prt="x")),
        ("PrometheusRule", "runfold", lambda s: s["groups"][0]["rules"][0].update(expression="")),
    ],
)
def test_a_slip_of_the_pen_is_found(kind: str, name: str, change: Callable[[Any], object]):
    judge(misspelt(lambda spec: None, kind, name))
    with pytest.raises(NotTaken):
        judge(misspelt(change, kind, name))


def test_a_kind_that_nobody_knows_is_refused():
    with pytest.raises(NotTaken, match="Deploymnt"):
        judge({"apiVersion": "apps/v1", "kind": "Deploymnt", "metadata": {"name": "x"}})


# ---- its parts know each other ------------------------------------------------------------------


def test_what_a_pod_names_is_there(applied: list[Document]):
    there = {(one["kind"], one["metadata"]["name"]) for one in applied}
    named: set[tuple[str, str]] = set()
    for _, template in pods(applied):
        spec = template["spec"]
        named.add(("ServiceAccount", spec["serviceAccountName"]))
        for source in spec["containers"][0]["envFrom"]:
            for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if key in source:
                    named.add((kind, source[key]["name"]))
        for volume in spec.get("volumes", ()):
            if "secret" in volume:
                named.add(("Secret", volume["secret"]["secretName"]))
    assert named - there == set()
    assert len([one for one in named if one[0] == "Secret"]) == 5


def test_each_role_has_its_own_password_and_the_admins_is_in_the_job_alone(
    applied: list[Document],
):
    roles: dict[str, list[str]] = {}
    for name, template in pods(applied):
        for source in template["spec"]["containers"][0]["envFrom"]:
            if "secretRef" in source:
                secret = source["secretRef"]["name"].rpartition("-")[0]
                roles.setdefault(secret, []).append(name)
    assert roles == {
        f"runfold-{role}": [f"runfold-{pod}"]
        for role, pod in (
            ("admin", "init"),
            ("worker", "worker"),
            ("bridge", "bridge"),
            ("auditor", "auditor"),
        )
    }


def test_every_selector_finds_pods(applied: list[Document]):
    labels = [template["metadata"]["labels"] for _, template in pods(applied)]
    looked = 0
    for document in applied:
        spec = document.get("spec", {})
        selector = spec.get("podSelector") or spec.get("selector")
        if document["kind"] != "Job" and selector is not None:
            looked += 1
            assert any(matches(selector, one) for one in labels), document["metadata"]["name"]
    assert looked >= 14


def test_what_scrapes_finds_a_port_and_a_path(applied: list[Document]):
    served = {"health": METRICS, "http": METRICS, "metrics": METRICS}
    monitors = [one["spec"] for one in applied if one["kind"] == "PodMonitor"]
    assert len(monitors) == 3
    for spec in monitors:
        for _, template in pods(applied):
            if matches(spec["selector"], template["metadata"]["labels"]):
                (endpoint,) = spec["podMetricsEndpoints"]
                (port,) = template["spec"]["containers"][0]["ports"]
                assert endpoint["port"] == port["name"]
                assert endpoint["path"] == served[port["name"]]


def test_no_pod_may_do_more_than_the_restricted_standard_allows(applied: list[Document]):
    for name, template in pods(applied):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        for one in spec["containers"]:
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert one["resources"]["limits"].keys() == {"memory"}
            assert one["resources"]["requests"].keys() == {"cpu", "memory"}


def test_every_pod_is_closed_but_for_what_a_policy_names(applied: list[Document]):
    policies = [one["spec"] for one in applied if one["kind"] == "NetworkPolicy"]
    closed = [one for one in policies if "ingress" not in one and "egress" not in one]
    (nothing,) = closed
    assert nothing["policyTypes"] == ["Ingress", "Egress"]
    for _, template in pods(applied):
        assert matches(nothing["podSelector"], template["metadata"]["labels"])
    ports = {
        port["port"]
        for one in policies
        for rule in one.get("ingress", ())
        for port in rule["ports"]
    }
    assert ports == {8081, 8082, 8787}


# ---- it says what the code says -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["worker", "bridge", "auditor", "init"])
def test_the_command_line_of_each_pod_is_one_that_runfold_takes(name: str):
    command, *words = container(f"runfold-{name}")["args"]
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group | typer.core.TyperGroup)
    found = group.commands[command]
    context = found.make_context(command, list(words))
    assert context.params["store"] is None  # it comes from the secret: RUNFOLD_STORE
    assert context.params["namespace"] == "runfold"


@pytest.mark.parametrize(
    ("name", "option", "port"),
    [
        ("worker", "--health", 8081),
        ("bridge", "--listen", 8787),
        ("auditor", "--metrics-port", 8082),
    ],
)
def test_each_pod_listens_at_the_port_it_names_and_on_every_address(
    name: str, option: str, port: int
):
    found = container(f"runfold-{name}")
    args = found["args"]
    assert args[args.index(option) + 1] == f"0.0.0.0:{port}"
    assert [one["containerPort"] for one in found["ports"]] == [port]


def test_a_worker_is_restarted_only_where_a_kill_helps_and_takes_part_only_when_it_can_work():
    """Never for want of NATS: see worker/health.py."""
    found = container("runfold-worker")
    assert found["livenessProbe"]["httpGet"] == {"path": ALIVE, "port": "health"}
    assert found["startupProbe"]["httpGet"] == {"path": ALIVE, "port": "health"}
    assert found["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}
    assert "/readyz" in PATHS


def test_a_bridge_is_never_restarted_for_want_of_nats():
    found = container("runfold-bridge")
    assert found["livenessProbe"]["httpGet"]["path"] == "/"  # the page: a file
    assert found["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_a_pod_is_killed_only_after_everything_that_a_drain_may_take():
    worker = base("Deployment", "runfold-worker")["spec"]["template"]["spec"]
    args = worker["containers"][0]["args"]
    grace_s = float(args[args.index("--grace") + 1])
    assert grace_s == GRACE_S
    assert worker["terminationGracePeriodSeconds"] >= grace_s + CUT_S + LEAVE_S + MARGIN_S
    bridge = base("Deployment", "runfold-bridge")["spec"]["template"]["spec"]
    sleep_s = bridge["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert bridge["terminationGracePeriodSeconds"] >= sleep_s + DRAIN_S + MARGIN_S


@pytest.mark.parametrize("name", ["runfold-worker", "runfold-bridge"])
def test_a_rollout_and_a_drained_node_leave_the_others_at_work(name: str):
    spec = base("Deployment", name)["spec"]
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert spec["replicas"] >= 2
    assert base("PodDisruptionBudget", name)["spec"]["maxUnavailable"] == 1


def test_the_autoscaler_asks_for_every_consumer_of_its_agent_and_adds_them_up():
    spec = base("ScaledObject", "runfold-worker")["spec"]
    triggers = spec["triggers"]
    agent = triggers[0]["metadata"]["consumer"]
    consumers = [trigger["metadata"]["consumer"] for trigger in triggers]
    assert sorted(consumers) == sorted(consumer_name(agent, one) for one in PRIORITIES)
    modifiers = spec["advanced"]["scalingModifiers"]
    assert modifiers["formula"].split(" + ") == [trigger["name"] for trigger in triggers]
    assert 0 < int(modifiers["target"]) < CONCURRENCY
    assert {trigger["metadata"]["stream"] for trigger in triggers} == {"RUNFOLD_TASKS"}


def test_with_the_autoscaler_no_apply_sets_the_number_of_workers_back(applied: list[Document]):
    found = {one["metadata"]["name"]: one["spec"] for one in applied if one["kind"] == "Deployment"}
    assert "replicas" not in found["runfold-worker"]
    assert found["runfold-bridge"]["replicas"] == 2


def test_nats_syncs_every_write_and_stops_before_its_volume_is_full():
    """The values for NATS' own chart: the chart isn't here, so what matters is read from them."""
    values = yaml.safe_load((KUBERNETES / "nats-values.yaml").read_text())
    config = values["config"]
    assert config["cluster"] == {
        "enabled": True,
        "replicas": 3,
        "merge": {"ping_interval": "5s", "ping_max": 2},
    }
    assert config["jetstream"]["merge"] == {"sync_interval": "always"}
    store = config["jetstream"]["fileStore"]
    size, kept = (int(text.removesuffix("Gi")) for text in (store["pvc"]["size"], store["maxSize"]))
    assert kept < size
    assert config["merge"]["00$include"] == "roles.conf"
    assert values["podDisruptionBudget"] == {"enabled": True}

"""The manifests of deploy/kubernetes: read, rendered, and judged by the schemas of what takes them.

Kubernetes' own kinds by Kubernetes' own schemas (kubernetes-validate, strict). Of kinds that come
with the Prometheus operator and KEDA only the fields in use are known here, each with its type: a
misspelt one is no field, a new one must be added below.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import kubernetes_validate
import msgspec
import yaml
from msgspec import Struct

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
VERSIONS = ("1.30", "1.37")
"""The oldest that takes all of it (a preStop that sleeps), and the newest with a schema here."""

Document = dict[str, Any]


class NotTaken(Exception):
    """What would be refused, and why."""


def documents(path: Path) -> list[Document]:
    """Of a YAML file."""
    return parsed(path.read_text())


def parsed(text: str) -> list[Document]:
    """Of a text in YAML."""
    return [found for found in yaml.load_all(text, yaml.CSafeLoader) if found]


def sources() -> list[Path]:
    """All files of manifests, as they are written."""
    others = ("kustomization.yaml", "nats-values.yaml")
    return sorted(path for path in KUBERNETES.rglob("*.yaml") if path.name not in others)


def rendered(folder: Path) -> list[Document]:
    """What `kubectl apply -k` would send."""
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or done.stderr:  # what is deprecated is said there
        raise NotTaken(done.stderr)
    return parsed(done.stdout)


def example(folder: Path) -> Path:
    """The example overlay in a copy of deploy/, with secrets of its own."""
    kept = ("kubernetes", "grafana", "prometheus", "nats")
    made = shutil.ignore_patterns("*.env", "*.token", "tokens.json")
    for name in kept:
        shutil.copytree(DEPLOY / name, folder / name, ignore=made)
    overlay = folder / "kubernetes" / "example"
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [overlay / "secrets" / "make.sh"]
    subprocess.run(command, env=environ, check=True, capture_output=True)
    return overlay


def judge(document: Document) -> None:
    """Raises NotTaken, KeyError."""
    kind = f"{document['apiVersion']} {document['kind']}"
    try:
        if kind in _KINDS:
            msgspec.convert(document, _KINDS[kind])
        else:
            for version in VERSIONS:
                kubernetes_validate.validate(document, version, strict=True)
    except (msgspec.ValidationError, kubernetes_validate.ValidationError) as error:
        name = document["metadata"].get("name")
        raise NotTaken(f"{kind} {name}: {error}") from error
    except kubernetes_validate.SchemaNotFoundError as error:
        raise NotTaken(error.message) from error


def pods(found: list[Document]) -> Iterator[tuple[str, Document]]:
    """By the name of what makes them, their template."""
    for document in found:
        if document["kind"] in ("Deployment", "Job"):
            yield document["metadata"]["name"], document["spec"]["template"]


def matches(selector: Document, labels: dict[str, str]) -> bool:
    """Whether a selector by `matchLabels`, or of a service, is met by these."""
    return selector.get("matchLabels", selector).items() <= labels.items()


# ---- kinds that Kubernetes has no schema of -----------------------------------------------------


class Strict(Struct, forbid_unknown_fields=True, rename="camel", kw_only=True):
    pass


class Metadata(Strict):
    name: str
    namespace: str = ""
    labels: dict[str, str] = {}


class Matching(Strict):
    match_labels: dict[str, str]


class SecretKey(Strict):
    name: str
    key: str


class Authorization(Strict):
    credentials: SecretKey


class Endpoint(Strict):
    port: str
    path: str
    interval: str
    authorization: Authorization | None = None


class PodMonitorSpec(Strict):
    selector: Matching
    pod_metrics_endpoints: list[Endpoint]


class PodMonitor(Strict):
    api_version: str
    kind: str
    metadata: Metadata
    spec: PodMonitorSpec


class Rule(Struct, forbid_unknown_fields=True, kw_only=True):
    """Of a file of rules, too."""

    alert: str
    expr: str
    labels: dict[str, str]
    annotations: dict[str, str]
    duration: str = msgspec.field(name="for", default="")


class Group(Struct, forbid_unknown_fields=True):
    name: str
    rules: list[Rule]


class Rules(Struct, forbid_unknown_fields=True):
    groups: list[Group]


class PrometheusRule(Strict):
    api_version: str
    kind: str
    metadata: Metadata
    spec: Rules


class Named(Strict):
    name: str


class Policy(Strict):
    type: Literal["Pods", "Percent"]
    value: int
    period_seconds: int


class Pace(Strict):
    stabilization_window_seconds: int
    policies: list[Policy]


class Behavior(Strict):
    scale_up: Pace
    scale_down: Pace


class HpaConfig(Strict):
    behavior: Behavior


class Modifiers(Strict):
    formula: str
    target: str
    metric_type: Literal["AverageValue", "Value"]


class Advanced(Strict):
    scaling_modifiers: Modifiers
    horizontal_pod_autoscaler_config: HpaConfig


class Trigger(Strict):
    type: Literal["nats-jetstream"]
    name: str
    metadata: dict[str, str]


class ScaledObjectSpec(Strict):
    scale_target_ref: Named
    polling_interval: int
    min_replica_count: int
    max_replica_count: int
    advanced: Advanced
    triggers: list[Trigger]


class ScaledObject(Strict):
    api_version: str
    kind: str
    metadata: Metadata
    spec: ScaledObjectSpec


_KINDS: dict[str, type[Struct]] = {
    "monitoring.coreos.com/v1 PodMonitor": PodMonitor,
    "monitoring.coreos.com/v1 PrometheusRule": PrometheusRule,
    "keda.sh/v1alpha1 ScaledObject": ScaledObject,
}

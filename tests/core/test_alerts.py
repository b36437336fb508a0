"""deploy/prometheus, deploy/grafana (R72, R73): every expression parses, asks for metrics and
labels that Runfold has, and every alert is explained and tried both ways."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
import promql_parser
import pytest
from kit.build import AGENT, AT, Log, claimed, started
from kit.manifests import DEPLOY, KUBERNETES, Rule, Rules, documents
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from bridge.fleet_metrics import FleetLook
from bridge.metrics import Metrics
from journal.claims import Answer, Delivery, Take, decide_task
from journal.counting import Counting
from journal.families import Family
from journal.stores.jetstream import JetStreamStore
from runfold.audit_metrics import _Collector
from worker.agent import Agent
from worker.metrics import gauges_of
from worker.models.scripted import ScriptedModel
from worker.service import Worker

PROMETHEUS = DEPLOY / "prometheus"
RUNBOOK = DEPLOY.parent / "docs" / "alerts.md"
NOWHERE = "nats://127.0.0.1:1"
TARGET = frozenset({"namespace", "pod", "instance", "job"})
"""Labels that whoever scrapes adds."""

PROMTOOL = shutil.which("promtool", path=f"{os.environ['PATH']}:/usr/lib/prometheus")
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here (Debian: apt-get install prometheus)"
)


# ---- what Runfold has ---------------------------------------------------------------------------


@cache
def known() -> dict[str, frozenset[str]]:
    """Each series' name, with its labels."""
    worker = Worker(NOWHERE, [Agent("a", model=ScriptedModel([]))])
    look = FleetLook(JetStreamStore(NOWHERE))
    found: dict[str, frozenset[str]] = {}
    for family in (*Counting(time.monotonic).families(), *gauges_of(worker), *look.families()):
        found |= dict(series(family))
    bridge = Metrics()
    bridge.request("runs", "GET", 200, 0.1)
    bridge.signal("approve", "applied")
    for family in text_string_to_metric_families(bridge.text().decode()):
        for sample in family.samples:
            if sample.name.startswith("runfold_bridge_") and "_created" not in sample.name:
                found[sample.name] = frozenset(sample.labels)
    for metric in _Collector(Counts()).collect():
        found[metric.samples[0].name] = frozenset()
    return found


class Counts:
    violations = runs = records = behind = 0
    looked_at = 0.0


def series(family: Family) -> Iterator[tuple[str, frozenset[str]]]:
    labels = frozenset(family.labels)
    match family.kind:
        case "counter":
            yield f"{family.name}_total", labels
        case "gauge":
            yield family.name, labels
        case "histogram":
            yield f"{family.name}_bucket", labels | {"le"}
            yield f"{family.name}_count", labels
            yield f"{family.name}_sum", labels


# ---- what is asked for --------------------------------------------------------------------------


class Asked(Struct):
    """Of an expression: what it selects, and the labels it groups or matches by."""

    selected: list[tuple[str, frozenset[str]]]
    grouped: set[str]


def asked(expression: str) -> Asked:
    """Raises ValueError for what is no PromQL. Grafana's variables are put in place first."""
    text = expression.replace("$__rate_interval", "5m").replace("$namespace", ".*")
    found = Asked([], set())

    def look(node: Any) -> None:
        match node:
            case promql_parser.VectorSelector():
                labels = frozenset(one.name for one in node.matchers.matchers)
                found.selected.append((node.name, labels))
            case promql_parser.AggregateExpr() if node.modifier is not None:
                found.grouped.update(node.modifier.labels)
            case promql_parser.BinaryExpr() if node.modifier is not None:
                matching = node.modifier.matching
                found.grouped.update(matching.labels if matching is not None else ())
            case _:
                pass

    promql_parser.walk(promql_parser.parse(text), look)
    assert found.selected, expression
    return found


def unknown(expression: str) -> set[str]:
    """What it asks for that isn't there."""
    ask, there = asked(expression), known()
    bad = {name for name, _ in ask.selected if name not in there}
    labels = TARGET.union(*(there.get(name, frozenset()) for name, _ in ask.selected))
    bad |= {f"by {label}" for label in ask.grouped - labels}
    for name, used in ask.selected:
        bad |= {f"{name}{{{label}}}" for label in used - TARGET - there.get(name, used)}
    return bad


def test_what_is_not_there_is_found():
    assert unknown('sum by (kind) (rate(runfold_steps_total{outcome="error"}[5m]))') == set()
    assert unknown("runfold_step_total > 0") == {"runfold_step_total"}
    assert unknown("sum by (why) (runfold_steps_total)") == {"by why"}
    assert unknown('runfold_parks_total{kind="x"}') == {"runfold_parks_total{kind}"}
    assert unknown("runfold_fenced_total and on (agent) runfold_fenced_total") == {"by agent"}
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        asked("sum by (x (y)")


# ---- alerts -------------------------------------------------------------------------------------


def rules() -> list[Rule]:
    (found,) = documents(PROMETHEUS / "alerts.yaml")
    return [rule for group in msgspec.convert(found, Rules).groups for rule in group.rules]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.alert)
def test_an_alert_asks_for_what_there_is_and_says_what_to_do(rule: Rule):
    assert unknown(rule.expr) == set()
    assert rule.labels.keys() == {"severity"}
    assert rule.labels["severity"] in ("critical", "warning")
    assert rule.annotations.keys() == {"summary", "description", "runbook_url"}
    assert rule.annotations["runbook_url"] == f"docs/alerts.md#{rule.alert.lower()}"


def test_the_runbook_explains_each_alert_and_no_other():
    headings = re.findall(r"^## (Runfold\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(rule.alert for rule in rules())


def test_each_alert_is_tried_when_it_should_come_and_when_not():
    (found,) = documents(PROMETHEUS / "alerts_test.yaml")
    cases = [case for test in found["tests"] for case in test["alert_rule_test"]]
    names = {rule.alert for rule in rules()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def test_workers_lost_counts_each_way_that_a_live_claim_is_taken_over():
    """Killed: nobody answers for it. Stalled or cut off: silent, and its message comes again."""
    (rule,) = (rule for rule in rules() if rule.alert == "RunfoldWorkersLost")
    (of,) = re.findall(r'reason=~"([a-z|]+)"', rule.expr)
    fold = Log(started(), claimed("w1", task=7, delivery=1)).fold
    found: set[str] = set()
    ways: tuple[tuple[Answer, ...], ...] = (("nobody", "nobody"), ("no",), ("silent",))
    for answers in ways:
        again = Delivery(sequence=7, delivery=2, cause=1)
        decision = decide_task(
            fold,
            again,
            answers,
            agent=AGENT,
            accepts=("1",),
            restart_limit=5,
            ack_wait_s=30,
            now=AT,
        )
        assert isinstance(decision, Take)
        found.add(decision.reason)
    assert set(of.split("|")) == found


def test_a_bridge_that_sees_less_hides_no_degraded_storage():
    """Of 1, 0 and -1 the least is not the worst: 0 is asked for by itself."""
    panel = next(one for one in dashboard().panels if one.title == "Storage")
    (rule,) = (rule for rule in rules() if rule.alert == "RunfoldStorageDegraded")
    assert re.search(r"\(runfold_storage_safe == 0\)", rule.expr)
    assert re.match(r"min\(runfold_storage_safe\{[^}]*\} == 0\) or ", panel.targets[0].expr)


def test_the_operators_rule_is_the_same_rules():
    (rule,) = documents(KUBERNETES / "components" / "prometheus-operator" / "rule.yaml")
    (plain,) = documents(PROMETHEUS / "alerts.yaml")
    assert rule["spec"] == plain, "its first lines say how it is made anew"


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [
        ("check", "rules", "--lint-fatal", "alerts.yaml"),
        ("test", "rules", "alerts_test.yaml"),
        ("check", "config", "--syntax-only", "scrape.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(words: tuple[str, ...]):
    assert PROMTOOL is not None
    command = [PROMTOOL, *words]
    done = subprocess.run(command, cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- the dashboard ------------------------------------------------------------------------------


class Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class Source(Strict):
    type: str
    uid: str


class Target(Strict, rename="camel"):
    datasource: Source
    editor_mode: str
    expr: str
    legend_format: str
    range: bool
    ref_id: str


class Place(Strict):
    h: int
    w: int
    x: int
    y: int


class Panel(Strict, rename="camel"):
    id: int
    type: str
    title: str
    grid_pos: Place
    description: str = ""
    datasource: Source | None = None
    targets: list[Target] = []
    field_config: dict[str, Any] = {}
    options: dict[str, Any] = {}
    collapsed: bool = False
    panels: list[Any] = []


class Dashboard(Strict, rename="camel"):
    title: str
    uid: str
    tags: list[str]
    description: str
    schema_version: int
    version: int
    editable: bool
    graph_tooltip: int
    refresh: str
    timezone: str
    time: dict[str, str]
    annotations: dict[str, list[Any]]
    links: list[Any]
    templating: dict[str, list[dict[str, Any]]]
    panels: list[Panel]


def dashboard() -> Dashboard:
    return msgspec.json.decode((DEPLOY / "grafana" / "runfold.json").read_bytes(), type=Dashboard)


def expressions() -> list[str]:
    return [target.expr for panel in dashboard().panels for target in panel.targets]


def test_every_panel_asks_for_what_there_is():
    assert [found for one in expressions() if (found := unknown(one))] == []


def test_the_dashboard_shows_every_metric():
    shown = {name for one in expressions() for name, _ in asked(one).selected}
    whole = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known()}
    assert whole - {re.sub(r"_bucket$", "", name) for name in shown} == set()


def test_every_panel_goes_by_the_variables_and_has_a_place_of_its_own():
    found = dashboard()
    assert [one["name"] for one in found.templating["list"]] == ["datasource", "namespace"]
    taken: set[tuple[int, int]] = set()
    for panel in found.panels:
        place = panel.grid_pos
        cells = {
            (x, y)
            for x in range(place.x, place.x + place.w)
            for y in range(place.y, place.y + place.h)
        }
        assert not cells & taken, panel.title
        assert place.x + place.w <= 24
        taken |= cells
        assert (panel.type == "row") == (not panel.targets)
        for target in panel.targets:
            assert (
                target.datasource
                == panel.datasource
                == Source(type="prometheus", uid="${datasource}")
            )
            selected = len(asked(target.expr).selected)
            assert target.expr.count('namespace=~"$namespace"') == selected
    assert len({panel.id for panel in found.panels}) == len(found.panels)

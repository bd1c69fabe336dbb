"""The dashboard, the scrape file and the page on operations name what a running server really has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from promql_parser import AggregateExpr, Call, Expr, VectorSelector, parse, walk

from isthmus.server.config import ServerConfig
from tests.server.running import Server

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "monitoring" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
TARGETS: list[dict[str, Any]] = [target for panel in PANELS for target in panel["targets"]]
E = TypeVar("E", bound=Expr)


def within(expr: Expr, kind: type[E]) -> list[E]:
    """The parts of a query that are of one kind, the query itself included."""
    found: list[E] = []
    walk(expr, lambda part: found.append(part) if isinstance(part, kind) else None)
    return found


def names(expr: Expr) -> list[str]:
    return [selector.name or "" for selector in within(expr, VectorSelector)]


@pytest.fixture
def samples(server: Server) -> dict[str, set[str]]:
    """Labels by the name of every sample, after a request was served."""
    server.openai.completions.create(model="tiny", prompt="the cat", max_tokens=3)
    found: dict[str, set[str]] = {}
    for sample in server.metrics():
        name, _, labels = sample.partition("{")
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


@pytest.fixture
def counters(server: Server) -> set[str]:
    """Samples that only grow."""
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", server.http.get("/metrics").text, re.MULTILINE)
    whole = {name for name, kind in kinds if kind == "counter"}
    return whole | {f"{name}_bucket" for name, kind in kinds if kind == "histogram"}


def test_the_dashboard_asks_for_metrics_that_exist(samples: dict[str, set[str]]) -> None:
    asked = {name for target in TARGETS for name in names(parse(target["expr"]))}
    assert len(asked) > 10
    assert asked <= set(samples)


def test_the_dashboard_asks_for_labels_that_exist(samples: dict[str, set[str]]) -> None:
    for target in TARGETS:
        query = parse(target["expr"])
        for selector in within(query, VectorSelector):
            assert {matcher.name for matcher in selector.matchers.matchers} <= samples[selector.name or ""], target
        for part in within(query, AggregateExpr):
            assert part.modifier is not None, target
            assert part.modifier.labels, target
            for name in names(part):
                assert set(part.modifier.labels) <= samples[name], target


def test_legends_name_labels_that_are_left(samples: dict[str, set[str]]) -> None:
    for target in TARGETS:
        query = parse(target["expr"])
        asked = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        if isinstance(query, AggregateExpr):
            assert query.modifier is not None
            assert asked == set(query.modifier.labels), "curves of one panel have different names"
        elif within(query, AggregateExpr):
            assert asked == set(), target
        else:
            assert all(asked == samples[name] for name in names(query)), target


def test_rates_are_those_of_counters(counters: set[str]) -> None:
    rated: list[str] = []
    for target in TARGETS:
        query = parse(target["expr"])
        inside = [name for call in within(query, Call) if call.func.name == "rate" for name in names(call)]
        rated += inside
        assert set(names(query)) & counters <= set(inside), "the bare count of a counter says little"
    assert len(rated) > 10
    assert set(rated) <= counters


def test_grafana_can_load_it() -> None:
    assert DASHBOARD["title"]
    assert isinstance(DASHBOARD["schemaVersion"], int)
    assert "id" not in DASHBOARD, "an id belongs to one Grafana, and importing a foreign one fails"
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    ids = [panel["id"] for panel in PANELS]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        assert {"type", "title", "gridPos", "fieldConfig", "options"} <= set(panel)
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert refs
        assert len(set(refs)) == len(refs)
        assert all(target["expr"] for target in panel["targets"])


def lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Where what was given did not come through."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            yield from lost(value, kept.get(name), f"{path}.{name}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for i, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{i}]")
    elif given != kept:
        yield path


def test_every_field_is_one_that_grafana_has() -> None:
    """Grafana's own model of dashboards, panels, their options and Prometheus queries; it drops what it has not."""
    register_default_plugins()
    model = Dashboard.from_json(DASHBOARD)
    assert list(lost(DASHBOARD, json.loads(JSONEncoder().encode(model)))) == []


def test_panels_lie_beside_each_other() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        assert 0 <= at["x"] < at["x"] + at["w"] <= 24
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells, panel["title"]
        cells |= mine


def test_prometheus_scrapes_where_the_server_listens() -> None:
    (job,) = yaml.safe_load((ROOT / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert job["static_configs"][0]["targets"] == [f"{ServerConfig().host}:{ServerConfig().port}"]


def test_every_metric_is_explained(server: Server) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    kinds = re.findall(r"^# TYPE isthmus:(\w+) ", server.http.get("/metrics").text, re.MULTILINE)
    assert len(kinds) > 15
    assert [name for name in kinds if f"`{name}" not in page] == []


def test_every_figure_of_the_pool_is_explained(server: Server) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    pool = server.pool()
    names = set(pool) | set(pool["groups"][0])
    assert [name for name in sorted(names) if f"`{name}" not in page] == []

"""Dashboards and alerts in deploy/: existing metrics and labels only."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from rankdumpd.server.metrics import METRIC_DEFINITIONS, find_metric_name

DEPLOY = Path(__file__).parents[3] / "deploy"
NAMES = re.compile(r"\brankdump_\w+")
LABELS = re.compile(r"\b(rankdump_\w+)\{([^}]*)\}")
OF_SERVERS = {"instance", "job", "le"}
"""Labels that Prometheus itself adds, or a histogram."""


def queries_of_the_dashboard() -> list[str]:
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    found = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    variables = [each["query"] for each in board["templating"]["list"]]
    return found + [each["query"] for each in variables if isinstance(each, dict)]


def rules() -> list[dict]:
    return [
        rule
        for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
        for rule in group["rules"]
    ]


def test_queries_use_existing_metrics_and_labels():
    queries = [*queries_of_the_dashboard(), *(rule["expr"] for rule in rules())]
    assert len(queries) > 30
    for query in queries:
        assert NAMES.search(query) or "process_" in query, query
        for name in NAMES.findall(query):
            assert find_metric_name(name) in METRIC_DEFINITIONS, query
        for name, labels in LABELS.findall(query):
            known = METRIC_DEFINITIONS[find_metric_name(name)].labels
            for label, value in re.findall(r'(\w+)\s*[=!]~?\s*"([^"]*)"', labels):
                assert label in known.keys() | OF_SERVERS, query
                if known.get(label) and re.fullmatch(r"\w+", value):
                    assert value in known[label], query
        for by in re.findall(r"by \(([^)]*)\)", query):
            known = {
                label
                for name in NAMES.findall(query)
                for label in METRIC_DEFINITIONS[find_metric_name(name)].labels
            }
            assert set(by.replace(" ", "").split(",")) <= known | OF_SERVERS, query


def test_dashboard_shows_every_metric():
    asked = {
        find_metric_name(n) for query in queries_of_the_dashboard() for n in NAMES.findall(query)
    }
    assert asked == set(METRIC_DEFINITIONS)


def test_alerts_have_unique_names_severity_and_known_labels():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        texts = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
        known = {
            label for n in NAMES.findall(rule["expr"]) for label in METRIC_DEFINITIONS[n].labels
        }
        assert set(texts) <= known | OF_SERVERS, rule["alert"]


def test_dashboard_panels_do_not_overlap():
    board = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)


def test_metrics_page_of_docs_lists_every_metric():
    text = (DEPLOY.parent / "docs" / "observability.md").read_text()
    rows = dict(re.findall(r"^\| `(rankdump_\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert rows == {name: metric.kind.value for name, metric in METRIC_DEFINITIONS.items()}

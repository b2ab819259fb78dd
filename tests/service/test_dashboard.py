"""The dashboard asks only for what the server states."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.serving import ServerThread, eventually

OPS = Path(__file__).resolve().parents[2] / "ops"
WORDS = {
    "sum",
    "max",
    "rate",
    "histogram_quantile",
    "by",
    "le",
    "outcome",
    "finished_reason",
    "route",
    "status",
}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((OPS / "grafana.json").read_text())
    return document


def expressions(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def names(expression: str) -> set[str]:
    """Return the metrics of an expression; whatever else stands there must be known."""
    bare = re.sub(r"\{[^}]*\}|\[\$__rate_interval\]|\"[^\"]*\"", " ", expression)
    assert not re.sub(r"[\w:.,()/\s]", "", bare)
    return {word for word in re.findall(r"[a-zA-Z_][\w:]*", bare) if word not in WORDS}


def test_every_metric_of_the_dashboard_is_stated(dashboard: dict[str, Any], scripted: ServerThread) -> None:
    def stated() -> set[str]:
        text = scripted.request("GET", "/metrics").body.decode()
        return {sample.name for each in text_string_to_metric_families(text) for sample in each.samples}

    assert scripted.chat(max_tokens=2).status == 200
    eventually(lambda: "logitwire:http_requests_total" in stated())
    asked = set().union(*map(names, expressions(dashboard)))
    assert len(asked) > 20
    assert asked <= stated()
    for variable in dashboard["templating"]["list"]:
        (metric, label) = re.fullmatch(
            r"label_values\(([\w:]+), (\w+)\)", variable["query"]["query"]
        ).groups()
        assert metric in stated()
        assert label in ("model_name", "job")


def test_the_dashboard_can_be_imported(dashboard: dict[str, Any]) -> None:
    (source,) = dashboard["__inputs"]
    assert (source["type"], source["pluginId"]) == ("datasource", "prometheus")
    assert {"title", "uid", "schemaVersion", "time", "templating", "panels"} <= set(dashboard)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(taken)) == len(panels)
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    for panel in panels:
        assert panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in [panel, *panel["targets"]]:
            assert target["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables | {"__rate_interval"}

"""The Grafana board and the alerts use existing metrics, labels and values, and together all metrics."""

import itertools
import json
import pathlib
import re

import pytest
import yaml
from synthetic_runs import exported

from zaya_jax.aegis.agent.log_rules import load_rules
from zaya_jax.aegis.supervisor.restart_policy import ACTIONS
from zaya_jax.aegis.views.goodput import BUCKETS
from zaya_jax.aegis.views.prometheus_samples import KILLED, METRICS
from zaya_jax.run_folder.names import AT, BEGAN, DAMAGED, DECIDED, ENDS, SPIKED, STARVED

CLUSTER = pathlib.Path(__file__).parents[3] / "configs/cluster"
BOARD = json.loads((CLUSTER / "grafana.json").read_text())
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((CLUSTER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
}
SELECTOR = re.compile(r"\b(zaya_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')
KNOWN = {
    "bucket": BUCKETS,
    "end": (*ENDS, KILLED),
    "action": ACTIONS,
    "event": (BEGAN, AT, SPIKED, STARVED, DAMAGED, DECIDED, *ENDS),
    "split": ("train", "validation"),
    "class": tuple(rule.name for rule in load_rules()),
}
"""Known values of labels."""


def panels():
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def expressions():
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in BOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for name, rule in ALERTS.items():
        yield name, rule["expr"]


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_queries_use_existing_metrics_and_labels(where, expression):
    asked = SELECTOR.findall(expression)
    assert asked
    for name, matchers in asked:
        assert name in METRICS
        found = MATCHER.findall(matchers)
        assert re.sub(MATCHER, "", matchers).strip(", ") == ""
        for label, operator, value in found:
            assert label in ("run", *METRICS[name].labels)
            if label == "run":
                assert (operator, value) == ("=~", "$run")
            else:
                assert set(value.split("|")) <= set(KNOWN[label])
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


def test_every_metric_is_used():
    asked = {name for _, expression in expressions() for name, _ in SELECTOR.findall(expression)}
    assert asked == set(METRICS)


def test_panels_have_titles_and_descriptions_and_do_not_overlap():
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    taken = []
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
        taken.extend(cells)
    assert len(taken) == len(set(taken))
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")


def test_the_data_source_is_chosen_at_import():
    (source,) = [each for each in BOARD["templating"]["list"] if each["type"] == "datasource"]
    uid = f"${{{source['name']}}}"
    asking = [*panels(), *BOARD["annotations"]["list"], *(t for p in panels() for t in p["targets"])]
    assert {each["datasource"]["uid"] for each in asking} == {uid}


@pytest.mark.parametrize("name", ALERTS)
def test_alerts_have_summaries_and_descriptions(name):
    rule = ALERTS[name]
    assert set(rule) - {"for"} == {"alert", "expr", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("page", "warn")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert len(rule["annotations"]["description"].split()) > 15
    labels = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    known = {"run"}.union(*(METRICS[metric].labels for metric, _ in SELECTOR.findall(rule["expr"])))
    assert labels
    assert labels <= known


def test_counters_of_alerts_exist_from_the_first_scrape(tmp_path):
    """To Prometheus a series that appears with 1 has not increased."""
    at_first, looked_at = exported(tmp_path / "not begun"), 0
    for rule in ALERTS.values():
        for name, matchers in re.findall(r"increase\((zaya_\w+)\{([^}]*)\}", rule["expr"]):
            if (
                name != "zaya_sightings_total"
            ):  # its hosts are unknown at first, and the alert needs several sightings
                ((_, _, values),) = MATCHER.findall(matchers)
                assert {at_first[name, value] for value in values.split("|")} == {0}
                looked_at += 1
    assert looked_at > 4

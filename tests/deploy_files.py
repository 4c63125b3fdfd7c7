"""The files in `deploy/`: the dashboard, the alert rules, and the metrics that they name."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parent.parent / "deploy"


def dashboard() -> dict[str, Any]:
    """Read the Grafana dashboard."""
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text("utf-8"))
    return loaded


def alert_rules() -> list[dict[str, Any]]:
    """Read the alert rules of all groups."""
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text("utf-8"))["groups"]
    assert all(group["name"] for group in groups)
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    """Return all PromQL expressions, with a value for Grafana's variable of the interval."""
    targets = [target for panel in dashboard()["panels"] for target in panel["targets"]]
    queries = [*(target["expr"] for target in targets), *(rule["expr"] for rule in alert_rules())]
    return [query.replace("$__rate_interval", "5m") for query in queries]


def named_metrics() -> set[str]:
    """Return the metrics that the expressions and the variables of the dashboard name."""
    definitions = [each.get("definition", "") for each in dashboard()["templating"]["list"]]
    return set(re.findall(r"\bforetrace_\w+", " ".join([*expressions(), *definitions])))

"""The files in `deploy/` fit the code, each other, and the programs that read them."""

import ast
import re
import subprocess
from itertools import combinations
from typing import Any

import pytest
import typer

pytest.importorskip("yaml", reason="needs the extra `evaluate`")

import yaml

from deploy_files import DEPLOY, alert_rules, dashboard, expressions, named_metrics
from foretrace.cli import app

SOURCE = DEPLOY.parent / "src" / "foretrace" / "engines" / "vllm" / "metrics.py"
SUFFIXES = {"Counter": ["total"], "Histogram": ["bucket", "count", "sum"]}
GRID_WIDTH = 24
VLLM_OPTIONS = {"--host", "--port"}


def exported_metrics() -> set[str]:
    """Read the names of the time series from the code, which needs prometheus_client to run."""
    return {
        f"{ast.literal_eval(node.args[0])}_{suffix}"
        for node in ast.walk(ast.parse(SOURCE.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        for suffix in SUFFIXES.get(node.func.id, ())
    }


def test_the_dashboard_and_the_alerts_name_metrics_that_exist() -> None:
    named, exported = named_metrics(), exported_metrics()
    assert named <= exported
    # All metrics are shown: of a histogram, at least its buckets.
    assert {name for name in exported if name.endswith(("_total", "_bucket"))} <= named


def test_the_page_on_metrics_names_all_metrics() -> None:
    page = (DEPLOY.parent / "docs" / "reference" / "metrics.md").read_text("utf-8")
    families = {name.removesuffix("_bucket") for name in exported_metrics()}
    assert all(f"`{name}`" in page for name in families if not name.endswith(("_count", "_sum")))


def test_expressions_are_promql() -> None:
    promql_parser = pytest.importorskip("promql_parser", reason="needs the extra `dev`")
    for expression in expressions():
        promql_parser.parse(expression)


def test_the_dashboard_has_what_grafana_requires() -> None:
    board = dashboard()
    assert board["title"]
    assert 0 < len(board["uid"]) <= 40
    assert board["schemaVersion"] >= 36  # data sources are objects
    assert {"from", "to"} <= set(board["time"])
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "job"} == variables
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["title"]
        assert panel["type"] == "timeseries"
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= GRID_WIDTH
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
        for part in [panel, *panel["targets"]]:
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert not any(_overlap(*pair) for pair in combinations(panels, 2))


def _overlap(first: dict[str, Any], second: dict[str, Any]) -> bool:
    one, other = first["gridPos"], second["gridPos"]
    beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
    below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    return not (beside or below)


def test_alert_rules_have_what_prometheus_requires() -> None:
    for rule in alert_rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["alert"].isidentifier()
        assert rule["labels"]["severity"]
        assert {"summary", "description"} == set(rule["annotations"])


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    """The objects of the Kubernetes manifest, by kind."""
    text = (DEPLOY / "kubernetes.yaml").read_text("utf-8")
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


def test_the_manifest_fits_the_schemas_of_kubernetes(manifest: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="see CONTRIBUTING.md")
    for document in manifest.values():
        validate.validate(document, validate.latest_version(), strict=True)


def test_the_pods_of_the_ray_cluster_fit_the_schemas_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="see CONTRIBUTING.md")
    spec = ray_job()["spec"]["rayClusterSpec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group["template"]}
        validate.validate(pod, validate.latest_version(), strict=True)


def ray_job() -> dict[str, Any]:
    job: dict[str, Any] = yaml.safe_load((DEPLOY / "raycluster.yaml").read_text("utf-8"))
    return job


def test_the_jobs_on_clusters_use_options_that_exist() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    known = {name for option in commands["distill"].params for name in option.opts}
    script = (DEPLOY / "slurm.sh").read_text("utf-8")
    in_script = script[script.index("foretrace distill") : script.index("mapfile")]
    for command in (ray_job()["spec"]["entrypoint"], in_script):
        assert set(re.findall(r"--[a-z-]+", command)) <= known
    workers = ray_job()["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["maxReplicas"]
    assert f"--workers {workers} " in ray_job()["spec"]["entrypoint"]
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True)


def test_the_parts_of_the_manifest_fit_each_other(manifest: dict[str, Any]) -> None:
    deployment, service = manifest["Deployment"]["spec"], manifest["Service"]["spec"]
    pod = deployment["template"]
    labels = pod["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == service["selector"] == labels
    [container] = pod["spec"]["containers"]
    [port] = container["ports"]
    assert {each["targetPort"] for each in service["ports"]} == {port["name"]}
    assert f"--port={port['containerPort']}" in container["args"]
    annotations = pod["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["shared"]["persistentVolumeClaim"]["claimName"]
    assert claim == manifest["PersistentVolumeClaim"]["metadata"]["name"]


def test_the_server_knows_the_options_of_the_manifest_and_of_compose(
    manifest: dict[str, Any],
) -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    [container] = manifest["Deployment"]["spec"]["template"]["spec"]["containers"]
    command: Any = typer.main.get_command(app)
    known = {name for option in command.commands["serve"].params for name in option.opts}
    for model, *options in (container["args"], compose["services"]["foretrace"]["command"]):
        assert not model.startswith("--")
        assert {option.partition("=")[0] for option in options} <= known | VLLM_OPTIONS

"""The Grafana dashboard asks for figures that the server has, and compose.yaml puts its files where they are read."""

import json
import re
from pathlib import Path

import pytest
import yaml

from medusa.serve.metrics import Metrics
from medusa.serve.server import build_parser

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "serve" / "grafana"
LABELS = {"model_name", "finished_reason", "reason", "position", "le", "job", "instance"}
PARTS = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
NAME = re.compile(r"\b(?:medusa:|process_)\w+")


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads((GRAFANA / "dashboard.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def services() -> dict:
    return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]


@pytest.fixture(scope="module")
def exposed() -> dict[str, str]:
    """Names of series, with the kind of their figure."""
    text = Metrics("small").render().decode()
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", text, flags=re.MULTILINE)
    return {name + part: kind for name, kind in kinds for part in PARTS[kind] if not name.endswith("_created")}


def queries(dashboard: dict) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def asked(query: str) -> list[str]:
    return NAME.findall(query)


def test_every_figure_that_is_asked_for_is_exposed(dashboard, exposed):
    variables = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    names = {name for query in queries(dashboard) + variables for name in asked(query)}
    assert len(names) > 20
    assert not names - set(exposed)


def test_every_figure_of_the_engine_is_shown(dashboard, exposed):
    def figure(name: str) -> str:
        return re.sub("_(bucket|sum|count)$", "", name)

    shown = {figure(name) for query in queries(dashboard) for name in asked(query)}
    assert {figure(name) for name in exposed if name.startswith("medusa:")} <= shown


def test_what_only_grows_is_shown_as_a_rate_and_only_that(dashboard, exposed):
    for query in queries(dashboard):
        rated = NAME.findall(" ".join(re.findall(r"rate\(([^)\[]*\[)", query)))
        growing = [name for name in asked(query) if exposed[name] != "gauge"]
        assert sorted(rated) == sorted(growing), query


def test_labels_are_those_of_the_figures(dashboard):
    for query in queries(dashboard):
        grouped = re.findall(r"\b(?:by|on|group_left) \(([^)]*)\)", query)
        used = {word for words in grouped for word in re.findall(r"\w+", words)} | set(re.findall(r"(\w+)=~", query))
        assert used <= LABELS, query
        assert query.count("(") == query.count(")")
        assert ("histogram_quantile" in query) == ("_bucket" in query and "le" in used)


def test_panels_have_titles_units_and_places_of_their_own(dashboard):
    panels = dashboard["panels"]
    for key in ("id", "title"):
        assert len({panel[key] for panel in panels}) == len(panels)
    taken = [(x, y) for panel in panels for x in cells(panel, "x", "w") for y in cells(panel, "y", "h")]
    assert len(set(taken)) == len(taken)
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)
    assert all(target["legendFormat"] for panel in panels for target in panel["targets"])


def cells(panel: dict, start: str, size: str) -> range:
    place = panel["gridPos"]
    return range(place[start], place[start] + place[size])


def test_files_are_where_prometheus_and_grafana_read_them(services):
    config = yaml.safe_load((GRAFANA / "prometheus.yaml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"medusa:{build_parser().parse_args([]).port}"]}]
    (source,) = yaml.safe_load((GRAFANA / "datasource.yaml").read_text(encoding="utf-8"))["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load((GRAFANA / "dashboards.yaml").read_text(encoding="utf-8"))["providers"]
    grafana = dict(volume.split(":")[1::-1] for volume in services["grafana"]["volumes"])
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert grafana[home] == "./serve/grafana/dashboard.json"
    assert str(Path(home).parent) == provider["options"]["path"]
    mounted = [volume.split(":")[0] for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    files = {f"./serve/grafana/{path.name}" for path in GRAFANA.iterdir()}
    assert {path for path in mounted if path.startswith("./")} == files


def test_figures_are_asked_for_by_name_and_stay_on_this_machine(services):
    assert "profiles" not in services["medusa"]
    assert services["prometheus"]["profiles"] == services["grafana"]["profiles"] == ["figures"]
    assert "ports" not in services["prometheus"]
    assert all(port.startswith("127.0.0.1:") for port in services["grafana"]["ports"])
    assert all(":latest" not in one.get("image", "") for one in services.values())

# SPDX-License-Identifier: Apache-2.0
"""The CPU overlay's container, run on this machine: confined, probed, watched by a real Prometheus, drained at last.

One server for all of it; the tests stand in the order of its life.
"""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy import manifests, queries
from tests.deploy.container import Container, confinement_is_possible
from tests.deploy.load import HEADERS, Load, chat
from tests.deploy.prometheus import Prometheus
from tests.deploy.tools import DEPLOY, PROMETHEUS, missing, output, tool

pytestmark = [pytest.mark.engine, pytest.mark.pair]

SCRAPED_FOR = 15  # seconds of load that the queries look back on


@pytest.fixture(scope="module")
def container(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    if not confinement_is_possible():
        missing("run as root where mounts are allowed: the container's file system is made of them")
    models = pytestconfig.getoption("--demo-pair").absolute()
    with Container(manifests.overlay("cpu-demo"), models, tmp_path_factory.mktemp("container")) as started:
        started.wait_until_started()
        yield started


@pytest.fixture(scope="module")
def load(container: Container) -> Iterator[Load]:
    """Requests of three workloads, from here to the drain."""
    with Load(container.url) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(container: Container, load: Load, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus after some seconds of load on the container, during which requests were answered."""
    with Prometheus(tmp_path_factory.mktemp("prometheus"), f"127.0.0.1:{container.port}") as running:
        time.sleep(SCRAPED_FOR)
        answered = load.answers
        deadline = time.monotonic() + 120
        while load.answers < answered + load.clients and not load.failures and time.monotonic() < deadline:
            time.sleep(0.5)
        assert load.answers > answered and not load.failures, load.failures
        yield running


def status(container: Container) -> dict[str, str]:
    lines = Path(f"/proc/{container.process.pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def test_it_runs_as_the_pods_user_without_any_capability(container: Container) -> None:
    found = status(container)
    user = str(container.pod["securityContext"]["runAsUser"])
    assert set(found["Uid"].split()) == set(found["Gid"].split()) == {user}
    assert found["NoNewPrivs"] == "1"
    assert all(int(found[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"))
    command = Path(f"/proc/{container.process.pid}/cmdline").read_text().split("\0")
    assert command[2:4] == ["serve", "/models/target"]
    assert "--shutdown-timeout=240" in command


def test_its_root_is_read_only_and_only_mounted_volumes_are_writable(container: Container) -> None:
    mounts = Path(f"/proc/{container.process.pid}/mountinfo").read_text().splitlines()
    found = {line.split()[4]: line.split()[5].split(",") for line in mounts}
    writable = {place for place, options in found.items() if "rw" in options}
    root = f"/proc/{container.process.pid}/root"
    assert Path(root).resolve() != Path("/")
    ours = {place for place in writable if not re.match(r"/(proc|sys|dev)(/|$)", place)}
    declared = {mount["mountPath"] for mount in container.container["volumeMounts"]}
    assert ours == {place for place in declared if place != "/dev/shm"} | {
        f"/models/{name}" for name in ("target", "drafter")
    }
    outside = ["nsenter", f"--target={container.process.pid}", "--mount", "--", "touch", f"{root}/written"]
    assert "Read-only file system" in subprocess.run(outside, capture_output=True, text=True).stderr


def test_it_answers_its_probes(container: Container) -> None:
    assert all(container.probe(name) for name in ("startupProbe", "readinessProbe", "livenessProbe"))


def test_the_api_asks_for_the_key_and_probes_and_metrics_do_not(container: Container) -> None:
    with httpx.Client(base_url=container.url, trust_env=False, timeout=60) as client:
        assert client.post("/v1/chat/completions", json=chat("chat", 4)).status_code == 401
        answer = client.post("/v1/chat/completions", json=chat("chat", 4), headers=HEADERS)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert client.get("/metrics").status_code == 200


def test_promtool_accepts_the_configuration() -> None:
    output(tool("promtool", PROMETHEUS), "check", "config", str(DEPLOY / "prometheus" / "prometheus.yaml"))


def test_prometheus_scrapes_it_and_evaluates_every_rule(prometheus: Prometheus) -> None:
    assert (prometheus.target()["health"], prometheus.target()["lastError"]) == ("up", "")
    expected = {**queries.rules("record"), **queries.rules("alert")}
    assert prometheus.rules() == dict.fromkeys(expected, "ok")


def test_no_query_names_a_metric_that_does_not_exist(prometheus: Prometheus) -> None:
    there = prometheus.names()
    for expression in queries.every_expression():
        named = queries.exported_names(expression) | queries.recorded_names(expression)
        assert named or expression in ("prometheus", "vector(1)"), expression
        assert named <= there, f"{expression}: {sorted(named - there)}"


def finite(series: list[dict]) -> bool:
    return any(one["value"][1] not in ("NaN", "+Inf", "-Inf") for one in series)


@pytest.mark.parametrize(("name", "expression"), list(queries.panel_queries()))
def test_every_query_of_the_dashboard_has_data(prometheus: Prometheus, name: str, expression: str) -> None:
    assert finite(prometheus.query(queries.filled(expression, model="smollm2"))), name


@pytest.mark.parametrize("name", queries.rules("record"))
def test_every_recorded_series_has_data(prometheus: Prometheus, name: str) -> None:
    series = prometheus.query(name)
    assert finite(series)
    assert all(one["metric"]["model_name"] == "smollm2" for one in series)


@pytest.mark.parametrize("name", queries.rules("alert"))
def test_every_part_of_an_alert_has_data(prometheus: Prometheus, name: str) -> None:
    """An alert's expression is empty where all is well; each comparison's left side is not."""
    for side in re.split(r"\s(?:and|unless)\s", queries.rules("alert")[name]):
        compared = re.sub(r"\s(?:<|>|==)\s*[\d.]+$", "", side.strip())
        assert compared != side.strip(), side
        assert prometheus.query(compared), compared


@pytest.mark.parametrize("expression", queries.scaling_queries())
def test_keda_gets_one_number(prometheus: Prometheus, expression: str) -> None:
    # The namespace is the cluster's label; nothing here has one.
    (series,) = prometheus.query(expression.replace('{namespace="vllm-dflash"}', ""))
    assert series["metric"] == {} and float(series["value"][1]) >= 0


def test_workloads_are_told_apart(prometheus: Prometheus) -> None:
    series = prometheus.query("model_workload:vllm_dflash_acceptance_length:mean_rate5m")
    found = {one["metric"]["workload"]: float(one["value"][1]) for one in series if one["value"][1] != "NaN"}
    assert {"chat", "code", "list"} <= found.keys()
    assert all(length >= 1 for length in found.values())


def test_every_panel_draws_its_data(prometheus: Prometheus, tmp_path: Path) -> None:
    from tests.deploy.picture import draw

    picture = tmp_path / "dashboard.png"
    counted = draw(prometheus, time.time() - SCRAPED_FOR, time.time(), picture)
    assert all(counted.values()), counted
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sigterm_drains_a_streaming_request(container: Container, load: Load) -> None:
    """The last test: a request in flight when the container is told to stop ends as if nothing had been."""
    load.stop()
    body = chat("code", 96, stream=True, ignore_eos=True, stream_options={"include_usage": True})
    events: list[str] = []
    with (
        httpx.Client(base_url=container.url, trust_env=False, timeout=120, headers=HEADERS) as client,
        client.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
                if len(events) == 5:
                    container.process.terminate()
    assert events[-1] == "[DONE]"
    *chunks, usage = (json.loads(event) for event in events[:-1])
    assert usage["usage"]["completion_tokens"] == 96
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert len(chunks) > 10, "the request was over before the container was told to stop"
    assert container.process.wait(120) == 0
    assert not container.probe("readinessProbe")

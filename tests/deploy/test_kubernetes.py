# SPDX-License-Identifier: Apache-2.0
"""Every overlay renders, validates strictly, and keeps what was promised of its pods."""

import copy
import re
from typing import Any

import pytest

from tests.deploy import manifests
from tests.deploy.manifests import OVERLAYS, Manifest

EXPECTED = {
    "ServiceAccount",
    "ConfigMap",
    "Service",
    "PersistentVolumeClaim",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "ServiceMonitor",
    "PrometheusRule",
}
GPUS = {"one-gpu": 1, "tensor-parallel": 4, "multi-node": 8, "autoscaling": 1, "cpu-demo": None}


@pytest.fixture(scope="module")
def rendered() -> dict[str, list[Manifest]]:
    return {name: manifests.overlay(name) for name in OVERLAYS}


def pods(documents: list[Manifest]) -> list[Manifest]:
    return [template for document in documents for template in manifests.pod_templates(document)]


def container(pod: Manifest) -> Manifest:
    (only,) = pod["spec"]["containers"]
    return only


def answering(documents: list[Manifest]) -> Manifest:
    """The pod that serves the API: a Deployment's, or the leader of a group."""
    return pods(documents)[0]


def option(pod: Manifest, name: str) -> str:
    (value,) = (text.split("=", 1)[1] for text in container(pod)["args"] if text.startswith(f"{name}="))
    return value


def test_the_overlays_are_those_promised() -> None:
    assert OVERLAYS == sorted(GPUS)


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_manifest_is_valid_to_the_last_field(rendered: dict[str, list[Manifest]], name: str) -> None:
    for document in rendered[name]:
        manifests.validate(document)
    kinds = {document["kind"] for document in rendered[name]}
    own = {"LeaderWorkerSet"} if name == "multi-node" else {"Deployment"}
    assert kinds == EXPECTED | own | ({"ScaledObject"} if name == "autoscaling" else set())


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_field_that_does_not_exist_is_refused_in_every_manifest(
    rendered: dict[str, list[Manifest]], name: str
) -> None:
    for document in rendered[name]:
        wrong: dict[str, Any] = copy.deepcopy(document)
        wrong.get("spec", wrong)["replicaz"] = 1
        with pytest.raises(Exception, match="replicaz"):
            manifests.validate(wrong)


@pytest.mark.parametrize(
    ("overlay", "kind", "path"),
    [
        ("one-gpu", "Deployment", ["spec", "template", "spec", "containers", 0, "readinessProbe"]),
        ("one-gpu", "NetworkPolicy", ["spec", "ingress", 0, "ports", 0]),
        ("one-gpu", "ServiceMonitor", ["spec", "endpoints", 0]),
        ("one-gpu", "PrometheusRule", ["spec", "groups", 0, "rules", 0]),
        ("autoscaling", "ScaledObject", ["spec", "triggers", 0]),
        ("autoscaling", "ScaledObject", ["spec", "advanced", "horizontalPodAutoscalerConfig", "behavior", "scaleUp"]),
        ("multi-node", "LeaderWorkerSet", ["spec", "leaderWorkerTemplate"]),
        ("multi-node", "LeaderWorkerSet", ["spec", "rolloutStrategy", "rollingUpdateConfiguration"]),
        ("multi-node", "LeaderWorkerSet", ["spec", "leaderWorkerTemplate", "workerTemplate", "spec"]),
    ],
)
def test_so_is_one_deep_inside(
    rendered: dict[str, list[Manifest]], overlay: str, kind: str, path: list[str | int]
) -> None:
    wrong = copy.deepcopy(next(document for document in rendered[overlay] if document["kind"] == kind))
    place: Any = wrong
    for step in path:
        place = place[step]
    place["periodSecs"] = 1
    with pytest.raises(Exception, match="periodSecs"):
        manifests.validate(wrong)


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_confined(rendered: dict[str, list[Manifest]], name: str) -> None:
    for pod in pods(rendered[name]):
        spec, inside = pod["spec"], container(pod)
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert inside["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec["volumes"])
    assert manifests.only(rendered[name], "ServiceAccount")["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", OVERLAYS)
def test_what_must_be_writable_is_mounted(rendered: dict[str, list[Manifest]], name: str) -> None:
    for pod in pods(rendered[name]):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container(pod)["volumeMounts"]}
        assert "emptyDir" in mounts["/tmp"] and "emptyDir" in mounts["/cache"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert mounts["/models"]["persistentVolumeClaim"] == {"claimName": "vllm-dflash-models"}
        shared = gibibytes(mounts["/dev/shm"]["emptyDir"]["sizeLimit"])
        assert shared < gibibytes(container(pod)["resources"]["limits"]["memory"])


def gibibytes(quantity: str) -> int:
    assert quantity.endswith("Gi")
    return int(quantity.removesuffix("Gi"))


@pytest.mark.parametrize("name", OVERLAYS)
def test_probes_wait_for_the_model_and_watch_it_afterwards(rendered: dict[str, list[Manifest]], name: str) -> None:
    inside = container(answering(rendered[name]))
    assert [port["name"] for port in inside["ports"]] == ["http"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert inside[probe]["httpGet"] == {"path": "/health", "port": "http"}
    starting = inside["startupProbe"]["periodSeconds"] * inside["startupProbe"]["failureThreshold"]
    assert starting >= 20 * 60
    ready, alive = (
        inside[probe]["periodSeconds"] * inside[probe]["failureThreshold"]
        for probe in ("readinessProbe", "livenessProbe")
    )
    assert ready < alive
    for document in rendered[name]:
        if document["kind"] == "Deployment":
            assert document["spec"]["progressDeadlineSeconds"] > starting


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_drain_fits_the_grace_period(rendered: dict[str, list[Manifest]], name: str) -> None:
    pod = answering(rendered[name])
    before = container(pod)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before >= 10
    assert before + int(option(pod, "--shutdown-timeout")) + 30 <= pod["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_requests_limits_and_gpus(rendered: dict[str, list[Manifest]], name: str) -> None:
    for pod in pods(rendered[name]):
        resources = container(pod)["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys()
        assert gibibytes(resources["requests"]["memory"]) <= gibibytes(resources["limits"]["memory"])
        assert resources["limits"].get("nvidia.com/gpu") == GPUS[name]


@pytest.mark.parametrize("name", OVERLAYS)
def test_images_are_pinned_to_one_version(rendered: dict[str, list[Manifest]], name: str) -> None:
    images = {container(pod)["image"] for pod in pods(rendered[name])}
    (image,) = images
    assert re.fullmatch(r"vllm-dflash:\d+\.\d+\.\d+(-cpu)?", image)


@pytest.mark.parametrize("name", OVERLAYS)
def test_secrets_are_referred_to_and_never_written(rendered: dict[str, list[Manifest]], name: str) -> None:
    secrets = {
        entry["name"]: entry["valueFrom"]["secretKeyRef"]
        for entry in container(answering(rendered[name]))["env"]
        if "secretKeyRef" in entry.get("valueFrom", {})
    }
    assert secrets["HF_TOKEN"]["optional"] is True
    assert secrets["VLLM_API_KEY"].get("optional", False) is (name == "cpu-demo")
    assert not any(document["kind"] == "Secret" for document in rendered[name])


@pytest.mark.parametrize("name", OVERLAYS)
def test_settings_reach_the_pods_by_their_hashed_name(rendered: dict[str, list[Manifest]], name: str) -> None:
    config = manifests.settings(rendered[name])
    assert re.fullmatch(r"vllm-dflash-[a-z0-9]{10}", config["metadata"]["name"])
    assert config["data"]["DFLASH"] == "on"
    for pod in pods(rendered[name]):
        assert container(pod)["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]


@pytest.mark.parametrize("name", OVERLAYS)
def test_selectors_find_the_pods_and_the_service(rendered: dict[str, list[Manifest]], name: str) -> None:
    documents = rendered[name]
    labels = [pod["metadata"]["labels"] for pod in pods(documents)]
    budget = manifests.only(documents, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    policies = [d["spec"]["podSelector"]["matchLabels"] for d in documents if d["kind"] == "NetworkPolicy"]
    for selector in (budget, *policies):
        assert all(selector.items() <= found.items() for found in labels)
    service = manifests.only(documents, "Service")
    chosen = dict(service["spec"]["selector"])
    if name == "multi-node":
        # The controller writes this label: only leaders serve.
        assert chosen.pop("leaderworkerset.sigs.k8s.io/worker-index") == "0"
    assert chosen.items() <= answering(documents)["metadata"]["labels"].items()
    monitor = manifests.only(documents, "ServiceMonitor")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [end["port"] for end in monitor["endpoints"]] == [port["name"] for port in service["spec"]["ports"]]
    assert {document["metadata"]["namespace"] for document in documents} == {"vllm-dflash"}


def test_tensor_parallel_uses_the_gpus_it_asks_for(rendered: dict[str, list[Manifest]]) -> None:
    assert option(answering(rendered["tensor-parallel"]), "--tensor-parallel-size") == str(GPUS["tensor-parallel"])


def test_a_group_is_one_engine_over_its_nodes(rendered: dict[str, list[Manifest]]) -> None:
    group = manifests.only(rendered["multi-node"], "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    leader, worker = (container(pod) for pod in pods(rendered["multi-node"]))
    for inside in (leader, worker):
        assert "--distributed-executor-backend=mp" in inside["args"]
        assert "--nnodes=$(LWS_GROUP_SIZE)" in inside["args"]
        assert "--node-rank=$(LWS_WORKER_INDEX)" in inside["args"]
        assert "--master-addr=$(LWS_LEADER_ADDRESS)" in inside["args"]
        assert f"--tensor-parallel-size={group['size'] * GPUS['multi-node']}" in inside["args"]
    assert "--headless" in worker["args"] and "--headless" not in leader["args"]
    assert "readinessProbe" not in worker


def test_keda_scales_the_deployment_and_nothing_else_sets_its_size(rendered: dict[str, list[Manifest]]) -> None:
    deployment = manifests.only(rendered["autoscaling"], "Deployment")
    scaled = manifests.only(rendered["autoscaling"], "ScaledObject")["spec"]
    assert "replicas" not in deployment["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert [trigger["name"] for trigger in scaled["triggers"]] == ["queue", "time-per-output-token"]
    assert all(trigger["type"] == "prometheus" for trigger in scaled["triggers"])

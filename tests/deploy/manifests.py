# SPDX-License-Identifier: Apache-2.0
"""Kubernetes manifests: rendered by kustomize, and validated strictly, so that unknown fields are errors too."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from tests.deploy.tools import DEPLOY, KUBECTL, output, tool

KUBERNETES = ("1.32", "1.37")
BASE = DEPLOY / "kubernetes" / "base"
OVERLAYS = sorted(path.parent.name for path in (DEPLOY / "kubernetes" / "overlays").glob("*/kustomization.yaml"))
CORE = {"v1", "apps/v1", "policy/v1", "networking.k8s.io/v1"}

Manifest = dict[str, Any]


def render(folder: Path) -> list[Manifest]:
    """What `kubectl apply -k folder` would send."""
    text = output(tool("kubectl", KUBECTL), "kustomize", str(folder))
    return [document for document in yaml.safe_load_all(text) if document]


def overlay(name: str) -> list[Manifest]:
    return render(DEPLOY / "kubernetes" / "overlays" / name)


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class GroupRollout(Fields):
    partition: int = 0
    maxUnavailable: int | str = 1
    maxSurge: int | str = 0


class GroupStrategy(Fields):
    type: Literal["RollingUpdate"]
    rollingUpdateConfiguration: GroupRollout | None = None


class SubGroups(Fields):
    subGroupPolicyType: Literal["LeaderWorker", "LeaderExcluded"] = "LeaderWorker"
    subGroupSize: int | None = None


class GroupNetwork(Fields):
    subdomainPolicy: Literal["Shared", "UniquePerReplica"]


class Group(Fields):
    leaderTemplate: Manifest | None = None
    workerTemplate: Manifest
    size: int = Field(1, ge=1)
    restartPolicy: Literal["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"] = "RecreateGroupOnPodRestart"
    subGroupPolicy: SubGroups | None = None
    volumeClaimTemplates: list[Manifest] = []
    persistentVolumeClaimRetentionPolicy: Manifest | None = None


class GroupSpec(Fields):
    replicas: int = Field(1, ge=0)
    leaderWorkerTemplate: Group
    rolloutStrategy: GroupStrategy | None = None
    startupPolicy: Literal["LeaderCreated", "LeaderReady"] = "LeaderCreated"
    networkConfig: GroupNetwork | None = None


class Metadata(Fields):
    name: str
    namespace: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class LeaderWorkerSet(Fields):
    """leaderworkerset.x-k8s.io/v1, from the fields its API documents; its pods are checked as core pods."""

    apiVersion: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: Metadata
    spec: GroupSpec


@cache
def custom_kinds() -> dict[tuple[str, str], type[BaseModel]]:
    """The models of the custom kinds. Their modules take seconds to import."""
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from cloudcoil.models.prometheus_operator.v1 import PrometheusRule, ServiceMonitor

    return {
        ("monitoring.coreos.com/v1", "ServiceMonitor"): ServiceMonitor,
        ("monitoring.coreos.com/v1", "PrometheusRule"): PrometheusRule,
        ("keda.sh/v1alpha1", "ScaledObject"): ScaledObject,
        ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): LeaderWorkerSet,
    }


def validate(manifest: Manifest) -> None:
    """Raises where a field is unknown, missing or of the wrong type, or where nothing here knows the kind."""
    import kubernetes_validate

    kind = (manifest["apiVersion"], manifest["kind"])
    if kind[0] in CORE:
        for version in KUBERNETES:
            kubernetes_validate.validate(manifest, version, strict=True)
        return
    custom_kinds()[kind].model_validate(manifest, extra="forbid", by_alias=True, by_name=False)
    for template in pod_templates(manifest):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        for version in KUBERNETES:
            kubernetes_validate.validate(pod, version, strict=True)


def pod_templates(manifest: Manifest) -> list[Manifest]:
    """The pod templates of a Deployment (one) or a LeaderWorkerSet (leader, worker)."""
    if manifest["kind"] == "Deployment":
        return [manifest["spec"]["template"]]
    if manifest["kind"] == "LeaderWorkerSet":
        group = manifest["spec"]["leaderWorkerTemplate"]
        return [group["leaderTemplate"], group["workerTemplate"]]
    return []


def only(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


def settings(manifests: list[Manifest]) -> Manifest:
    """The ConfigMap that the pods take their environment from."""
    (found,) = (m for m in manifests if m["kind"] == "ConfigMap" and "MODEL" in m["data"])
    return found

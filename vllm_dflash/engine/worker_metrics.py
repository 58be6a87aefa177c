# SPDX-License-Identifier: Apache-2.0
"""The recorder of one worker, whichever its runner: whose workload is whose, and what it says about itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from vllm.logger import init_logger

from vllm_dflash.drafter.model import DFlashDrafter
from vllm_dflash.engine import facts
from vllm_dflash.engine.metrics import attach
from vllm_dflash.metrics.recorder import Delta, Recorder
from vllm_dflash.metrics.workloads import Workloads
from vllm_dflash.options import RequestOptionError, request_options, server_options
from vllm_dflash.spec_decode import SpecDecodeWorker

logger = init_logger(__name__)


class WorkerMetrics(ABC):
    """Records the steps of one runner. Rank 0 of its tensor parallel group speaks for all."""

    def __init__(self, vllm_config: Any, worker: SpecDecodeWorker) -> None:
        self.vllm_config = vllm_config
        self.worker = worker
        self.workloads = Workloads(server_options(vllm_config.additional_config).workloads)
        self.recorder = Recorder(worker.tally, self.workload_of)
        worker.observers.append(self.recorder.on_outcome)
        worker.timing_observers.append(self.recorder.on_timings)

    @abstractmethod
    def workload_of(self, request_id: str) -> str:
        """The label of a request's workload."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """See `Recorder.facts`; the KV caches are there."""

    def label(self, sampling_params: Any) -> str:
        """The label that a request's own parameters ask for."""
        try:
            return self.workloads.label(request_options(getattr(sampling_params, "extra_args", None)).workload)
        except RequestOptionError:  # it came past the front end's check
            return self.workloads.label(None)

    def take(self) -> Delta:
        if not self.recorder.facts:
            self.recorder.facts = self.facts()
        return self.recorder.take()

    def hand_over(self, output: Any) -> None:
        """Sends what was recorded since the last call along with the runner's output of this step."""
        attach(output, self.take())

    def facts_of(self, runner: str, draft: DFlashDrafter, device: str, q_bytes: int) -> dict[str, Any]:
        """runner: "v1" or "v2". device: its type."""
        layers = self.vllm_config.compilation_config.static_forward_context
        caches = {name: layer.kv_cache for name, layer in layers.items() if hasattr(layer, "kv_cache")}
        attention = [layer.attn for layer in draft.attention_layers()]
        backends = {attn.get_attn_backend().get_name() for attn in attention}
        return {
            "info": facts.info(self.vllm_config, runner, device, ",".join(sorted(backends))),
            "weights_bytes": draft.own_weights_bytes,
            "kv_bytes": facts.kv_bytes([attn.layer_name for attn in attention], caches),
            "q_bytes": q_bytes,
        }


def wanted(vllm_config: Any) -> bool:
    """Whether the user left the metrics on."""
    return server_options(vllm_config.additional_config).metrics

# SPDX-License-Identifier: Apache-2.0
"""The metrics of a V1 runner."""

from __future__ import annotations

from typing import Any

from vllm_dflash.engine import facts
from vllm_dflash.engine.worker_metrics import WorkerMetrics
from vllm_dflash.spec_decode import SpecDecodeWorker


class V1Metrics(WorkerMetrics):
    def __init__(self, runner: Any, worker: SpecDecodeWorker) -> None:
        super().__init__(runner.vllm_config, worker)
        self.runner = runner

    def workload_of(self, request_id: str) -> str:
        """Kept on the runner's own state of the request, and gone with that."""
        state = self.runner.requests.get(request_id)
        label: str | None = getattr(state, "vllm_dflash_workload", None)
        if label is None:
            label = self.label(getattr(state, "sampling_params", None))
            if state is not None:
                state.vllm_dflash_workload = label
        return label

    def facts(self) -> dict[str, Any]:
        runner = self.runner
        q_bytes = facts.q_bytes(self.worker, runner.scheduler_config.max_num_seqs)
        return self.facts_of("v1", runner.drafter.model, runner.device.type, q_bytes)

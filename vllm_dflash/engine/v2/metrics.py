# SPDX-License-Identifier: Apache-2.0
"""The metrics of a V2 runner."""

from __future__ import annotations

from typing import Any

from vllm_dflash.engine.worker_metrics import WorkerMetrics
from vllm_dflash.metrics.workloads import DEFAULT
from vllm_dflash.spec_decode import SpecDecodeWorker


class V2Metrics(WorkerMetrics):
    def __init__(self, runner: Any, worker: SpecDecodeWorker) -> None:
        super().__init__(runner.vllm_config, worker)
        self.runner = runner
        # Of the requests that name one; the runner keeps no request's parameters.
        self._labels: dict[str, str] = {}

    def follow(self, scheduler_output: Any) -> None:
        """Learns of new requests and drops those that have ended, aborted ones too."""
        for request_id in scheduler_output.finished_req_ids:
            self._labels.pop(request_id, None)
        for request in scheduler_output.scheduled_new_reqs:
            label = self.label(request.sampling_params)
            if label != DEFAULT:
                self._labels[request.req_id] = label

    def workload_of(self, request_id: str) -> str:
        return self._labels.get(request_id, DEFAULT)

    def facts(self) -> dict[str, Any]:
        runner, speculator = self.runner, self.runner.speculator
        q_bytes = speculator.draft_tokens.nbytes
        if speculator.draft_logits is not None:
            q_bytes += speculator.draft_logits.nbytes
        return self.facts_of("v2", speculator.model, runner.device.type, q_bytes)

# SPDX-License-Identifier: Apache-2.0
"""Keep, while vLLM generates, what it computes anyway: tapped features, and the target's own top candidates.

Needs the engine in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), eager mode, and no prefix caching, since a cached
row is not computed again. This saves the second forward of features.py, a third of the data's cost on a CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

SOFT_CANDIDATES = 16


class Captured:
    """Rows of one request by position; the last token of a sequence is never run, its row stays 0."""

    def __init__(self, length: int, width: int, wide_ids: bool) -> None:
        self.taps = np.zeros((length, width), np.uint16)
        self.soft_ids = np.zeros((length, SOFT_CANDIDATES), np.uint32 if wide_ids else np.uint16)
        self.soft_chances = np.zeros((length, SOFT_CANDIDATES), np.float16)

    def cut(self, length: int) -> Captured:
        """Keep the first `length` rows and the memory that they need."""
        for name in ("taps", "soft_ids", "soft_chances"):
            setattr(self, name, getattr(self, name)[:length].copy())
        return self


def top_candidates(logits: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """logits [..., V] -> ids and probabilities at T=1, both [..., 16]."""
    scores, ids = logits.topk(SOFT_CANDIDATES, dim=-1)
    return ids.cpu().numpy(), chances_of(logits, scores).cpu().numpy()


def chances_of(logits: Tensor, scores: Tensor) -> Tensor:
    """Probabilities at T=1 of the top `scores` of logits [..., V], float32."""
    return (scores.float() - logits.logsumexp(-1, keepdim=True).float()).exp()


def bf16_bits(rows: Tensor) -> np.ndarray:
    return rows.to(torch.bfloat16).contiguous().cpu().view(torch.uint16).numpy()


class Capture:
    """Hooks on the target inside an in-process `vllm.LLM`; `take` hands over what a finished request left."""

    def __init__(self, llm: Any, taps: tuple[int, ...]) -> None:
        core = llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.length = llm.llm_engine.model_config.max_model_len
        self.taps = taps
        self.kept: dict[int, Tensor] = {}
        self.requests: dict[str, Captured] = {}
        self.top: Any = None
        model = self.runner.model
        for tap in taps:
            model.model.layers[tap].register_forward_hook(
                lambda _, __, output, tap=tap: self.keep(tap, output[0] + output[1])
            )
        compute_logits = model.compute_logits

        def watched(hidden: Tensor, *arguments: Any, **options: Any) -> Tensor:
            logits = compute_logits(hidden, *arguments, **options)
            self.store_candidates(logits)
            return logits

        model.compute_logits = watched
        self.runner.sampler = self.sample

    def sample(self, logits: Tensor, sampling_metadata: Any, **_: Any) -> Any:
        """In place of vLLM's sampler: the best token, or one of the top 16 at the request's temperature.

        A draw from the whole vocabulary would take more of a CPU's time than the target's forward.
        """
        from vllm.v1.outputs import SamplerOutput

        scores, ids = self.top.values.float(), self.top.indices
        chosen = ids[:, :1]
        if not sampling_metadata.all_greedy:
            temperature = sampling_metadata.temperature[:, None]
            chances = (scores / temperature.clamp(min=1e-3)).softmax(-1)
            chosen = torch.where(temperature > 1e-3, ids.gather(-1, chances.multinomial(1)), chosen)
        return SamplerOutput(sampled_token_ids=chosen.to(torch.int32), logprobs_tensors=None)

    def rows(self) -> list[tuple[Captured, int, int]]:
        """(request, first row, last row + 1) of this step's batch."""
        names = self.runner.input_batch.req_ids
        starts = self.runner.query_start_loc.np[: len(names) + 1].tolist()
        config = self.runner.model_config
        for name in names:
            if name not in self.requests:
                width = len(self.taps) * config.get_hidden_size()
                self.requests[name] = Captured(self.length, width, config.get_vocab_size() > 2**16)
        return [(self.requests[name], starts[i], starts[i + 1]) for i, name in enumerate(names)]

    def keep(self, tap: int, residual: Tensor) -> None:
        """Called as each tapped layer leaves; the deepest one completes the step's rows."""
        self.kept[tap] = residual
        if tap == max(self.taps):
            self.store_taps()

    def store_taps(self) -> None:
        batch = self.rows()
        if not batch:
            return
        bits = bf16_bits(torch.cat([self.kept[tap] for tap in self.taps], dim=-1))
        positions = self.runner.positions[: len(bits)].cpu().numpy()
        for request, first, end in batch:
            request.taps[positions[first:end]] = bits[first:end]

    def store_candidates(self, logits: Tensor) -> None:
        self.top = logits.topk(SOFT_CANDIDATES, dim=-1)
        batch = self.rows()
        if len(batch) != len(logits):
            return
        ids, chances = self.top.indices.cpu().numpy(), chances_of(logits, self.top.values).cpu().numpy()
        positions = self.runner.positions.cpu().numpy()
        for row, (request, _, end) in enumerate(batch):
            request.soft_ids[positions[end - 1]] = ids[row]
            request.soft_chances[positions[end - 1]] = chances[row]

    def take(self, request_id: str, length: int) -> Captured:
        """What the request with vLLM's public id left, `length` rows; inside the engine an id carries a suffix."""
        name = next(name for name in self.requests if name.rsplit("-", 1)[0] == request_id)
        return self.requests.pop(name).cut(length)

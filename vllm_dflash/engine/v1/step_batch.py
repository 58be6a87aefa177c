# SPDX-License-Identifier: Apache-2.0
"""What the host knows of a V1 step's requests, read once, before the target's forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class StepBatch:
    """computed: of B requests, tokens computed before the step. without_token: rows of the batch that sample none, as
    they are in the midst of their prompt or come back from a preemption. past_prompts: whether nobody's prompt is left.
    """

    computed: list[int]
    without_token: list[int]
    past_prompts: bool


def step_batch(runner: Any) -> StepBatch:
    """Of the step that a GPUModelRunner has prepared. Its numbers change when the step has sampled."""
    batch = runner.input_batch
    count = batch.num_reqs
    computed, prompts = batch.num_computed_tokens_cpu[:count], batch.num_prompt_tokens[:count]
    without_token = np.flatnonzero(runner.discard_request_mask.np[:count]).tolist()
    return StepBatch(computed.tolist(), without_token, bool((computed >= prompts).all()))

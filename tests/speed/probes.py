# SPDX-License-Identifier: Apache-2.0
"""What runs inside the engine's process."""

import time
from typing import Any

from tests.support.engine_process import engine_core


def serve(llm: Any, prompts: list[str], sampling: dict[str, Any], at_once: int) -> dict[str, float]:
    """Serves prompts in batches of `at_once` -> tokens a second and a processor's second, drafts a step."""
    from vllm import SamplingParams

    scheduler = engine_core(llm).scheduler
    stock = scheduler.update_from_output
    counts = {"steps": 0, "drafts": 0}

    def update(scheduler_output: Any, output: Any) -> Any:
        counts["steps"] += len(scheduler_output.num_scheduled_tokens)
        counts["drafts"] += sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        return stock(scheduler_output, output)

    scheduler.update_from_output = update
    tokens, began, busy = 0, time.perf_counter(), time.process_time()
    for first in range(0, len(prompts), at_once):
        outputs = llm.generate(prompts[first : first + at_once], SamplingParams(**sampling), use_tqdm=False)
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    scheduler.update_from_output = stock
    return {"rate": tokens / seconds, "busy_rate": tokens / busy, "drafts": counts["drafts"] / counts["steps"]}

# SPDX-License-Identifier: Apache-2.0
"""What runs inside the engine's process."""

import time
from typing import Any

from tests.support.engine_process import engine_core


def serve(llm: Any, prompts: list[str], sampling: dict[str, Any], at_once: int) -> dict[str, float]:
    """Serves prompts, `at_once` of them at any time -> tokens a second and a processor's second, drafts a step."""
    from vllm import SamplingParams

    engine, scheduler = llm.llm_engine, engine_core(llm).scheduler
    stock = scheduler.update_from_output
    counts = {"steps": 0, "drafts": 0}

    def update(scheduler_output: Any, output: Any) -> Any:
        counts["steps"] += len(scheduler_output.num_scheduled_tokens)
        counts["drafts"] += sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        return stock(scheduler_output, output)

    scheduler.update_from_output = update
    tokens, waiting, running = 0, list(enumerate(prompts)), 0
    began, busy = time.perf_counter(), time.process_time()
    while waiting or running:
        while waiting and running < at_once:
            number, prompt = waiting.pop(0)
            engine.add_request(f"{began}-{number}", prompt, SamplingParams(**sampling))
            running += 1
        for output in engine.step():
            if output.finished:
                tokens += len(output.outputs[0].token_ids)
                running -= 1
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    scheduler.update_from_output = stock
    return {"rate": tokens / seconds, "busy_rate": tokens / busy, "drafts": counts["drafts"] / counts["steps"]}

# SPDX-License-Identifier: Apache-2.0
"""What runs inside the engine's process."""

import time
from typing import Any

from tests.support.engine_process import engine_core

_serving: dict[str, Any] = {}


def begin(llm: Any, prompts: list[str], tokens: int, at_once: int) -> None:
    """Prompts to be served by `serve`, `at_once` of them at any time, each with `tokens`, a quarter fewer to more.

    On a server requests come and go one by one. Of like lengths plain decoding alone would have prompts several at a
    time, as requests with drafts part.
    """
    lengths = [tokens * 3 // 4 + 37 * number % (tokens // 2 + 1) for number in range(len(prompts))]
    _serving.update(waiting=list(zip(prompts, lengths, strict=True)), running={}, at_once=at_once)


def serve(llm: Any, seconds: float) -> dict[str, Any]:
    """Goes on for so long -> tokens, seconds and a processor's seconds, drafts and steps of requests; done or not.

    It is done when a place is left empty: what remains would be served by fewer at once.
    """
    from vllm import SamplingParams

    engine, scheduler = llm.llm_engine, engine_core(llm).scheduler
    stock = scheduler.update_from_output
    figures = {"tokens": 0, "steps": 0, "drafts": 0}

    def update(scheduler_output: Any, output: Any) -> Any:
        figures["steps"] += len(scheduler_output.num_scheduled_tokens)
        figures["drafts"] += sum(map(len, scheduler_output.scheduled_spec_decode_tokens.values()))
        return stock(scheduler_output, output)

    scheduler.update_from_output = update
    waiting, running = _serving["waiting"], _serving["running"]
    began, busy, done = time.perf_counter(), time.process_time(), False
    while not done and time.perf_counter() - began < seconds:
        while waiting and len(running) < _serving["at_once"]:
            prompt, length = waiting.pop(0)
            name = f"{began}-{len(waiting)}"
            running[name] = 0
            engine.add_request(name, prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        for output in engine.step():
            count = len(output.outputs[0].token_ids)
            figures["tokens"] += count - running[output.request_id]
            running[output.request_id] = count
            if output.finished:
                del running[output.request_id]
        done = not waiting and len(running) < _serving["at_once"]
    seconds, busy = time.perf_counter() - began, time.process_time() - busy
    scheduler.update_from_output = stock
    if done and running:
        engine.abort_request(list(running))
        while engine.has_unfinished_requests():
            engine.step()
    return {**figures, "seconds": seconds, "busy": busy, "done": done}

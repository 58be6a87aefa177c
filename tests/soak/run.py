# SPDX-License-Identifier: Apache-2.0
"""A soak inside an engine's process: thousands of steps of random traffic, every step checked."""

import ctypes
import gc
import os
import pickle
from dataclasses import dataclass, field
from typing import Any

from tests.soak.invariants import Invariants, remembered
from tests.soak.traffic import SoakRequest, Traffic
from tests.support.engine_process import engine_core

ABORTED = 0.01
SAMPLES = 40


@dataclass
class SoakReport:
    """What a soak did, and what it found. rss: resident bytes, sampled SAMPLES times over the soak."""

    steps: int = 0
    requests: int = 0
    tokens: int = 0
    drafts: int = 0
    accepted: int = 0
    aborted: int = 0
    preemptions: int = 0
    unfinished_chunks: int = 0
    prefix_hits: int = 0
    at_the_longest: int = 0
    opted_out: int = 0
    blocks_written: int = 0
    rss: list[int] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    greedy: list[SoakRequest] = field(default_factory=list)

    @property
    def growth(self) -> int:
        """Bytes that the process grew by over the last half: the least of its last fifth less the least before."""
        half = self.rss[len(self.rss) // 2 :]
        fifth = len(half) // 5 or 1
        return min(half[-fifth:]) - min(half[:-fifth])


def soak(llm: Any, steps: int, seed: int, vocabulary: int, longest: int, options: bool, streams: int) -> SoakReport:
    """Drives the engine `steps` steps with about `streams` requests at once, then lets all of them finish."""
    from vllm import SamplingParams, TokensPrompt

    engine = llm.llm_engine
    traffic = Traffic(seed, vocabulary, longest, options)
    watch = Invariants(llm, vocabulary)
    report = SoakReport()
    running: dict[str, SoakRequest] = {}
    # As bytes: the report must not be what grows.
    greedy: list[bytes] = []
    while watch.steps < steps or running:
        while watch.steps < steps and len(running) < streams and traffic.random.random() < 0.6:
            request = traffic.next()
            running[request.name] = request
            report.opted_out += request.sampling.get("extra_args", {}).get("dflash", {}).get("max_draft_tokens") == 0
            prompt = TokensPrompt(prompt_token_ids=request.prompt)
            engine.add_request(request.name, prompt, SamplingParams(**request.sampling))
        for output in engine.step():
            request = running[output.request_id]
            request.tokens = list(output.outputs[0].token_ids)
            if output.finished:
                request.finished = True
                report.at_the_longest += len(request.prompt) + len(request.tokens) >= longest
                _close(request, running, traffic, report, greedy)
        if running and traffic.random.random() < ABORTED:
            request = running[traffic.random.choice(sorted(running))]
            engine.abort_request([request.name])
            report.aborted += 1
            _close(request, running, traffic, report, greedy)
        if watch.steps % max(1, steps // SAMPLES) == 0 and len(report.rss) < SAMPLES * watch.steps / steps:
            report.rss.append(_resident())
    # The runner hears of finished requests in the next step.
    llm.generate(TokensPrompt(prompt_token_ids=[3, 4]), SamplingParams(max_tokens=4, temperature=0), use_tqdm=False)
    report.leaked = remembered(llm, traffic.prefix)
    report.greedy = [pickle.loads(one) for one in greedy]
    report.steps, report.drafts, report.preemptions = watch.steps, watch.drafts, watch.preemptions
    report.unfinished_chunks, report.blocks_written = watch.chunks, watch.blocks_written
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_accepted_tokens":
            report.accepted = int(metric.value)
        if metric.name == "vllm:prefix_cache_hits":
            report.prefix_hits = int(metric.value)
    free = engine_core(llm).scheduler.kv_cache_manager.block_pool
    if free.get_num_free_blocks() != free.num_gpu_blocks - 1:
        report.leaked.append("KV blocks")
    return report


def _close(
    request: SoakRequest, running: dict[str, SoakRequest], traffic: Traffic, report: SoakReport, greedy: list[bytes]
) -> None:
    del running[request.name]
    report.requests += 1
    report.tokens += len(request.tokens)
    if request.finished:
        traffic.finished.append(request)
        del traffic.finished[:-8]
    if request.greedy and "repetition_penalty" not in request.sampling:
        greedy.append(pickle.dumps(request))


def _resident() -> int:
    """Bytes, once everything free has gone back to the system."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

# SPDX-License-Identifier: Apache-2.0
"""A soak from the outside: start the engine, run it, replay its greedy requests, list what was broken."""

from typing import Any

from tests.soak.run import SoakReport, soak
from tests.support.checkpoints import Pair
from tests.support.engine import EngineProcess, Runner

LONGEST = 256
STREAMS = 10
MOST_GROWTH = 4 * 2**20
# Until then the process still fills its caches (8,044 steps grew by 2.8 MiB over the last half, 5,054 by 6.9).
STEPS_TO_JUDGE_MEMORY = 8000
ENGINE: dict[str, Any] = {
    "traced": False,
    "max_model_len": LONGEST,
    "max_num_seqs": 8,
    # Prompts come in chunks, and blocks run out: 8 requests of 256 tokens would need 64.
    "max_num_batched_tokens": 96,
    "num_gpu_blocks_override": 26,
}


def soak_pair(pair: Pair, runner: Runner, steps: int, seed: int) -> tuple[SoakReport, list[str]]:
    """The report and a sentence for each promise that did not hold. A broken invariant of a step raises EngineError."""
    vocabulary = pair.target_shape.vocab_size
    process = EngineProcess(runner=runner)
    try:
        process.start(pair.target, pair.drafter, speculative={"num_speculative_tokens": 7}, **ENGINE)
        report = process.probe(soak, steps, seed, vocabulary, LONGEST, True, STREAMS)
        process.start(pair.target, max_model_len=LONGEST)
        return report, [*_missing(report), *_broken(report, process)]
    finally:
        process.close()


def _missing(report: SoakReport) -> list[str]:
    """A soak that did not meet what it is for has shown nothing."""
    return [
        f"no {name.replace('_', ' ')} in {report.steps} steps"
        for name in (
            "drafts",
            "accepted",
            "aborted",
            "preemptions",
            "unfinished_chunks",
            "prefix_hits",
            "at_the_longest",
            "opted_out",
            "blocks_written",
            "greedy",
        )
        if not getattr(report, name)
    ]


def _broken(report: SoakReport, plain: EngineProcess) -> list[str]:
    broken = [f"after the last request, {owner} still holds some" for owner in report.leaked]
    if report.steps >= STEPS_TO_JUDGE_MEMORY and report.growth > MOST_GROWTH:
        broken.append(f"memory grew by {report.growth:,} bytes over the last half, {MOST_GROWTH:,} are allowed")
    for request in report.greedy:
        sampling = {key: value for key, value in request.sampling.items() if key not in ("extra_args", "logprobs")}
        [alone] = plain.generate([request.prompt], sampling)
        expected = alone.token_ids if request.finished else alone.token_ids[: len(request.tokens)]
        if request.tokens != expected:
            broken.append(f"{request.name} gave {request.tokens}, alone {expected}")
    return broken

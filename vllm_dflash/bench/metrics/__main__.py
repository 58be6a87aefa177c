# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_dflash.bench.metrics [--target DIR --drafter DIR]`: the metrics' work, and its share of a step."""

from __future__ import annotations

import argparse
import os

from prometheus_client import REGISTRY

from vllm_dflash.bench.metrics.work import measure
from vllm_dflash.spec_decode.timing import STAGES

REQUESTS = (1, 8, 256)


def step_seconds(llm: object, requests: int) -> float:
    """Mean seconds of a step's stages, gaps left out, while `requests` requests decode in an engine of this process."""
    from vllm import SamplingParams

    def total(suffix: str, *stages: str) -> float:
        return sum(
            sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name in [f"vllm_dflash:{stage}_seconds_{suffix}" for stage in stages]
        )

    before = total("sum", *STAGES), total("count", "target")
    prompts = [f"Number {i} is" for i in range(requests)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False)  # type: ignore[attr-defined]
    return (total("sum", *STAGES) - before[0]) / (total("count", "target") - before[1])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vllm_dflash.bench.metrics", description=__doc__)
    parser.add_argument("--target", help="a model folder; with --drafter the share of its steps is measured too")
    parser.add_argument("--drafter", help="its drafter's folder")
    parser.add_argument("--drafts", type=int, default=7, help="drafts a request")
    arguments = parser.parse_args()
    work = {requests: measure(requests, arguments.drafts) for requests in REQUESTS}
    steps: dict[int, float] = {}
    if arguments.target and arguments.drafter:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM

        llm = LLM(
            arguments.target,
            max_model_len=512,
            max_num_batched_tokens=8192,
            enforce_eager=True,
            disable_log_stats=False,
            additional_config={"dflash": {"block_length": arguments.drafts}},
            speculative_config={
                "method": "dflash",
                "model": arguments.drafter,
                "num_speculative_tokens": arguments.drafts,
            },
        )
        step_seconds(llm, 2)
        steps = {requests: step_seconds(llm, requests) for requests in REQUESTS}
    print(f"{'requests':>8}  {'worker':>9}  {'transport':>9}  {'front end':>9}  {'step':>10}  {'worker of step':>14}")
    for requests, one in work.items():
        times = "  ".join(f"{s * 1e6:6.0f} us" for s in (one.worker, one.transport, one.front_end))
        step = steps.get(requests)
        print(
            f"{requests:8}  {times}"
            + (f"  {step * 1e3:7.1f} ms  {one.worker / step:14.2%}" if step else f"  {'':>10}  {'':>14}")
        )


if __name__ == "__main__":
    main()

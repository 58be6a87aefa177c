# SPDX-License-Identifier: Apache-2.0
"""Step 6: acceptance length by kind of prompt, through vLLM itself.

    python -m examples.smollm2.evaluate --drafter .demo/my-drafter

The acceptance length counts the verifier's own token: 1.0 is no gain. It comes from vLLM's own counters.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from examples.smollm2.data import TRAINING
from examples.smollm2.generate import encode, read_prompts
from vllm_dflash.checkpoint import load_draft


def fixed_length(drafts: int) -> dict[str, Any]:
    """Engine arguments that keep this package at `drafts` tokens a step, whatever they gain."""
    return {"additional_config": {"dflash": {"block_length": drafts}}}


def counters(llm: Any) -> tuple[int, int]:
    """(drafts, accepted draft tokens) since the engine started."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return values["vllm:spec_decode_num_drafts"], values["vllm:spec_decode_num_accepted_tokens"]


def measure(llm: Any, prompts: list[list[int]], temperature: float, count: int) -> dict[str, float]:
    """Continue `prompts` (token ids) all at once; acceptance length and tokens a second."""
    from vllm import SamplingParams

    before, began = counters(llm), time.monotonic()
    sampling = SamplingParams(temperature=temperature, max_tokens=count)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=True)
    seconds = time.monotonic() - began
    drafts, accepted = (after - earlier for after, earlier in zip(counters(llm), before, strict=True))
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"acceptance_length": 1 + accepted / max(1, drafts), "tokens_per_second": made / seconds}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--drafter", type=Path, default=Path(".demo/drafter"))
    parser.add_argument("--prompts", type=Path, default=TRAINING / "held-out.jsonl")
    parser.add_argument("--drafts", type=int, help="tokens to draft a step (default: the drafter's most)")
    parser.add_argument("--kinds", nargs="+", help="kinds of prompts (default all)")
    parser.add_argument("--each", type=int, default=24, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=8, help="sequences that run at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file as well")
    arguments = parser.parse_args(argv)

    from vllm import LLM

    # Every draft counts here, whether it pays on this machine or not.
    drafts = arguments.drafts or load_draft(str(arguments.drafter)).config.num_draft_tokens
    llm = LLM(
        str(arguments.target),
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=512 + arguments.max_tokens,
        max_num_seqs=arguments.sequences,
        speculative_config={
            "method": "dflash",
            "model": str(arguments.drafter),
            "num_speculative_tokens": drafts,
        },
        **fixed_length(drafts),
        disable_log_stats=False,
        seed=0,
    )
    tokenizer = llm.get_tokenizer()
    by_kind: dict[str, list[list[int]]] = {}
    for prompt in read_prompts(arguments.prompts):
        if arguments.kinds and prompt["kind"] not in arguments.kinds:
            continue
        chosen = by_kind.setdefault(prompt["kind"], [])
        if len(chosen) < arguments.each:
            chosen.append(encode(tokenizer, prompt, 512))
    figures = {
        f"{kind} T={temperature:g}": measure(llm, prompts, temperature, arguments.max_tokens)
        for temperature in arguments.temperatures
        for kind, prompts in sorted(by_kind.items())
    }
    for name, values in figures.items():
        print(f"{name:18} {values['acceptance_length']:6.2f} {values['tokens_per_second']:8.1f} tokens/s")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()

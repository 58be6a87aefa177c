# SPDX-License-Identifier: Apache-2.0
"""Step 2: the target's own continuations, made with vLLM, and its features.

    python -m examples.smollm2.generate
    python -m examples.smollm2.generate --prompts .demo/training/held-out.jsonl

With the tokens come the features that a drafter sees (capture.py). Every prompt with an even index is
continued greedily, the others at T=0.8. A shard that is there is skipped, so the command can be stopped and
repeated, and several workers can share it. About 6 kB a token for SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from examples.smollm2.capture import Capture
from examples.smollm2.data import TRAINING
from examples.smollm2.features import TAPS

TEMPERATURES = (0.0, 0.8)


def read_prompts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def encode(tokenizer: Any, prompt: dict[str, Any], longest: int) -> list[int]:
    """Token ids of a prompt: as it stands, or through the target's chat template."""
    if "text" in prompt:
        return tokenizer.encode(prompt["text"])[:longest]
    text = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)[:longest]


def write_shard(path: Path, rows: list[dict[str, Any]]) -> None:
    """One npz: `tokens` all sequences end to end, `lengths`, `prompt_lengths`, `temperatures`, `kinds`.

    Captured features go beside it, in the layout of features.py; the npz appears last: the shard is done.
    """
    tokens = np.concatenate([row["tokens"] for row in rows])
    partial = path.with_suffix(".partial.npz")
    if "captured" in rows[0]:
        parts = [(row["captured"], len(row["tokens"])) for row in rows]
        with path.with_suffix(".taps").open("wb") as file:
            np.lib.format.write_array(file, np.concatenate([part.taps[:length] for part, length in parts]))
        np.savez(
            path.with_suffix(".soft.npz"),
            ids=np.concatenate([part.soft_ids[:length] for part, length in parts]),
            chances=np.concatenate([part.soft_chances[:length] for part, length in parts]),
        )
    np.savez_compressed(
        partial,
        tokens=tokens.astype(np.uint16 if tokens.max() < 2**16 else np.uint32),
        lengths=np.array([len(row["tokens"]) for row in rows], np.int32),
        prompt_lengths=np.array([row["prompt_length"] for row in rows], np.int32),
        temperatures=np.array([row["temperature"] for row in rows], np.float32),
        kinds=np.array([row["kind"] for row in rows]),
    )
    partial.rename(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--prompts", type=Path, default=TRAINING / "prompts.jsonl")
    parser.add_argument("--out", type=Path, help="folder of shards (default: the prompts' file without suffix)")
    parser.add_argument("--max-tokens", type=int, default=320, help="longest continuation")
    parser.add_argument("--longest-prompt", type=int, default=256)
    parser.add_argument("--shard", type=int, default=256, help="prompts a shard")
    parser.add_argument("--sequences", type=int, default=128, help="sequences that run at once")
    parser.add_argument("--worker", type=int, default=0, help="this worker's number")
    parser.add_argument("--workers", type=int, default=1, help="workers that share the shards")
    parser.add_argument("--taps", type=int, nargs="+", default=TAPS, help="0-based decoder layers")
    parser.add_argument("--tokens-only", action="store_true", help="leave the features to features.py")
    arguments = parser.parse_args(argv)

    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    out = arguments.out or arguments.prompts.with_suffix("")
    out.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(arguments.prompts)
    llm = LLM(
        str(arguments.target),
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=arguments.longest_prompt + arguments.max_tokens,
        max_num_seqs=arguments.sequences,
        seed=0,
    )
    tokenizer = llm.get_tokenizer()
    capture = None if arguments.tokens_only else Capture(llm, tuple(arguments.taps))
    shards = range(0, len(prompts), arguments.shard)
    for number, start in list(enumerate(shards))[arguments.worker :: arguments.workers]:
        path = out / f"shard-{number:05d}.npz"
        if path.exists():
            continue
        began = time.monotonic()
        indices = range(start, min(start + arguments.shard, len(prompts)))
        chosen = [prompts[i] for i in indices]
        encoded = [encode(tokenizer, prompt, arguments.longest_prompt) for prompt in chosen]
        sampling = [SamplingParams(temperature=TEMPERATURES[i % 2], max_tokens=arguments.max_tokens) for i in indices]
        inputs: Any = [{"prompt_token_ids": ids} for ids in encoded]
        outputs = llm.generate(inputs, sampling, use_tqdm=True)
        rows = [
            {
                "tokens": np.array([*ids, *output.outputs[0].token_ids]),
                "prompt_length": len(ids),
                "temperature": params.temperature,
                "kind": prompt["kind"],
                **({"captured": capture.take(output.request_id)} if capture is not None else {}),
            }
            for prompt, ids, params, output in zip(chosen, encoded, sampling, outputs, strict=True)
        ]
        write_shard(path, rows)
        made = sum(len(row["tokens"]) - row["prompt_length"] for row in rows)
        rate = made / (time.monotonic() - began)
        print(f"generate: {path.name}: {made} tokens, {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()

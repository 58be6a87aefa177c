# SPDX-License-Identifier: Apache-2.0
"""Step 2: the target's own continuations, made with vLLM, and its features.

    python -m examples.smollm2.generate
    python -m examples.smollm2.generate --prompts .demo/training/held-out.jsonl

With the tokens come the features that a drafter sees (capture.py). Every prompt with an even index is
continued greedily, the others at T=0.8 (`--temperatures`) among the target's top 16. The batch stays full across
shards. A shard that is there is skipped, so the command can be stopped and repeated, and several workers can share
it. About 6 kB a token for SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from examples.smollm2.capture import Capture
from examples.smollm2.data import TRAINING
from examples.smollm2.features import TAPS


def read_prompts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def encode(tokenizer: Any, prompt: dict[str, Any], longest: int) -> list[int]:
    """Token ids of a prompt: as it stands, or through the target's chat template."""
    if "text" in prompt:
        return tokenizer.encode(prompt["text"])[:longest]
    text = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)[:longest]


@dataclass
class Shard:
    """A file to write: the prompts with `indices`, and the `rows` that are done."""

    path: Path
    indices: range
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)


def write_shard(path: Path, rows: list[dict[str, Any]]) -> None:
    """One npz: `tokens` all sequences end to end, `lengths`, `prompt_lengths`, `temperatures`, `kinds`.

    Captured features go beside it, in the layout of features.py; the npz appears last: the shard is done.
    """
    tokens = np.concatenate([row["tokens"] for row in rows])
    partial = path.with_suffix(".partial.npz")
    if "captured" in rows[0]:
        parts = [row["captured"] for row in rows]
        with path.with_suffix(".taps").open("wb") as file:
            np.lib.format.write_array(file, np.concatenate([part.taps for part in parts]))
        np.savez(
            path.with_suffix(".soft.npz"),
            ids=np.concatenate([part.soft_ids for part in parts]),
            chances=np.concatenate([part.soft_chances for part in parts]),
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
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8], help="of the prompts in turn")
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
    mine = [
        Shard(path, range(start, min(start + arguments.shard, len(prompts))))
        for number, start in list(enumerate(shards))[arguments.worker :: arguments.workers]
        if not (path := out / f"shard-{number:05d}.npz").exists()
    ]

    def temperature(index: int) -> float:
        return arguments.temperatures[index % len(arguments.temperatures)]

    def row(index: int, output: Any) -> dict[str, Any]:
        ids = output.prompt_token_ids
        tokens = np.array([*ids, *output.outputs[0].token_ids])
        return {
            "tokens": tokens,
            "prompt_length": len(ids),
            "temperature": temperature(index),
            "kind": prompts[index]["kind"],
            **({"captured": capture.take(output.request_id, len(tokens))} if capture is not None else {}),
        }

    def submit(index: int) -> None:
        sampling = SamplingParams(temperature=temperature(index), max_tokens=arguments.max_tokens)
        ids = encode(tokenizer, prompts[index], arguments.longest_prompt)
        llm.llm_engine.add_request(str(index), {"prompt_token_ids": ids}, sampling)

    waiting = iter([(shard, index) for shard in mine for index in shard.indices])
    running: dict[str, Shard] = {}
    made, began = 0, time.monotonic()
    with tqdm(total=sum(len(shard.indices) for shard in mine), desc="generate", unit="prompt", mininterval=5) as bar:
        while True:
            for shard, index in itertools.islice(waiting, arguments.sequences - len(running)):
                submit(index)
                running[str(index)] = shard
            if not running:
                break
            for output in llm.llm_engine.step():
                if not output.finished:
                    continue
                shard = running.pop(output.request_id)
                made += len(output.outputs[0].token_ids)
                shard.rows[int(output.request_id)] = row(int(output.request_id), output)
                bar.update(1)
                bar.set_postfix(tokens_per_second=f"{made / (time.monotonic() - began):.0f}", refresh=False)
                if len(shard.rows) == len(shard.indices):
                    write_shard(shard.path, [shard.rows[i] for i in shard.indices])
                    shard.rows.clear()


if __name__ == "__main__":
    main()

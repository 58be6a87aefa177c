# SPDX-License-Identifier: Apache-2.0
"""Step 3: what the drafter sees of the target: tapped features, and the target's own next-token candidates.

    python -m examples.smollm2.features
    python -m examples.smollm2.features --tokens .demo/training/held-out

One teacher-forced bf16 forward of the target over every sequence. Beside `shard-00000.npz` it writes
`shard-00000.taps` (bf16 bits, [tokens, F*H]) and `shard-00000.soft.npz` (the target's top candidates and
their probabilities at T=1, for soft targets). A shard that is done is skipped.
About 6 kB a token for SmolLM2-135M.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from examples.smollm2.capture import SOFT_CANDIDATES, bf16_bits, top_candidates
from examples.smollm2.data import TRAINING

TAPS = (1, 7, 14, 20, 27)


def load_target(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def tapped(target: Any, tokens: Tensor, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """tokens [B, T] -> (features [B, T, F*H], logits [B, T, V]); tap i is the output of decoder layer i."""
    kept: dict[int, Tensor] = {}

    def keep(tap: int, output: Any) -> None:
        kept[tap] = output[0] if isinstance(output, tuple) else output

    layers = target.model.layers
    hooks = [layers[tap].register_forward_hook(lambda _, __, output, tap=tap: keep(tap, output)) for tap in taps]
    try:
        with torch.no_grad():
            logits = target(tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return torch.cat([kept[tap] for tap in taps], dim=-1), logits


def write_features(path: Path, target: Any, taps: tuple[int, ...], batch: int, progress: tqdm) -> None:
    """Make both files of the shard at `path`; the .taps file appears last: the shard is done."""
    shard = np.load(path)
    lengths = shard["lengths"]
    ends = np.cumsum(lengths)
    starts = ends - lengths
    width = len(taps) * target.config.hidden_size
    features = np.lib.format.open_memmap(
        path.with_suffix(".partial"), mode="w+", dtype=np.uint16, shape=(int(ends[-1]), width)
    )
    ids = np.zeros((int(ends[-1]), SOFT_CANDIDATES), shard["tokens"].dtype)
    chances = np.zeros((int(ends[-1]), SOFT_CANDIDATES), np.float16)
    order = np.argsort(lengths, kind="stable")
    for chosen in np.array_split(order, max(1, len(order) // batch)):
        padded = torch.zeros(len(chosen), int(lengths[chosen].max()), dtype=torch.int64)
        for row, i in enumerate(chosen):
            padded[row, : lengths[i]] = torch.from_numpy(shard["tokens"][starts[i] : ends[i]].astype(np.int64))
        rows, logits = tapped(target, padded.to(target.device), taps)
        top_ids, top_chances = top_candidates(logits)
        bits = bf16_bits(rows)
        for row, i in enumerate(chosen):
            features[starts[i] : ends[i]] = bits[row, : lengths[i]]
            ids[starts[i] : ends[i]] = top_ids[row, : lengths[i]]
            chances[starts[i] : ends[i]] = top_chances[row, : lengths[i]]
        progress.update(int(lengths[chosen].sum()))
    features.flush()
    np.savez(path.with_suffix(".soft.npz"), ids=ids, chances=chances)
    path.with_suffix(".partial").rename(path.with_suffix(".taps"))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--tokens", type=Path, default=TRAINING / "prompts", help="folder of shards from generate.py")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--taps", type=int, nargs="+", default=TAPS, help="0-based decoder layers")
    parser.add_argument("--batch", type=int, default=8, help="sequences a forward")
    arguments = parser.parse_args(argv)
    target = load_target(arguments.target).to(arguments.device)
    shards = sorted(arguments.tokens.glob("shard-?????.npz"))
    shards = [path for path in shards if not path.with_suffix(".taps").exists()]
    with tqdm(
        total=sum(int(np.load(path)["lengths"].sum()) for path in shards),
        desc="features",
        unit="token",
        mininterval=5,
    ) as progress:
        for path in shards:
            write_features(path, target, tuple(arguments.taps), arguments.batch, progress)


if __name__ == "__main__":
    main()

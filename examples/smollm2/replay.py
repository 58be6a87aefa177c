# SPDX-License-Identifier: Apache-2.0
"""Acceptance length of a drafter without an engine, on continuations that the target made greedily.

    python -m examples.smollm2.replay --drafter .demo/drafter

What the target would verify is known there, so the drafter alone runs: fast enough for early stopping.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.smollm2.data import TRAINING, Batch, Sequence, collate, load_sequences
from examples.smollm2.export import load_exported
from examples.smollm2.features import load_target
from examples.smollm2.model import Drafter, block_ids, unit_scaled


def choose(drafter: Drafter, hidden: Tensor, anchor_ids: Tensor, head: Tensor, ids: Tensor, scaled: Tensor) -> Tensor:
    """Greedy drafts [..., K] of final-normed hidden [..., S, H]; head [Vc, H] scores `ids` [Vc]."""
    logits = (hidden[..., 1:, :].to(head.dtype) @ head.T).float()
    if not drafter.shape.is_dflash2:
        return ids[logits.argmax(-1)]
    scores, places = logits.topk(drafter.shape.selector_top, dim=-1)
    candidates = ids[places]
    previous, path = anchor_ids, []
    for j in range(candidates.shape[-2]):
        added = drafter.candidate_selector(hidden[..., j + 1, :], previous, candidates[..., j, :], scaled)
        best = (scores[..., j, :] + added).argmax(-1, keepdim=True)
        previous = candidates[..., j, :].gather(-1, best)[..., 0]
        path.append(previous)
    return torch.stack(path, dim=-1)


class Replay:
    """Acceptance over stored greedy continuations, with the output head cut to `ids`."""

    def __init__(self, embeddings: Tensor, head: Tensor, ids: Tensor, anchors_at_once: int = 128) -> None:
        self.embeddings, self.ids = embeddings, ids
        self.head, self.scaled = head[ids], unit_scaled(embeddings)
        self.at_once = anchors_at_once

    def drafts(self, drafter: Drafter, batch: Batch) -> Tensor:
        with torch.no_grad(), torch.autocast(self.embeddings.device.type, torch.bfloat16):
            batch = batch.to(self.embeddings.device)
            embedded = self.embeddings[block_ids(batch.anchor_ids, drafter)].float()
            hidden = drafter(batch.taps, embedded, batch.anchors)
            return choose(drafter, hidden, batch.anchor_ids, self.head, self.ids, self.scaled)

    def accepted(self, drafter: Drafter, sequence: Sequence) -> np.ndarray:
        """How many drafts the target would accept at each anchor from the continuation's first token on."""
        slots = drafter.shape.block_size - 1
        everywhere = np.arange(sequence.prompt_length, len(sequence.tokens) - slots)
        counts = []
        for first in range(0, len(everywhere), self.at_once):
            batch = collate([sequence], [everywhere[first : first + self.at_once]], slots)
            right = self.drafts(drafter, batch).cpu() == batch.labels
            counts.append(right.int().cumprod(-1).sum(-1)[0].numpy())
        return np.concatenate(counts) if counts else np.zeros(0, int)

    def acceptance_length(self, drafter: Drafter, sequences: list[Sequence]) -> dict[str, float]:
        """Mean tokens a step, the verifier's own included, by kind and over all ("all")."""
        tokens: dict[str, int] = defaultdict(int)
        steps: dict[str, int] = defaultdict(int)
        for sequence in sequences:
            accepted = self.accepted(drafter, sequence)
            at = 0
            while at < len(accepted):
                for kind in (sequence.kind, "all"):
                    tokens[kind] += int(accepted[at]) + 1
                    steps[kind] += 1
                at += int(accepted[at]) + 1
        return {kind: tokens[kind] / steps[kind] for kind in sorted(steps)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=Path(".demo/target"))
    parser.add_argument("--drafter", type=Path, default=Path(".demo/drafter"))
    parser.add_argument("--tokens", type=Path, default=TRAINING / "held-out", help="shards with features")
    arguments = parser.parse_args(argv)
    target = load_target(arguments.target)
    drafter = load_exported(arguments.drafter)
    embeddings = target.get_input_embeddings().weight.detach()
    head = target.get_output_embeddings().weight.detach()
    replay = Replay(embeddings, head, torch.arange(len(head)))
    sequences = [sequence for sequence in load_sequences([arguments.tokens]) if sequence.temperature == 0]
    lengths = replay.acceptance_length(drafter, sequences)
    print(json.dumps({kind: round(length, 3) for kind, length in lengths.items()}))


if __name__ == "__main__":
    main()

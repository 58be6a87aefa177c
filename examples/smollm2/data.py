# SPDX-License-Identifier: Apache-2.0
"""Batches of training blocks out of the shards that generate.py and features.py wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TRAINING = Path(".demo/training")
RAW_KINDS = ("code", "prose")
CONTEXT_STEP = 64


@dataclass
class Sequence:
    """One prompt and its continuation; `taps` is a view into the shard's file on disk."""

    tokens: np.ndarray
    taps: np.ndarray
    soft_ids: np.ndarray
    soft_chances: np.ndarray
    prompt_length: int
    temperature: float
    kind: str

    @property
    def first_anchor(self) -> int:
        """Where blocks may start in training: a raw prompt is text to learn from too, a templated one is not."""
        return min(8, self.prompt_length) if self.kind in RAW_KINDS else self.prompt_length


@dataclass
class Batch:
    """B sequences with N blocks each; slot j of a block predicts the token at anchor + j."""

    taps: Tensor
    """[B, T, F*H] bf16, T a multiple of 64, the rows behind a sequence 0"""
    anchors: Tensor
    """[B, N] positions"""
    anchor_ids: Tensor
    """[B, N]"""
    labels: Tensor
    """[B, N, K], -1 behind the end of the sequence"""
    soft_ids: Tensor
    """[B, N, K, 16]"""
    soft_chances: Tensor
    """[B, N, K, 16] float32"""

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


def shards_with_features(folders: list[Path]) -> list[Path]:
    """The .taps files of all complete shards."""
    found = [path for folder in folders for path in sorted(folder.glob("shard-?????.taps"))]
    return [path for path in found if path.with_suffix(".npz").exists()]


def load_sequences(folders: list[Path], shortest: int = 12) -> list[Sequence]:
    """Sequences of all shards with features, whose continuation has at least `shortest` tokens."""
    sequences = []
    for done in shards_with_features(folders):
        shard, soft = np.load(done.with_suffix(".npz")), np.load(done.with_suffix(".soft.npz"))
        taps = np.load(done, mmap_mode="r")
        tokens, ids, chances = shard["tokens"], soft["ids"], soft["chances"]
        ends = np.cumsum(shard["lengths"])
        columns = (shard["lengths"], shard["prompt_lengths"], shard["temperatures"], shard["kinds"])
        for end, length, prompt_length, temperature, kind in zip(ends, *columns, strict=True):
            part = slice(end - length, end)
            if length - prompt_length >= shortest:
                sequences.append(
                    Sequence(
                        tokens[part],
                        taps[part],
                        ids[part],
                        chances[part],
                        int(prompt_length),
                        float(temperature),
                        str(kind),
                    )
                )
    if not sequences:
        names = " and ".join(str(folder) for folder in folders)
        raise ValueError(f"no shard with features in {names}; run generate.py, or features.py after --tokens-only.")
    return sequences


class Data:
    """The sequences of some folders, which may still be growing."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.shards: list[Path] = []
        self.sequences: list[Sequence] = []
        if not self.refresh():
            load_sequences(folders)

    def refresh(self) -> bool:
        """Whether there are new shards; if so `sequences` has been read anew."""
        shards = shards_with_features(self.folders)
        if shards == self.shards:
            return False
        self.shards, self.sequences = shards, load_sequences(self.folders)
        made = sum(len(sequence.tokens) - sequence.prompt_length for sequence in self.sequences)
        print(f"data: {len(self.sequences)} sequences, {made} tokens of the target", flush=True)
        return True


def frequent_tokens(sequences: list[Sequence], vocabulary: int, most: int) -> Tensor:
    """Sorted ids of the tokens that the data shows or the target ranks among its first four, the `most` frequent."""
    counts = np.zeros(vocabulary, np.int64)
    for sequence in sequences:
        counts += np.bincount(sequence.tokens, minlength=vocabulary)
        counts[np.unique(sequence.soft_ids[sequence.prompt_length - 1 :, :4])] += 1
    order = np.argsort(-counts, kind="stable")[:most]
    return torch.from_numpy(np.sort(order[counts[order] > 0]))


def collate(sequences: list[Sequence], anchors: list[np.ndarray], slots: int) -> Batch:
    """Put blocks at `anchors` (equal counts a sequence) of the given sequences together."""
    longest = -(-max(len(sequence.tokens) for sequence in sequences) // CONTEXT_STEP) * CONTEXT_STEP
    width = sequences[0].taps.shape[1]
    taps = np.zeros((len(sequences), longest, width), np.uint16)
    ids, labels, soft_ids, soft_chances = [], [], [], []
    for row, (sequence, chosen) in enumerate(zip(sequences, anchors, strict=True)):
        taps[row, : len(sequence.tokens)] = sequence.taps
        tokens = sequence.tokens.astype(np.int64)
        at = chosen[:, None] + np.arange(1, slots + 1)
        inside = at < len(tokens)
        at = np.where(inside, at, 1)
        ids.append(tokens[chosen])
        labels.append(np.where(inside, tokens[at], -1))
        soft_ids.append(sequence.soft_ids[at - 1].astype(np.int64))
        soft_chances.append(sequence.soft_chances[at - 1].astype(np.float32))
    return Batch(
        torch.from_numpy(taps).view(torch.bfloat16),
        *(torch.from_numpy(np.stack(part)) for part in (anchors, ids, labels, soft_ids, soft_chances)),
    )


def batches(
    sequences: list[Sequence], count: int, blocks: int, slots: int, rng: np.random.Generator, short: float = 0.0
) -> Iterator[Batch]:
    """Endless batches of `count` sequences with `blocks` anchors each, lengths alike, order by `rng`.

    A share `short` of them has half as many slots and twice as many blocks: early slots matter most, and
    a server may draft fewer tokens than the drafter's most.
    """
    while True:
        order = rng.permutation(len(sequences))
        for pool in np.array_split(order, max(1, len(order) // (count * 16))):
            alike = sorted(pool, key=lambda i: len(sequences[i].tokens))
            groups = [alike[i : i + count] for i in range(0, len(alike), count)]
            for g in rng.permutation(len(groups)):
                chosen = [sequences[i] for i in groups[g]]
                halve = short > 0 and rng.random() < short
                wanted = 2 * blocks if halve else blocks
                anchors = [
                    np.sort(
                        rng.choice(
                            np.arange(s.first_anchor, len(s.tokens) - 1),
                            wanted,
                            replace=len(s.tokens) - 1 - s.first_anchor < wanted,
                        )
                    )
                    for s in chosen
                ]
                yield collate(chosen, anchors, slots // 2 if halve else slots)

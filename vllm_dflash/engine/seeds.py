# SPDX-License-Identifier: Apache-2.0
"""The seed of a request's noise."""

import functools
import hashlib
from collections.abc import Mapping, Sequence

import torch


def request_seeds(
    request_ids: Sequence[str], generators: Mapping[int, torch.Generator], engine_seed: int
) -> torch.Tensor:
    """[B] int64: the user's seed where a request has one, else a hash of the engine's seed and the request's id.

    A function of both alone, so that every tensor-parallel rank of an engine draws the same noise and nothing is kept a
    request.
    generators: row -> its seeded generator, as in vLLM's SamplingMetadata.
    """
    seeds = [
        generators[row].initial_seed() if row in generators else _hash(request_id, engine_seed)
        for row, request_id in enumerate(request_ids)
    ]
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64)


@functools.lru_cache(maxsize=8192)
def _hash(request_id: str, engine_seed: int) -> int:
    key = (engine_seed & (1 << 64) - 1).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8, key=key).digest(), "little")


def _signed(seed: int) -> int:
    return (seed & (1 << 64) - 1) - (1 << 64 if seed >> 63 & 1 else 0)

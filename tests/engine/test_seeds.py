# SPDX-License-Identifier: Apache-2.0
"""The seed of a request's noise: the user's where given, else a function of engine seed and request id."""

import torch

from vllm_dflash.engine.seeds import request_seeds


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_users_seed_is_used_as_it_is() -> None:
    seeds = request_seeds(["a", "b"], {1: generator(1234)}, 0)
    assert seeds[1] == 1234


def test_without_a_seed_requests_and_engines_differ_and_ranks_agree() -> None:
    ids = [f"request-{i}" for i in range(1000)]
    seeds = request_seeds(ids, {}, 7)
    assert torch.equal(seeds, request_seeds(ids, {}, 7))
    assert len(set(seeds.tolist())) == 1000
    assert not torch.equal(seeds, request_seeds(ids, {}, 8))


def test_seeds_of_64_bits_and_negative_ones_fit() -> None:
    assert request_seeds(["a"], {0: generator(2**63 + 5)}, 0).tolist() == [5 - 2**63]
    request_seeds(["a"], {}, -1)

# SPDX-License-Identifier: Apache-2.0
"""The noise: the published Philox vectors, the interval, and independence of slots, streams and steps."""

import torch

from vllm_dflash.ops import noise


def words(key: tuple[int, int], counter: tuple[int, int, int, int]) -> list[int]:
    out = noise.philox(tuple(map(torch.tensor, key)), tuple(map(torch.tensor, counter)))
    return [int(word) for word in out]


def test_philox_gives_the_published_words() -> None:
    # Random123's known-answer vectors of philox4x32-10.
    assert words((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert words((ones, ones), (ones, ones, ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert words((0xA4093822, 0x299F31D0), pi) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def test_uniform_is_open_and_flat() -> None:
    u = noise.uniform(torch.arange(200_000), torch.tensor(7), 1, noise.ACCEPT)
    assert u.dtype == torch.float64 and 0 < u.min() and u.max() < 1
    counts = torch.histc(u, bins=64, min=0, max=1)
    chi_square = ((counts - 200_000 / 64) ** 2 / (200_000 / 64)).sum()
    assert chi_square < 130  # 63 degrees of freedom: above that once in 1e6


def test_every_key_part_changes_the_number() -> None:
    seeds, positions = torch.tensor([5, 5 + (1 << 32), 6]), torch.tensor([9, 10])
    seen = {
        float(noise.uniform(seed, position, slot, stream))
        for seed in seeds
        for position in positions
        for slot in (1, 2)
        for stream in (noise.DRAFT, noise.ACCEPT, noise.RECOVER, noise.BONUS)
    }
    assert len(seen) == 3 * 2 * 2 * 4


def test_negative_seeds_and_broadcast() -> None:
    u = noise.uniform(torch.tensor([-1, -(1 << 63)])[:, None], torch.tensor([0, 3]), torch.tensor([1, 2]), 2)
    assert u.shape == (2, 2) and ((u > 0) & (u < 1)).all()

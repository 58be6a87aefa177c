# SPDX-License-Identifier: Apache-2.0
"""Counter-based noise: one uniform number a (request, step, slot, stream), the same in torch, C++ and CUDA.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with
key = (seed low 32, seed high 32) and counter = (anchor position low 32, slot, stream, 0).
The key is the anchor's position, not the drafted token's own: a position that is drafted again in a later
step must get fresh noise, or cutting a draft by its confidence would bias the output.
"""

from __future__ import annotations

import torch

DRAFT, ACCEPT, RECOVER, BONUS = 1, 2, 3, 4

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(key: tuple[torch.Tensor, torch.Tensor], counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Ten rounds of Philox4x32 over int64 tensors that hold 32-bit words; returns the four output words."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        # The low 64 bits of an int64 product are right even where it wraps.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & _MASK) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32 & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(
    seeds: torch.Tensor, anchor_positions: torch.Tensor, slots: torch.Tensor | int, stream: int
) -> torch.Tensor:
    """Uniform numbers in the open interval (0, 1), float64, for broadcastable int64 seeds, positions and
    slots.

    With n = word0 * 2^20 + (word1 >> 12), 52 bits, u = (2n + 1) * 2^-53: exact in a double, never 0 or 1.
    Streams: DRAFT, ACCEPT, RECOVER, BONUS.
    """
    shape = torch.broadcast_shapes(seeds.shape, anchor_positions.shape, getattr(slots, "shape", ()))
    seeds = seeds.to(torch.int64).expand(shape)
    slot = torch.as_tensor(slots, dtype=torch.int64, device=seeds.device).expand(shape) & _MASK
    word0, word1, _, _ = philox(
        (seeds & _MASK, seeds >> 32 & _MASK),
        (
            anchor_positions.to(torch.int64) & _MASK,
            slot,
            torch.full_like(slot, stream),
            torch.zeros_like(slot),
        ),
    )
    n = (word0 << 20) | (word1 >> 12)
    return (2 * n + 1).to(torch.float64) * 2.0**-53

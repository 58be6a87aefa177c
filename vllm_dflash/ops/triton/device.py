# SPDX-License-Identifier: Apache-2.0
"""What the kernels share: noise, the inverse CDF, and numbers of 8 bits by their bits, which any GPU can."""

from __future__ import annotations

import triton
import triton.language as tl

DRAFT, ACCEPT, RECOVER, BONUS = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def uniform(seed, position, slot, stream):
    """The number of vllm_dflash.ops.noise.uniform: float64 in (0, 1), the same bits."""
    low: tl.constexpr = 0xFFFFFFFF
    k0 = (seed & low).to(tl.uint64)
    k1 = ((seed >> 32) & low).to(tl.uint64)
    c0 = (position & low).to(tl.uint64)
    c1 = c0 * 0 + slot
    c2 = c0 * 0 + stream
    c3 = c0 * 0
    for _ in tl.static_range(10):
        p0 = c0 * 0xD2511F53
        p1 = c2 * 0xCD9E8D57
        c0 = (p1 >> 32) ^ c1 ^ k0
        c1 = p1 & low
        c2 = (p0 >> 32) ^ c3 ^ k1
        c3 = p0 & low
        k0 = (k0 + 0x9E3779B9) & low
        k1 = (k1 + 0xBB67AE85) & low
    n = (c0 << 20) | (c1 >> 12)
    return (2 * n + 1).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def first_above(running, target):
    """First index whose running sum [n] is above `target`; where rounding leaves none, the last that raised the sum."""
    below = tl.sum((running <= target).to(tl.int32), 0)
    raised = tl.sum((running < tl.max(running, 0)).to(tl.int32), 0)
    return tl.minimum(below, raised)


@triton.jit
def weight_of(x, top, inverse):
    """exp((x - top) / T) for top the largest, also where both are infinite; NaN weighs nothing. inverse: 1 / T."""
    z = (x - top) * inverse
    return tl.where(x == top, 1.0, tl.where(z >= -87.0, tl.exp(tl.where(z >= -87.0, z, 0.0)), 0.0))


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 -> dtype, rounded to nearest even: for bfloat16 by its bits, since the interpreter's own cast cuts."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def e4m3_of(x):
    """fp32 -> the bits of float8_e4m3fn, rounded to nearest even, saturated at +-448; NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # 2^14 has a unit in the last place of 2^-9, the smallest e4m3: the sum's low bits count those.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    normal = (magnitude - 0x3C000000 + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    special = tl.where(magnitude > 0x7F800000, 0x7F, 0x7E)
    out = tl.where(magnitude >= 0x43E00000, special, tl.where(magnitude < 0x3C800000, small, normal))
    return (sign | out).to(tl.uint8)


@triton.jit
def of_e4m3(x):
    """The bits of float8_e4m3fn [uint8] -> fp32."""
    bits = x.to(tl.uint32)
    magnitude = (bits & 0x7F) << 20
    finite = (magnitude.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(tl.uint32, bitcast=True)  # 2^120
    out = tl.where((bits & 0x7F) == 0x7F, 0x7FC00000, finite) | ((bits & 0x80) << 24)
    return out.to(tl.float32, bitcast=True)

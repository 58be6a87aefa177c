// SPDX-License-Identifier: Apache-2.0
// The noise of vllm_dflash/ops/noise.py: Philox4x32-10, one number a (seed, anchor position, slot, stream).
#pragma once
#include "numbers.h"

namespace dflash {

enum Stream : uint32_t { draft_stream = 1, accept_stream = 2, recover_stream = 3, bonus_stream = 4 };

DFLASH_FN double uniform(int64_t seed, int64_t anchor_position, uint32_t slot, uint32_t stream) {
  uint32_t c0 = uint32_t(anchor_position), c1 = slot, c2 = stream, c3 = 0;
  uint32_t k0 = uint32_t(uint64_t(seed)), k1 = uint32_t(uint64_t(seed) >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t(c0) * 0xD2511F53u, p1 = uint64_t(c2) * 0xCD9E8D57u;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  // 52 bits and a half: exact in a double, never 0 or 1.
  const uint64_t n = uint64_t(c0) << 20 | c1 >> 12;
  return double(2 * n + 1) * (1.0 / 9007199254740992.0);
}

}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
// torch's thread pool through its C interface.
#pragma once
#include <torch/csrc/stable/c/shim.h>

#include <cstdint>

namespace dflash {

inline int64_t threads() {
  uint32_t count = 1;
  torch_get_num_threads(&count);
  return count;
}

// f(begin, end) over [0, n) in pieces of at least `grain`; inside a parallel region on the calling thread.
template <typename F>
void parallel(int64_t n, int64_t grain, const F& f) {
  if (n <= 0) return;
  if (n <= grain) return f(0, n);
  torch_parallel_for(
      0, n, grain, [](int64_t begin, int64_t end, void* f) { (*static_cast<const F*>(f))(begin, end); },
      const_cast<void*>(static_cast<const void*>(&f)));
}

}  // namespace dflash

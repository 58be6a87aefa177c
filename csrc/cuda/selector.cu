// SPDX-License-Identifier: Apache-2.0
#include "launch.h"
#include "../kernels/selector.cuh"
#include "launchers.h"

namespace dflash::cuda {

const char* select_path(const Path& a, void* stream) {
  const int64_t warps = a.candidates < 1 ? 1 : a.candidates < 16 ? a.candidates : 16;
  by_type(a.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int pack = 16 / sizeof(T);
    const auto fits = [&](const void* p, int64_t stride) { return aligned(static_cast<const T*>(p), stride, 16); };
    const bool packed = a.rank % pack == 0 && fits(a.projected, a.projected_batch) &&
                        fits(a.projected, a.projected_slot) && fits(a.predecessor, a.predecessor_row) &&
                        fits(a.successor, a.successor_row);
    const unsigned batch = unsigned(a.batch), threads = unsigned(32 * warps);
    const size_t shared = sizeof(float) * a.candidates;
    if (packed)
      LAUNCH((path_kernel<T, pack>), batch, threads, shared, stream, a);
    else
      LAUNCH((path_kernel<T, 1>), batch, threads, shared, stream, a);
  });
  return launched();
}

}  // namespace dflash::cuda

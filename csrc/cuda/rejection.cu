// SPDX-License-Identifier: Apache-2.0
#include "launch.h"
#include "../kernels/rejection.cuh"
#include "launchers.h"

namespace dflash::cuda {

static int64_t chunks_of(const Rejection& a) { return (a.vocabulary + chunk_elements - 1) / chunk_elements; }

int64_t rejection_workspace(const Rejection& a) {
  return a.batch * (a.max_drafts + 1) * chunks_of(a) * int64_t(sizeof(ChunkStatistics));
}

const char* reject_sparse(const Rejection& a, void* stream) {
  const Verification v{a, static_cast<ChunkStatistics*>(a.workspace), chunks_of(a)};
  by_type(a.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int pack = 16 / sizeof(T);
    const bool packed = a.vocabulary % pack == 0 && aligned(static_cast<const T*>(a.logits), a.logits_row, 16);
    const dim3 grid(unsigned(v.chunks), unsigned(a.max_drafts + 1), unsigned(a.batch));
    if (packed)
      LAUNCH((chunk_kernel<T, pack>), grid, chunk_threads, 0, stream, v);
    else
      LAUNCH((chunk_kernel<T, 1>), grid, chunk_threads, 0, stream, v);
    const int64_t candidates = a.candidates > 0 ? a.candidates : 1;
    const size_t shared = sizeof(double) * v.chunks + (sizeof(int64_t) + sizeof(float)) * candidates;
    LAUNCH((decide_kernel<T>), unsigned(a.batch), decide_threads, shared, stream, v);
  });
  return launched();
}

}  // namespace dflash::cuda

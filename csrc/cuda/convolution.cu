// SPDX-License-Identifier: Apache-2.0
#include "launch.h"
#include "../kernels/convolution.cuh"
#include "launchers.h"

namespace dflash::cuda {

const char* grouped_convolution(const Convolution& a, void* stream) {
  by_type(a.type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int pack = 16 / sizeof(T);
    const auto fits = [&](const void* p, int64_t stride) { return aligned(static_cast<const T*>(p), stride, 16); };
    const bool packed =
        a.width / a.groups % pack == 0 && fits(a.x, a.x_row) && fits(a.base, a.base_tap) && fits(a.out, a.width);
    // Rows are the grid's second dimension, which has 65,535 at most.
    for (int64_t row = 0; row < a.rows; row += 65535 / a.block * a.block) {
      Convolution part = a;
      part.rows = a.rows - row < 65535 / a.block * a.block ? a.rows - row : 65535 / a.block * a.block;
      part.x = static_cast<const T*>(a.x) + row * a.x_row;
      part.dynamic = static_cast<const T*>(a.dynamic) + row * a.dynamic_row;
      part.out = static_cast<T*>(a.out) + row * a.width;
      const unsigned rows = unsigned(part.rows);
      if (packed)
        LAUNCH((convolution_kernel<T, pack>), dim3(blocks_for(a.width, 128 * pack), rows), 128, 0, stream, part);
      else
        LAUNCH((convolution_kernel<T, 1>), dim3(blocks_for(a.width, 128), rows), 128, 0, stream, part);
    }
  });
  return launched();
}

}  // namespace dflash::cuda

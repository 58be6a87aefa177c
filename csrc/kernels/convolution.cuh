// SPDX-License-Identifier: Apache-2.0
// out[i, c] = sum_t (base[t, c] + dynamic[i, t, c / group]) * x[i - t, c]. Reference: ops/reference/convolution.py.
// A thread has `pack` channels of a row. Bytes, for rows x H of b bytes: x and out once, 2 * rows * H * b (the taps'
// rows come from the cache), base Kc * H * b, dynamic rows * Kc * G * b. FLOPs: 3 * rows * Kc * H.
#pragma once
#include "warp.cuh"

namespace dflash {

template <typename T, int pack>
__global__ void convolution_kernel(const Convolution a) {
  const int64_t c = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * pack, i = blockIdx.y;
  if (c >= a.width) return;
  const T *x = static_cast<const T*>(a.x), *base = static_cast<const T*>(a.base);
  const T* dynamic = static_cast<const T*>(a.dynamic) + i * a.dynamic_row;
  const int64_t group = c / (a.width / a.groups), inside = i % a.block + 1, taps = inside < a.taps ? inside : a.taps;
  float total[pack] = {};
  for (int64_t t = 0; t < taps; ++t) {
    const float own = widen(dynamic[t * a.dynamic_tap + group]);
    float weight[pack], value[pack];
    load<T, pack>(base + t * a.base_tap + c, weight);
    load<T, pack>(x + (i - t) * a.x_row + c, value);
#pragma unroll
    for (int j = 0; j < pack; ++j) total[j] += (weight[j] + own) * value[j];
  }
  store<T, pack>(static_cast<T*>(a.out) + i * a.width + c, total);
}

}  // namespace dflash

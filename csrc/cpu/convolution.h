// SPDX-License-Identifier: Apache-2.0
// out[i, c] = sum_t (base[t, c] + dynamic[i, t, c / group]) * x[i - t, c]. Reference: ops/reference/convolution.py.
#pragma once
#include "../arguments.h"
#include "vector.h"

namespace dflash {
namespace {

template <typename T>
void convolution(const Convolution& a, int64_t begin, int64_t end) {
  const T *x = static_cast<const T*>(a.x), *base = static_cast<const T*>(a.base);
  const int64_t size = a.width / a.groups;
  for (int64_t i = begin; i < end; ++i) {
    const T* dynamic = static_cast<const T*>(a.dynamic) + i * a.dynamic_row;
    T* out = static_cast<T*>(a.out) + i * a.width;
    const int64_t inside = i % a.block + 1, taps = inside < a.taps ? inside : a.taps;
    for (int64_t group = 0; group < a.groups; ++group)
      for (int64_t c = group * size; c < (group + 1) * size; c += lanes) {
        const int64_t n = (group + 1) * size - c;
        Floats total{};
        for (int64_t t = 0; t < taps; ++t)
          total += (load(base + t * a.base_tap + c, n) + widen(dynamic[t * a.dynamic_tap + group])) *
                   load(x + (i - t) * a.x_row + c, n);
        store(out + c, total, n);
      }
  }
}

void convolution(const Convolution& a, int64_t begin, int64_t end) {
  if (a.type == Type::f32) return convolution<float>(a, begin, end);
  if (a.type == Type::bf16) return convolution<bf16>(a, begin, end);
  convolution<f16>(a, begin, end);
}

}  // namespace
}  // namespace dflash

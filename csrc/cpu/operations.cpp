// SPDX-License-Identifier: Apache-2.0
#include "operations.h"

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace dflash::cpu {

namespace {

// Rows a thread, so that a thread's part outweighs waking it.
int64_t grain_of(int64_t elements_a_row) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, elements_a_row)); }

}  // namespace

void grouped_convolution(const Convolution& a) {
  parallel(a.rows, grain_of(a.width * a.taps),
           [&](int64_t begin, int64_t end) { kernels().convolution(a, begin, end); });
}

void select_path(const Path& a) {
  parallel(a.batch, grain_of(a.slots * a.candidates * a.rank), [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> mixed;
    mixed.resize(a.rank);
    kernels().path(a, begin, end, mixed.data());
  });
}

void write_context_kv(const Context& a, const Destination& d) {
  static thread_local std::vector<float> norm;
  norm.resize(a.layers * a.size);
  const int64_t bytes = a.k_norm_type == Type::f32 ? 4 : 2;
  for (int64_t layer = 0; layer < a.layers; ++layer)
    kernels().to_floats(static_cast<const char*>(a.k_norm) + layer * a.k_norm_layer * bytes, a.k_norm_type, a.size,
                        norm.data() + layer * a.size);
  const float* k_norm = norm.data();
  parallel(a.rows, grain_of(a.layers * a.heads * a.size),
           [&](int64_t begin, int64_t end) { kernels().context(a, d, k_norm, begin, end); });
}

}  // namespace dflash::cpu

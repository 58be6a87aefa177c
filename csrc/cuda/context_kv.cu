// SPDX-License-Identifier: Apache-2.0
#include "launch.h"
#include "../kernels/context_kv.cuh"
#include "launchers.h"

namespace dflash::cuda {

namespace {

template <typename From, typename To, int pairs>
void write(const Context& a, const Destination& d, void* stream) {
  const bool whole = a.is_neox && a.rotated == a.size && a.size == 64 * pairs;
  const auto from = [&](int64_t stride) {
    return aligned(static_cast<const From*>(a.kv), stride, pairs * sizeof(From));
  };
  const bool packed_from = whole && from(a.kv_row) && from(a.kv_layer) && from(a.kv_side) && from(a.kv_head);
  bool packed_to = whole;
  for (int64_t layer = 0; layer < a.layers; ++layer) {
    const int bytes = pairs * int(sizeof(To));
    const To *k = static_cast<const To*>(d.keys[layer]), *v = static_cast<const To*>(d.values[layer]);
    packed_to = packed_to && aligned(k, d.key_block, bytes) && aligned(k, d.key_offset, bytes) &&
                aligned(k, d.key_head, bytes) && aligned(v, d.value_block, bytes) &&
                aligned(v, d.value_offset, bytes) && aligned(v, d.value_head, bytes);
  }
  constexpr int warps = 8;
  const unsigned blocks = blocks_for(a.rows * a.layers * a.heads, warps);
  LAUNCH((context_kernel<From, To, pairs>), blocks, 32 * warps, 0, stream, a, d, packed_from, packed_to);
}

template <typename From, typename To>
void write_by_size(const Context& a, const Destination& d, void* stream) {
  if (a.size <= 64) return write<From, To, 1>(a, d, stream);
  if (a.size <= 128) return write<From, To, 2>(a, d, stream);
  if (a.size <= 256) return write<From, To, 4>(a, d, stream);
  write<From, To, 8>(a, d, stream);
}

}  // namespace

const char* write_context_kv(const Context& a, const Destination& d, void* stream) {
  by_type(a.type, [&](auto from) {
    using From = decltype(from);
    if (d.type == Type::e4m3) return write_by_size<From, e4m3>(a, d, stream);
    by_type(d.type, [&](auto to) { write_by_size<From, decltype(to)>(a, d, stream); });
  });
  return launched();
}

}  // namespace dflash::cuda

// SPDX-License-Identifier: Apache-2.0
// k-RMSNorm, RoPE, value scale, conversion and scatter, a warp a head of a row of a layer. Reference:
// ops/reference/context_kv.py. Bytes for T rows, L layers: reads T * L * 2 * nkv * hd * b once, writes as many in the
// cache's type once; k_norm and cos_sin come from the cache. FLOPs: about 8 a key element, 1 a value element.
#pragma once
#include "warp.cuh"

namespace dflash {

// A lane has `pairs` rotated pairs, of a head's elements first(i) and second(i), i = lane * pairs + j. "Packed" means
// that a lane's firsts lie together, and its seconds, and that every lane has some.
struct Pairing {
  int half, rotated_half;  // size / 2, rotated / 2
  bool is_neox;
  __device__ __forceinline__ int first(int i) const { return i >= rotated_half ? 2 * i : is_neox ? i : 2 * i; }
  __device__ __forceinline__ int second(int i) const {
    return i >= rotated_half ? 2 * i + 1 : is_neox ? i + rotated_half : 2 * i + 1;
  }
};

template <typename T, int pairs>
__device__ __forceinline__ void load_pairs(const T* x, const Pairing& p, bool packed, float* first, float* second) {
  const int i0 = lane_id() * pairs;
  if (packed) {
    load<T, pairs>(x + i0, first);
    load<T, pairs>(x + p.half + i0, second);
    return;
  }
#pragma unroll
  for (int j = 0; j < pairs; ++j) {
    const bool inside = i0 + j < p.half;
    first[j] = inside ? widen(x[p.first(i0 + j)]) : 0.0f;
    second[j] = inside ? widen(x[p.second(i0 + j)]) : 0.0f;
  }
}

template <typename T, int pairs>
__device__ __forceinline__ void store_pairs(T* x, const Pairing& p, bool packed, const float* first,
                                            const float* second) {
  const int i0 = lane_id() * pairs;
  if (packed) {
    store<T, pairs>(x + i0, first);
    store<T, pairs>(x + p.half + i0, second);
    return;
  }
#pragma unroll
  for (int j = 0; j < pairs; ++j)
    if (i0 + j < p.half) {
      x[p.first(i0 + j)] = narrow<T>(first[j]);
      x[p.second(i0 + j)] = narrow<T>(second[j]);
    }
}

__device__ __forceinline__ float read(const void* p, Type type, int64_t i) {
  if (type == Type::f32) return static_cast<const float*>(p)[i];
  if (type == Type::bf16) return widen(static_cast<const bf16*>(p)[i]);
  return widen(static_cast<const f16*>(p)[i]);
}

// Norm and rotation of a key head that the warp holds; `position` is a row of cos_sin.
template <int pairs>
__device__ __forceinline__ void finish_key(const Context& a, const Pairing& p, int64_t layer, int64_t position,
                                           float* first, float* second) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < pairs; ++j) squares += first[j] * first[j] + second[j] * second[j];
  const float inverse = rsqrtf(warp_sum(squares) / float(a.size) + a.eps);
#pragma unroll
  for (int j = 0; j < pairs; ++j) {
    const int i = lane_id() * pairs + j;
    if (i >= p.half) continue;
    const float x = first[j] * inverse * read(a.k_norm, a.k_norm_type, layer * a.k_norm_layer + p.first(i));
    const float y = second[j] * inverse * read(a.k_norm, a.k_norm_type, layer * a.k_norm_layer + p.second(i));
    const bool turns = i < p.rotated_half;
    const int64_t angle = position * a.cos_sin_row + i;
    const float c = turns ? read(a.cos_sin, a.cos_sin_type, angle) : 1.0f;
    const float s = turns ? read(a.cos_sin, a.cos_sin_type, angle + p.rotated_half) : 0.0f;
    first[j] = x * c - y * s;
    second[j] = y * c + x * s;
  }
}

// Where a head of (layer, row t) goes; null where nothing is to be written.
template <typename To>
__device__ __forceinline__ To* destination(const Destination& d, bool is_value, int64_t layer, int64_t t,
                                           int64_t head) {
  const int64_t slot = d.slots ? d.slots[layer * d.slots_layer + t] : t;
  if (slot < 0 || slot >= d.num_slots) return nullptr;
  const int64_t block = slot / d.block_size, offset = slot % d.block_size;
  To* cache = static_cast<To*>(is_value ? d.values[layer] : d.keys[layer]);
  return is_value ? cache + block * d.value_block + offset * d.value_offset + head * d.value_head
                  : cache + block * d.key_block + offset * d.key_offset + head * d.key_head;
}

template <int pairs>
__device__ __forceinline__ void scale_pairs(float scale, float* first, float* second) {
#pragma unroll
  for (int j = 0; j < pairs; ++j) {
    first[j] *= scale;
    second[j] *= scale;
  }
}

template <typename From, typename To, int pairs>
__global__ void context_kernel(const __grid_constant__ Context a, const __grid_constant__ Destination d,
                               bool packed_from, bool packed_to) {
  const int64_t index = int64_t(blockIdx.x) * (blockDim.x >> 5) + warp_id();
  const int64_t head = index % a.heads, layer = index / a.heads % a.layers, t = index / (a.heads * a.layers);
  if (t >= a.rows) return;
  const int64_t position = a.positions[t];
  const bool known = position >= 0 && position < a.cos_sin_rows;
  if (!known && d.slots) return;
  To *key = destination<To>(d, false, layer, t, head), *value = destination<To>(d, true, layer, t, head);
  if (!key) return;
  const Pairing p{int(a.size / 2), int(a.rotated / 2), a.is_neox};
  const From* x = static_cast<const From*>(a.kv) + t * a.kv_row + layer * a.kv_layer + head * a.kv_head;
  const bool fp8 = d.type == Type::e4m3;
  float first[pairs] = {}, second[pairs] = {};
  if (known) {
    load_pairs<From, pairs>(x, p, packed_from, first, second);
    finish_key<pairs>(a, p, layer, position, first, second);
    if (fp8) scale_pairs<pairs>(1.0f / d.k_scale, first, second);
  }
  store_pairs<To, pairs>(key, p, packed_to, first, second);
  if (known) {
    load_pairs<From, pairs>(x + a.kv_side, p, packed_from, first, second);
    if (a.scales_values || fp8) scale_pairs<pairs>(a.value_scale * (fp8 ? 1.0f / d.v_scale : 1.0f), first, second);
  }
  store_pairs<To, pairs>(value, p, packed_to, first, second);
}

}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
// Per-head k-RMSNorm, RoPE, value scale, conversion and scatter of a row of all layers: each input is read once, each
// output written once. Reference: ops/reference/context_kv.py.
#pragma once
#include "../arguments.h"
#include "vector.h"

namespace dflash {
namespace {

constexpr int64_t max_head_size = 512;

// x [size] -> out [size], cos and sin [rotated / 2], `scale` last. With a size known to the compiler (and a full
// rotation by halves) the head stays in registers.
template <int64_t known_size, typename From, typename To>
VECTOR_FN void key_head(const From* x, To* out, const float* norm, const float* cos, const float* sin, const Context& a,
                        float scale) {
  const int64_t size = known_size ? known_size : a.size, half = known_size ? known_size / 2 : a.rotated / 2;
  alignas(64) float buffer[known_size ? 1 : max_head_size];
  Floats held[known_size ? known_size / lanes : 1];
  const auto at = [&](int64_t i) { return known_size ? held[i / lanes] : load(buffer + i, size - i); };
  Floats squares{};
  for (int64_t i = 0; i < size; i += lanes) {
    const Floats value = load(x + i, size - i);
    squares += value * value;
    if (known_size)
      held[i / lanes] = value;
    else
      store(buffer + i, value, size - i);
  }
  const float inverse = scale / __builtin_sqrtf(sum(squares) / float(size) + a.eps);
  if (known_size || a.is_neox) {
    for (int64_t i = 0; i < half; i += lanes) {
      const int64_t n = half - i;
      const Floats c = load(cos + i, n), s = load(sin + i, n);
      const Floats first = at(i) * inverse * load(norm + i, n);
      const Floats second =
          (known_size ? at(half + i) : load(buffer + half + i, n)) * inverse * load(norm + half + i, n);
      store(out + i, first * c - second * s, n);
      store(out + half + i, second * c + first * s, n);
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      const float first = buffer[2 * i] * inverse * norm[2 * i], second = buffer[2 * i + 1] * inverse * norm[2 * i + 1];
      buffer[2 * i] = first * cos[i] - second * sin[i];
      buffer[2 * i + 1] = second * cos[i] + first * sin[i];
    }
    for (int64_t i = 0; i < a.rotated; i += lanes) store(out + i, at(i), a.rotated - i);
  }
  if (!known_size)
    for (int64_t i = a.rotated; i < size; i += lanes)
      store(out + i, load(buffer + i, size - i) * inverse * load(norm + i, size - i), size - i);
}

template <typename A, typename B>
struct Same {
  static constexpr bool value = false;
};
template <typename A>
struct Same<A, A> {
  static constexpr bool value = true;
};

template <typename From, typename To>
VECTOR_FN void value_head(const From* x, To* out, int64_t size, const Context& a, float scale) {
  if (Same<From, To>::value && !a.scales_values) {
    __builtin_memcpy(out, x, size * sizeof(To));
    return;
  }
  for (int64_t i = 0; i < size; i += lanes) store(out + i, load(x + i, size - i) * scale, size - i);
}

template <typename T>
void widen_all(const void* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += lanes) store(to + i, load(static_cast<const T*>(from) + i, n - i), n - i);
}

void to_floats(const void* from, Type type, int64_t n, float* to) {
  if (type == Type::f32) return widen_all<float>(from, n, to);
  if (type == Type::bf16) return widen_all<bf16>(from, n, to);
  widen_all<f16>(from, n, to);
}

VECTOR_FN int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : type == Type::e4m3 ? 1 : 2; }

// A head's numbers where they belong, `stride` apart; zeros where there is nothing to compute them from.
template <typename To, typename F>
VECTOR_FN void put(To* to, int64_t stride, int64_t size, bool known, const F& compute) {
  if (__builtin_expect(stride == 1 && known, 1)) return compute(to);
  To head[max_head_size];
  if (known)
    compute(head);
  else
    __builtin_memset(head, 0, size * sizeof(To));
  for (int64_t i = 0; i < size; ++i) to[i * stride] = head[i];
}

// Some rows at a time, layer by layer, so that a thread writes few streams at once. Where a cache's numbers lie apart,
// a head of all these rows comes before the next head, so that the cache lines that they share are still at hand.
constexpr int64_t max_rows_at_once = 32;

template <int64_t known_size, typename From, typename To>
void context(const Context& a, const Destination& d, const float* k_norm, int64_t begin, int64_t end) {
  alignas(64) float angles[max_rows_at_once * max_head_size];  // cos | sin of each row
  To *keys[max_rows_at_once], *values[max_rows_at_once];       // null: nothing to write
  bool known[max_rows_at_once];
  const bool fp8 = d.type == Type::e4m3;
  const float key_scale = fp8 ? 1.0f / d.k_scale : 1.0f;
  const float value_scale = (a.scales_values ? a.value_scale : 1.0f) * (fp8 ? 1.0f / d.v_scale : 1.0f);
  const bool apart = d.key_element != 1 || d.value_element != 1;
  for (int64_t t0 = begin; t0 < end; t0 += max_rows_at_once) {
    const int64_t rows = end - t0 < max_rows_at_once ? end - t0 : max_rows_at_once;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t position = a.positions[t0 + i];
      known[i] = position >= 0 && position < a.cos_sin_rows;
      if (known[i])
        to_floats(static_cast<const char*>(a.cos_sin) + position * a.cos_sin_row * bytes_of(a.cos_sin_type),
                  a.cos_sin_type, a.rotated, angles + i * a.rotated);
    }
    for (int64_t layer = 0; layer < a.layers; ++layer) {
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t slot = d.slots ? d.slots[layer * d.slots_layer + t0 + i] : t0 + i;
        keys[i] = values[i] = nullptr;
        if (slot < 0 || slot >= d.num_slots || (d.slots && !known[i])) continue;
        const int64_t block = slot / d.block_size, offset = slot % d.block_size;
        keys[i] = static_cast<To*>(d.keys[layer]) + block * d.key_block + offset * d.key_offset;
        values[i] = static_cast<To*>(d.values[layer]) + block * d.value_block + offset * d.value_offset;
      }
      const From* kv = static_cast<const From*>(a.kv) + t0 * a.kv_row + layer * a.kv_layer;
      const int64_t outer_count = apart ? a.heads : rows, inner_count = apart ? rows : a.heads;
      for (int64_t outer = 0; outer < outer_count; ++outer)
        for (int64_t inner = 0; inner < inner_count; ++inner) {
          const int64_t i = apart ? inner : outer, head = apart ? outer : inner;
          if (!keys[i]) continue;
          const From *k = kv + i * a.kv_row + head * a.kv_head, *v = k + a.kv_side;
          const float *cos = angles + i * a.rotated, *sin = cos + a.rotated / 2;
          put(keys[i] + head * d.key_head, d.key_element, a.size, known[i],
              [&](To* to) { key_head<known_size>(k, to, k_norm + layer * a.size, cos, sin, a, key_scale); });
          put(values[i] + head * d.value_head, d.value_element, a.size, known[i],
              [&](To* to) { value_head(v, to, a.size, a, value_scale); });
        }
    }
  }
}

template <typename From, typename To>
void context(const Context& a, const Destination& d, const float* k_norm, int64_t begin, int64_t end) {
  if (a.is_neox && a.size == 128 && a.rotated == 128) return context<128, From, To>(a, d, k_norm, begin, end);
  if (a.is_neox && a.size == 64 && a.rotated == 64) return context<64, From, To>(a, d, k_norm, begin, end);
  context<0, From, To>(a, d, k_norm, begin, end);
}

template <typename From>
void context_to(const Context& a, const Destination& d, const float* k_norm, int64_t begin, int64_t end) {
  if (d.type == Type::f32) return context<From, float>(a, d, k_norm, begin, end);
  if (d.type == Type::bf16) return context<From, bf16>(a, d, k_norm, begin, end);
  if (d.type == Type::f16) return context<From, f16>(a, d, k_norm, begin, end);
  context<From, e4m3>(a, d, k_norm, begin, end);
}

void context(const Context& a, const Destination& d, const float* k_norm, int64_t begin, int64_t end) {
  if (a.type == Type::f32) return context_to<float>(a, d, k_norm, begin, end);
  if (a.type == Type::bf16) return context_to<bf16>(a, d, k_norm, begin, end);
  context_to<f16>(a, d, k_norm, begin, end);
}

}  // namespace
}  // namespace dflash

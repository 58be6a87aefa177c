// SPDX-License-Identifier: Apache-2.0
// Passes over a row of logits: chunk statistics (each logit is read from memory once), and the weights of one chunk.
// NaN counts as -inf; +inf takes all of p. Reference: ops/reference/rejection.py.
#pragma once
#include "kernels.h"
#include "vector.h"

namespace dflash {
namespace {

template <typename T>
float chunk_max(const T* x, int64_t n) {
  Floats top[4] = {all(-infinity), all(-infinity), all(-infinity), all(-infinity)};
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    for (int j = 0; j < 4; ++j) top[j] = larger(load(x + i + j * lanes), top[j]);
  for (; i < n; i += lanes) top[0] = larger(load(x + i, n - i, -infinity), top[0]);
  return max(larger(larger(top[0], top[1]), larger(top[2], top[3])));
}

VECTOR_FN Floats weights_of(Floats x, float top, float inverse_temperature) {
  // Infinite minus infinite would be NaN; with the largest at +inf, p is even over its entries of +inf.
  if (__builtin_expect(top > largest, 0)) return x > largest ? all(1.0f) : Floats{};
  return exp((x - top) * inverse_temperature);
}

template <typename T>
float chunk_sum(const T* x, int64_t n, float top, float inverse_temperature) {
  if (top == -infinity) return 0.0f;
  Floats total[4] = {};
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    for (int j = 0; j < 4; ++j) total[j] += weights_of(load(x + i + j * lanes), top, inverse_temperature);
  for (; i < n; i += lanes) total[0] += weights_of(load(x + i, n - i, -infinity), top, inverse_temperature);
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

VECTOR_FN int64_t chunk_length(const Row& row, int64_t chunk) {
  const int64_t left = row.vocabulary - chunk * chunk_size;
  return left < chunk_size ? left : chunk_size;
}

template <typename T>
void row_chunks(const Row& row, int64_t begin, int64_t end, Chunk* chunks) {
  for (int64_t chunk = begin; chunk < end; ++chunk) {
    const T* x = static_cast<const T*>(row.logits) + chunk * chunk_size;
    const int64_t n = chunk_length(row, chunk);
    chunks[chunk].max = chunk_max(x, n);
    if (row.inverse_temperature > 0.0f) chunks[chunk].sum = chunk_sum(x, n, chunks[chunk].max, row.inverse_temperature);
  }
}

template <typename T>
float chunk_weights(const Row& row, int64_t chunk, const Correction* corrections, int64_t count, float* weights) {
  const T* x = static_cast<const T*>(row.logits) + chunk * chunk_size;
  const int64_t n = chunk_length(row, chunk);
  for (int64_t i = 0; i < n; i += lanes)
    store(weights + i, weights_of(load(x + i, n - i, -infinity), row.max, row.inverse_temperature), n - i);
  for (int64_t c = 0; c < count; ++c)
    if (corrections[c].id / chunk_size == chunk) weights[corrections[c].id % chunk_size] = corrections[c].weight;
  Floats total{};
  for (int64_t i = 0; i < n; i += lanes) total += load(weights + i, n - i);
  return sum(total);
}

template <typename T>
int64_t first_max(const Row& row, int64_t chunk) {
  const T* x = static_cast<const T*>(row.logits) + chunk * chunk_size;
  for (int64_t i = 0; i < chunk_length(row, chunk); ++i)
    if (widen(x[i]) == row.max) return chunk * chunk_size + i;
  return -1;
}

#define BY_TYPE(function, ...)                                         \
  if (row.type == Type::f32) return function<float>(row, __VA_ARGS__); \
  if (row.type == Type::bf16) return function<bf16>(row, __VA_ARGS__); \
  return function<f16>(row, __VA_ARGS__)

void row_chunks(const Row& row, int64_t begin, int64_t end, Chunk* chunks) { BY_TYPE(row_chunks, begin, end, chunks); }

float chunk_weights(const Row& row, int64_t chunk, const Correction* corrections, int64_t count, float* weights) {
  BY_TYPE(chunk_weights, chunk, corrections, count, weights);
}

int64_t first_max(const Row& row, int64_t chunk) { BY_TYPE(first_max, chunk); }

#undef BY_TYPE

float logit(const Row& row, int64_t id) {
  if (row.type == Type::f32) return static_cast<const float*>(row.logits)[id];
  if (row.type == Type::bf16) return widen(static_cast<const bf16*>(row.logits)[id]);
  return widen(static_cast<const f16*>(row.logits)[id]);
}

}  // namespace
}  // namespace dflash

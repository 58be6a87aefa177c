// SPDX-License-Identifier: Apache-2.0
// The walk through the candidates: only the chosen predecessor's row of scores is computed.
// Reference: ops/reference/selector.py.
#pragma once
#include "../arguments.h"
#include "../noise.h"
#include "vector.h"

namespace dflash {
namespace {

template <typename T>
float dot(const float* a, const T* b, int64_t n) {
  Floats total{}, second{};
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    total += load(a + i) * load(b + i);
    second += load(a + i + lanes) * load(b + i + lanes);
  }
  for (; i < n; i += lanes) total += load(a + i, n - i) * load(b + i, n - i);
  return sum(total + second);
}

// First maximum at temperature 0, else the inverse CDF of softmax(scores); -1 where no score is finite.
int64_t choose(const float* scores, int64_t n, float temperature, double u) {
  int64_t top = -1;
  for (int64_t c = 0; c < n; ++c)
    if (scores[c] > (top < 0 ? -infinity : scores[top])) top = c;
  if (top < 0 || temperature == 0.0f) return top;
  double total = 0.0, running = 0.0;
  for (int64_t c = 0; c < n; ++c) total += exp(scores[c] - scores[top]);
  int64_t last = top;
  for (int64_t c = 0; c < n; ++c) {
    const float weight = exp(scores[c] - scores[top]);
    running += weight;
    if (running > u * total) return c;
    if (weight > 0.0f) last = c;
  }
  return last;
}

template <typename T>
void path(const Path& a, int64_t begin, int64_t end, float* mixed) {
  const T *predecessor = static_cast<const T*>(a.predecessor), *successor = static_cast<const T*>(a.successor);
  const int64_t row_bytes = a.rank * int64_t(sizeof(T));
  for (int64_t b = begin; b < end; ++b) {
    const int64_t* ids = a.candidate_ids + b * a.slots * a.candidates;
    // The candidates of every slot are known before the walk; only the predecessors are not.
    for (int64_t c = 0; c < a.slots * a.candidates; ++c)
      if (ids[c] >= 0 && ids[c] < a.vocabulary)
        for (int64_t byte = 0; byte < row_bytes; byte += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(successor + ids[c] * a.successor_row) + byte);
    const float temperature = a.temperature[b];
    int64_t last = a.anchors[b];
    for (int64_t slot = 0; slot < a.slots; ++slot, ids += a.candidates) {
      const int64_t at = (b * a.slots + slot) * a.candidates;
      float* scores = a.scores + at;
      const bool known = last >= 0 && last < a.vocabulary;
      if (known) {
        const T* from = predecessor + last * a.predecessor_row;
        const T* through = static_cast<const T*>(a.projected) + b * a.projected_batch + slot * a.projected_slot;
        for (int64_t r = 0; r < a.rank; r += lanes)
          store(mixed + r, load(from + r, a.rank - r) * load(through + r, a.rank - r), a.rank - r);
      }
      for (int64_t c = 0; c < a.candidates; ++c) {
        scores[c] = -infinity;
        if (!known || ids[c] < 0 || ids[c] >= a.vocabulary) continue;
        float score = a.candidate_logits[at + c] + dot(mixed, successor + ids[c] * a.successor_row, a.rank);
        if (temperature > 0.0f) score /= temperature;
        if (score >= -largest && score <= largest) scores[c] = score;
      }
      const double u = uniform(a.seeds[b], a.anchor_positions[b], uint32_t(slot + 1), draft_stream);
      const int64_t choice = choose(scores, a.candidates, temperature, u);
      last = choice < 0 ? -1 : ids[choice];
      a.tokens[b * a.slots + slot] = last;
    }
  }
}

void path(const Path& a, int64_t begin, int64_t end, float* mixed) {
  if (a.type == Type::f32) return path<float>(a, begin, end, mixed);
  if (a.type == Type::bf16) return path<bf16>(a, begin, end, mixed);
  path<f16>(a, begin, end, mixed);
}

}  // namespace
}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
// The walk through the candidates, a block a request, a warp a candidate. Reference: ops/reference/selector.py.
// Bytes a slot of a request: C successor rows, one predecessor row and one of projected, (C + 2) * R * b, and 16 * C of
// ids, logits and scores. FLOPs: 3 * C * R. The walk is a chain of K dependent reads of a predecessor row, so its time
// is their latency.
#pragma once
#include "../noise.h"
#include "warp.cuh"

namespace dflash {

__device__ __forceinline__ bool finite(float x) { return x >= -3.402823466e38f && x <= 3.402823466e38f; }

// First maximum at temperature 0, else the inverse CDF of softmax(scores); -1 where no score is finite.
__device__ __forceinline__ int choose(const float* scores, int n, float temperature, double u) {
  int top = -1;
  for (int c = 0; c < n; ++c)
    if (finite(scores[c]) && (top < 0 || scores[c] > scores[top])) top = c;
  if (top < 0 || temperature == 0.0f) return top;
  double total = 0.0, running = 0.0;
  for (int c = 0; c < n; ++c) total += expf(scores[c] - scores[top]);
  int last = top;
  for (int c = 0; c < n; ++c) {
    const float weight = expf(scores[c] - scores[top]);
    running += weight;
    if (running > u * total) return c;
    if (weight > 0.0f) last = c;
  }
  return last;
}

template <typename T, int pack>
__global__ void path_kernel(const Path a) {
  DYNAMIC_SHARED(float, scores);
  __shared__ int64_t last;
  const int64_t b = blockIdx.x;
  const int candidates = int(a.candidates), warps = int(blockDim.x) >> 5;
  const float temperature = a.temperature[b];
  if (threadIdx.x == 0) last = a.anchors[b];
  __syncthreads();
  for (int64_t slot = 0; slot < a.slots; ++slot) {
    const int64_t at = (b * a.slots + slot) * a.candidates, from_id = last;
    const bool known = from_id >= 0 && from_id < a.vocabulary;
    const T* from = static_cast<const T*>(a.predecessor) + (known ? from_id : 0) * a.predecessor_row;
    const T* through = static_cast<const T*>(a.projected) + b * a.projected_batch + slot * a.projected_slot;
    for (int c = warp_id(); c < candidates; c += warps) {
      const int64_t id = a.candidate_ids[at + c];
      const bool present = known && id >= 0 && id < a.vocabulary;
      float sum = 0.0f;
      if (present) {
        const T* to = static_cast<const T*>(a.successor) + id * a.successor_row;
        for (int64_t r = int64_t(lane_id()) * pack; r < a.rank; r += 32 * pack) {
          float x[pack], y[pack], z[pack];
          load<T, pack>(from + r, x);
          load<T, pack>(through + r, y);
          load<T, pack>(to + r, z);
#pragma unroll
          for (int i = 0; i < pack; ++i) sum += x[i] * y[i] * z[i];
        }
      }
      sum = warp_sum(sum);
      if (lane_id() == 0) {
        float score = a.candidate_logits[at + c] + sum;
        if (temperature > 0.0f) score /= temperature;
        score = present && finite(score) ? score : -INFINITY;
        scores[c] = score;
        a.scores[at + c] = score;
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const double u = uniform(a.seeds[b], a.anchor_positions[b], uint32_t(slot + 1), draft_stream);
      const int choice = choose(scores, candidates, temperature, u);
      last = choice < 0 ? -1 : a.candidate_ids[at + choice];
      a.tokens[b * a.slots + slot] = last;
    }
    __syncthreads();
  }
}

}  // namespace dflash

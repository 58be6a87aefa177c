// SPDX-License-Identifier: Apache-2.0
// Verification with a sparse q in two launches. Reference: ops/reference/rejection.py.
//   chunk_kernel   every chunk of every judged row: its maximum and its sum of exp((x - max) / T), or its first argmax
//   decide_kernel  a block a request: accepts by a warp a slot, then samples at the first rejection or the bonus row
// Bytes: each judged row once, (drafts + bonuses) * V * b; then one chunk of 4096 logits of the row that is sampled,
// and the chunks that hold its C candidates, to leave their logits out exactly. FLOPs: about 12 a logit.
// NaN counts as -inf; +inf takes all of p.
#pragma once
#include "../noise.h"
#include "warp.cuh"

namespace dflash {

constexpr int chunk_elements = 4096, chunk_threads = 256, decide_threads = 512, segment = 256;

struct ChunkStatistics {
  float max;     // -inf: no finite logit
  uint32_t sum;  // the bits of a float; for a greedy request the id of the first maximum instead
};

// What both kernels share: statistics [batch, max_drafts + 1, chunks], slot n of a request being its bonus row.
struct Verification {
  Rejection a;
  ChunkStatistics* statistics;
  int64_t chunks;
};

__device__ __forceinline__ int64_t drafts_of(const Rejection& a, int64_t b) {
  const int64_t n = a.cu_drafts[b + 1] - a.cu_drafts[b];
  return n < a.max_drafts ? n : a.max_drafts;
}

// The row of logits of a slot; -1 where there is none.
__device__ __forceinline__ int64_t row_of(const Rejection& a, int64_t b, int64_t slot, int64_t drafts) {
  if (slot > drafts) return -1;
  const int64_t row = slot < drafts ? a.draft_rows[a.cu_drafts[b] + slot] : a.bonus_rows[b];
  return row < a.rows ? row : -1;
}

__device__ __forceinline__ float inverse_temperature(const Rejection& a, int64_t b) {
  const float temperature = a.temperature[b];
  return temperature > 0.0f ? fminf(1.0f / temperature, 1e30f) : 0.0f;
}

// exp((x - top) / T), for top the largest; also where both are infinite.
__device__ __forceinline__ float weight_of(float x, float top, float inverse) {
  const float z = (x - top) * inverse;
  return x == top ? 1.0f : z >= -87.0f ? expf(z) : 0.0f;
}

template <typename T, int pack>
__global__ void chunk_kernel(const Verification v) {
  constexpr int packs = chunk_elements / (chunk_threads * pack);
  __shared__ float tops[chunk_threads / 32], sums[chunk_threads / 32];
  __shared__ int where[chunk_threads / 32];
  const Rejection& a = v.a;
  const int64_t chunk = blockIdx.x, slot = blockIdx.y, b = blockIdx.z;
  const int64_t row = row_of(a, b, slot, drafts_of(a, b));
  if (row < 0) return;
  const T* x = static_cast<const T*>(a.logits) + row * a.logits_row + chunk * chunk_elements;
  const int64_t left = a.vocabulary - chunk * chunk_elements;
  float value[packs * pack];
#pragma unroll
  for (int i = 0; i < packs; ++i) {
    const int64_t at = (int64_t(i) * chunk_threads + threadIdx.x) * pack;
    if (at < left) {
      load<T, pack>(x + at, value + i * pack);
    } else {
#pragma unroll
      for (int j = 0; j < pack; ++j) value[i * pack + j] = -INFINITY;
    }
  }
  float top = -INFINITY;
#pragma unroll
  for (int i = 0; i < packs * pack; ++i) top = value[i] > top ? value[i] : top;
  top = warp_max(top);
  if (lane_id() == 0) tops[warp_id()] = top;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < chunk_threads / 32; ++w) top = tops[w] > top ? tops[w] : top;
  const float inverse = inverse_temperature(a, b);
  float sum = 0.0f;
  int first = chunk_elements;
#pragma unroll
  for (int i = 0; i < packs; ++i)
#pragma unroll
    for (int j = 0; j < pack; ++j) {
      const float y = value[i * pack + j];
      if (inverse > 0.0f) {
        sum += top > -INFINITY && y > -INFINITY ? weight_of(y, top, inverse) : 0.0f;
      } else if (y == top) {
        const int at = (i * chunk_threads + int(threadIdx.x)) * pack + j;
        first = at < first ? at : first;
      }
    }
  sum = warp_sum(sum);
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    const int other = __shfl_xor_sync(all_lanes, first, o);
    first = other < first ? other : first;
  }
  if (lane_id() == 0) {
    sums[warp_id()] = sum;
    where[warp_id()] = first;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < chunk_threads / 32; ++w) {
      sum += sums[w];
      first = where[w] < first ? where[w] : first;
    }
    v.statistics[(b * (a.max_drafts + 1) + slot) * v.chunks + chunk] = {
        top, inverse > 0.0f ? as_bits(sum) : uint32_t(chunk * chunk_elements + first)};
  }
}

// A row as the statistics tell it, the same in all lanes of the warp that asks.
struct RowSummary {
  float top;
  double total;    // of the weights
  int64_t argmax;  // of a greedy request
};

__device__ __forceinline__ RowSummary summarize(const ChunkStatistics* statistics, int64_t chunks, float inverse) {
  RowSummary row{-INFINITY, 0.0, -1};
  for (int64_t i = lane_id(); i < chunks; i += 32) row.top = fmaxf(row.top, statistics[i].max);
  row.top = warp_max(row.top);
  if (row.top == -INFINITY) return row;
  if (inverse > 0.0f) {
    for (int64_t i = lane_id(); i < chunks; i += 32)
      row.total += double(as_float(statistics[i].sum)) * weight_of(statistics[i].max, row.top, inverse);
    row.total = warp_sum(row.total);
    return row;
  }
  uint32_t first = 0xffffffffu;
  for (int64_t i = lane_id(); i < chunks; i += 32)
    if (statistics[i].max == row.top && statistics[i].sum < first) first = statistics[i].sum;
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    const uint32_t other = __shfl_xor_sync(all_lanes, first, o);
    first = other < first ? other : first;
  }
  row.argmax = first;
  return row;
}

// q over the present candidates of draft n, over the lanes of a warp: exp(score - top) / sum.
struct Proposal {
  float top, sum, of_draft;  // of_draft 0: the draft is no candidate, q is one-hot
};

__device__ __forceinline__ bool present(const Rejection& a, int64_t at) {
  const int64_t id = a.candidate_ids[at];
  return id >= 0 && id < a.vocabulary && a.candidate_scores[at] >= -3.402823466e38f;
}

__device__ __forceinline__ float score_at(const Rejection& a, int64_t at) {
  return fminf(a.candidate_scores[at], 3.402823466e38f);
}

__device__ __forceinline__ Proposal proposal(const Rejection& a, int64_t n, int64_t draft) {
  Proposal q{-3.402823466e38f, 0.0f, 0.0f};
  const int64_t from = n * a.candidates;
  for (int64_t c = lane_id(); c < a.candidates; c += 32)
    if (present(a, from + c)) q.top = fmaxf(q.top, score_at(a, from + c));
  q.top = warp_max(q.top);
  for (int64_t c = lane_id(); c < a.candidates; c += 32)
    if (present(a, from + c)) {
      const float e = weight_of(score_at(a, from + c), q.top, 1.0f);
      q.sum += e;
      if (a.candidate_ids[from + c] == draft) q.of_draft = e;
    }
  q.sum = warp_sum(q.sum);
  q.of_draft = warp_max(q.of_draft);
  return q;
}

// A row to sample from: its weights, those of some ids replaced.
template <typename T>
struct Weights {
  const T* x;
  int64_t vocabulary;
  float top, inverse;
  const int64_t* ids;  // replaced ids and their weights, in shared memory
  const float* replaced;
  int count;

  // The bits of this warp's bitmap [chunk_elements / 32] of the replaced ids of a chunk.
  __device__ __forceinline__ void mark(int64_t chunk, uint32_t* bitmap) const {
    for (int w = lane_id(); w < chunk_elements / 32; w += 32) bitmap[w] = 0;
    __syncwarp();
    if (lane_id() == 0)
      for (int c = 0; c < count; ++c)
        if (ids[c] >= 0 && ids[c] / chunk_elements == chunk)
          bitmap[ids[c] % chunk_elements / 32] |= 1u << (ids[c] & 31);
    __syncwarp();
  }

  __device__ __forceinline__ float at(int64_t id, const uint32_t* bitmap) const {
    if (id >= vocabulary) return 0.0f;
    if (bitmap[id % chunk_elements / 32] >> (id & 31) & 1)
      for (int c = 0; c < count; ++c)
        if (ids[c] == id) return replaced[c];
    const float value = widen(x[id]);
    return value > -INFINITY ? weight_of(value, top, inverse) : 0.0f;
  }

  // Sum of `length` weights from `begin`, by a warp.
  __device__ __forceinline__ double sum(int64_t begin, int length, const uint32_t* bitmap) const {
    double total = 0.0;
    for (int i = lane_id(); i < length; i += 32) total += at(begin + i, bitmap);
    return warp_sum(total);
  }
};

// First i < n with running + value(0) + ... + value(i) > target, by a warp; `running` becomes what stands before it.
// Where rounding leaves none, the last with a value above 0; -1 where all are 0.
template <typename Value>
__device__ __forceinline__ int64_t first_above(int64_t n, double target, double& running, Value value) {
  int64_t last = -1;
  double before_last = running;
  for (int64_t base = 0; base < n; base += 32) {
    const int64_t i = base + lane_id();
    const double own = i < n ? value(i) : 0.0, up_to = running + warp_prefix_sum(own);
    const unsigned positive = __ballot_sync(all_lanes, own > 0.0);
    const unsigned above = __ballot_sync(all_lanes, own > 0.0 && up_to > target);
    const int lane = above ? __ffs(int(above)) - 1 : positive ? 31 - __clz(int(positive)) : -1;
    if (lane >= 0) {
      last = base + lane;
      before_last = __shfl_sync(all_lanes, up_to - own, lane);
    }
    if (above) break;
    running = __shfl_sync(all_lanes, up_to, 31);
  }
  running = before_last;
  return last;
}

// Shared memory of decide_kernel, after the masses of all chunks.
struct DecideShared {
  uint32_t bitmaps[decide_threads / 32][chunk_elements / 32];
  double segments[chunk_elements / segment];
  double running, target;
  int64_t chunk;
};

// Inverse CDF of the weights, by the block; all threads get the id, -1 where all weights are 0.
template <typename T>
__device__ __forceinline__ int64_t sample(const Weights<T>& w, const ChunkStatistics* statistics, int64_t chunks,
                                          double u, double* masses, DecideShared& s) {
  uint32_t* bitmap = s.bitmaps[warp_id()];
  const int warps = int(blockDim.x) >> 5;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < chunks; i += blockDim.x)
    masses[i] = double(as_float(statistics[i].sum)) *
                (statistics[i].max > -INFINITY ? weight_of(statistics[i].max, w.top, w.inverse) : 0.0f);
  __syncthreads();
  for (int c = warp_id(); c < w.count; c += warps) {
    if (w.ids[c] < 0) continue;
    const int64_t chunk = w.ids[c] / chunk_elements;
    w.mark(chunk, bitmap);
    const double mass = w.sum(chunk * chunk_elements, chunk_elements, bitmap);
    if (lane_id() == 0) masses[chunk] = mass;  // warps of the same chunk write the same
  }
  __syncthreads();
  if (warp_id() == 0) {
    double total = 0.0, running = 0.0;
    for (int64_t i = lane_id(); i < chunks; i += 32) total += masses[i];
    total = warp_sum(total);
    const int64_t chunk = first_above(chunks, u * total, running, [&](int64_t i) { return masses[i]; });
    if (lane_id() == 0) {
      s.chunk = chunk;
      s.running = running;
      s.target = u * total;
    }
  }
  __syncthreads();
  const int64_t chunk = s.chunk;
  if (chunk < 0) return -1;
  w.mark(chunk, bitmap);
  for (int i = warp_id(); i < chunk_elements / segment; i += warps) {
    const double sum = w.sum(chunk * chunk_elements + i * segment, segment, bitmap);
    if (lane_id() == 0) s.segments[i] = sum;
  }
  __syncthreads();
  if (warp_id() == 0) {
    double running = s.running;
    const int64_t part =
        first_above(chunk_elements / segment, s.target, running, [&](int64_t i) { return s.segments[i]; });
    const int64_t begin = chunk * chunk_elements + (part < 0 ? 0 : part) * segment;
    const int64_t i =
        first_above(segment, s.target, running, [&](int64_t i) { return double(w.at(begin + i, bitmap)); });
    if (lane_id() == 0) s.chunk = part < 0 || i < 0 ? -1 : begin + i;
  }
  __syncthreads();
  return s.chunk;
}

template <typename T>
__global__ void decide_kernel(const Verification v) {
  DYNAMIC_SHARED(double, masses);  // [chunks], then ids [candidates] and replaced [candidates]
  __shared__ DecideShared s;
  __shared__ int stop;  // the first slot that is not accepted
  const Rejection& a = v.a;
  const int64_t b = blockIdx.x, drafts = drafts_of(a, b), first = a.cu_drafts[b];
  const ChunkStatistics* statistics = v.statistics + b * (a.max_drafts + 1) * v.chunks;
  const float inverse = inverse_temperature(a, b);
  int64_t* ids = reinterpret_cast<int64_t*>(masses + v.chunks);
  float* replaced = reinterpret_cast<float*>(ids + a.candidates);
  int32_t* out = a.output + b * (a.max_drafts + 1);
  const auto noise = [&](int64_t slot, uint32_t stream) {
    return uniform(a.seeds[b], a.anchor_positions[b], uint32_t(slot), stream);
  };

  if (threadIdx.x == 0) stop = int(drafts);
  __syncthreads();
  for (int64_t slot = warp_id(); slot < drafts; slot += blockDim.x >> 5) {
    const int64_t row = row_of(a, b, slot, drafts), draft = a.draft_ids[first + slot];
    bool accept = row >= 0 && draft >= 0 && draft < a.vocabulary;
    if (accept) {
      const RowSummary p = summarize(statistics + slot * v.chunks, v.chunks, inverse);
      if (inverse == 0.0f || p.top == -INFINITY) {
        accept = p.argmax == draft;
      } else {
        const Proposal q = proposal(a, first + slot, draft);
        const float x = widen(static_cast<const T*>(a.logits)[row * a.logits_row + draft]);
        const double of_p = (x > -INFINITY ? weight_of(x, p.top, inverse) : 0.0f) / p.total;
        accept = noise(slot + 1, accept_stream) * (q.of_draft > 0.0f ? q.of_draft / q.sum : 1.0f) < of_p;
      }
    }
    if (!accept && lane_id() == 0) atomicMin(&stop, int(slot));
  }
  __syncthreads();
  const int64_t slot = stop, row = row_of(a, b, slot, drafts);
  for (int64_t i = threadIdx.x; i <= a.max_drafts; i += blockDim.x)
    out[i] = i < slot ? int32_t(a.draft_ids[first + i]) : -1;
  if (threadIdx.x == 0) a.accepted[b] = int32_t(slot > 0 ? slot : 0);
  if (row < 0) return;
  __syncthreads();  // out[slot] is written again below

  statistics += slot * v.chunks;
  const RowSummary p = summarize(statistics, v.chunks, inverse);
  if (p.top == -INFINITY) return;
  int64_t token = p.argmax;
  if (inverse > 0.0f) {
    const bool is_bonus = slot == drafts;
    Weights<T> w{static_cast<const T*>(a.logits) + row * a.logits_row, a.vocabulary, p.top, inverse, ids, replaced, 0};
    const double u = noise(slot + 1, is_bonus ? bonus_stream : recover_stream);
    const int64_t draft = is_bonus ? -1 : a.draft_ids[first + slot];
    if (draft >= 0 && draft < a.vocabulary) {
      const Proposal q = proposal(a, first + slot, draft);
      const bool one_hot = !(q.of_draft > 0.0f);
      w.count = one_hot ? 1 : int(a.candidates);
      for (int c = threadIdx.x; c < w.count; c += blockDim.x) {
        const int64_t at = (first + slot) * a.candidates + c;
        const bool real = one_hot || present(a, at);
        const int64_t id = one_hot ? draft : real ? a.candidate_ids[at] : draft;
        const float own = one_hot ? 1.0f : weight_of(score_at(a, at), q.top, 1.0f) / q.sum;
        const float x = widen(w.x[id]);
        const double rest = (x > -INFINITY ? weight_of(x, p.top, inverse) : 0.0f) - own * p.total;
        ids[c] = real ? id : -1;
        replaced[c] = real && rest > 0.0 ? float(rest) : 0.0f;
      }
    }
    token = sample(w, statistics, v.chunks, u, masses, s);
    if (token < 0 && w.count > 0) {
      w.count = 0;  // nothing is left of p - q: p itself
      token = sample(w, statistics, v.chunks, u, masses, s);
    }
  }
  if (threadIdx.x == 0) out[slot] = int32_t(token);
}

}  // namespace dflash

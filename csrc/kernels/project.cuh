// SPDX-License-Identifier: Apache-2.0
// Features (after fc) into the paged K and V of all layers in one launch, for up to 16 rows. Reference: the torch path
// of vllm_dflash.ops.project_context_kv. A block has the columns of one head of K or V of a layer, so that k-norm and
// RoPE stay inside it; its warps split the features' width. hidden_norm has no pass of its own: its weight is folded
// into the projection, its row scale is applied to the sums.
// Bytes: the weight once, L * 2 * nkv * hd * H * w; features 16 * H * b a block, from the L2 cache; K and V once.
// FLOPs: 2 * 16 * L * 2 * nkv * hd * H on tensor cores, whatever the row count: 32 a weight, below their rate at the
// memory's speed. Bytes in flight a block: 256 threads * hd / 8 loads of 8 weights, 64 KiB for hd = 128 and 16 bits.
#pragma once
#include "context_kv.cuh"
#include "mma.cuh"

namespace dflash {

constexpr int project_rows = 16, project_warps = 8, features_a_lane = 8;

template <typename A, typename B>
constexpr bool same = false;
template <typename A>
constexpr bool same<A, A> = true;

template <typename T, typename W>
__device__ __forceinline__ uint32_t bits_as(W x) {
  if constexpr (same<T, W>)
    return x.bits;
  else
    return narrow<T>(widen(x)).bits;
}

// Weights 4 * step to 4 * step + 3 of a pack as two words of T.
template <typename T, typename W, int n>
__device__ __forceinline__ void words_of(const Pack<W, n>& pack, int step, uint32_t* words) {
#pragma unroll
  for (int i = 0; i < 2; ++i)
    words[i] = bits_as<T>(pack.x[4 * step + 2 * i]) | bits_as<T>(pack.x[4 * step + 2 * i + 1]) << 16;
}

template <typename T, int n>
__device__ __forceinline__ float squares_of(const Pack<T, n>& pack) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < n; ++i) sum += widen(pack.x[i]) * widen(pack.x[i]);
  return sum;
}

// A run of n features of a row, zeros for a row that is not there.
template <typename T, int n>
__device__ __forceinline__ Pack<T, n> features_at(const Projection& p, int64_t row, int64_t k) {
  Pack<T, n> pack = {};
  if (row < p.context.rows)
    pack = *reinterpret_cast<const Pack<T, n>*>(static_cast<const T*>(p.features) + row * p.feature_row + k);
  return pack;
}

// sums [project_rows][size] of the block's columns from `column`, and the squares of the features' rows.
template <typename T, typename W, int size>
__device__ __forceinline__ void multiply(const Projection& p, int64_t column, float (*sums)[size], float* squares) {
  constexpr int tiles = size / 8, run = features_a_lane;
  const int quad = lane_id() >> 2, sub = lane_id() & 3;
  float total[tiles][4] = {};
  float low_squares = 0.0f, high_squares = 0.0f;
  const W* weight = static_cast<const W*>(p.weight) + (column + quad) * p.weight_row + sub * run;
  for (int64_t k = warp_id() * 4 * run; k < p.width; k += project_warps * 4 * run) {
    Pack<W, run> w[tiles];
#pragma unroll
    for (int tile = 0; tile < tiles; ++tile)
      w[tile] = *reinterpret_cast<const Pack<W, run>*>(weight + tile * 8 * p.weight_row + k);
    const Pack<T, run> low = features_at<T, run>(p, quad, k + sub * run),
                       high = features_at<T, run>(p, quad + 8, k + sub * run);
    low_squares += squares_of(low);
    high_squares += squares_of(high);
#pragma unroll
    for (int step = 0; step < run / 4; ++step) {
      uint32_t a[4], from_low[2], from_high[2];
      words_of<T>(low, step, from_low);
      words_of<T>(high, step, from_high);
      a[0] = from_low[0], a[1] = from_high[0], a[2] = from_low[1], a[3] = from_high[1];
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile) {
        uint32_t b[2];
        words_of<T>(w[tile], step, b);
        mma<T>(total[tile], a, b);
      }
    }
  }
#pragma unroll
  for (int o = 1; o < 4; o <<= 1) {
    low_squares += __shfl_xor_sync(all_lanes, low_squares, o);
    high_squares += __shfl_xor_sync(all_lanes, high_squares, o);
  }
  // The warps add their parts in turn, so that the sum does not depend on their timing.
  for (int turn = 0; turn < project_warps; ++turn) {
    if (warp_id() == turn) {
#pragma unroll
      for (int tile = 0; tile < tiles; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& sum = sums[quad + i / 2 * 8][tile * 8 + sub * 2 + i % 2];
          sum = turn ? sum + total[tile][i] : total[tile][i];
        }
      if (sub == 0) {
        squares[quad] = turn ? squares[quad] + low_squares : low_squares;
        squares[quad + 8] = turn ? squares[quad + 8] + high_squares : high_squares;
      }
    }
    __syncthreads();
  }
}

template <typename T, typename W, typename To, int size>
__global__ void __launch_bounds__(32 * project_warps, 1)
    project_kernel(const __grid_constant__ Projection p, const __grid_constant__ Destination d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  if constexpr (same<T, bf16>) return;  // no such tensor cores; the launcher refuses
#endif
  constexpr int pairs = size / 64;
  __shared__ float sums[project_rows][size];
  __shared__ float squares[project_rows];
  const Context& a = p.context;
  const int64_t head = blockIdx.x % a.heads, is_value = blockIdx.x / a.heads % 2, layer = blockIdx.x / (2 * a.heads);
  const int64_t column = int64_t(blockIdx.x) * size;
  multiply<T, W, size>(p, column, sums, squares);

  const Pairing pairing{size / 2, int(a.rotated / 2), a.is_neox};
  for (int64_t t = warp_id(); t < a.rows; t += project_warps) {
    const int64_t position = a.positions[t];
    if (position < 0 || position >= a.cos_sin_rows) continue;
    To* to = destination<To>(d, is_value, layer, t, head);
    if (!to) continue;
    const float row_scale = rsqrtf(squares[t] / float(p.width) + a.eps);
    const auto value = [&](int c) {
      const float scale = p.weight_scale ? row_scale * p.weight_scale[column + c] : row_scale;
      return sums[t][c] * scale + (p.bias ? widen(static_cast<const T*>(p.bias)[column + c]) : 0.0f);
    };
    float first[pairs], second[pairs];
#pragma unroll
    for (int j = 0; j < pairs; ++j) {
      first[j] = value(pairing.first(lane_id() * pairs + j));
      second[j] = value(pairing.second(lane_id() * pairs + j));
    }
    if (is_value) {
      if (a.scales_values) scale_pairs<pairs>(a.value_scale, first, second);
    } else {
      finish_key<pairs>(a, pairing, layer, position, first, second);
    }
    if (d.type == Type::e4m3) scale_pairs<pairs>(1.0f / (is_value ? d.v_scale : d.k_scale), first, second);
    store_pairs<To, pairs>(to, pairing, false, first, second);
  }
}

}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
// Reductions of a warp and of a block, and loads of several numbers at once. Device code only: no CUDA runtime calls,
// so the emulation includes it too.
#pragma once
#include "../arguments.h"
#include "../numbers.h"

namespace dflash {

constexpr unsigned all_lanes = 0xffffffffu;

__device__ __forceinline__ int lane_id() { return int(threadIdx.x) & 31; }
__device__ __forceinline__ int warp_id() { return int(threadIdx.x) >> 5; }

template <typename T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(all_lanes, x, o);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = 16; o > 0; o >>= 1) {
    const float other = __shfl_xor_sync(all_lanes, x, o);
    x = other > x ? other : x;
  }
  return x;
}

template <typename T>
__device__ __forceinline__ T warp_prefix_sum(T x) {
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const T before = __shfl_up_sync(all_lanes, x, o);
    if (lane_id() >= o) x += before;
  }
  return x;
}

// n numbers that lie together, read or written at once.
template <typename T, int n>
struct alignas(sizeof(T) * n) Pack {
  T x[n];
};

template <typename T, int n>
__device__ __forceinline__ void load(const T* from, float* to) {
  const Pack<T, n> pack = *reinterpret_cast<const Pack<T, n>*>(from);
#pragma unroll
  for (int i = 0; i < n; ++i) to[i] = widen(pack.x[i]);
}

template <typename T, int n>
__device__ __forceinline__ void store(T* to, const float* from) {
  Pack<T, n> pack;
#pragma unroll
  for (int i = 0; i < n; ++i) pack.x[i] = narrow<T>(from[i]);
  *reinterpret_cast<Pack<T, n>*>(to) = pack;
}

// Whether every multiple of `stride` elements from p can be read `bytes` at a time.
template <typename T>
DFLASH_FN bool aligned(const T* p, int64_t stride, int bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0 && stride * int64_t(sizeof(T)) % bytes == 0;
}

}  // namespace dflash

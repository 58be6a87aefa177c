// SPDX-License-Identifier: Apache-2.0
// d [16 x 8] += a [16 x 16] * b [16 x 8] by a warp, of 16-bit numbers in fp32. With quad = lane / 4, sub = lane % 4: a
// has rows quad (words 0 and 2) and quad + 8 (1 and 3), b column quad, d rows quad (0 and 1) and quad + 8 (2 and 3) of
// columns 2 * sub and 2 * sub + 1. Words 0, 1 of a meet word 0 of b; which k they stand for is the caller's choice.
#pragma once
#include "warp.cuh"

namespace dflash {

template <typename T>
__device__ __forceinline__ void mma(float* d, const uint32_t* a, const uint32_t* b);

#ifdef DFLASH_EMULATION

template <typename T>
float dot2(uint32_t x, uint32_t y) {
  return widen(T{uint16_t(x)}) * widen(T{uint16_t(y)}) + widen(T{uint16_t(x >> 16)}) * widen(T{uint16_t(y >> 16)});
}

template <typename T>
void mma(float* d, const uint32_t* a, const uint32_t* b) {
  const int quad = lane_id() >> 2, sub = lane_id() & 3;
  for (int k = 0; k < 4; ++k)
    for (int half = 0; half < 2; ++half) {
      const uint32_t low = __shfl_sync(all_lanes, a[2 * half], quad * 4 + k);
      const uint32_t high = __shfl_sync(all_lanes, a[2 * half + 1], quad * 4 + k);
      for (int column = 0; column < 2; ++column) {
        const uint32_t w = __shfl_sync(all_lanes, b[half], (2 * sub + column) * 4 + k);
        d[column] += dot2<T>(low, w);
        d[2 + column] += dot2<T>(high, w);
      }
    }
}

#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800

template <>
__device__ __forceinline__ void mma<bf16>(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma<f16>(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#else  // sm_75: half of the width at a time, float16 only

template <>
__device__ __forceinline__ void mma<bf16>(float*, const uint32_t*, const uint32_t*) {}

template <>
__device__ __forceinline__ void mma<f16>(float* d, const uint32_t* a, const uint32_t* b) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[2 * half]), "r"(a[2 * half + 1]), "r"(b[half]));
}

#endif

}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
// 16- and 8-bit floats by their bits, so that one source serves any compiler, nvcc and the emulation. Rounding is to
// nearest even, as torch rounds.
#pragma once
#include <cstdint>
#include <cstring>
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define DFLASH_FN __host__ __device__ __forceinline__
#else
#define DFLASH_FN inline __attribute__((always_inline))
#endif

namespace dflash {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};

DFLASH_FN float as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
#endif
}

DFLASH_FN uint32_t as_bits(float x) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(x);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
#endif
}

DFLASH_FN float widen(float x) { return x; }
DFLASH_FN float widen(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
DFLASH_FN float widen(int8_t x) { return float(x); }

DFLASH_FN float widen(f16 x) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(x.bits));
#else
  // The exponent moves by a multiplication, which makes subnormals right too; infinities and NaNs get theirs back.
  const uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13, sign = uint32_t(x.bits & 0x8000) << 16;
  const uint32_t finite = as_bits(as_float(magnitude) * as_float(0x77800000));  // 2^112
  return as_float(((x.bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : finite) | sign);
#endif
}

DFLASH_FN float widen(e4m3 x) {
  const uint32_t magnitude = uint32_t(x.bits & 0x7f) << 20, sign = uint32_t(x.bits & 0x80) << 24;
  const uint32_t finite = as_bits(as_float(magnitude) * as_float(0x7b800000));  // 2^120
  return as_float(((x.bits & 0x7f) == 0x7f ? 0x7fc00000 : finite) | sign);
}

template <typename T>
DFLASH_FN T narrow(float x);

template <>
DFLASH_FN float narrow<float>(float x) {
  return x;
}

template <>
DFLASH_FN bf16 narrow<bf16>(float x) {
#ifdef __CUDA_ARCH__
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const uint32_t bits = as_bits(x);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return {uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};
#endif
}

template <>
DFLASH_FN f16 narrow<f16>(float x) {
#ifdef __CUDA_ARCH__
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t bits = as_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  // Adding 0.5 leaves a subnormal half's 10 bits in the lowest bits of the sum, rounded by the addition itself.
  const uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000;
  const uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7e00 : 0x7c00;
  return {uint16_t(sign | (magnitude >= 0x477ff000 ? special : magnitude < 0x38800000 ? subnormal : normal))};
#endif
}

// Saturated at +-448, the largest e4m3; NaN stays NaN.
template <>
DFLASH_FN e4m3 narrow<e4m3>(float x) {
  const uint32_t bits = as_bits(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  // 2^14 has a unit in the last place of 2^-9, e4m3's smallest number, so the sum's low bits count those.
  const uint32_t subnormal = as_bits(as_float(magnitude) + 16384.0f) - 0x46800000;
  const uint32_t normal = (magnitude - 0x3c000000 + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  const uint32_t special = magnitude > 0x7f800000 ? 0x7f : 0x7e;
  return {uint8_t(sign | (magnitude >= 0x43e00000 ? special : magnitude < 0x3c800000 ? subnormal : normal))};
}

}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
// A vector register of floats by the compiler's vector extension: one source, compiled once for each instruction set
// (kernels.cpp). Everything here is inlined and nothing comes from the standard library, so no code of one
// instruction set can be linked into another's.
#pragma once
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#include "../numbers.h"

namespace dflash {
namespace {

#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif
constexpr float infinity = __builtin_inff();
constexpr float largest = 3.402823466e38f;

typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef int32_t Ints __attribute__((vector_size(4 * lanes)));
typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));
typedef uint8_t Bytes __attribute__((vector_size(lanes)));

#define VECTOR_FN static inline __attribute__((always_inline, unused))

VECTOR_FN Floats all(float x) { return x - Floats{}; }

VECTOR_FN Words widen_words(Halves x) { return __builtin_convertvector(x, Words); }

VECTOR_FN Floats load(const float* p) {
  Floats x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}

VECTOR_FN Floats load(const bf16* p) {
  Halves x;
  __builtin_memcpy(&x, p, sizeof x);
  return (Floats)(widen_words(x) << 16);
}

VECTOR_FN Floats load(const f16* p) {
  Halves x;
  __builtin_memcpy(&x, p, sizeof x);
  const Words bits = widen_words(x), magnitude = (bits & 0x7fff) << 13, sign = (bits & 0x8000) << 16;
  const Words finite = (Words)((Floats)magnitude * as_float(0x77800000));  // as widen(f16) in numbers.h
  return (Floats)(((bits & 0x7c00) == 0x7c00 ? magnitude | 0x7f800000 : finite) | sign);
}

VECTOR_FN void store(float* p, Floats x) { __builtin_memcpy(p, &x, sizeof x); }

VECTOR_FN void store(bf16* p, Floats x) {
#ifdef __AVX512BF16__
  const __m256bh out = _mm512_cvtneps_pbh(x);
  __builtin_memcpy(p, &out, sizeof out);
#else
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  const Halves out = __builtin_convertvector(x == x ? rounded : (rounded & 0) + 0x7fc0, Halves);
  __builtin_memcpy(p, &out, sizeof out);
#endif
}

VECTOR_FN void store(f16* p, Floats x) {
  const Words bits = (Words)x, sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  const Words subnormal = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;  // as narrow<f16> in numbers.h
  const Words normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  const Words special = magnitude > 0x7f800000 ? (bits & 0) + 0x7e00 : (bits & 0) + 0x7c00;
  const Words finite = magnitude < 0x38800000 ? subnormal : normal;
  const Halves out = __builtin_convertvector(sign | (magnitude >= 0x477ff000 ? special : finite), Halves);
  __builtin_memcpy(p, &out, sizeof out);
}

VECTOR_FN void store(e4m3* p, Floats x) {
  const Words bits = (Words)x, sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
  const Words subnormal = (Words)((Floats)magnitude + 16384.0f) - 0x46800000;  // as narrow<e4m3> in numbers.h
  const Words normal = (magnitude - 0x3c000000 + 0x7ffff + (magnitude >> 20 & 1)) >> 20;
  const Words special = magnitude > 0x7f800000 ? (bits & 0) + 0x7f : (bits & 0) + 0x7e;
  const Words finite = magnitude < 0x3c800000 ? subnormal : normal;
  const Bytes out = __builtin_convertvector(sign | (magnitude >= 0x43e00000 ? special : finite), Bytes);
  __builtin_memcpy(p, &out, sizeof out);
}

// The first n entries, at most a register, the others `fill`.
template <typename T>
VECTOR_FN Floats load(const T* p, int64_t n, float fill = 0.0f) {
  if (__builtin_expect(n >= lanes, 1)) return load(p);
  T padded[lanes];
  store(padded, all(fill));
  __builtin_memcpy(padded, p, n * sizeof(T));
  return load(padded);
}

template <typename T>
VECTOR_FN void store(T* p, Floats x, int64_t n) {
  if (__builtin_expect(n >= lanes, 1)) return store(p, x);
  T padded[lanes];
  store(padded, x);
  __builtin_memcpy(p, padded, n * sizeof(T));
}

VECTOR_FN Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b where a is NaN

typedef float Quad __attribute__((vector_size(16)));

// Quarter i of a register of sixteen, half i of one of eight.
VECTOR_FN Quad quad(Floats x, int i) {
  Quad part;
  __builtin_memcpy(&part, reinterpret_cast<const char*>(&x) + 16 * i, sizeof part);
  return part;
}

VECTOR_FN float sum(Floats x) {
  Quad part = quad(x, 0);
  if (lanes == 8) part += quad(x, 1 % (lanes / 4));
  if (lanes == 16) part = (part + quad(x, 1 % (lanes / 4))) + (quad(x, 2 % (lanes / 4)) + quad(x, 3 % (lanes / 4)));
  return (part[0] + part[1]) + (part[2] + part[3]);
}

VECTOR_FN float max(Floats x) {
  float top = -infinity;
  for (int i = 0; i < lanes; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// exp for x <= 88 to about one unit in the last place; below -87, and for NaN, exactly 0.
VECTOR_FN Floats exp(Floats x) {
  const Floats shifted = x * 1.44269504f + 12582912.0f;  // the integer nearest x / ln 2 in the low bits
  const Floats n = shifted - 12582912.0f;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Floats scaled = (Floats)((Words)y + ((Words)shifted << 23));
  return x >= -87.0f ? scaled : Floats{};
}

VECTOR_FN float exp(float x) { return exp(all(x))[0]; }

}  // namespace
}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
// What a launcher needs: kernel launches and shared memory, spelled for nvcc or for the emulation of CUDA on a CPU.
#pragma once
#ifdef DFLASH_EMULATION
#include "cuda_emulation.h"
#else
#include <cuda_runtime.h>
#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  kernel<<<grid, block, shared, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define DYNAMIC_SHARED(T, name)                                 \
  extern __shared__ __align__(16) unsigned char shared_bytes[]; \
  T* const name = reinterpret_cast<T*>(shared_bytes)
#endif

#include "../arguments.h"
#include "../numbers.h"

namespace dflash {

inline const char* launched() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

template <typename F>
void by_type(Type type, const F& f) {
  if (type == Type::f32) return f(float());
  if (type == Type::bf16) return f(bf16());
  f(f16());
}

inline unsigned blocks_for(int64_t n, int64_t size) { return unsigned((n + size - 1) / size); }

}  // namespace dflash

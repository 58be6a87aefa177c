// SPDX-License-Identifier: Apache-2.0
#include "launch.h"
#include "../kernels/project.cuh"
#include "launchers.h"

namespace dflash::cuda {

namespace {

template <typename T, typename W, typename To>
void project(const Projection& p, const Destination& d, void* stream) {
  const unsigned blocks = unsigned(p.context.layers * 2 * p.context.heads);
  if (p.context.size == 64)
    LAUNCH((project_kernel<T, W, To, 64>), blocks, 32 * project_warps, 0, stream, p, d);
  else
    LAUNCH((project_kernel<T, W, To, 128>), blocks, 32 * project_warps, 0, stream, p, d);
}

template <typename T>
void project_from(const Projection& p, const Destination& d, void* stream) {
  const auto to = [&](auto cache) {
    using To = decltype(cache);
    if (p.weight_type == Type::e4m3) return project<T, e4m3, To>(p, d, stream);
    if (p.weight_type == Type::i8) return project<T, int8_t, To>(p, d, stream);
    project<T, T, To>(p, d, stream);
  };
  d.type == Type::e4m3 ? to(e4m3()) : to(T());
}

}  // namespace

const char* project_context_kv(const Projection& p, const Destination& d, void* stream) {
  if (p.context.type == Type::bf16) {
    int device = 0, major = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (major < 8) return "bfloat16 features need compute capability 8.0; use float16 or inject_context_kv";
    project_from<bf16>(p, d, stream);
  } else {
    project_from<f16>(p, d, stream);
  }
  return launched();
}

}  // namespace dflash::cuda

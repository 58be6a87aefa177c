// SPDX-License-Identifier: Apache-2.0
// Where an operation runs: the allocation of its results, and the choice between the processor's code and CUDA's.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

#include <array>

#include "checks.h"
#include "cpu/operations.h"
#ifdef DFLASH_CUDA
#include "cuda/launchers.h"
#endif

namespace dflash {

inline int32_t type_of(const Tensor& t) {
  int32_t type;
  aoti_torch_get_dtype(t.get(), &type);
  return type;
}

// A new contiguous tensor beside `like`; `type` as type_of gives it.
template <size_t n>
Tensor empty(const std::array<int64_t, n>& sizes, int32_t type, const Tensor& like) {
  std::array<int64_t, n> strides;
  int64_t stride = 1;
  for (size_t i = n; i-- > 0;) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  int32_t device_type;
  aoti_torch_get_device_type(like.get(), &device_type);
  AtenTensorHandle handle = nullptr;
  if (aoti_torch_empty_strided(int64_t(n), sizes.data(), strides.data(), type, device_type, like.get_device_index(),
                               &handle))
    throw std::runtime_error("no memory for a result of the operation");
  return Tensor(handle);
}

#ifdef DFLASH_CUDA
// torch's current stream of the tensor's device, which is made the current device.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& like);
  void* stream() const { return stream_; }

 private:
#ifndef DFLASH_EMULATION
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

#ifdef DFLASH_EMULATION
inline bool uses_cuda(const Tensor&) { return true; }
#define DFLASH_ON_CPU(function, ...) (void)0
#else
inline bool uses_cuda(const Tensor& like) { return !like.is_cpu(); }
#define DFLASH_ON_CPU(function, ...) cpu::function(__VA_ARGS__)
#endif

#define DFLASH_ON_CUDA(op, like, function, ...)                       \
  do {                                                                \
    const OnDevice device(like);                                      \
    const char* error = cuda::function(__VA_ARGS__, device.stream()); \
    if (error) fail(op, error);                                       \
  } while (0)

#define DFLASH_RUN(op, like, function, ...)            \
  do {                                                 \
    if (uses_cuda(like))                               \
      DFLASH_ON_CUDA(op, like, function, __VA_ARGS__); \
    else                                               \
      DFLASH_ON_CPU(function, __VA_ARGS__);            \
  } while (0)
#else
inline bool uses_cuda(const Tensor&) { return false; }
#define DFLASH_RUN(op, like, function, ...) cpu::function(__VA_ARGS__)
#endif

}  // namespace dflash

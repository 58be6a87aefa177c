// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#if defined(DFLASH_CUDA) && !defined(DFLASH_EMULATION)
#include <dlfcn.h>
#endif

namespace dflash {

#ifdef DFLASH_CUDA
#ifdef DFLASH_EMULATION
OnDevice::OnDevice(const Tensor&) {}
#else
OnDevice::OnDevice(const Tensor& like) : guard_(like.get_device_index()) {
  // The function is in libtorch_cuda.so only: a strong reference would break the import under a CPU build of torch, a
  // weak one stays null even under a CUDA build, since that library is not in this one's lookup scope.
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function current_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<Function>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  if (!current_stream || current_stream(like.get_device_index(), &stream_))
    throw std::runtime_error("dflash: this build of torch has no CUDA stream to run on");
}
#endif
#endif

}  // namespace dflash

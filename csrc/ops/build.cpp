// SPDX-License-Identifier: Apache-2.0
// What this build has.
#ifndef DFLASH_EMULATION
#include "../checks.h"
#include "../cpu/kernels.h"
#include "../operations.h"

namespace dflash {

bool has_cuda() {
#ifdef DFLASH_CUDA
  return true;
#else
  return false;
#endif
}

std::string cpu_isa(std::optional<std::string> use) {
  const char* name = use ? use_kernels(use->c_str()) : kernels().name;
  if (!name)
    fail("cpu_isa", "this processor or this build has no \"", *use, "\"; choose baseline, avx2, avx512 or avx512bf16");
  return name;
}

}  // namespace dflash
#endif

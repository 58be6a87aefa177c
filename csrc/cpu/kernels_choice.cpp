// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace dflash {

namespace baseline {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace avx512bf16 {
extern const Kernels table;
}

namespace {

// The i-th best that was compiled and that this processor has, null after the last.
const Kernels* available(int i) {
#if defined(DFLASH_AVX2) || defined(DFLASH_AVX512) || defined(DFLASH_AVX512BF16)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
#ifdef DFLASH_AVX512BF16
  if (avx512 && __builtin_cpu_supports("avx512bf16") && i-- == 0) return &avx512bf16::table;
#endif
#ifdef DFLASH_AVX512
  if (avx512 && i-- == 0) return &avx512::table;
#endif
#ifdef DFLASH_AVX2
  if (avx2 && i-- == 0) return &avx2::table;
#endif
  return i == 0 ? &baseline::table : nullptr;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* table = chosen.load(std::memory_order_relaxed);
  if (!table) chosen = table = available(0);
  return *table;
}

const char* use_kernels(const char* name) {
  for (int i = 0; const Kernels* table = available(i); ++i)
    if (!name || !std::strcmp(table->name, name)) {
      chosen = table;
      return table->name;
    }
  return nullptr;
}

}  // namespace dflash

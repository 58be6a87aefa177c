// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace dflash {

namespace baseline { extern const Kernels table; }
#ifdef DFLASH_X86
namespace avx2 { extern const Kernels table; }
namespace avx512 { extern const Kernels table; }
#endif

namespace {

// Best first.
const Kernels* available(int i) {
  int found = 0;
#ifdef DFLASH_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && found++ == i)
    return &avx512::table;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && found++ == i) return &avx2::table;
#endif
  return found == i ? &baseline::table : nullptr;
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

// SPDX-License-Identifier: Apache-2.0
// Kernels with faults that the emulation must show; prints what it saw.
#include <cstdio>

#include "cuda_emulation.h"

__global__ void reversed(int* out, int base, bool waits) {
  __shared__ int s[64];
  s[threadIdx.x] = int(threadIdx.x) + base;
  if (waits) __syncthreads();
  out[threadIdx.x] = s[63 - threadIdx.x];
}

__global__ void stuck() {
  if (threadIdx.x == 0)
    __shfl_xor_sync(~0u, 1, 1);
  else
    __syncthreads();
}

int main() {
  int base = 0;
  for (const char* order : {"forward", "reverse", "shuffled"})
    for (bool waits : {true, false}) {
      setenv("DFLASH_EMULATION_ORDER", order, 1);
      base += 1000;  // shared memory keeps the last block's numbers
      int out[64], *p = out, wrong = 0;
      LAUNCH(reversed, 1, 64, 0, nullptr, p, base, waits);
      for (int i = 0; i < 64; ++i) wrong += out[i] != base + 63 - i;
      std::printf("%s %s: %s\n", order, waits ? "with barrier" : "without barrier", wrong ? "wrong" : "right");
    }
  try {
    LAUNCH(stuck, 1, 64, 0, nullptr);
    std::printf("no deadlock\n");
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
  }
}

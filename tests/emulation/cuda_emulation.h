// SPDX-License-Identifier: Apache-2.0
// Runs CUDA kernel source on a CPU (g++ or clang, x86-64). A block runs on one OS thread; each of its CUDA threads is a
// fiber with its own stack. Fibers switch only at barriers and shuffles, so
//  - __syncthreads, __syncwarp, shuffles and votes have exact rendez-vous semantics,
//  - a barrier that some live thread can never reach is reported as a deadlock,
//  - a missing barrier shows when the fibers' order changes: DFLASH_EMULATION_ORDER is forward, reverse or shuffled.
// Not modelled: timing, the memory model between barriers, textures, cp.async, clusters. Tensor cores: see mma.cuh.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#ifndef __x86_64__
#error "the emulation's switch between fibers is written for x86-64"
#endif

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint3 {
  unsigned x, y, z;
};

#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local  // a block stays on one OS thread
#define __launch_bounds__(...)
#define __grid_constant__
#define __forceinline__ inline

namespace emulation {

constexpr unsigned warp_size = 32;
#ifdef __SANITIZE_ADDRESS__
constexpr size_t stack_size = 512 << 10;
#else
constexpr size_t stack_size = 64 << 10;
#endif
constexpr size_t shared_limit = 227 << 10;

enum class State : uint8_t { ready, at_block, at_warp, done };

struct Fiber {
  void* stack_pointer;
  uint3 index;
  State state;
  unsigned mask;
};

struct Warp {
  uint64_t slots[warp_size];
};

extern "C" void dflash_switch(void** save, void* load);
asm(R"(
.text
.weak dflash_switch
.type dflash_switch,@function
dflash_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi); movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size dflash_switch,.-dflash_switch
)");

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<char> shared;
  char* stacks = nullptr;
  size_t capacity = 0;
  void* scheduler = nullptr;
  Fiber* current = nullptr;
  uint3 index{};
  dim3 dim, grid;
  const std::function<void()>* body = nullptr;
  std::exception_ptr error;
  ~Block() {
    if (stacks) munmap(stacks, capacity * stack_size);
  }
};

inline Block*& block() {
  static thread_local Block* current = nullptr;
  return current;
}

// Not inlined: the address of a thread_local must not be kept over a switch.
__attribute__((noinline)) inline void wait_as(State state) {
  Block& b = *block();
  b.current->state = state;
  dflash_switch(&b.current->stack_pointer, b.scheduler);
}

inline void fiber_main() {
  Block& b = *block();
  try {
    (*b.body)();
  } catch (...) {
    if (!b.error) b.error = std::current_exception();
  }
  wait_as(State::done);
  __builtin_unreachable();
}

inline unsigned thread_number() { return unsigned(block()->current - block()->fibers.data()); }
inline unsigned lane() { return thread_number() % warp_size; }
inline Warp& warp() { return block()->warps[thread_number() / warp_size]; }

inline void warp_barrier(unsigned mask) {
  if (!(mask >> lane() & 1)) throw std::runtime_error("emulation: the calling lane is not in the mask");
  block()->current->mask = mask;
  wait_as(State::at_warp);
}

// Lets the lanes of a warp go on whose mask has no live lane elsewhere; whether there were any.
inline bool release_warp(Fiber* lanes, unsigned count) {
  bool released = false;
  for (unsigned l = 0; l < count; ++l) {
    if (lanes[l].state != State::at_warp) continue;
    const unsigned mask = lanes[l].mask;
    bool together = true;
    for (unsigned j = 0; j < count; ++j)
      if (mask >> j & 1)
        together &= lanes[j].state == State::done || (lanes[j].state == State::at_warp && lanes[j].mask == mask);
    if (!together) continue;
    for (unsigned j = 0; j < count; ++j)
      if ((mask >> j & 1) && lanes[j].state == State::at_warp) lanes[j].state = State::ready;
    released = true;
  }
  return released;
}

#ifdef __SANITIZE_ADDRESS__
extern "C" void __asan_unpoison_memory_region(void const volatile*, size_t);
#endif

inline void prepare(Block& b, unsigned n) {
  b.fibers.resize(n);
  b.warps.resize((n + warp_size - 1) / warp_size);
  b.error = nullptr;
  if (b.capacity < n) {
    if (b.stacks) munmap(b.stacks, b.capacity * stack_size);
    b.capacity = n;
    void* memory =
        mmap(nullptr, n * stack_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    b.stacks = static_cast<char*>(memory);
  }
#ifdef __SANITIZE_ADDRESS__
  // A fiber ends within its functions: what they had forbidden is still so.
  __asan_unpoison_memory_region(b.stacks, n * stack_size);
#endif
  for (unsigned i = 0; i < n; ++i) {
    Fiber& fiber = b.fibers[i];
    fiber.state = State::ready;
    fiber.index = {i % b.dim.x, i / b.dim.x % b.dim.y, i / (b.dim.x * b.dim.y)};
    void** top = reinterpret_cast<void**>(b.stacks + (i + 1) * stack_size) - 2;
    top[0] = reinterpret_cast<void*>(&fiber_main);
    top[1] = nullptr;
    top -= 6;
    std::memset(top, 0, 6 * sizeof(void*));
    fiber.stack_pointer = top;
  }
}

inline void run_block(Block& b, const std::vector<unsigned>& order) {
  const unsigned n = unsigned(order.size());
  prepare(b, n);
  for (;;) {
    bool ran = false;
    for (unsigned i : order) {
      if (b.fibers[i].state != State::ready) continue;
      b.current = &b.fibers[i];
      dflash_switch(&b.scheduler, b.fibers[i].stack_pointer);
      ran = true;
      if (b.error) std::rethrow_exception(b.error);
    }
    for (unsigned first = 0; first < n; first += warp_size)
      ran |= release_warp(&b.fibers[first], std::min(warp_size, n - first));
    if (ran) continue;
    unsigned done = 0, waiting = 0;
    for (const Fiber& fiber : b.fibers) {
      done += fiber.state == State::done;
      waiting += fiber.state == State::at_block;
    }
    if (done == n) return;
    if (waiting + done != n)
      throw std::runtime_error("emulation: deadlock, " + std::to_string(waiting) + " of " + std::to_string(n) +
                               " threads at __syncthreads, " + std::to_string(done) +
                               " done, the others in their warps");
    for (Fiber& fiber : b.fibers)
      if (fiber.state == State::at_block) fiber.state = State::ready;
  }
}

// 0 to n - 1 in the order that the environment asks for.
inline std::vector<unsigned> in_order(size_t n) {
  const char* named = std::getenv("DFLASH_EMULATION_ORDER");
  const std::string name = named ? named : "forward";
  std::vector<unsigned> order(n);
  for (size_t i = 0; i < n; ++i) order[i] = unsigned(name == "reverse" ? n - 1 - i : i);
  if (name == "shuffled") std::shuffle(order.begin(), order.end(), std::minstd_rand(unsigned(n)));
  return order;
}

inline void launch(dim3 grid, dim3 dim, size_t shared, const std::function<void()>& body) {
  const size_t blocks = size_t(grid.x) * grid.y * grid.z, threads = size_t(dim.x) * dim.y * dim.z;
  if (!blocks || !threads || threads > 1024 || shared > shared_limit || grid.y > 65535 || grid.z > 65535)
    throw std::runtime_error("emulation: invalid launch configuration");
  const std::vector<unsigned> block_order = in_order(blocks), thread_order = in_order(threads);
  std::atomic<size_t> next{0};
  std::atomic<bool> stop{false};
  std::exception_ptr error;
  const auto work = [&] {
    static thread_local Block b;
    block() = &b;
    b.body = &body;
    b.dim = dim;
    b.grid = grid;
    try {
      for (size_t i; !stop && (i = next++) < blocks;) {
        const unsigned at = block_order[i];
        b.index = {at % grid.x, at / grid.x % grid.y, at / (grid.x * grid.y)};
        b.shared = std::vector<char>(shared, char(0xff));  // of its own each time: what is past its end may be checked
        run_block(b, thread_order);
      }
    } catch (...) {
      if (!stop.exchange(true)) error = std::current_exception();
    }
    block() = nullptr;
  };
  std::vector<std::thread> helpers;
  for (size_t i = 1; i < std::min<size_t>(blocks, std::thread::hardware_concurrency()); ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  if (error) std::rethrow_exception(error);
}

template <typename T>
T exchange(unsigned mask, T value, unsigned from) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  std::memcpy(&warp().slots[lane()], &value, sizeof(T));
  warp_barrier(mask);
  T result;
  std::memcpy(&result, &warp().slots[from], sizeof(T));
  warp_barrier(mask);
  return result;
}

template <typename T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(block()->shared.data());  // operator new aligns to 16
}

}  // namespace emulation

#define threadIdx (emulation::block()->current->index)
#define blockIdx (emulation::block()->index)
#define blockDim (emulation::block()->dim)
#define gridDim (emulation::block()->grid)

inline void __syncthreads() { emulation::wait_as(emulation::State::at_block); }
inline void __syncwarp(unsigned mask = ~0u) { emulation::warp_barrier(mask); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int from) {
  return emulation::exchange(mask, value, unsigned(from) & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int other) {
  return emulation::exchange(mask, value, emulation::lane() ^ unsigned(other));
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  const unsigned lane = emulation::lane();
  return emulation::exchange(mask, value, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  emulation::warp().slots[emulation::lane()] = predicate != 0;
  emulation::warp_barrier(mask);
  unsigned votes = 0;
  for (unsigned i = 0; i < emulation::warp_size; ++i)
    if (mask >> i & 1) votes |= unsigned(emulation::warp().slots[i]) << i;
  emulation::warp_barrier(mask);
  return votes;
}
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int atomicMin(int* p, int value) {
  int old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  while (old > value && !__atomic_compare_exchange_n(p, &old, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
  return old;
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

using cudaError_t = int;
constexpr cudaError_t cudaSuccess = 0;
enum cudaDeviceAttr { cudaDevAttrComputeCapabilityMajor };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 9;
  return cudaSuccess;
}

#define LAUNCH(kernel, grid, block, shared, stream, ...) \
  ((void)(stream), emulation::launch(grid, block, shared, [=] { kernel(__VA_ARGS__); }))
#define DYNAMIC_SHARED(T, name) T* const name = emulation::dynamic_shared<T>()

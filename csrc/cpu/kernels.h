// SPDX-License-Identifier: Apache-2.0
// The vectorised loops of the CPU operations, one table an instruction set, chosen when the extension is first used.
#pragma once
#include "../arguments.h"

namespace dflash {

// A row of logits is read in chunks that stay in the first-level cache.
constexpr int64_t chunk_size = 2048;

struct Chunk {
  float max;  // largest logit, -inf where none is finite
  float sum;  // of exp((logit - max) / T); not set for a greedy request
};

// An entry of the row whose weight is not its exponential: the residual of a candidate.
struct Correction {
  int64_t id;
  float weight;
};

struct Row {
  const void* logits;
  int64_t vocabulary;
  Type type;
  float inverse_temperature;  // 0: greedy
  float max;
};

struct Kernels {
  const char* name;
  void (*convolution)(const Convolution&, int64_t begin, int64_t end);  // rows
  void (*path)(const Path&, int64_t begin, int64_t end, float* mixed);  // requests; mixed [rank]
  void (*context)(const Context&, const Destination&, const float* k_norm, int64_t begin, int64_t end);  // rows
  void (*row_chunks)(const Row&, int64_t begin, int64_t end, Chunk*);  // chunks of a row
  // Unnormalised probabilities of a chunk, exp((logit - row max) / T), with corrections; returns their sum.
  float (*chunk_weights)(const Row&, int64_t chunk, const Correction*, int64_t corrections, float* weights);
  float (*logit)(const Row&, int64_t id);
  int64_t (*first_max)(const Row&, int64_t chunk);  // id of the first entry equal to the row's max
  float (*exponential)(float);
  void (*to_floats)(const void*, Type, int64_t n, float*);
};

const Kernels& kernels();
// Chooses an instruction set by name; null: the best that this processor has. Returns null where it has not.
const char* use_kernels(const char* name);

}  // namespace dflash

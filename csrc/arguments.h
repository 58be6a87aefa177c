// SPDX-License-Identifier: Apache-2.0
// What an operation gets after its arguments were checked: raw pointers, sizes and strides (in elements), no torch.
// The same for the CPU, CUDA and the emulation of CUDA.
#pragma once
#include <cstdint>

namespace dflash {

enum class Type : int32_t { f32, bf16, f16, e4m3, i8 };

struct Convolution {
  const void *x, *dynamic, *base;  // x [rows, width], dynamic [rows, taps, groups], base [taps, width]
  void* out;                       // [rows, width], contiguous
  int64_t rows, width, taps, groups, block;
  int64_t x_row, dynamic_row, dynamic_tap, base_tap;
  Type type;
};

struct Path {
  const int64_t* candidate_ids;                     // [batch, slots, candidates]
  const float* candidate_logits;                    // [batch, slots, candidates]
  const void *projected, *predecessor, *successor;  // [batch, slots, rank], [vocabulary, rank] twice
  const int64_t *anchors, *seeds, *anchor_positions;
  const float* temperature;
  int64_t* tokens;  // [batch, slots]
  float* scores;    // [batch, slots, candidates]
  int64_t batch, slots, candidates, rank, vocabulary;
  int64_t projected_batch, projected_slot, predecessor_row, successor_row;
  Type type;
};

struct Rejection {
  const void* logits;  // [rows, vocabulary]
  const int64_t *draft_rows, *bonus_rows, *draft_ids;
  const int32_t* cu_drafts;
  const int64_t* candidate_ids;   // [drafts, candidates]
  const float* candidate_scores;  // [drafts, candidates]
  const float* temperature;
  const int64_t *seeds, *anchor_positions;
  int32_t* output;    // [batch, max_drafts + 1]
  int32_t* accepted;  // [batch]
  int64_t rows, vocabulary, logits_row, drafts, batch, candidates, max_drafts;
  Type type;
  void* workspace;  // CUDA: cuda::rejection_workspace bytes
};

constexpr int max_layers = 64;

struct Context {
  const void* kv;  // [rows, layers, 2, heads, size], strides below, last 1
  const void* k_norm;
  const int64_t* positions;
  const void* cos_sin;  // [cos_sin_rows, rotated]
  int64_t rows, layers, heads, size, rotated, cos_sin_rows;
  int64_t kv_row, kv_layer, kv_side, kv_head, k_norm_layer, cos_sin_row;
  float eps, value_scale;
  bool is_neox, scales_values;
  Type type, k_norm_type, cos_sin_type;
};

// Where K and V of a (layer, row) go: rows of one tensor, or slots of a layer's paged cache.
struct Destination {
  void *keys[max_layers], *values[max_layers];
  const int64_t* slots;  // null: row t goes to "slot" t and every row is written
  int64_t slots_layer;   // 0 where all layers share the mapping
  int64_t block_size, num_slots;
  int64_t key_block, key_offset, key_head, value_block, value_offset, value_head;
  int64_t key_element, value_element;  // 1 but for caches on a CPU
  float k_scale, v_scale;
  Type type;
};

// Features to K and V of all layers in one launch; `kv` of the context is what the projection would give.
struct Projection {
  Context context;
  const void* features;       // [rows, width] of the context's type
  const void* weight;         // [layers * 2 * heads * size, width], hidden_norm's weight folded in
  const float* weight_scale;  // [layers * 2 * heads * size], null where the weight is not quantised
  const void* bias;           // [layers * 2 * heads * size] of the context's type, or null
  int64_t width, feature_row, weight_row;
  Type weight_type;
};

}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
#include "../device.h"
#include "../operations.h"

namespace dflash {

namespace {

Context checked(const char* op, const Tensor& kv, const Tensor& k_norm, double eps, const Tensor& positions,
                const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale) {
  const Argument input{op, "kv", kv}, norm{op, "k_norm", k_norm}, angles{op, "cos_sin", cos_sin};
  const Type type = input.dims(5, "[T, L, 2, nkv, hd]").dense_rows().floating();
  const int64_t rows = kv.size(0), layers = kv.size(1), heads = kv.size(3), size = kv.size(4);
  input.shape({rows, layers, 2, heads, size}, "[T, L, 2, nkv, hd]");
  if (layers > max_layers) fail(op, "kv has ", layers, " layers, at most ", max_layers, " go into one call");
  if (size < 1 || size > 1024) fail(op, "kv has heads of ", size, ", from 1 to 1024 are supported");
  norm.shape({layers, size}, "[L, hd of kv]").dense_rows().beside(input);
  Argument{op, "positions", positions}.shape({rows}, "[T of kv]").type(ScalarType::Long).contiguous().beside(input);
  angles.dims(2, "[P, rot]").dense_rows().beside(input);
  const int64_t rotated = cos_sin.size(1);
  if (rotated % 2 || rotated > size) fail(op, "cos_sin has rot = ", rotated, ", must be even and at most hd = ", size);
  return {kv.const_data_ptr(), k_norm.const_data_ptr(), positions.const_data_ptr<int64_t>(), cos_sin.const_data_ptr(),
          rows, layers, heads, size, rotated, cos_sin.size(0),
          kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3), k_norm.stride(0), cos_sin.stride(0),
          float(eps), float(value_scale.value_or(1.0)), is_neox, value_scale.has_value(),
          type, norm.floating(), angles.floating()};
}

// Strides of caches [num_blocks, block_size, nkv, hd], the same in every layer.
void check_caches(const char* op, const char* name, const std::vector<Tensor>& caches, const Context& a,
                  int64_t block_size, ScalarType type, const Argument& input, void** pointers) {
  if (int64_t(caches.size()) != a.layers) fail(op, name, " has ", caches.size(), " tensors, kv has ", a.layers, " layers");
  for (int64_t layer = 0; layer < a.layers; ++layer) {
    const Tensor &cache = caches[layer], &first = caches[0];
    const Argument argument{op, name, cache};
    argument.dims(4, "of tensors [num_blocks, block_size, nkv, hd]");
    argument.shape({first.size(0), block_size, a.heads, a.size}, "of tensors [num_blocks, block_size, nkv, hd]");
    argument.dense_rows().type(type, " like the first key cache").beside(input);
    for (int64_t i = 0; i < 3; ++i)
      if (cache.stride(i) != first.stride(i))
        fail(op, name, " must have the same strides in every layer; layer ", layer, " has ", cache.stride(i), ", layer 0 has ",
             first.stride(i), " in dimension ", i, "; call once for each layout with its layers of kv");
    pointers[layer] = cache.mutable_data_ptr();
  }
}

}  // namespace

std::tuple<Tensor, Tensor> context_kv_rows(const Tensor& kv, const Tensor& k_norm, double eps, const Tensor& positions,
                                           const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale) {
  constexpr const char* op = "context_kv_rows";
  const Context a = checked(op, kv, k_norm, eps, positions, cos_sin, is_neox, value_scale);
  Tensor keys = empty<4>({a.layers, a.rows, a.heads, a.size}, type_of(kv), kv);
  Tensor values = empty<4>({a.layers, a.rows, a.heads, a.size}, type_of(kv), kv);
  if (keys.numel() == 0) return {keys, values};
  const int64_t row = a.heads * a.size, layer_bytes = a.rows * row * (a.type == Type::f32 ? 4 : 2);
  Destination d{};
  for (int64_t layer = 0; layer < a.layers; ++layer) {
    d.keys[layer] = static_cast<char*>(keys.mutable_data_ptr()) + layer * layer_bytes;
    d.values[layer] = static_cast<char*>(values.mutable_data_ptr()) + layer * layer_bytes;
  }
  d.block_size = 1;
  d.num_slots = a.rows;
  d.key_block = d.value_block = row;
  d.key_head = d.value_head = a.size;
  d.k_scale = d.v_scale = 1.0f;
  d.type = a.type;
  DFLASH_RUN(op, kv, write_context_kv, a, d);
  return {keys, values};
}

void inject_context_kv(const Tensor& kv, const Tensor& k_norm, double eps, const Tensor& positions,
                       const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale,
                       std::vector<Tensor> key_caches, std::vector<Tensor> value_caches, const Tensor& slot_mapping,
                       int64_t block_size, double k_scale, double v_scale) {
  constexpr const char* op = "inject_context_kv";
  const Context a = checked(op, kv, k_norm, eps, positions, cos_sin, is_neox, value_scale);
  const Argument input{op, "kv", kv}, slots{op, "slot_mapping", slot_mapping};
  if (slot_mapping.dim() == 2)
    slots.shape({a.layers, a.rows}, "[T] or [L, T] of kv");
  else
    slots.shape({a.rows}, "[T] or [L, T] of kv");
  slots.type(ScalarType::Long).dense_rows().beside(input);
  if (a.layers == 0) return;
  if (block_size < 1) fail(op, "block_size must be at least 1, is ", block_size);
  if (key_caches.empty()) fail(op, "key_caches has 0 tensors, kv has ", a.layers, " layers");
  Destination d{};
  const ScalarType type = key_caches[0].scalar_type();
  d.type = type == ScalarType::Float8_e4m3fn ? Type::e4m3 : Argument{op, "key_caches (or float8_e4m3fn)", key_caches[0]}.floating();
  check_caches(op, "key_caches", key_caches, a, block_size, type, input, d.keys);
  check_caches(op, "value_caches", value_caches, a, block_size, type, input, d.values);
  const Tensor &key = key_caches[0], &value = value_caches[0];
  if (key.size(0) != value.size(0)) fail(op, "value_caches have ", value.size(0), " blocks, key_caches have ", key.size(0));
  if (d.type == Type::e4m3 && !(k_scale > 0.0 && v_scale > 0.0))
    fail(op, "k_scale and v_scale must be positive for fp8 caches, are ", k_scale, " and ", v_scale);
  if (a.rows == 0 || a.heads == 0 || key.size(0) == 0) return;
  d.slots = slot_mapping.const_data_ptr<int64_t>();
  d.slots_layer = slot_mapping.dim() == 2 ? slot_mapping.stride(0) : 0;
  d.block_size = block_size;
  d.num_slots = key.size(0) * block_size;
  d.key_block = key.stride(0), d.key_offset = key.stride(1), d.key_head = key.stride(2);
  d.value_block = value.stride(0), d.value_offset = value.stride(1), d.value_head = value.stride(2);
  d.k_scale = float(k_scale), d.v_scale = float(v_scale);
  DFLASH_RUN(op, kv, write_context_kv, a, d);
}

}  // namespace dflash

// SPDX-License-Identifier: Apache-2.0
#include "../device.h"
#include "../operations.h"

namespace dflash {

namespace {

// What the three operations share; the caller adds where kv (or the features) is.
Context context(const Argument& input, int64_t rows, int64_t layers, int64_t heads, int64_t size, const Tensor& k_norm,
                double eps, const Tensor& positions, const Tensor& cos_sin, bool is_neox,
                std::optional<double> value_scale) {
  const char* op = input.op;
  const Argument norm{op, "k_norm", k_norm}, angles{op, "cos_sin", cos_sin};
  if (layers > max_layers) fail(op, "there are ", layers, " layers, at most ", max_layers, " go into one call");
  if (size < 2 || size > 512 || size % 2)
    fail(op, "heads have size ", size, "; even sizes from 2 to 512 are supported");
  norm.shape({layers, size}, "[L, hd]").dense_rows().beside(input);
  Argument{op, "positions", positions}.shape({rows}, "[T]").type(ScalarType::Long).contiguous().beside(input);
  angles.dims(2, "[P, rot]").dense_rows().beside(input);
  const int64_t rotated = cos_sin.size(1);
  if (rotated % 2 || rotated > size) fail(op, "cos_sin has rot = ", rotated, ", must be even and at most hd = ", size);
  Context a{};
  a.k_norm = k_norm.const_data_ptr();
  a.positions = positions.const_data_ptr<int64_t>();
  a.cos_sin = cos_sin.const_data_ptr();
  a.rows = rows, a.layers = layers, a.heads = heads, a.size = size;
  a.rotated = rotated, a.cos_sin_rows = cos_sin.size(0);
  a.k_norm_layer = k_norm.stride(0), a.cos_sin_row = cos_sin.stride(0);
  a.eps = float(eps), a.value_scale = float(value_scale.value_or(1.0));
  a.is_neox = is_neox, a.scales_values = value_scale.has_value();
  a.type = input.floating(), a.k_norm_type = norm.floating(), a.cos_sin_type = angles.floating();
  return a;
}

Context context_of_kv(const Argument& input, const Tensor& k_norm, double eps, const Tensor& positions,
                      const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale) {
  const Tensor& kv = input.dims(5, "[T, L, 2, nkv, hd]").dense_rows().t;
  input.shape({kv.size(0), kv.size(1), 2, kv.size(3), kv.size(4)}, "[T, L, 2, nkv, hd]");
  Context a = context(input, kv.size(0), kv.size(1), kv.size(3), kv.size(4), k_norm, eps, positions, cos_sin, is_neox,
                      value_scale);
  a.kv = kv.const_data_ptr();
  a.kv_row = kv.stride(0), a.kv_layer = kv.stride(1), a.kv_side = kv.stride(2), a.kv_head = kv.stride(3);
  return a;
}

// One side's caches [num_blocks, block_size, nkv, hd], with the same strides in every layer.
void check_caches(const Argument& input, const char* name, const std::vector<Tensor>& caches, const Context& a,
                  int64_t block_size, ScalarType type, void** pointers) {
  const char* op = input.op;
  if (int64_t(caches.size()) != a.layers) fail(op, name, " has ", caches.size(), " tensors for ", a.layers, " layers");
  for (int64_t layer = 0; layer < a.layers; ++layer) {
    const Tensor &cache = caches[layer], &first = caches[0];
    pointers[layer] = cache.mutable_data_ptr();
    // The usual case in few calls: a decode step's rows take no longer than asking each cache for everything.
    if (layer > 0 && cache.sizes() == first.sizes() && cache.strides() == first.strides() &&
        cache.scalar_type() == type && cache.get_device_index() == first.get_device_index())
      continue;
    const Argument argument{op, name, cache};
    argument.dims(4, "of tensors [num_blocks, block_size, nkv, hd]");
    argument.shape({first.size(0), block_size, a.heads, a.size}, "of tensors [num_blocks, block_size, nkv, hd]");
    argument.type(type, " like the first key cache").beside(input);
    if (uses_cuda(cache)) argument.dense_rows();
    for (int64_t i = 0; i < 4; ++i)
      if (cache.stride(i) != first.stride(i))
        fail(op, name, " must have the same strides in every layer; layer ", layer, " has ", cache.stride(i),
             " in dimension ", i, ", layer 0 has ", first.stride(i), "; call once for each layout with its layers");
  }
}

// The paged caches as a destination; num_slots 0 where there is nothing to write.
Destination pages(const Argument& input, const Context& a, const std::vector<Tensor>& key_caches,
                  const std::vector<Tensor>& value_caches, const Tensor& slot_mapping, int64_t block_size,
                  double k_scale, double v_scale) {
  const char* op = input.op;
  const Argument slots{op, "slot_mapping", slot_mapping};
  if (slot_mapping.dim() == 2)
    slots.shape({a.layers, a.rows}, "[T] or [L, T]");
  else
    slots.shape({a.rows}, "[T] or [L, T]");
  slots.type(ScalarType::Long).dense_rows().beside(input);
  Destination d{};
  if (a.layers == 0) return d;
  if (block_size < 1) fail(op, "block_size must be at least 1, is ", block_size);
  if (key_caches.empty()) fail(op, "key_caches has 0 tensors for ", a.layers, " layers");
  const ScalarType type = key_caches[0].scalar_type();
  d.type = type == ScalarType::Float8_e4m3fn
               ? Type::e4m3
               : Argument{op, "key_caches, unless float8_e4m3fn,", key_caches[0]}.floating();
  check_caches(input, "key_caches", key_caches, a, block_size, type, d.keys);
  check_caches(input, "value_caches", value_caches, a, block_size, type, d.values);
  const Tensor &key = key_caches[0], &value = value_caches[0];
  if (key.size(0) != value.size(0))
    fail(op, "value_caches have ", value.size(0), " blocks, key_caches have ", key.size(0));
  if (d.type == Type::e4m3 && !(k_scale > 0.0 && v_scale > 0.0))
    fail(op, "k_scale and v_scale must be positive for fp8 caches, are ", k_scale, " and ", v_scale);
  d.slots = slot_mapping.const_data_ptr<int64_t>();
  d.slots_layer = slot_mapping.dim() == 2 ? slot_mapping.stride(0) : 0;
  d.block_size = block_size;
  d.num_slots = a.rows && a.heads ? key.size(0) * block_size : 0;
  d.key_block = key.stride(0), d.key_offset = key.stride(1), d.key_head = key.stride(2);
  d.key_element = key.stride(3), d.value_element = value.stride(3);
  d.value_block = value.stride(0), d.value_offset = value.stride(1), d.value_head = value.stride(2);
  d.k_scale = float(k_scale), d.v_scale = float(v_scale);
  return d;
}

}  // namespace

std::tuple<Tensor, Tensor> context_kv_rows(const Tensor& kv, const Tensor& k_norm, double eps, const Tensor& positions,
                                           const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale) {
  const Argument input{"context_kv_rows", "kv", kv};
  const Context a = context_of_kv(input, k_norm, eps, positions, cos_sin, is_neox, value_scale);
  Tensor keys = empty<4>({a.layers, a.rows, a.heads, a.size}, type_of(kv), kv);
  Tensor values = empty<4>({a.layers, a.rows, a.heads, a.size}, type_of(kv), kv);
  if (a.layers * a.rows * a.heads == 0) return {keys, values};
  const int64_t row = a.heads * a.size, layer_bytes = a.rows * row * (a.type == Type::f32 ? 4 : 2);
  char *key = static_cast<char*>(keys.mutable_data_ptr()), *value = static_cast<char*>(values.mutable_data_ptr());
  Destination d{};
  for (int64_t layer = 0; layer < a.layers; ++layer) {
    d.keys[layer] = key + layer * layer_bytes;
    d.values[layer] = value + layer * layer_bytes;
  }
  d.block_size = 1;
  d.num_slots = a.rows;
  d.key_block = d.value_block = row;
  d.key_head = d.value_head = a.size;
  d.key_element = d.value_element = 1;
  d.k_scale = d.v_scale = 1.0f;
  d.type = a.type;
  DFLASH_RUN(input.op, kv, write_context_kv, a, d);
  return {keys, values};
}

void inject_context_kv(const Tensor& kv, const Tensor& k_norm, double eps, const Tensor& positions,
                       const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale,
                       std::vector<Tensor> key_caches, std::vector<Tensor> value_caches, const Tensor& slot_mapping,
                       int64_t block_size, double k_scale, double v_scale) {
  const Argument input{"inject_context_kv", "kv", kv};
  const Context a = context_of_kv(input, k_norm, eps, positions, cos_sin, is_neox, value_scale);
  const Destination d = pages(input, a, key_caches, value_caches, slot_mapping, block_size, k_scale, v_scale);
  if (d.num_slots > 0) DFLASH_RUN(input.op, kv, write_context_kv, a, d);
}

#ifdef DFLASH_CUDA
void project_context_kv(const Tensor& features, const Tensor& weight, std::optional<Tensor> weight_scale,
                        std::optional<Tensor> bias, const Tensor& k_norm, double eps, const Tensor& positions,
                        const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale,
                        std::vector<Tensor> key_caches, std::vector<Tensor> value_caches, const Tensor& slot_mapping,
                        int64_t block_size, double k_scale, double v_scale) {
  const Argument input{"project_context_kv", "features", features}, columns{input.op, "weight", weight};
  const char* op = input.op;
  const int64_t rows = input.dims(2, "[T, H]").dense_rows().t.size(0), width = features.size(1);
  const int64_t layers = Argument{op, "k_norm", k_norm}.dims(2, "[L, hd]").t.size(0), size = k_norm.size(1);
  columns.shape({columns.dims(2, "[L * 2 * nkv * hd, H]").t.size(0), width}, "[L * 2 * nkv * hd, H of features]");
  columns.dense_rows().beside(input);
  if (size != 64 && size != 128)
    fail(op, "heads have size ", size, ", one launch has 64 or 128; use inject_context_kv");
  if (layers < 1 || weight.size(0) % (2 * layers * size))
    fail(op, "weight has ", weight.size(0), " rows, which are no whole number of K and V heads of ", layers, " layers");
  if (rows > 16) fail(op, "features have ", rows, " rows, one launch has at most 16; use inject_context_kv");
  const int64_t heads = weight.size(0) / (2 * layers * size);
  Projection p{};
  p.context = context(input, rows, layers, heads, size, k_norm, eps, positions, cos_sin, is_neox, value_scale);
  if (p.context.type == Type::f32) fail(op, "features must be bfloat16 or float16, are float32; use inject_context_kv");
  const ScalarType type = weight.scalar_type();
  p.weight_type = type == ScalarType::Float8_e4m3fn ? Type::e4m3 : type == ScalarType::Char ? Type::i8 : p.context.type;
  if (p.weight_type == p.context.type)
    columns.type(features.scalar_type(), " like features (or float8_e4m3fn, or int8)");
  if ((p.weight_type != p.context.type) != weight_scale.has_value())
    fail(op, "weight_scale must be given for a quantised weight, and only for one");
  if (weight_scale)
    Argument{op, "weight_scale", *weight_scale}
        .shape({weight.size(0)}, "[rows of weight]")
        .type(ScalarType::Float)
        .contiguous()
        .beside(input);
  if (bias)
    Argument{op, "bias", *bias}
        .shape({weight.size(0)}, "[rows of weight]")
        .type(features.scalar_type(), " like features")
        .contiguous()
        .beside(input);
  const auto misaligned = [](const Tensor& t, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 || t.stride(0) * bytes % 16;
  };
  if (width % 32 || misaligned(features, 2) || misaligned(weight, p.weight_type == p.context.type ? 2 : 1))
    fail(op, "features and weight need rows of a multiple of 32 numbers, 16 bytes aligned, width is ", width);
  const Destination d = pages(input, p.context, key_caches, value_caches, slot_mapping, block_size, k_scale, v_scale);
  if (d.type != Type::e4m3 && d.type != p.context.type) fail(op, "caches must be of features' type or float8_e4m3fn");
  if (d.num_slots == 0) return;
  p.features = features.const_data_ptr();
  p.weight = weight.const_data_ptr();
  p.weight_scale = weight_scale ? weight_scale->const_data_ptr<float>() : nullptr;
  p.bias = bias ? bias->const_data_ptr() : nullptr;
  p.width = width, p.feature_row = features.stride(0), p.weight_row = weight.stride(0);
  DFLASH_ON_CUDA(op, features, project_context_kv, p, d);
}
#endif

}  // namespace dflash

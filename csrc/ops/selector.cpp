// SPDX-License-Identifier: Apache-2.0
#include "../device.h"
#include "../operations.h"

namespace dflash {

std::tuple<Tensor, Tensor> select_path(const Tensor& candidate_ids, const Tensor& candidate_logits,
                                       const Tensor& projected, const Tensor& predecessor, const Tensor& successor,
                                       const Tensor& anchors, const Tensor& temperature, const Tensor& seeds,
                                       const Tensor& anchor_positions) {
  constexpr const char* op = "select_path";
  constexpr ScalarType int64 = ScalarType::Long, float32 = ScalarType::Float;
  const Argument ids{op, "candidate_ids", candidate_ids};
  ids.dims(3, "[B, K, C]").type(int64).contiguous();
  const int64_t batch = candidate_ids.size(0), slots = candidate_ids.size(1), candidates = candidate_ids.size(2);
  Argument{op, "candidate_logits", candidate_logits}
      .shape({batch, slots, candidates}, "[B, K, C] of candidate_ids")
      .type(float32)
      .contiguous()
      .beside(ids);
  const Argument through{op, "projected", projected};
  const Type type = through.dims(3, "[B, K, R]").floating();
  const int64_t rank = projected.size(2);
  through.shape({batch, slots, rank}, "[B, K of candidate_ids, R]").dense_rows().beside(ids);
  const Argument from{op, "predecessor", predecessor}, to{op, "successor", successor};
  const int64_t vocabulary = from.dims(2, "[V, R]").t.size(0);
  from.shape({vocabulary, rank}, "[V, R of projected]").type(projected.scalar_type(), " like projected");
  to.shape({vocabulary, rank}, "[V of predecessor, R of projected]").type(projected.scalar_type(), " like projected");
  from.dense_rows().beside(ids);
  to.dense_rows().beside(ids);
  const auto of_request = [&](const char* name, const Tensor& t, ScalarType wanted) {
    Argument{op, name, t}.shape({batch}, "[B of candidate_ids]").type(wanted).contiguous().beside(ids);
  };
  of_request("anchors", anchors, int64);
  of_request("temperature", temperature, float32);
  of_request("seeds", seeds, int64);
  of_request("anchor_positions", anchor_positions, int64);
  Tensor tokens = empty<2>({batch, slots}, aoti_torch_dtype_int64(), candidate_ids);
  Tensor scores = empty<3>({batch, slots, candidates}, aoti_torch_dtype_float32(), candidate_ids);
  if (batch == 0 || slots == 0) return {tokens, scores};
  const Path a{candidate_ids.const_data_ptr<int64_t>(),
               candidate_logits.const_data_ptr<float>(),
               projected.const_data_ptr(),
               predecessor.const_data_ptr(),
               successor.const_data_ptr(),
               anchors.const_data_ptr<int64_t>(),
               seeds.const_data_ptr<int64_t>(),
               anchor_positions.const_data_ptr<int64_t>(),
               temperature.const_data_ptr<float>(),
               tokens.mutable_data_ptr<int64_t>(),
               scores.mutable_data_ptr<float>(),
               batch,
               slots,
               candidates,
               rank,
               vocabulary,
               projected.stride(0),
               projected.stride(1),
               predecessor.stride(0),
               successor.stride(0),
               type};
  DFLASH_RUN(op, candidate_ids, select_path, a);
  return {tokens, scores};
}

}  // namespace dflash

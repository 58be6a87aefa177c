// SPDX-License-Identifier: Apache-2.0
#include "../device.h"
#include "../operations.h"

namespace dflash {

std::tuple<Tensor, Tensor> reject_sparse(const Tensor& logits, const Tensor& draft_rows, const Tensor& bonus_rows,
                                         const Tensor& draft_ids, const Tensor& cu_drafts, const Tensor& candidate_ids,
                                         const Tensor& candidate_scores, const Tensor& temperature, const Tensor& seeds,
                                         const Tensor& anchor_positions, int64_t max_drafts) {
  constexpr const char* op = "reject_sparse";
  constexpr ScalarType int64 = ScalarType::Long, int32 = ScalarType::Int, float32 = ScalarType::Float;
  const Argument p{op, "logits", logits};
  const Type type = p.dims(2, "[M, V]").dense_rows().floating();
  const Argument ids{op, "draft_ids", draft_ids}, ends{op, "cu_drafts", cu_drafts};
  const int64_t drafts = ids.dims(1, "[N]").type(int64).contiguous().beside(p).t.size(0);
  ends.dims(1, "[B + 1]").type(int32).contiguous().beside(p);
  const int64_t batch = cu_drafts.size(0) - 1;
  if (logits.size(1) < 1) fail(op, "logits have no columns, are ", shape_of(logits));
  if (batch < 0) fail(op, "cu_drafts must have B + 1 entries, has none");
  if (max_drafts < 0) fail(op, "max_drafts must be at least 0, is ", max_drafts);
  const auto of_draft = [&](const char* name, const Tensor& t, ScalarType wanted) {
    Argument{op, name, t}.shape({drafts}, "[N of draft_ids]").type(wanted).contiguous().beside(p);
  };
  const auto of_request = [&](const char* name, const Tensor& t, ScalarType wanted) {
    Argument{op, name, t}.shape({batch}, "[B, one less than cu_drafts]").type(wanted).contiguous().beside(p);
  };
  of_draft("draft_rows", draft_rows, int64);
  const Argument q{op, "candidate_ids", candidate_ids};
  const int64_t candidates = q.dims(2, "[N, C]").t.size(1);
  q.shape({drafts, candidates}, "[N of draft_ids, C]").type(int64).contiguous().beside(p);
  Argument{op, "candidate_scores", candidate_scores}
      .shape({drafts, candidates}, "[N, C] of candidate_ids")
      .type(float32)
      .contiguous()
      .beside(p);
  of_request("bonus_rows", bonus_rows, int64);
  of_request("temperature", temperature, float32);
  of_request("seeds", seeds, int64);
  of_request("anchor_positions", anchor_positions, int64);
  Tensor output = empty<2>({batch, max_drafts + 1}, aoti_torch_dtype_int32(), logits);
  Tensor accepted = empty<1>({batch}, aoti_torch_dtype_int32(), logits);
  if (batch == 0) return {output, accepted};
  Rejection a{logits.const_data_ptr(),
              draft_rows.const_data_ptr<int64_t>(),
              bonus_rows.const_data_ptr<int64_t>(),
              draft_ids.const_data_ptr<int64_t>(),
              cu_drafts.const_data_ptr<int32_t>(),
              candidate_ids.const_data_ptr<int64_t>(),
              candidate_scores.const_data_ptr<float>(),
              temperature.const_data_ptr<float>(),
              seeds.const_data_ptr<int64_t>(),
              anchor_positions.const_data_ptr<int64_t>(),
              output.mutable_data_ptr<int32_t>(),
              accepted.mutable_data_ptr<int32_t>(),
              logits.size(0),
              logits.size(1),
              logits.stride(0),
              drafts,
              batch,
              candidates,
              max_drafts,
              type,
              nullptr};
#ifdef DFLASH_CUDA
  Tensor workspace;
  if (uses_cuda(logits)) {
    workspace = empty<1>({cuda::rejection_workspace(a)}, aoti_torch_dtype_uint8(), logits);
    a.workspace = workspace.mutable_data_ptr();
  }
#endif
  DFLASH_RUN(op, logits, reject_sparse, a);
  return {output, accepted};
}

}  // namespace dflash

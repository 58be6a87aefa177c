// SPDX-License-Identifier: Apache-2.0
// The operations as torch calls them: arguments checked, results allocated, the device's code called.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

namespace dflash {

using torch::stable::Tensor;

Tensor grouped_convolution(const Tensor& x, const Tensor& dynamic, const Tensor& base, int64_t block);

std::tuple<Tensor, Tensor> select_path(const Tensor& candidate_ids, const Tensor& candidate_logits,
                                       const Tensor& projected, const Tensor& predecessor, const Tensor& successor,
                                       const Tensor& anchors, const Tensor& temperature, const Tensor& seeds,
                                       const Tensor& anchor_positions);

std::tuple<Tensor, Tensor> reject_sparse(const Tensor& logits, const Tensor& draft_rows, const Tensor& bonus_rows,
                                         const Tensor& draft_ids, const Tensor& cu_drafts, const Tensor& candidate_ids,
                                         const Tensor& candidate_scores, const Tensor& temperature, const Tensor& seeds,
                                         const Tensor& anchor_positions, int64_t max_drafts);

std::tuple<Tensor, Tensor> context_kv_rows(const Tensor& kv, const Tensor& k_norm, double eps, const Tensor& positions,
                                           const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale);

void inject_context_kv(const Tensor& kv, const Tensor& k_norm, double eps, const Tensor& positions,
                       const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale,
                       std::vector<Tensor> key_caches, std::vector<Tensor> value_caches, const Tensor& slot_mapping,
                       int64_t block_size, double k_scale, double v_scale);

void project_context_kv(const Tensor& features, const Tensor& weight, std::optional<Tensor> weight_scale,
                        std::optional<Tensor> bias, const Tensor& k_norm, double eps, const Tensor& positions,
                        const Tensor& cos_sin, bool is_neox, std::optional<double> value_scale,
                        std::vector<Tensor> key_caches, std::vector<Tensor> value_caches, const Tensor& slot_mapping,
                        int64_t block_size, double k_scale, double v_scale);

bool has_cuda();
std::string cpu_isa(std::optional<std::string> use);

}  // namespace dflash

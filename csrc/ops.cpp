// SPDX-License-Identifier: Apache-2.0
// torch.ops.vllm_dflash: schemas and dispatch, on LibTorch's stable ABI (one binary for torch 2.10 and later). Argument
// checks are in the operation's own file; vllm_dflash/ops has the documentation.
#include <Python.h>

#include "operations.h"

#ifndef DFLASH_NAMESPACE
#define DFLASH_NAMESPACE vllm_dflash
#endif

STABLE_TORCH_LIBRARY(DFLASH_NAMESPACE, m) {
  m.def("grouped_convolution(Tensor x, Tensor dynamic, Tensor base, int block) -> Tensor");
  m.def(
      "select_path(Tensor candidate_ids, Tensor candidate_logits, Tensor projected, Tensor predecessor, "
      "Tensor successor, Tensor anchors, Tensor temperature, Tensor seeds, Tensor anchor_positions) -> (Tensor, "
      "Tensor)");
  m.def(
      "reject_sparse(Tensor logits, Tensor draft_rows, Tensor bonus_rows, Tensor draft_ids, Tensor cu_drafts, "
      "Tensor candidate_ids, Tensor candidate_scores, Tensor temperature, Tensor seeds, Tensor anchor_positions, "
      "int max_drafts) -> (Tensor, Tensor)");
  m.def(
      "context_kv_rows(Tensor kv, Tensor k_norm, float eps, Tensor positions, Tensor cos_sin, bool is_neox, "
      "float? value_scale) -> (Tensor, Tensor)");
  m.def(
      "inject_context_kv(Tensor kv, Tensor k_norm, float eps, Tensor positions, Tensor cos_sin, bool is_neox, "
      "float? value_scale, Tensor(a!)[] key_caches, Tensor(b!)[] value_caches, Tensor slot_mapping, int block_size, "
      "float k_scale, float v_scale) -> ()");
  m.def(
      "project_context_kv(Tensor features, Tensor weight, Tensor? weight_scale, Tensor? bias, Tensor k_norm, float "
      "eps, "
      "Tensor positions, Tensor cos_sin, bool is_neox, float? value_scale, Tensor(a!)[] key_caches, "
      "Tensor(b!)[] value_caches, Tensor slot_mapping, int block_size, float k_scale, float v_scale) -> ()");
#ifndef DFLASH_EMULATION
  m.def("has_cuda() -> bool");
  m.def("cpu_isa(str? use) -> str");
#endif
}

#define DFLASH_REGISTER(m)                                                \
  m.impl("grouped_convolution", TORCH_BOX(&dflash::grouped_convolution)); \
  m.impl("select_path", TORCH_BOX(&dflash::select_path));                 \
  m.impl("reject_sparse", TORCH_BOX(&dflash::reject_sparse));             \
  m.impl("context_kv_rows", TORCH_BOX(&dflash::context_kv_rows));         \
  m.impl("inject_context_kv", TORCH_BOX(&dflash::inject_context_kv))

#ifdef DFLASH_EMULATION  // the CUDA code, run on a processor
STABLE_TORCH_LIBRARY_IMPL(DFLASH_NAMESPACE, CPU, m) {
  DFLASH_REGISTER(m);
  m.impl("project_context_kv", TORCH_BOX(&dflash::project_context_kv));
}
#else
STABLE_TORCH_LIBRARY_IMPL(DFLASH_NAMESPACE, CPU, m) { DFLASH_REGISTER(m); }
#ifdef DFLASH_CUDA
STABLE_TORCH_LIBRARY_IMPL(DFLASH_NAMESPACE, CUDA, m) {
  DFLASH_REGISTER(m);
  m.impl("project_context_kv", TORCH_BOX(&dflash::project_context_kv));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(DFLASH_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("has_cuda", TORCH_BOX(&dflash::has_cuda));
  m.impl("cpu_isa", TORCH_BOX(&dflash::cpu_isa));
}
#endif

// Importing the module runs the registrations above.
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C(void) { return PyModule_Create(&module); }

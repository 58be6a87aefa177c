// SPDX-License-Identifier: Apache-2.0
// The operations on a device: launches on `stream`, null or what CUDA reports. No host synchronisation.
#pragma once
#include "../arguments.h"

namespace dflash::cuda {

const char* grouped_convolution(const Convolution&, void* stream);
const char* select_path(const Path&, void* stream);
const char* reject_sparse(const Rejection&, void* stream);
int64_t rejection_workspace(const Rejection&);
const char* write_context_kv(const Context&, const Destination&, void* stream);
const char* project_context_kv(const Projection&, const Destination&, void* stream);

}  // namespace dflash::cuda

// SPDX-License-Identifier: Apache-2.0
// The operations on a processor: the loops of kernels.h over torch's threads.
#pragma once
#include "../arguments.h"

namespace dflash::cpu {

void grouped_convolution(const Convolution&);
void select_path(const Path&);
void reject_sparse(const Rejection&);
void write_context_kv(const Context&, const Destination&);

}  // namespace dflash::cpu

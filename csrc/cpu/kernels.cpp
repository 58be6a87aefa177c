// SPDX-License-Identifier: Apache-2.0
// Compiled once an instruction set, with -DDFLASH_ISA=baseline, avx2 ... and that set's compiler flags.
#include "context_kv.h"
#include "convolution.h"
#include "kernels.h"
#include "rejection.h"
#include "selector.h"

#define STRING(x) #x
#define NAME(x) STRING(x)

namespace dflash {
namespace DFLASH_ISA {

extern const Kernels table;
const Kernels table = {
    NAME(DFLASH_ISA), convolution, path, context, row_chunks, chunk_weights, logit, first_max, exp, to_floats,
};

}  // namespace DFLASH_ISA
}  // namespace dflash

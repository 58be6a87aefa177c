// SPDX-License-Identifier: Apache-2.0
#include "../device.h"
#include "../operations.h"

namespace dflash {

Tensor grouped_convolution(const Tensor& x, const Tensor& dynamic, const Tensor& base, int64_t block) {
  constexpr const char* op = "grouped_convolution";
  const Argument input{op, "x", x};
  const Type type = input.dims(2, "[rows, H]").dense_rows().floating();
  const int64_t rows = x.size(0), width = x.size(1);
  const Argument kernel{op, "dynamic", dynamic};
  kernel.dims(3, "[rows, Kc, G]").dense_rows().type(x.scalar_type(), " like x").beside(input);
  const int64_t taps = dynamic.size(1), groups = dynamic.size(2);
  kernel.shape({rows, taps, groups}, "[rows of x, Kc, G]");
  Argument{op, "base", base}
      .shape({taps, width}, "[Kc of dynamic, H of x]")
      .dense_rows()
      .type(x.scalar_type(), " like x")
      .beside(input);
  if (groups < 1 || width % groups) fail(op, "dynamic has ", groups, " groups, which do not divide x's width ", width);
  if (block < 1) fail(op, "block is ", block, "; it must be at least 1");
  Tensor out = empty<2>({rows, width}, type_of(x), x);
  if (rows == 0 || width == 0) return out;
  const Convolution a{x.const_data_ptr(),
                      dynamic.const_data_ptr(),
                      base.const_data_ptr(),
                      out.mutable_data_ptr(),
                      rows,
                      width,
                      taps,
                      groups,
                      block,
                      x.stride(0),
                      dynamic.stride(0),
                      dynamic.stride(1),
                      base.stride(0),
                      type};
  DFLASH_RUN(op, x, grouped_convolution, a);
  return out;
}

}  // namespace dflash

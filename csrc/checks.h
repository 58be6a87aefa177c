// SPDX-License-Identifier: Apache-2.0
// Argument errors in the caller's words: which operation, which argument, what it is and what it should be.
#pragma once
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>

#include "arguments.h"

namespace dflash {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename... Parts>
[[noreturn]] inline void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

inline const char* type_name(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another type";
  }
}

inline std::string shape_of(const Tensor& t) {
  std::ostringstream text;
  text << '[';
  for (int64_t i = 0; i < t.dim(); ++i) text << (i ? ", " : "") << t.size(i);
  text << ']';
  return text.str();
}

struct Argument {
  const char* op;
  const char* name;
  const Tensor& t;

  const Argument& dims(int64_t n, const char* meaning) const {
    if (t.dim() != n) fail(op, name, " must be ", meaning, ", is ", shape_of(t));
    return *this;
  }

  const Argument& shape(std::initializer_list<int64_t> sizes, const char* meaning) const {
    dims(int64_t(sizes.size()), meaning);
    int64_t i = 0;
    for (int64_t size : sizes)
      if (t.size(i++) != size) {
        std::ostringstream wanted;
        const char* comma = "";
        for (int64_t s : sizes) {
          wanted << comma << s;
          comma = ", ";
        }
        fail(op, name, " must be ", meaning, " = [", wanted.str(), "], is ", shape_of(t));
      }
    return *this;
  }

  const Argument& type(ScalarType wanted, const char* because = "") const {
    if (t.scalar_type() != wanted)
      fail(op, name, " must be ", type_name(wanted), because, ", is ", type_name(t.scalar_type()));
    return *this;
  }

  // One of fp32, bf16, fp16.
  Type floating() const {
    switch (t.scalar_type()) {
      case ScalarType::Float:
        return Type::f32;
      case ScalarType::BFloat16:
        return Type::bf16;
      case ScalarType::Half:
        return Type::f16;
      default:
        fail(op, name, " must be float32, bfloat16 or float16, is ", type_name(t.scalar_type()));
    }
  }

  const Argument& beside(const Argument& other) const {
    if (t.is_cpu() != other.t.is_cpu() || t.get_device_index() != other.t.get_device_index())
      fail(op, name, " must be on the same device as ", other.name);
    return *this;
  }

  const Argument& contiguous() const {
    if (!t.is_contiguous()) fail(op, name, " must be contiguous; pass ", name, ".contiguous()");
    return *this;
  }

  const Argument& dense_rows() const {
    if (t.numel() > 0 && t.size(t.dim() - 1) > 1 && t.stride(t.dim() - 1) != 1)
      fail(op, name, " must have stride 1 in its last dimension, has ", t.stride(t.dim() - 1), "; pass ", name,
           ".contiguous()");
    return *this;
  }
};

}  // namespace dflash

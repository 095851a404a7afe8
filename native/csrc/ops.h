// What the operators share: types and checks of tensors. Of torch only its stable ABI is used: one build serves torch 2.10 and later.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "kernels.h"

namespace pagetide {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline Type type_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Type::float32;
    case ScalarType::BFloat16: return Type::bfloat16;
    case ScalarType::Half: return Type::float16;
    default: STD_TORCH_CHECK(false, name, " must be float32, bfloat16 or float16");
  }
}

inline void check_dense_rows(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cpu(), name, " must be on the CPU");
  STD_TORCH_CHECK(tensor.dim() >= 1 && (tensor.size(-1) <= 1 || tensor.stride(-1) == 1), name, " must have a last stride of 1");
}

inline void check_dense(const Tensor& tensor, const char* name, ScalarType type, int64_t numel) {
  STD_TORCH_CHECK(tensor.is_cpu() && tensor.is_contiguous(), name, " must be contiguous and on the CPU");
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, " has another element type than expected");
  STD_TORCH_CHECK(tensor.numel() == numel, name, " must have ", numel, " elements, got ", tensor.numel());
}

// Of a kernel that the calling thread runs: what set_threads set for it, else torch's number.
int threads();

inline Tensor empty_bytes(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}

}  // namespace pagetide

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

inline ScalarType scalar_type(Type type) {
  return type == Type::float32 ? ScalarType::Float : type == Type::bfloat16 ? ScalarType::BFloat16 : ScalarType::Half;
}

inline int64_t bytes_of(Type type) { return type == Type::float32 ? 4 : 2; }  // of floats

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

// --- arguments of kernels from tensors, checked; what is no tensor's is left to be set ---

// A packed weight [n, k], with what belongs to it. `type` is a number as in LinearArgs.
struct ProductWeight {
  Tensor packed;
  std::optional<Tensor> bias, scales, in_scales, zeros, factors;
  int64_t type, n, group;
  bool rows_in_int8;
};

// All but x, out and scratch; strides are those of dense rows.
LinearArgs product_args(Type x_type, int64_t rows, int64_t k, const ProductWeight& weight);

// All but the rows that are written.
WriteArgs write_args(Type type, int64_t tokens, const Tensor& cache, const std::optional<Tensor>& scales, const Tensor& blocks,
                     const Tensor& offsets);

// Of the caches; `set_chunks` sets the chunks of a step of `tokens`.
AttentionArgs attention_args(Type type, int64_t heads, const Tensor& cache_key, const Tensor& cache_value,
                             const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale);
void set_chunks(AttentionArgs& args, int64_t tokens, const Tensor& tables, const Tensor& bounds, const Tensor& lens);

// Runs the kernel; padding gets zeros.
void attend_to(AttentionArgs& args, int64_t tokens);

// All but the parts.
RotateArgs rotate_args(int64_t batch, int64_t tokens, const Tensor& cos, const Tensor& sin, int64_t rotation);

}  // namespace pagetide

// torch.ops.pagetide.*: recurrences over the tokens of sequences.
#include <initializer_list>
#include <utility>

#include "ops.h"

namespace pagetide {
namespace {

void check_shape(const Tensor& x, const char* name, std::initializer_list<int64_t> sizes) {
  int64_t numel = 1, d = 0;
  for (const int64_t size : sizes) numel *= size;
  check_dense(x, name, ScalarType::Float, numel);
  STD_TORCH_CHECK(x.dim() == static_cast<int64_t>(sizes.size()), name, " must have ", sizes.size(), " dimensions");
  for (const int64_t size : sizes) STD_TORCH_CHECK(x.size(d++) == size, name, " must have ", size, " items in dimension ", d - 1);
}

// q, k [batch, tokens, k_heads, k_dim], v [batch, tokens, v_heads, v_dim], g and beta [batch, tokens, v_heads], states
// [batch, v_heads, k_dim, v_dim], which change -> as v. All are float32 and dense.
Tensor gated_delta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& states,
                   bool normalizes, double scale) {
  STD_TORCH_CHECK(q.dim() == 4 && v.dim() == 4, "q and v have four dimensions: batch, tokens, heads and elements");
  GatedDeltaArgs args{};
  args.batch = v.size(0), args.tokens = v.size(1), args.v_heads = v.size(2), args.v_dim = v.size(3);
  args.k_heads = q.size(2), args.k_dim = q.size(3);
  STD_TORCH_CHECK(args.k_heads > 0 && args.v_heads % args.k_heads == 0, args.v_heads, " heads of v for ", args.k_heads, " of k");
  STD_TORCH_CHECK(args.k_dim <= kMostKeyDim, "heads of k have at most ", kMostKeyDim, " elements, got ", args.k_dim);
  for (const auto& [x, name] : {std::pair<const Tensor&, const char*>{q, "q"}, {k, "k"}}) {
    check_shape(x, name, {args.batch, args.tokens, args.k_heads, args.k_dim});
  }
  check_shape(v, "v", {args.batch, args.tokens, args.v_heads, args.v_dim});
  check_shape(g, "g", {args.batch, args.tokens, args.v_heads});
  check_shape(beta, "beta", {args.batch, args.tokens, args.v_heads});
  check_shape(states, "states", {args.batch, args.v_heads, args.k_dim, args.v_dim});
  Tensor out = torch::stable::new_empty(v, {args.batch, args.tokens, args.v_heads, args.v_dim});
  args.q = static_cast<const float*>(q.const_data_ptr()), args.k = static_cast<const float*>(k.const_data_ptr());
  args.v = static_cast<const float*>(v.const_data_ptr()), args.g = static_cast<const float*>(g.const_data_ptr());
  args.beta = static_cast<const float*>(beta.const_data_ptr()), args.states = static_cast<float*>(states.mutable_data_ptr());
  args.out = static_cast<float*>(out.mutable_data_ptr());
  args.normalizes = normalizes, args.scale = static_cast<float>(scale), args.threads = threads();
  if (args.tokens > 0) kernels()->recurrent.gated_delta(args);
  return out;
}

}  // namespace
}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def(
      "gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) states, bool normalizes, float scale) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) { m.impl("gated_delta", TORCH_BOX(&pagetide::gated_delta)); }

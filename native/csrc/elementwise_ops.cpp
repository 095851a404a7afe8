// torch.ops.pagetide.*: norms, rotary embeddings and gates.
#include <vector>

#include "ops.h"

namespace pagetide {
namespace {

// The dimensions but the last one, as two: [outer, inner]. False if their strides need more.
bool two_outer_dimensions(const Tensor& x, NormArgs& args) {
  int64_t sizes[2] = {1, 1}, strides[2] = {0, 0};
  int used = 0;  // from the innermost
  for (int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (used > 0 && x.stride(d) == strides[used - 1] * sizes[used - 1]) {
      sizes[used - 1] *= x.size(d);
    } else {
      if (used == 2) return false;
      sizes[used] = x.size(d), strides[used] = x.stride(d);
      ++used;
    }
  }
  args.inner = sizes[0], args.inner_stride = strides[0];
  args.outer = sizes[1], args.outer_stride = strides[1];
  return true;
}

Tensor empty_of_shape(const Tensor& like) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < like.dim(); ++d) sizes.push_back(like.size(d));
  return torch::stable::new_empty(like, sizes);
}

// Fills in all but `residual`, `total` and `out`. `x` becomes a copy if it is strided too irregularly.
void prepare_norm(NormArgs& args, Tensor& x, const std::optional<Tensor>& weight, double eps, double offset, bool rounds_first) {
  args.type = type_of(x, "x");
  STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1, "x must be on the CPU, with at least one dimension");
  args.n = x.size(-1);
  if ((args.n > 1 && x.stride(-1) != 1) || !two_outer_dimensions(x, args)) {
    x = torch::stable::contiguous(x);
    two_outer_dimensions(x, args);
  }
  args.x = x.const_data_ptr();
  if (weight) {
    check_dense(*weight, "weight", x.scalar_type(), args.n);
    args.weight = weight->const_data_ptr();
  }
  args.eps = static_cast<float>(eps), args.offset = static_cast<float>(offset), args.rounds_first = rounds_first;
  args.threads = threads();
}

// x [..., n] -> its rows over the root of their mean square, times weight [n] + offset.
Tensor rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double eps, double offset, bool rounds_first) {
  NormArgs args{};
  Tensor rows = x;
  prepare_norm(args, rows, weight, eps, offset, rounds_first);
  Tensor out = empty_of_shape(x);
  args.out = out.mutable_data_ptr();
  kernels()->elementwise.norm(args);
  return out;
}

// The rms_norm of x times gate / (1 + e^-gate), which is of its shape.
Tensor gated_rms_norm(const Tensor& x, const Tensor& gate, const std::optional<Tensor>& weight, double eps, double offset,
                      bool rounds_first) {
  NormArgs args{};
  Tensor rows = x, gates = torch::stable::contiguous(gate);
  prepare_norm(args, rows, weight, eps, offset, rounds_first);
  check_dense(gates, "gate", x.scalar_type(), x.numel());
  STD_TORCH_CHECK(gate.dim() == x.dim(), "x and gate differ in shape");
  for (int64_t d = 0; d < x.dim(); ++d) STD_TORCH_CHECK(gate.size(d) == x.size(d), "x and gate differ in dimension ", d);
  args.gate = gates.const_data_ptr();
  Tensor out = empty_of_shape(x);
  args.out = out.mutable_data_ptr();
  kernels()->elementwise.norm(args);
  return out;
}

// (x + residual, its rms_norm), both dense.
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const std::optional<Tensor>& weight, double eps,
                                        double offset, bool rounds_first) {
  NormArgs args{};
  Tensor rows = x;
  prepare_norm(args, rows, weight, eps, offset, rounds_first);
  check_dense(residual, "residual", x.scalar_type(), x.numel());
  STD_TORCH_CHECK(residual.dim() == x.dim(), "x and residual differ in shape");
  for (int64_t d = 0; d < x.dim(); ++d) STD_TORCH_CHECK(residual.size(d) == x.size(d), "x and residual differ in dimension ", d);
  args.residual = residual.const_data_ptr();
  Tensor total = empty_of_shape(x), out = empty_of_shape(x);
  args.total = total.mutable_data_ptr(), args.out = out.mutable_data_ptr();
  kernels()->elementwise.norm(args);
  return {total, out};
}

RotatedHeads heads_of(const Tensor& x, const char* name, int64_t token_dim, const RotateArgs& args) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 4 && x.size(0) == args.batch && x.size(token_dim) == args.tokens && x.size(3) >= args.rotated, name,
                  " must have four dimensions: batch, heads and tokens or tokens and heads, and at least ", args.rotated);
  STD_TORCH_CHECK(type_of(x, name) == args.type, name, " and cos differ in type");
  const int64_t head_dim = 3 - token_dim;
  return {x.const_data_ptr(), x.size(head_dim), x.size(3), x.stride(0), x.stride(token_dim), x.stride(head_dim), nullptr};
}

// q and k [batch, heads, tokens, dim] (token_dim 2) or [batch, tokens, heads, dim] (token_dim 1), each rotated by cos and sin
// [1 or batch, tokens, dims that rotate]. The results lie as [batch, tokens, heads, dim].
std::tuple<Tensor, Tensor> rotate(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin, int64_t token_dim,
                                  int64_t rotation) {
  STD_TORCH_CHECK(token_dim == 1 || token_dim == 2, "token_dim must be 1 or 2, got ", token_dim);
  STD_TORCH_CHECK(q.dim() == 4, "q has four dimensions");
  RotateArgs args = rotate_args(q.size(0), q.size(token_dim), cos, sin, rotation);
  Tensor out[2];
  Tensor in[2] = {q, k};
  for (int i = 0; i < 2; ++i) {
    if (in[i].dim() == 4 && in[i].size(3) > 1 && in[i].stride(3) != 1) in[i] = torch::stable::contiguous(in[i]);
    args.parts[i] = heads_of(in[i], i == 0 ? "q" : "k", token_dim, args);
    out[i] = torch::stable::new_empty(q, {args.batch, args.tokens, args.parts[i].heads, args.parts[i].dim});
    args.parts[i].out = out[i].mutable_data_ptr();
  }
  kernels()->elementwise.rotate(args);
  if (token_dim == 1) return {out[0], out[1]};
  return {torch::stable::transpose(out[0], 1, 2), torch::stable::transpose(out[1], 1, 2)};
}

// both [..., width] -> [..., n]: the activated columns gate_at .. gate_at + n, times columns up_at .. up_at + n.
Tensor gated(const Tensor& both, int64_t n, int64_t gate_at, int64_t up_at, int64_t gate) {
  GateArgs args{};
  args.type = type_of(both, "both");
  STD_TORCH_CHECK(0 <= gate && gate <= static_cast<int64_t>(Gate::gelu_tanh), "unknown gate ", gate);
  STD_TORCH_CHECK(both.is_cpu() && both.is_contiguous() && both.dim() >= 1, "both must be contiguous and on the CPU");
  args.gate = static_cast<Gate>(gate), args.n = n, args.stride = both.size(-1);
  for (const int64_t at : {gate_at, up_at}) {
    STD_TORCH_CHECK(0 <= n && 0 <= at && n <= args.stride && at <= args.stride - n, "columns ", at, " to ", at + n, " of ", args.stride);
  }
  args.rows = args.stride > 0 ? both.numel() / args.stride : 0;
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d + 1 < both.dim(); ++d) sizes.push_back(both.size(d));
  sizes.push_back(n);
  Tensor out = torch::stable::new_empty(both, sizes);
  if (args.rows == 0 || n == 0) return out;
  const char* data = static_cast<const char*>(both.const_data_ptr());
  const int64_t bytes = args.type == Type::float32 ? 4 : 2;
  args.gate_x = data + gate_at * bytes, args.up_x = data + up_at * bytes;
  args.out = out.mutable_data_ptr();
  args.threads = threads();
  kernels()->elementwise.gate(args);
  return out;
}

}  // namespace

RotateArgs rotate_args(int64_t batch, int64_t tokens, const Tensor& cos, const Tensor& sin, int64_t rotation) {
  RotateArgs args{};
  STD_TORCH_CHECK(0 <= rotation && rotation <= static_cast<int64_t>(Rotation::neighbours), "unknown rotation ", rotation);
  args.type = type_of(cos, "cos"), args.rotation = static_cast<Rotation>(rotation);
  check_dense_rows(cos, "cos");
  check_dense_rows(sin, "sin");
  STD_TORCH_CHECK(cos.dim() == 3 && sin.dim() == 3 && sin.scalar_type() == cos.scalar_type(), "cos and sin have three dimensions and one type");
  for (int64_t d = 0; d < 3; ++d) {
    STD_TORCH_CHECK(cos.size(d) == sin.size(d) && (cos.size(d) <= 1 || cos.stride(d) == sin.stride(d)), "cos and sin differ in dimension ", d);
  }
  args.batch = batch, args.tokens = tokens;
  STD_TORCH_CHECK((cos.size(0) == 1 || cos.size(0) == batch) && cos.size(1) == tokens, "cos must be [", batch, ", ", tokens, ", ...]");
  args.rotated = cos.size(2) * (args.rotation == Rotation::halves_of_pairs ? 2 : 1);
  STD_TORCH_CHECK(args.rotated % 2 == 0, "an even number of dimensions rotates, got ", args.rotated);
  args.cos = cos.const_data_ptr(), args.sin = sin.const_data_ptr();
  args.cos_batch_stride = cos.size(0) == 1 ? 0 : cos.stride(0), args.cos_token_stride = cos.size(1) == 1 ? 0 : cos.stride(1);
  args.threads = threads();
  return args;
}

}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float eps, float offset, bool rounds_first) -> Tensor");
  m.def("gated_rms_norm(Tensor x, Tensor gate, Tensor? weight, float eps, float offset, bool rounds_first) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool rounds_first) -> (Tensor, Tensor)");
  m.def("rotate(Tensor q, Tensor k, Tensor cos, Tensor sin, int token_dim, int rotation) -> (Tensor, Tensor)");
  m.def("gated(Tensor both, int n, int gate_at, int up_at, int gate) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&pagetide::rms_norm));
  m.impl("gated_rms_norm", TORCH_BOX(&pagetide::gated_rms_norm));
  m.impl("add_rms_norm", TORCH_BOX(&pagetide::add_rms_norm));
  m.impl("rotate", TORCH_BOX(&pagetide::rotate));
  m.impl("gated", TORCH_BOX(&pagetide::gated));
}

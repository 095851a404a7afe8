// torch.ops.pagetide.decoder_layer: a decoder layer of the usual form in one call, by the kernels of the other operators, over memory
// that is allocated once.
#include <vector>

#include "ops.h"

namespace pagetide {
namespace {

enum Norms { kOfInput, kOfQueries, kOfKeys, kOfSum, kNorms };
enum Products { kQkv, kOut, kBoth, kDown, kProducts };

struct Norm {
  bool there, rounds_first;
  std::optional<Tensor> weight;
  double eps, offset;
};

// What a layer is made of, from the lists of an operator, in their order.
struct Layer {
  int64_t heads, q_at, k_at, v_at, rotation, inner, gate, gate_at, up_at, window;
  double scaling, softcap;
  Norm norms[kNorms];
  ProductWeight products[kProducts];
  std::optional<Tensor> sinks;

  Layer(const std::vector<Tensor>& tensors, const std::vector<int64_t>& numbers, const std::vector<double>& factors) {
    size_t tensor = 0, number = 0, factor = 0;
    const auto next = [](const auto& list, size_t& at, const char* name) {
      STD_TORCH_CHECK(at < list.size(), "a layer has more ", name, " than ", list.size());
      return list[at++];
    };
    const auto next_number = [&] { return next(numbers, number, "numbers"); };
    const auto next_factor = [&] { return next(factors, factor, "factors"); };
    const auto next_tensor = [&](bool there) -> std::optional<Tensor> {
      if (!there) return std::nullopt;
      return next(tensors, tensor, "tensors");
    };
    for (int64_t* to : {&heads, &q_at, &k_at, &v_at, &rotation, &inner, &gate, &gate_at, &up_at, &window}) *to = next_number();
    scaling = next_factor(), softcap = next_factor();
    for (Norm& norm : norms) {  // bits: there, with a weight, rounds first
      const int64_t form = next_number();
      norm.there = form & 1, norm.weight = next_tensor(form & 2), norm.rounds_first = form & 4;
      norm.eps = next_factor(), norm.offset = next_factor();
    }
    for (ProductWeight& product : products) {  // bits: bias, scales, scales of inputs, zeros, factors
      product.type = next_number(), product.n = next_number(), product.group = next_number(), product.rows_in_int8 = next_number();
      const int64_t parts = next_number();
      product.packed = *next_tensor(true);
      product.bias = next_tensor(parts & 1), product.scales = next_tensor(parts & 2), product.in_scales = next_tensor(parts & 4);
      product.zeros = next_tensor(parts & 8), product.factors = next_tensor(parts & 16);
    }
    sinks = next_tensor(tensor < tensors.size());
    STD_TORCH_CHECK(tensor == tensors.size() && number == numbers.size() && factor == factors.size(), "a layer's lists are longer than it");
  }
};

// Places in memory that is allocated afterwards.
class Places {
 public:
  int64_t take(int64_t bytes) {
    const int64_t at = end_;
    end_ += (bytes + 63) / 64 * 64;
    if (end_ > most_) most_ = end_;
    return at;
  }
  int64_t end() const { return end_; }
  void go_back(int64_t end) { end_ = end; }  // what was taken behind it is not needed any more
  int64_t most() const { return most_; }

 private:
  int64_t end_ = 0, most_ = 0;
};

void check_columns(int64_t at, int64_t count, const LinearArgs& product, const char* name) {
  STD_TORCH_CHECK(0 <= at && 0 <= count && at <= product.n && count <= product.n - at, name, " are columns ", at, " to ", at + count,
                  " of ", product.n);
}

// The norm of rows [rows, inner, n] with these strides.
NormArgs norm_args(const Norm& norm, Type type, int64_t rows, int64_t inner, int64_t n, int64_t row_stride) {
  NormArgs args{};
  args.type = type;
  args.outer = rows, args.inner = inner, args.n = n, args.outer_stride = row_stride, args.inner_stride = n;
  if (norm.weight) {
    check_dense(*norm.weight, "weight", scalar_type(type), n);
    args.weight = norm.weight->const_data_ptr();
  }
  args.eps = static_cast<float>(norm.eps), args.offset = static_cast<float>(norm.offset), args.rounds_first = norm.rounds_first;
  args.threads = threads();
  return args;
}

// x [1, tokens, hidden] -> the same shape: with h = x + out(attention(rotated q and k, v of qkv(norm(x)))), h + down(gated(norm(h))).
// Writes K and V of the tokens to the caches first. The other tensors are as those of `rotate`, `write_kv` and `attend` are.
Tensor decoder_layer(const Tensor& x, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& tensors,
                     const std::vector<int64_t>& numbers, const std::vector<double>& factors, Tensor cache_key, Tensor cache_value,
                     const Tensor& tables, const Tensor& blocks, const Tensor& offsets, const Tensor& bounds, const Tensor& lens,
                     const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  const Layer layer(tensors, numbers, factors);
  const Type type = type_of(x, "x");
  STD_TORCH_CHECK(x.dim() == 3 && x.size(0) == 1, "x has three dimensions: 1, tokens and features");
  const int64_t tokens = x.size(1), hidden = x.size(2), bytes = bytes_of(type);
  check_dense(x, "x", x.scalar_type(), tokens * hidden);
  STD_TORCH_CHECK(layer.heads > 0 && layer.inner > 0 && hidden > 0, "a layer has heads, hidden and inner features");

  AttentionArgs attention = attention_args(type, layer.heads, cache_key, cache_value, key_scale, value_scale);
  set_chunks(attention, tokens, tables, bounds, lens);
  STD_TORCH_CHECK(layer.window >= 0 && layer.softcap >= 0, "window and softcap must not be negative");
  attention.scaling = static_cast<float>(layer.scaling), attention.window = layer.window;
  attention.softcap = static_cast<float>(layer.softcap);
  if (layer.sinks) {
    check_dense(*layer.sinks, "sinks", ScalarType::Float, layer.heads);
    attention.sinks = static_cast<const float*>(layer.sinks->const_data_ptr());
  }
  WriteArgs keys = write_args(type, tokens, cache_key, key_scale, blocks, offsets);
  WriteArgs values = write_args(type, tokens, cache_value, value_scale, blocks, offsets);
  const int64_t dim = attention.key.dim, kv_heads = attention.kv_heads, value_width = layer.heads * attention.value.dim;
  RotateArgs rotate = rotate_args(1, tokens, cos, sin, layer.rotation);
  STD_TORCH_CHECK(rotate.type == type && rotate.rotated <= dim, "cos is of ", rotate.rotated, " dimensions of ", dim, ", and x's type");

  LinearArgs qkv = product_args(type, tokens, hidden, layer.products[kQkv]);
  LinearArgs out = product_args(type, tokens, value_width, layer.products[kOut]);
  LinearArgs both = product_args(type, tokens, hidden, layer.products[kBoth]);
  LinearArgs down = product_args(type, tokens, layer.inner, layer.products[kDown]);
  STD_TORCH_CHECK(out.n == hidden && down.n == hidden, "outputs of ", out.n, " and ", down.n, " features, and ", hidden, " of x");
  check_columns(layer.q_at, layer.heads * dim, qkv, "queries");
  check_columns(layer.k_at, kv_heads * dim, qkv, "keys");
  check_columns(layer.v_at, kv_heads * attention.value.dim, qkv, "values");
  check_columns(layer.gate_at, layer.inner, both, "gates");
  check_columns(layer.up_at, layer.inner, both, "what gates multiply");
  STD_TORCH_CHECK(0 <= layer.gate && layer.gate <= static_cast<int64_t>(Gate::gelu_tanh), "unknown gate ", layer.gate);
  STD_TORCH_CHECK(layer.norms[kOfInput].there && layer.norms[kOfSum].there, "a layer has a norm of its input, and one of the sum");

  Tensor result = torch::stable::new_empty(x, {1, tokens, hidden});
  if (tokens == 0) return result;
  const auto& linear = kernels()->linear;
  int64_t scratch_bytes = kernels()->attention.scratch_bytes(attention);
  for (const LinearArgs* product : {&qkv, &out, &both, &down}) {
    const int64_t needed = linear.scratch_bytes(*product);
    if (needed > scratch_bytes) scratch_bytes = needed;
  }
  Places places;
  const auto rows_of = [&](int64_t width) { return places.take(tokens * width * bytes); };
  const int64_t scratch = places.take(scratch_bytes), normed = rows_of(hidden), sum = rows_of(hidden), after = places.end();
  const int64_t qkv_at = rows_of(qkv.n), attended = rows_of(value_width);
  const int64_t parts[2] = {layer.heads, kv_heads}, columns[2] = {layer.q_at, layer.k_at};
  int64_t normed_parts[2] = {}, rotated[2] = {};
  for (int i = 0; i < 2; ++i) {
    if (layer.norms[kOfQueries + i].there) normed_parts[i] = rows_of(parts[i] * dim);
    rotated[i] = rows_of(parts[i] * dim);
  }
  places.go_back(after);
  const int64_t both_at = rows_of(both.n), hidden_at = rows_of(layer.inner);
  Tensor memory = empty_bytes(x, places.most());
  char* const base = static_cast<char*>(memory.mutable_data_ptr());
  for (LinearArgs* product : {&qkv, &out, &both, &down}) product->scratch = base + scratch;
  attention.scratch = base + scratch;

  const auto& elementwise = kernels()->elementwise;
  NormArgs of_input = norm_args(layer.norms[kOfInput], type, tokens, 1, hidden, hidden);
  of_input.x = x.const_data_ptr(), of_input.out = base + normed;
  elementwise.norm(of_input);
  qkv.x = base + normed, qkv.out = base + qkv_at;
  linear.multiply(qkv);
  for (int i = 0; i < 2; ++i) {
    RotatedHeads& part = rotate.parts[i];
    part = {base + qkv_at + columns[i] * bytes, parts[i], dim, 0, qkv.n, dim, base + rotated[i]};
    if (const Norm& norm = layer.norms[kOfQueries + i]; norm.there) {
      NormArgs args = norm_args(norm, type, tokens, parts[i], dim, qkv.n);
      args.x = part.x, args.out = base + normed_parts[i];
      elementwise.norm(args);
      part.x = args.out, part.token_stride = parts[i] * dim;
    }
  }
  elementwise.rotate(rotate);
  keys.from = base + rotated[1], keys.token_stride = kv_heads * dim, keys.head_stride = dim;
  values.from = base + qkv_at + layer.v_at * bytes, values.token_stride = qkv.n, values.head_stride = attention.value.dim;
  kernels()->attention.write(values);
  kernels()->attention.write(keys);
  attention.query = base + rotated[0], attention.query_stride = layer.heads * dim, attention.query_head_stride = dim;
  attention.out = base + attended;
  attend_to(attention, tokens);
  out.x = base + attended, out.out = base + normed;
  linear.multiply(out);

  NormArgs of_sum = norm_args(layer.norms[kOfSum], type, tokens, 1, hidden, hidden);
  of_sum.x = of_sum.out = base + normed;  // a row is added up before it is written
  of_sum.residual = x.const_data_ptr(), of_sum.total = base + sum;
  elementwise.norm(of_sum);
  both.x = base + normed, both.out = base + both_at;
  linear.multiply(both);
  GateArgs gate{};
  gate.type = type, gate.gate = static_cast<Gate>(layer.gate), gate.rows = tokens, gate.n = layer.inner, gate.stride = both.n;
  gate.gate_x = base + both_at + layer.gate_at * bytes, gate.up_x = base + both_at + layer.up_at * bytes;
  gate.out = base + hidden_at, gate.threads = threads();
  elementwise.gate(gate);
  down.x = base + hidden_at, down.out = base + normed;
  linear.multiply(down);
  elementwise.add({type, tokens, hidden, base + sum, base + normed, result.mutable_data_ptr(), threads()});
  return result;
}

}  // namespace
}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def(
      "decoder_layer(Tensor x, Tensor cos, Tensor sin, Tensor[] tensors, int[] numbers, float[] factors, Tensor(a!) cache_key, "
      "Tensor(b!) cache_value, Tensor tables, Tensor blocks, Tensor offsets, Tensor bounds, Tensor lens, Tensor(c!)? key_scale=None, "
      "Tensor(d!)? value_scale=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) { m.impl("decoder_layer", TORCH_BOX(&pagetide::decoder_layer)); }

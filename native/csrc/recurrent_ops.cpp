// torch.ops.pagetide.*: recurrences and convolutions over the tokens of sequences with states in blocks.
#include <cstring>
#include <initializer_list>

#include "ops.h"

namespace pagetide {
namespace {

void check_shape(const Tensor& x, const char* name, std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(x.dim() == static_cast<int64_t>(sizes.size()), name, " must have ", sizes.size(), " dimensions, got ", x.dim());
  int64_t d = 0;
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(x.size(d) == size, name, " must have ", size, " items in dimension ", d, ", got ", x.size(d));
    ++d;
  }
}

const int64_t* integers(const Tensor& x, const char* name, int64_t numel) {
  check_dense(x, name, ScalarType::Long, numel);
  return static_cast<const int64_t*>(x.const_data_ptr());
}

// Elements from token to token of x [tokens, ...], which is dense within a token.
int64_t token_stride(const Tensor& x, const char* name) {
  int64_t dense = 1;
  for (int64_t d = x.dim() - 1; d > 0; --d) {
    STD_TORCH_CHECK(x.size(d) == 1 || x.stride(d) == dense, name, " must be dense within a token");
    dense *= x.size(d);
  }
  STD_TORCH_CHECK(x.is_cpu(), name, " must be on the CPU");
  return x.size(0) > 1 ? x.stride(0) : dense;
}

// `chunks` int64 [3, n]: of each its first token, its number of tokens, and whether it continues a sequence. `memory` uint8
// [blocks, stride]; `tables` int64 [n, columns]; `places` int64 [2, parts]: the column of each part, and its byte in the block.
ChunkStates states_of(const Tensor& memory, const Tensor& tables, const Tensor& places, const Tensor& chunks, int64_t tokens,
                      int64_t items, int64_t item_bytes) {
  ChunkStates states{};
  STD_TORCH_CHECK(memory.is_cpu() && memory.dim() == 2 && memory.scalar_type() == ScalarType::Byte && memory.is_contiguous(),
                  "memory must be uint8 [blocks, stride], dense and on the CPU");
  STD_TORCH_CHECK(tables.dim() == 2 && places.dim() == 2 && chunks.dim() == 2, "tables, places and chunks have two dimensions");
  states.memory = static_cast<char*>(memory.mutable_data_ptr()), states.block_stride = memory.size(1);
  states.chunks = chunks.size(1), states.columns = tables.size(1), states.parts = places.size(1);
  states.tables = integers(tables, "tables", states.chunks * states.columns);
  states.blocks = integers(places, "places", 2 * states.parts), states.offsets = states.blocks + states.parts;
  states.starts = integers(chunks, "chunks", 3 * states.chunks);
  states.lengths = states.starts + states.chunks, states.continues = states.lengths + states.chunks;
  STD_TORCH_CHECK(states.parts > 0 && items % states.parts == 0, states.parts, " parts for ", items, " items of a state");
  const int64_t part_bytes = items / states.parts * item_bytes;
  for (int64_t p = 0; p < states.parts; ++p) {
    STD_TORCH_CHECK(0 <= states.blocks[p] && states.blocks[p] < states.columns, "part ", p, " is in none of ", states.columns, " blocks");
    STD_TORCH_CHECK(0 <= states.offsets[p] && states.offsets[p] <= states.block_stride - part_bytes, "part ", p, " leaves its block");
  }
  for (int64_t i = 0; i < states.chunks * states.columns; ++i) {
    STD_TORCH_CHECK(0 <= states.tables[i] && states.tables[i] < memory.size(0), "block ", states.tables[i], " of ", memory.size(0));
  }
  for (int64_t i = 0; i < states.chunks; ++i) {
    const int64_t start = states.starts[i], length = states.lengths[i];
    STD_TORCH_CHECK(0 <= length && length <= tokens && 0 <= start && start <= tokens - length, "chunk ", i, " leaves the ", tokens, " tokens");
  }
  return states;
}

// Zeros where no chunk writes.
void clear_others(void* out, const ChunkStates& states, int64_t tokens, int64_t token_bytes) {
  int64_t written = 0;
  for (int64_t i = 0; i < states.chunks; ++i) written += states.lengths[i];
  if (written < tokens) std::memset(out, 0, tokens * token_bytes);
}

int64_t item_size(Type type) { return type == Type::float32 ? 4 : 2; }

// q, k [tokens, k_heads, k_dim] and v [tokens, v_heads, v_dim] of one type, dense within a token; g and beta float32 [tokens,
// v_heads], dense; the states of chunks of them, which change -> as v, zeros for tokens of no chunk.
Tensor gated_delta(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta, const Tensor& memory,
                   const Tensor& tables, const Tensor& places, const Tensor& chunks, bool normalizes, double scale) {
  STD_TORCH_CHECK(q.dim() == 3 && v.dim() == 3, "q and v have three dimensions: tokens, heads and elements");
  GatedDeltaArgs args{};
  const int64_t tokens = v.size(0);
  args.type = type_of(v, "v"), args.v_heads = v.size(1), args.v_dim = v.size(2), args.k_heads = q.size(1), args.k_dim = q.size(2);
  STD_TORCH_CHECK(args.k_heads > 0 && args.v_heads % args.k_heads == 0, args.v_heads, " heads of v for ", args.k_heads, " of k");
  STD_TORCH_CHECK(args.k_dim <= kMostKeyDim, "heads of k have at most ", kMostKeyDim, " elements, got ", args.k_dim);
  STD_TORCH_CHECK(type_of(q, "q") == args.type && type_of(k, "k") == args.type, "q, k and v differ in type");
  check_shape(q, "q", {tokens, args.k_heads, args.k_dim});
  check_shape(k, "k", {tokens, args.k_heads, args.k_dim});
  args.q_stride = token_stride(q, "q"), args.k_stride = token_stride(k, "k"), args.v_stride = token_stride(v, "v");
  check_shape(g, "g", {tokens, args.v_heads});
  check_shape(beta, "beta", {tokens, args.v_heads});
  check_dense(g, "g", ScalarType::Float, tokens * args.v_heads);
  check_dense(beta, "beta", ScalarType::Float, tokens * args.v_heads);
  args.states = states_of(memory, tables, places, chunks, tokens, args.v_heads, args.k_dim * args.v_dim * 4);
  Tensor out = torch::stable::new_empty(v, {tokens, args.v_heads, args.v_dim});
  args.q = q.const_data_ptr(), args.k = k.const_data_ptr(), args.v = v.const_data_ptr();
  args.g = static_cast<const float*>(g.const_data_ptr()), args.beta = static_cast<const float*>(beta.const_data_ptr());
  args.out = out.mutable_data_ptr();
  args.normalizes = normalizes, args.scale = static_cast<float>(scale), args.threads = threads();
  clear_others(args.out, args.states, tokens, args.v_heads * args.v_dim * item_size(args.type));
  kernels()->recurrent.gated_delta(args);
  return out;
}

// x [tokens, channels], dense within a token; weight [channels, kernel] and bias [channels], dense; the states of chunks of the
// tokens, which change -> as x, zeros for tokens of no chunk. All are of one type.
Tensor causal_conv(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, bool silu, const Tensor& memory,
                   const Tensor& tables, const Tensor& places, const Tensor& chunks) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, "x is [tokens, channels], and weight [channels, kernel]");
  ConvArgs args{};
  const int64_t tokens = x.size(0);
  args.type = type_of(x, "x"), args.channels = x.size(1), args.kernel = weight.size(1), args.silu = silu;
  STD_TORCH_CHECK(kLeastKernel <= args.kernel && args.kernel <= kMostKernel, "a kernel has ", kLeastKernel, " to ", kMostKernel,
                  " columns, got ", args.kernel);
  args.x_stride = token_stride(x, "x");
  check_dense(weight, "weight", x.scalar_type(), args.channels * args.kernel);
  if (bias) check_dense(*bias, "bias", x.scalar_type(), args.channels);
  args.states = states_of(memory, tables, places, chunks, tokens, args.channels, args.kernel * item_size(args.type));
  Tensor out = torch::stable::new_empty(x, {tokens, args.channels});
  args.x = x.const_data_ptr(), args.weight = weight.const_data_ptr(), args.bias = bias ? bias->const_data_ptr() : nullptr;
  args.out = out.mutable_data_ptr(), args.threads = threads();
  clear_others(args.out, args.states, tokens, args.channels * item_size(args.type));
  kernels()->recurrent.conv(args);
  return out;
}

}  // namespace
}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def(
      "gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) memory, Tensor tables, Tensor places, Tensor "
      "chunks, bool normalizes, float scale) -> Tensor");
  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor(a!) memory, Tensor tables, Tensor places, Tensor "
      "chunks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) {
  m.impl("gated_delta", TORCH_BOX(&pagetide::gated_delta));
  m.impl("causal_conv", TORCH_BOX(&pagetide::causal_conv));
}

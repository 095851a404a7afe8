// torch.ops.pagetide.*: attention over the blocks of a cache.
#include <cstring>

#include "ops.h"

namespace pagetide {
namespace {

ScaleView scales_of(const Tensor& scales, const Tensor& cache, const char* name) {
  STD_TORCH_CHECK(scales.is_cpu(), "the scales of ", name, " must be on the CPU");
  STD_TORCH_CHECK(scales.scalar_type() == ScalarType::Half, "the scales of ", name, " must be float16");
  STD_TORCH_CHECK(scales.dim() == 3, "the scales of ", name, " have three dimensions: blocks, slots and heads");
  for (int64_t d = 0; d < 3; ++d) STD_TORCH_CHECK(scales.size(d) == cache.size(d), name, " and its scales differ in dimension ", d);
  return {scales.data_ptr(), scales.stride(0), scales.stride(1), scales.stride(2)};
}

// `type` is that of elements without scales.
CacheView view_of(const Tensor& cache, const std::optional<Tensor>& scales, Type type, const char* name) {
  STD_TORCH_CHECK(cache.dim() == 4, name, " has four dimensions: blocks, slots, heads and the head's");
  check_dense_rows(cache, name);
  const bool scaled = cache.scalar_type() == ScalarType::Char;
  STD_TORCH_CHECK(scaled == scales.has_value(), name, scaled ? " is int8 and needs scales" : " is not int8 and has no scales");
  STD_TORCH_CHECK(scaled || type_of(cache, name) == type, name, " and what is read or written with it differ in type");
  CacheView view = {cache.data_ptr(), cache.stride(0), cache.stride(1), cache.stride(2), cache.size(3)};
  if (scaled) view.scales = scales_of(*scales, cache, name);
  return view;
}

void check_rows(const Tensor& rows, const char* name, int64_t heads, int64_t dim) {
  check_dense_rows(rows, name);
  STD_TORCH_CHECK(rows.dim() == 3 && rows.size(1) == heads && rows.size(2) == dim, name, " must be [tokens, ", heads, ", ", dim, "]");
}

WriteArgs checked_write(const Tensor& rows, const char* name, const Tensor& cache, const std::optional<Tensor>& scales,
                        const Tensor& blocks, const Tensor& offsets) {
  WriteArgs args = write_args(type_of(rows, name), rows.size(0), cache, scales, blocks, offsets);
  check_rows(rows, name, args.kv_heads, args.to.dim);
  args.from = rows.const_data_ptr();
  args.token_stride = rows.stride(0), args.head_stride = rows.stride(1);
  return args;
}

// key, value [tokens, kv_heads, dim] -> slots `offsets` of `blocks` (int64 [tokens]) of the cache. Block 0 is not written. A cache of
// int8 has float16 scales [blocks, slots, heads]. Without a value only keys are written: values are a part of them.
void write_kv(const Tensor& key, const std::optional<Tensor>& value, Tensor cache_key, Tensor cache_value, const Tensor& blocks,
              const Tensor& offsets, const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  STD_TORCH_CHECK(key.dim() == 3 && (!value || value->dim() == 3), "key and value have three dimensions: tokens, heads and the head's");
  STD_TORCH_CHECK(!value || value->size(0) == key.size(0), "key and value differ in tokens");
  const WriteArgs keys = checked_write(key, "key", cache_key, key_scale, blocks, offsets);
  if (value) {
    const WriteArgs values = checked_write(*value, "value", cache_value, value_scale, blocks, offsets);
    kernels()->attention.write(values);
  }
  kernels()->attention.write(keys);
}

// query [tokens, heads, dim] -> [tokens, heads, dim of values]; see AttentionArgs. Padding gets zeros.
Tensor attend(const Tensor& query, const Tensor& cache_key, const Tensor& cache_value, const Tensor& tables, const Tensor& bounds,
              const Tensor& lens, double scaling, int64_t window, double softcap, const std::optional<Tensor>& sinks,
              const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  STD_TORCH_CHECK(query.dim() == 3, "query has three dimensions: tokens, heads and the head's");
  const int64_t tokens = query.size(0), heads = query.size(1);
  AttentionArgs args = attention_args(type_of(query, "query"), heads, cache_key, cache_value, key_scale, value_scale);
  check_rows(query, "query", heads, args.key.dim);
  args.query = query.const_data_ptr();
  args.query_stride = query.stride(0), args.query_head_stride = query.stride(1);
  set_chunks(args, tokens, tables, bounds, lens);
  STD_TORCH_CHECK(window >= 0 && softcap >= 0, "window and softcap must not be negative");
  args.scaling = static_cast<float>(scaling), args.window = window, args.softcap = static_cast<float>(softcap);
  if (sinks) {
    check_dense(*sinks, "sinks", ScalarType::Float, heads);
    args.sinks = static_cast<const float*>(sinks->const_data_ptr());
  }
  Tensor out = torch::stable::new_empty(query, {tokens, heads, args.value.dim});
  args.out = out.mutable_data_ptr();
  Tensor scratch = empty_bytes(query, kernels()->attention.scratch_bytes(args));
  args.scratch = scratch.mutable_data_ptr();
  attend_to(args, tokens);
  return out;
}

}  // namespace

WriteArgs write_args(Type type, int64_t tokens, const Tensor& cache, const std::optional<Tensor>& scales, const Tensor& blocks,
                     const Tensor& offsets) {
  WriteArgs args{};
  args.type = type;
  args.to = view_of(cache, scales, type, "the cache");
  args.tokens = tokens, args.kv_heads = cache.size(2);
  check_dense(blocks, "blocks", ScalarType::Long, tokens);
  check_dense(offsets, "offsets", ScalarType::Long, tokens);
  args.blocks = static_cast<const int64_t*>(blocks.const_data_ptr());
  args.offsets = static_cast<const int64_t*>(offsets.const_data_ptr());
  for (int64_t t = 0; t < tokens; ++t) {
    STD_TORCH_CHECK(0 <= args.blocks[t] && args.blocks[t] < cache.size(0), "token ", t, " goes to block ", args.blocks[t], " of ",
                    cache.size(0));
    STD_TORCH_CHECK(0 <= args.offsets[t] && args.offsets[t] < cache.size(1), "token ", t, " goes to slot ", args.offsets[t], " of ",
                    cache.size(1));
  }
  args.threads = threads();
  return args;
}

AttentionArgs attention_args(Type type, int64_t heads, const Tensor& cache_key, const Tensor& cache_value,
                             const std::optional<Tensor>& key_scale, const std::optional<Tensor>& value_scale) {
  AttentionArgs args{};
  args.type = type;
  args.key = view_of(cache_key, key_scale, type, "the cache of keys");
  args.value = view_of(cache_value, value_scale, type, "the cache of values");
  args.num_blocks = cache_key.size(0), args.block_size = cache_key.size(1), args.kv_heads = cache_key.size(2);
  for (int64_t d = 0; d < 3; ++d) STD_TORCH_CHECK(cache_value.size(d) == cache_key.size(d), "the caches differ in dimension ", d);
  STD_TORCH_CHECK(cache_value.scalar_type() == cache_key.scalar_type(), "the caches differ in type");
  STD_TORCH_CHECK(1 <= args.key.dim && args.key.dim <= 576 && 1 <= args.value.dim && args.value.dim <= 576,
                  "heads have 1 to 576 dimensions, got ", args.key.dim, " and ", args.value.dim);
  args.heads = heads;
  STD_TORCH_CHECK(args.kv_heads > 0 && heads % args.kv_heads == 0, heads, " heads over ", args.kv_heads, " KV heads");
  args.threads = threads();
  return args;
}

void set_chunks(AttentionArgs& args, int64_t tokens, const Tensor& tables, const Tensor& bounds, const Tensor& lens) {
  STD_TORCH_CHECK(tables.dim() == 2, "tables have two dimensions: chunks and blocks");
  args.chunks = tables.size(0), args.width = tables.size(1);
  check_dense(tables, "tables", ScalarType::Long, args.chunks * args.width);
  check_dense(bounds, "bounds", ScalarType::Int, args.chunks + 1);
  check_dense(lens, "lens", ScalarType::Int, args.chunks);
  args.tables = static_cast<const int64_t*>(tables.const_data_ptr());
  args.bounds = static_cast<const int32_t*>(bounds.const_data_ptr());
  args.lens = static_cast<const int32_t*>(lens.const_data_ptr());
  const int64_t filled = args.bounds[args.chunks];
  STD_TORCH_CHECK(args.bounds[0] == 0 && filled <= tokens, "chunks of tokens ", args.bounds[0], " to ", filled, " of ", tokens);
  for (int64_t i = 0; i < args.chunks; ++i) {
    const int64_t count = static_cast<int64_t>(args.bounds[i + 1]) - args.bounds[i], all = args.lens[i];
    const bool fits = count <= all && all <= args.width * args.block_size;
    STD_TORCH_CHECK(0 <= count && (all == 0 || fits), "chunk ", i, " is ", count, " of ", all, " tokens in ", args.width, " blocks of ",
                    args.block_size);
  }
}

void attend_to(AttentionArgs& args, int64_t tokens) {
  const int64_t token_bytes = args.heads * args.value.dim * bytes_of(args.type), filled = args.bounds[args.chunks];
  const auto clear = [&](int64_t begin, int64_t end) {
    if (begin == end) return;  // perhaps there is no memory
    std::memset(static_cast<char*>(args.out) + begin * token_bytes, 0, (end - begin) * token_bytes);
  };
  for (int64_t i = 0; i < args.chunks; ++i) {
    if (args.lens[i] == 0) clear(args.bounds[i], args.bounds[i + 1]);
  }
  clear(filled, tokens);
  if (filled == 0 || args.heads == 0) return;
  int fault = 0;
  args.fault = &fault;
  kernels()->attention.attend(args);
  STD_TORCH_CHECK(fault == 0, "a table names a block that is not among the ", args.num_blocks);
}

}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def(
      "write_kv(Tensor key, Tensor? value, Tensor(a!) cache_key, Tensor(b!) cache_value, Tensor blocks, Tensor offsets, "
      "Tensor(c!)? key_scale=None, Tensor(d!)? value_scale=None) -> ()");
  m.def(
      "attend(Tensor query, Tensor cache_key, Tensor cache_value, Tensor tables, Tensor bounds, Tensor lens, float scaling, "
      "int window, float softcap, Tensor? sinks, Tensor? key_scale=None, Tensor? value_scale=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&pagetide::write_kv));
  m.impl("attend", TORCH_BOX(&pagetide::attend));
}

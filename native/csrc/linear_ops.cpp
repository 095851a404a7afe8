// torch.ops.pagetide.*: products with packed weights.
#include "ops.h"

namespace pagetide {
namespace {

Type weight_type(int64_t type) {
  STD_TORCH_CHECK(0 <= type && type <= static_cast<int64_t>(Type::fp4), "unknown type of weights ", type);
  return static_cast<Type>(type);
}

bool is_float(Type type) { return type <= Type::float16; }

ScaleType scale_type(const Tensor& scales, bool with_factors) {
  switch (scales.scalar_type()) {
    case ScalarType::Float: return ScaleType::float32;
    case ScalarType::BFloat16: return ScaleType::bfloat16;
    case ScalarType::Half: return with_factors ? ScaleType::minimums : ScaleType::float16;
    case ScalarType::Byte: return with_factors ? ScaleType::six_bits : ScaleType::exponents;
    case ScalarType::Char: return ScaleType::int8;
    default: STD_TORCH_CHECK(false, "scales are float32, bfloat16, float16, uint8 exponents, or with factors int8, of six bits or float16");
  }
}

constexpr int64_t kMostSize = int64_t{1} << 28;  // of a dimension: bytes of a weight do not overflow

void check_sizes(int64_t n, int64_t k) {
  STD_TORCH_CHECK(0 <= n && n <= kMostSize && 0 <= k && k <= kMostSize, "a weight of ", n, " by ", k, ": each is from 0 to ", kMostSize);
}

// The bytes of a packed weight [n, k].
void check_packed(const Tensor& packed, Type type, int64_t n, int64_t k) {
  check_sizes(n, k);
  check_dense(packed, "packed", ScalarType::Byte, kernels()->linear.packed_bytes(type, n, k));
}

int64_t packed_bytes(int64_t type, int64_t n, int64_t k) {
  check_sizes(n, k);
  return kernels()->linear.packed_bytes(weight_type(type), n, k);
}

// weight [n, k] -> bytes. Weights of another type of floats are converted; those of less than 16 bits come as int8.
void pack_weight_into(const Tensor& weight, int64_t type_number, const Tensor& packed) {
  const Type type = weight_type(type_number);
  const bool floats = is_float(type);
  const Type from = floats ? type_of(weight, "weight") : Type::int8;
  STD_TORCH_CHECK(weight.dim() == 2, "a weight has two dimensions");
  const int64_t n = weight.size(0), k = weight.size(1);
  check_dense(weight, "weight", floats ? weight.scalar_type() : ScalarType::Char, n * k);
  check_packed(packed, type, n, k);
  if (n == 0 || k == 0) return;  // perhaps there is no memory
  kernels()->linear.pack(weight.const_data_ptr(), from, type, n, k, packed.mutable_data_ptr(), threads());
}

Tensor pack_weight(const Tensor& weight, int64_t type) {
  STD_TORCH_CHECK(weight.dim() == 2, "a weight has two dimensions");
  Tensor packed = empty_bytes(weight, packed_bytes(type, weight.size(0), weight.size(1)));
  pack_weight_into(weight, type, packed);
  return packed;
}

// blocks uint8 [n, blocks of a row, bytes], of GGUF's type `kind` -> bytes, as `pack_weight` of their values.
Tensor pack_blocks(const Tensor& blocks, int64_t kind_number) {
  const Block kind = static_cast<Block>(kind_number);
  STD_TORCH_CHECK(0 <= kind_number && kind_number < 256 && block_bytes(kind) > 0, "unknown type of blocks ", kind_number);
  STD_TORCH_CHECK(blocks.dim() == 3 && blocks.size(2) == block_bytes(kind), "blocks [n, blocks of a row, ", block_bytes(kind), "]");
  STD_TORCH_CHECK(blocks.size(1) <= kMostSize / kSuperGroup, blocks.size(1), " blocks of a row");
  const int64_t n = blocks.size(0), k = blocks.size(1) * block_weights(kind);
  check_dense(blocks, "blocks", ScalarType::Byte, n * blocks.size(1) * block_bytes(kind));
  check_sizes(n, k);
  Tensor packed = empty_bytes(blocks, kernels()->linear.packed_bytes(block_type(kind), n, k));
  if (n == 0 || k == 0) return packed;  // perhaps there is no memory
  kernels()->linear.pack_blocks(blocks.const_data_ptr(), kind, n, k, packed.mutable_data_ptr(), threads());
  return packed;
}

// float32 [k]: row `row` of a packed weight, without scales.
Tensor unpack_row(const Tensor& packed, int64_t type_number, int64_t n, int64_t k, int64_t row) {
  const Type type = weight_type(type_number);
  check_packed(packed, type, n, k);
  STD_TORCH_CHECK(0 <= row && row < n, "row ", row, " of ", n);
  Tensor values = torch::stable::new_empty(packed, {k}, ScalarType::Float);
  kernels()->linear.unpack(packed.const_data_ptr(), type, n, k, row, static_cast<float*>(values.mutable_data_ptr()));
  return values;
}

// Where the weights of a product are, how they are scaled and in groups of what size.
struct Scaling {
  const std::optional<Tensor>&scales, &zeros, &factors;
  int64_t group;
};

// The weight of `args`, which has its type and sizes.
void set_weight(LinearArgs& args, const Tensor& packed, const Scaling& scaling) {
  const bool whole = is_float(args.weight_type);
  check_packed(packed, args.weight_type, args.n, args.k);
  STD_TORCH_CHECK(args.k > 0, "x has no features");
  args.weight = packed.const_data_ptr();
  const int64_t group = args.group = scaling.group;
  const bool power = group >= 8 && group <= 256 && (group & (group - 1)) == 0;
  STD_TORCH_CHECK(group == 0 || (power && !whole), "group must be 0 or a power of 2 from 8 to 256, got ", group);
  STD_TORCH_CHECK(whole != scaling.scales.has_value(), "weights of less than 16 bits have scales, and others none");
  const int64_t num_scales = (group ? (args.k + group - 1) / group : 1) * args.n;
  const int64_t num_factors = (args.k + kSuperGroup - 1) / kSuperGroup * args.n;
  if (scaling.scales) {
    args.scale_type = scale_type(*scaling.scales, scaling.factors.has_value());
    const bool six_bits = args.scale_type == ScaleType::six_bits;
    const int64_t whole_rows = six_bits ? kSuperGroup : kMinimumGroup;
    STD_TORCH_CHECK(!has_minimums(args) || (group == kMinimumGroup && args.k % whole_rows == 0 && !scaling.zeros),
                    "scales with minimums are of groups of ", kMinimumGroup, " in rows of multiples of ", whole_rows, ", without zeros");
    const int64_t size = six_bits ? args.k / kSuperGroup * kSixBitBytes * args.n : num_scales;
    check_dense(*scaling.scales, "scales", scaling.scales->scalar_type(), size);
    args.scales = scaling.scales->const_data_ptr();
    STD_TORCH_CHECK(scaling.factors.has_value() == (has_minimums(args) || args.scale_type == ScaleType::int8),
                    "scales of integers have factors, float16 may have minimums, and others none");
    if (scaling.factors) {
      STD_TORCH_CHECK(group > 0, "scales with factors are of groups");
      const int64_t of_groups = args.scale_type == ScaleType::minimums ? num_scales : num_factors;
      check_dense(*scaling.factors, "factors", ScalarType::Half, six_bits ? 2 * num_factors : of_groups);
      args.factors = scaling.factors->const_data_ptr();
    }
  }
  if (scaling.zeros) {
    STD_TORCH_CHECK(args.weight_type == Type::int8 || args.weight_type == Type::int4, "integers alone have zero points");
    check_dense(*scaling.zeros, "zeros", ScalarType::Char, num_scales);
    args.zeros = static_cast<const int8_t*>(scaling.zeros->const_data_ptr());
  }
}

// [ids, k]: rows of a packed weight, of its type, or scaled and of `out_type`. ids int64 [ids].
Tensor embed(const Tensor& packed, int64_t type_number, int64_t n, int64_t k, const Tensor& ids, int64_t out_type,
             const std::optional<Tensor>& scales, int64_t group, const std::optional<Tensor>& zeros, const std::optional<Tensor>& factors) {
  LinearArgs args{};
  args.weight_type = weight_type(type_number), args.x_type = weight_type(out_type);
  args.n = n, args.k = k;
  STD_TORCH_CHECK(is_float(args.x_type), "rows are float32, bfloat16 or float16");
  const bool whole = is_float(args.weight_type);
  STD_TORCH_CHECK(!whole || args.weight_type == args.x_type, "rows of floats have the type of the weight");
  set_weight(args, packed, {scales, zeros, factors, group});
  const int64_t count = ids.numel();
  check_dense(ids, "ids", ScalarType::Long, count);
  const auto* rows = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(0 <= rows[i] && rows[i] < n, "index ", rows[i], " is out of range: ", n, " rows");
  }
  Tensor values = torch::stable::new_empty(packed, {count, k}, scalar_type(args.x_type));
  args.out = values.mutable_data_ptr();
  args.threads = threads();
  if (whole) {
    kernels()->linear.unpack_rows(args.weight, args.weight_type, k, rows, count, args.out, args.threads);
  } else {
    kernels()->linear.scaled_rows(args, rows, count);
  }
  return values;
}

// The most bytes that `linear` takes for copies of its rows, whatever their layout and the weight's type.
int64_t most_scratch_bytes(int64_t x_type, int64_t rows, int64_t k) {
  check_sizes(rows, k);
  const float scale = 1;
  LinearArgs args{};
  args.x_type = weight_type(x_type);
  args.weight_type = Type::int4, args.group = kMinimumGroup;  // of no type is a row's copy larger
  args.scale_type = ScaleType::six_bits;
  args.rows = rows, args.k = args.x_stride = k;
  args.in_scales = &scale;  // rows that are scaled are always copied
  return kernels()->linear.scratch_bytes(args);
}

// x [rows, k] -> [rows, n]
Tensor linear(const Tensor& x, const Tensor& packed, int64_t type_number, int64_t n, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& scales, int64_t group, const std::optional<Tensor>& in_scales, bool rows_in_int8,
              const std::optional<Tensor>& zeros, const std::optional<Tensor>& factors) {
  check_dense_rows(x, "x");
  STD_TORCH_CHECK(x.dim() == 2, "x has two dimensions, rows and features");
  const int64_t rows = x.size(0), k = x.size(1);
  const ProductWeight weight = {packed, bias, scales, in_scales, zeros, factors, type_number, n, group, rows_in_int8};
  LinearArgs args = product_args(type_of(x, "x"), rows, k, weight);
  args.x_stride = rows > 1 ? x.stride(0) : k;
  Tensor out = torch::stable::new_empty(x, {rows, n});
  if (rows == 0 || n == 0) return out;
  args.x = x.const_data_ptr();
  args.out = out.mutable_data_ptr();
  Tensor scratch = empty_bytes(x, kernels()->linear.scratch_bytes(args));
  args.scratch = scratch.mutable_data_ptr();
  kernels()->linear.multiply(args);
  return out;
}

}  // namespace

LinearArgs product_args(Type x_type, int64_t rows, int64_t k, const ProductWeight& weight) {
  LinearArgs args{};
  args.weight_type = weight_type(weight.type), args.x_type = x_type;
  args.rows = rows, args.k = args.x_stride = k, args.n = args.out_stride = weight.n;
  STD_TORCH_CHECK(args.weight_type == x_type || !is_float(args.weight_type), "x and weight differ in type");
  set_weight(args, weight.packed, {weight.scales, weight.zeros, weight.factors, weight.group});
  const bool in_groups = weight.group >= 16 && (args.weight_type == Type::int8 || args.weight_type == Type::int4 || args.weight_type == Type::fp4);
  const bool in_rows = args.weight_type == Type::int8 && k <= 65536 && weight.group == 0 && !weight.zeros;
  STD_TORCH_CHECK(!weight.rows_in_int8 || in_groups || in_rows,
                  "rows are quantised for int8 weights of at most 65536 columns with a scale each and no zero point, and for int8, "
                  "int4 and fp4 weights with groups of 16 and more");
  args.rows_in_int8 = weight.rows_in_int8;
  if (weight.bias) {
    check_dense(*weight.bias, "bias", scalar_type(x_type), weight.n);
    args.bias = weight.bias->const_data_ptr();
  }
  if (weight.in_scales) {
    check_dense(*weight.in_scales, "in_scales", ScalarType::Float, k);
    args.in_scales = static_cast<const float*>(weight.in_scales->const_data_ptr());
  }
  args.threads = threads();
  return args;
}

}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def("pack_weight(Tensor weight, int type) -> Tensor");
  m.def("pack_weight_into(Tensor weight, int type, Tensor(a!) packed) -> ()");
  m.def("packed_bytes(int type, int n, int k) -> int");
  m.def("pack_blocks(Tensor blocks, int kind) -> Tensor");
  m.def("unpack_row(Tensor packed, int type, int n, int k, int row) -> Tensor");
  m.def("embed(Tensor packed, int type, int n, int k, Tensor ids, int out_type, Tensor? scales=None, int group=0, "
        "Tensor? zeros=None, Tensor? factors=None) -> Tensor");
  m.def("most_scratch_bytes(int x_type, int rows, int k) -> int");
  m.def(
      "linear(Tensor x, Tensor packed, int type, int n, Tensor? bias, Tensor? scales, int group, Tensor? in_scales, "
      "bool rows_in_int8, Tensor? zeros=None, Tensor? factors=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) {
  m.impl("pack_weight", TORCH_BOX(&pagetide::pack_weight));
  m.impl("pack_weight_into", TORCH_BOX(&pagetide::pack_weight_into));
  m.impl("pack_blocks", TORCH_BOX(&pagetide::pack_blocks));
  m.impl("unpack_row", TORCH_BOX(&pagetide::unpack_row));
  m.impl("embed", TORCH_BOX(&pagetide::embed));
  m.impl("linear", TORCH_BOX(&pagetide::linear));
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CompositeExplicitAutograd, m) {
  m.impl("packed_bytes", TORCH_BOX(&pagetide::packed_bytes));
  m.impl("most_scratch_bytes", TORCH_BOX(&pagetide::most_scratch_bytes));
}

// torch.ops.pagetide.*: products with packed weights.
#include "ops.h"

namespace pagetide {
namespace {

Type weight_type(int64_t type) {
  STD_TORCH_CHECK(0 <= type && type <= static_cast<int64_t>(Type::fp4), "unknown type of weights ", type);
  return static_cast<Type>(type);
}

bool is_float(Type type) { return type <= Type::float16; }

ScaleType scale_type(const Tensor& scales) {
  switch (scales.scalar_type()) {
    case ScalarType::Float: return ScaleType::float32;
    case ScalarType::BFloat16: return ScaleType::bfloat16;
    case ScalarType::Half: return ScaleType::float16;
    case ScalarType::Byte: return ScaleType::exponents;
    default: STD_TORCH_CHECK(false, "scales are float32, bfloat16, float16, or uint8 exponents");
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

// weight [n, k] -> bytes. Weights of another type of floats are converted; those of less than 16 bits come as int8.
Tensor pack_weight(const Tensor& weight, int64_t type_number) {
  const Type type = weight_type(type_number);
  const bool floats = is_float(type);
  const Type from = floats ? type_of(weight, "weight") : Type::int8;
  STD_TORCH_CHECK(weight.dim() == 2, "a weight has two dimensions");
  const int64_t n = weight.size(0), k = weight.size(1);
  check_dense(weight, "weight", floats ? weight.scalar_type() : ScalarType::Char, n * k);
  Tensor packed = empty_bytes(weight, kernels()->linear.packed_bytes(type, n, k));
  if (n == 0 || k == 0) return packed;  // perhaps there is no memory
  kernels()->linear.pack(weight.const_data_ptr(), from, type, n, k, packed.mutable_data_ptr(), threads());
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

// [ids, k]: rows of a packed weight of floats. ids int64 [ids].
Tensor embed(const Tensor& packed, int64_t type_number, int64_t n, int64_t k, const Tensor& ids) {
  const Type type = weight_type(type_number);
  const ScalarType types[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
  STD_TORCH_CHECK(is_float(type), "rows of integers have no scales here");
  check_packed(packed, type, n, k);
  const int64_t count = ids.numel();
  check_dense(ids, "ids", ScalarType::Long, count);
  const auto* rows = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(0 <= rows[i] && rows[i] < n, "index ", rows[i], " is out of range: ", n, " rows");
  }
  Tensor values = torch::stable::new_empty(packed, {count, k}, types[type_number]);
  kernels()->linear.unpack_rows(packed.const_data_ptr(), type, k, rows, count, values.mutable_data_ptr(), threads());
  return values;
}

// The most bytes that `linear` takes for copies of its rows, whatever their layout and the weight's type.
int64_t most_scratch_bytes(int64_t x_type, int64_t rows, int64_t k) {
  check_sizes(rows, k);
  const float scale = 1;
  LinearArgs args{};
  args.x_type = weight_type(x_type);
  args.weight_type = Type::int4, args.group = 64;  // of no type is a row's copy larger
  args.rows = rows, args.k = args.x_stride = k;
  args.in_scales = &scale;  // rows that are scaled are always copied
  return kernels()->linear.scratch_bytes(args);
}

// x [rows, k] -> [rows, n]
Tensor linear(const Tensor& x, const Tensor& packed, int64_t type_number, int64_t n, const std::optional<Tensor>& bias,
              const std::optional<Tensor>& scales, int64_t group, const std::optional<Tensor>& in_scales, bool rows_in_int8,
              const std::optional<Tensor>& zeros) {
  LinearArgs args{};
  args.weight_type = weight_type(type_number);
  args.x_type = type_of(x, "x");
  check_dense_rows(x, "x");
  STD_TORCH_CHECK(x.dim() == 2, "x has two dimensions, rows and features");
  args.rows = x.size(0), args.k = x.size(1), args.n = n;
  args.x_stride = args.rows > 1 ? x.stride(0) : args.k;
  const bool whole = args.weight_type == args.x_type;
  STD_TORCH_CHECK(whole || !is_float(args.weight_type), "x and weight differ in type");
  check_packed(packed, args.weight_type, n, args.k);
  STD_TORCH_CHECK(args.k > 0, "x has no features");
  args.group = group;
  const bool power = group >= 8 && group <= 256 && (group & (group - 1)) == 0;
  STD_TORCH_CHECK(group == 0 || (power && !whole), "group must be 0 or a power of 2 from 8 to 256, got ", group);
  STD_TORCH_CHECK(!rows_in_int8 || (args.weight_type == Type::int8 && args.k <= 65536 && group == 0 && !zeros),
                  "rows are quantised for int8 weights of at most 65536 columns, with a scale each");
  args.rows_in_int8 = rows_in_int8;
  if (bias) {
    check_dense(*bias, "bias", x.scalar_type(), n);
    args.bias = bias->const_data_ptr();
  }
  STD_TORCH_CHECK(whole != scales.has_value(), "weights of less than 16 bits have scales, and others none");
  const int64_t num_scales = (group ? (args.k + group - 1) / group : 1) * n;
  if (scales) {
    args.scale_type = scale_type(*scales);
    check_dense(*scales, "scales", scales->scalar_type(), num_scales);
    args.scales = scales->const_data_ptr();
  }
  if (zeros) {
    STD_TORCH_CHECK(args.weight_type == Type::int8 || args.weight_type == Type::int4, "integers alone have zero points");
    check_dense(*zeros, "zeros", ScalarType::Char, num_scales);
    args.zeros = static_cast<const int8_t*>(zeros->const_data_ptr());
  }
  if (in_scales) {
    check_dense(*in_scales, "in_scales", ScalarType::Float, args.k);
    args.in_scales = static_cast<const float*>(in_scales->const_data_ptr());
  }
  Tensor out = torch::stable::new_empty(x, {args.rows, n});
  if (args.rows == 0 || n == 0) return out;
  args.x = x.const_data_ptr();
  args.weight = packed.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.out_stride = n;
  args.threads = threads();
  Tensor scratch = empty_bytes(x, kernels()->linear.scratch_bytes(args));
  args.scratch = scratch.mutable_data_ptr();
  kernels()->linear.multiply(args);
  return out;
}

}  // namespace
}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def("pack_weight(Tensor weight, int type) -> Tensor");
  m.def("unpack_row(Tensor packed, int type, int n, int k, int row) -> Tensor");
  m.def("embed(Tensor packed, int type, int n, int k, Tensor ids) -> Tensor");
  m.def("most_scratch_bytes(int x_type, int rows, int k) -> int");
  m.def(
      "linear(Tensor x, Tensor packed, int type, int n, Tensor? bias, Tensor? scales, int group, Tensor? in_scales, "
      "bool rows_in_int8, Tensor? zeros=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) {
  m.impl("pack_weight", TORCH_BOX(&pagetide::pack_weight));
  m.impl("unpack_row", TORCH_BOX(&pagetide::unpack_row));
  m.impl("embed", TORCH_BOX(&pagetide::embed));
  m.impl("linear", TORCH_BOX(&pagetide::linear));
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CompositeExplicitAutograd, m) {
  m.impl("most_scratch_bytes", TORCH_BOX(&pagetide::most_scratch_bytes));
}

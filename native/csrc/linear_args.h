// Products of rows with packed weights: out[r, n] = sum over k of x[r, k] * weight[n, k], plus bias[n].

struct LinearArgs {
  const void* x;  // [rows, k] of x_type, rows `x_stride` elements apart
  Type x_type;    // float32, bfloat16 or float16, also of bias and out
  int64_t rows, x_stride;
  const void* weight;  // as `pack` wrote it
  Type weight_type;    // x_type, int8 or int4
  int64_t n, k;
  const float* scales;    // int8: [n]; int4: [ceil(k / group), n]; else null
  int64_t group;          // int4: the rows of a scale, a multiple of 8
  const float* in_scales; // [k] factors of x, or null
  bool rows_in_int8;      // int8: quantise each row of x, symmetrically
  const void* bias;       // [n] of x_type, or null
  void* out;              // [rows, n], rows `out_stride` elements apart
  int64_t out_stride;
  void* scratch;          // `scratch_bytes(args)` bytes, aligned to 64
  int threads;
};

struct LinearKernels {
  int64_t panel_columns;  // outputs with weights that lie together
  int64_t (*packed_bytes)(Type type, int64_t n, int64_t k);
  // weight [n, k], contiguous: floats of type `from`, which are converted to `type` as torch does it, or int8 values for int8
  // (-127 .. 127) and int4 (-8 .. 7). `packed` is aligned to 64.
  void (*pack)(const void* weight, Type from, Type type, int64_t n, int64_t k, void* packed, int threads);
  // The inverse, one weight row: float32 values, without scales.
  void (*unpack)(const void* packed, Type type, int64_t n, int64_t k, int64_t row, float* values);
  // Weight rows as they were packed, [count, k] of `type`, a type of floats.
  void (*unpack_rows)(const void* packed, Type type, int64_t k, const int64_t* rows, int64_t count, void* values, int threads);
  int64_t (*scratch_bytes)(const LinearArgs& args);
  void (*multiply)(const LinearArgs& args);
};

// Products of rows with packed weights: out[r, n] = sum over k of x[r, k] * weight[n, k], plus bias[n].

// exponents: bytes e that stand for 2^(e - 127). The others are multiplied by a factor for each kSuperGroup weights: int8, or six
// bits as GGUF has them in Q4_K and Q5_K, of a scale and of a minimum that is subtracted. minimums: float16 scales, and a float16
// minimum for each (Q4_1, Q5_1). With minimums, int4 counts from 0 to 15.
enum class ScaleType : int { float32, bfloat16, float16, exponents, int8, six_bits, minimums };
constexpr int64_t kSuperGroup = 256;   // weights of a factor
constexpr int64_t kMinimumGroup = 32;  // weights of a minimum
constexpr int64_t kSixBitBytes = 12;   // of the scales and minimums of kSuperGroup weights

// Blocks of weights and their scales in GGUF files, by its numbers: engine/loading/gguf/weights.py has their layouts.
enum class Block : int { q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q4_k = 12, q5_k = 13, q6_k = 14, mxfp4 = 39 };

constexpr int64_t block_weights(Block kind) { return kind >= Block::q4_k && kind <= Block::q6_k ? kSuperGroup : 32; }

// 0 of a number that is no block's.
constexpr int64_t block_bytes(Block kind) {
  switch (kind) {
    case Block::q4_0: return 18;
    case Block::q4_1: return 20;
    case Block::q5_0: return 22;
    case Block::q5_1: return 24;
    case Block::q8_0: return 34;
    case Block::q4_k: return 144;
    case Block::q5_k: return 176;
    case Block::q6_k: return 210;
    case Block::mxfp4: return 17;
  }
  return 0;
}

// The type that weights in blocks are packed as.
constexpr Type block_type(Block kind) {
  if (kind == Block::mxfp4) return Type::fp4;
  return kind == Block::q4_0 || kind == Block::q4_1 || kind == Block::q4_k ? Type::int4 : Type::int8;
}

struct LinearArgs {
  const void* x;  // [rows, k] of x_type, rows `x_stride` elements apart
  Type x_type;    // float32, bfloat16 or float16, also of bias and out
  int64_t rows, x_stride;
  const void* weight;  // as `pack` wrote it
  Type weight_type;    // x_type, or one of less than 16 bits, which has scales
  int64_t n, k;
  const void* scales;     // [ceil(k / group), n], or [n] if group is 0; null for weights of x_type. six_bits: bytes
                          // [k / kSuperGroup * kSixBitBytes, n]
  const void* factors;    // float16 [ceil(k / kSuperGroup), n] of int8 scales; six_bits: two rows each, of scales and minimums;
                          // minimums: these, as scales
  ScaleType scale_type;
  int64_t group;          // weights of a scale, a power of 2 from 8 to 256; 0: all of a column
  const int8_t* zeros;    // int8 and int4: what is subtracted from values, with the sizes of scales; or null
  const float* in_scales; // [k] factors of x, or null
  bool rows_in_int8;      // quantise x symmetrically: each row for int8 with group 0 and no zeros, and each group of a row for
                          // int8, int4 and fp4 with groups of 16 and more
  const void* bias;       // [n] of x_type, or null
  void* out;              // [rows, n], rows `out_stride` elements apart
  int64_t out_stride;
  void* scratch;          // `scratch_bytes(args)` bytes, aligned to 64
  int threads;
};

inline bool has_minimums(const LinearArgs& args) { return args.scale_type >= ScaleType::six_bits; }

struct LinearKernels {
  int64_t panel_columns;  // outputs with weights that lie together
  int64_t (*packed_bytes)(Type type, int64_t n, int64_t k);
  // weight [n, k], contiguous: floats of type `from`, which are converted to `type` as torch does it, or int8 values for int8
  // (-128 .. 127) and int4 (-8 .. 7), the bits of fp8, or those of fp4 less 8. `packed` is aligned to 64.
  void (*pack)(const void* weight, Type from, Type type, int64_t n, int64_t k, void* packed, int threads);
  // The values of weights [n, k] in blocks, one behind the other along k, without their scales: as `pack` of these values.
  void (*pack_blocks)(const void* blocks, Block kind, int64_t n, int64_t k, void* packed, int threads);
  // The inverse, one weight row: float32 values, without scales.
  void (*unpack)(const void* packed, Type type, int64_t n, int64_t k, int64_t row, float* values);
  // Weight rows as they were packed, [count, k] of `type`, a type of floats.
  void (*unpack_rows)(const void* packed, Type type, int64_t k, const int64_t* rows, int64_t count, void* values, int threads);
  // Weight rows with their scales, [count, k] of args.x_type, of weights of less than 16 bits. Reads only the weight of `args`.
  void (*scaled_rows)(const LinearArgs& args, const int64_t* rows, int64_t count);
  int64_t (*scratch_bytes)(const LinearArgs& args);
  void (*multiply)(const LinearArgs& args);
};

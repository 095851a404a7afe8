// Products with packed weights. Weights lie in panels of kColumns columns of the product (rows of the weight), so that a product
// reads them once, in order. A panel's elements follow each other as the inner loop takes them:
//
//     float32, float16   [k][kColumns]
//     bfloat16           [k / 2][kColumns][2] where the processor multiplies pairs of bfloat16, else [k][kColumns]
//     int8               int32 [kColumns], kShift times the sums of the columns; then [k / 4][kColumns][4]
//     int4               [k / 8][kColumns][4] bytes, with weights k .. k + 3 in the low halves and k + 4 .. k + 7 in the high
//                        ones, each plus 8
//     fp8, fp4           as int8 and int4: the bits of e4m3 and e2m1
//
// Zeros follow up to a multiple of what the processor takes at once. An output is the sum of the sums over blocks of kBlock of k,
// in order; within a block, k by k. Tiles of AMX go on with the sums of the blocks before. Either depends on neither the number
// of rows nor that of threads. What the inner loop cannot read as it is, is converted block by block first.
namespace linear {

constexpr int kVectors = 2;  // of a panel's row
constexpr int kColumns = kVectors * kLanes;
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kRows = 6;  // of a tile: its sums stay in registers
#else
constexpr int kRows = 12;
#endif
constexpr int64_t kBlock = 256;
constexpr int64_t kItemRows = 96;         // of x in an item, at most
constexpr int64_t kItemTileRows = 256;    // the same where tiles multiply
constexpr int64_t kItemPanels = 4;        // of an item with many rows, which lie in a cache meanwhile
constexpr int64_t kManyRows = 4 * kRows;
constexpr int kFewRows = 3;               // that are multiplied with several panels at once
constexpr int kWidenedRows = 2 * kRows;   // with more, weights of 16 bits are widened once for all tiles
constexpr int64_t kItemsPerThread = 8;    // at least, with fewer rows

#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif
#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool kQuads = true;  // products of four int8 with weights of eight or four bits
#else
constexpr bool kQuads = false;
#endif

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
constexpr bool kTiles = true;  // the processor multiplies tiles of 16 rows of 64 bytes
constexpr int kShift = 0;      // of x, to be multiplied as bytes without a sign
#else
constexpr bool kTiles = false;
#if defined(__AVX512VNNI__)
constexpr int kShift = 128;
#else
constexpr int kShift = 0;
#endif
#endif
constexpr int kTileRows = 16;
constexpr int kTileBytes = 64;  // of a tile's row
constexpr int64_t kTotals = (kTiles ? kItemTileRows : kItemRows) * kColumns;  // of a panel in an item

// What the inner loop multiplies. quads: int8 with weights of eight bits; groups: int8, each group of a row with a scale of its
// own, with groups of weights; words: pairs of int16, for attention alone.
enum class Operand { float32, pairs, quads, groups, words };

// That few rows are multiplied with: as many sums as registers take.
constexpr int panels_at_once(int64_t rows) { return rows == 1 ? 4 : 2; }

INLINE int64_t rounded_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE int64_t operand_bytes(Operand operand) {
  return operand == Operand::float32 ? 4 : operand == Operand::quads || operand == Operand::groups ? 1 : 2;
}

constexpr Type layout_of(Type type) { return type == Type::fp8 ? Type::int8 : type == Type::fp4 ? Type::int4 : type; }

INLINE int64_t panel_bytes(Type type, int64_t k) {
  switch (layout_of(type)) {
    case Type::float32: return k * kColumns * 4;
    case Type::bfloat16: return rounded_up(k, kTiles ? 32 : kPairs ? 2 : 1) * kColumns * 2;
    case Type::float16: return k * kColumns * 2;
    case Type::int8: return kColumns * 4 + rounded_up(k, kTiles ? 64 : 4) * kColumns;
    case Type::int4: return rounded_up(k, kTiles ? 64 : 8) / 2 * kColumns;
    default: return 0;
  }
}

INLINE int64_t panel_stride(Type type, int64_t k) { return rounded_up(panel_bytes(type, k), 64); }

INLINE int64_t packed_bytes(Type type, int64_t n, int64_t k) {
  return rounded_up(n, kColumns) / kColumns * panel_stride(type, k);
}

// Where weight k of column c of a panel is, in elements (int4: in halves of bytes).
INLINE int64_t place(Type type, int64_t k, int64_t c) {
  switch (layout_of(type)) {
    case Type::bfloat16:
      if (kPairs) return (k / 2 * kColumns + c) * 2 + k % 2;
      break;
    case Type::int8: return kColumns * 4 + (k / 4 * kColumns + c) * 4 + k % 4;
    case Type::int4: return ((k / 8 * kColumns + c) * 4 + k % 4) * 2 + k / 4 % 2;
    default: break;
  }
  return k * kColumns + c;
}

// How many weights of a column follow each other in a panel, from each multiple of this on.
constexpr int64_t run_of(Type type) {
  return type == Type::int4 ? 8 : type == Type::int8 ? 4 : type == Type::bfloat16 && kPairs ? 2 : 1;
}

// Of subnormal numbers too, which the vectors' conversion to bfloat16 may take for zeros.
template <typename To, typename From>
INLINE To converted(From value) {
  if constexpr (std::is_same_v<To, From>) {
    return value;
  } else {
    return from_float(To{}, to_float(value));
  }
}

// A run of weights at its place.
template <Type type, typename T>
INLINE void store_run(const T* values, uint8_t* panel, int64_t to) {
  if constexpr (type == Type::int4) {
    uint32_t halves[2];
    __builtin_memcpy(halves, values, sizeof halves);
    for (uint32_t& four : halves) four = (four ^ 0x08080808) & 0x0f0f0f0f;  // plus 8, byte by byte
    const uint32_t both = halves[0] | halves[1] << 4;
    __builtin_memcpy(panel + to / 2, &both, sizeof both);
  } else {
    __builtin_memcpy(panel + to * static_cast<int64_t>(sizeof(T)), values, run_of(type) * sizeof(T));
  }
}

// Blocks of kBlock of k, so that the lines of the panel which a column writes are in a cache for the next one. `read(row, k0,
// count, values)` writes some weights of a row.
template <Type type, typename To, typename Read>
static void pack_panel(const Read& read, int64_t n, int64_t k, int64_t first, uint8_t* panel) {
  constexpr int64_t run = run_of(type);
  if (k % kBlock != 0 || first + kColumns > n) __builtin_memset(panel, type == Type::int4 ? 0x88 : 0, panel_stride(type, k));
  int32_t totals[kColumns] = {};
  for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
    const int64_t count = k0 + kBlock < k ? kBlock : k - k0;
    for (int64_t c = 0; c < kColumns && first + c < n; ++c) {
      To values[kBlock];
      read(first + c, k0, count, values);
      for (int64_t i = count; i < rounded_up(count, run); ++i) values[i] = To{};
      for (int64_t i = 0; i < count; i += run) store_run<type>(values + i, panel, place(type, k0 + i, c));
      if constexpr (type == Type::int8) {
        for (int64_t i = 0; i < count; ++i) totals[c] += values[i];
      }
    }
  }
  if constexpr (type == Type::int8) {
    for (int64_t c = 0; c < kColumns; ++c) static_cast<int32_t*>(static_cast<void*>(panel))[c] = totals[c] * kShift;
  }
}

template <Type type, typename To, typename Read>
static void pack_panels_of(const Read& read, int64_t n, int64_t k, void* packed, int threads) {
  const int64_t bytes = panel_stride(type, k);
  for_items(rounded_up(n, kColumns) / kColumns, threads, [=](int64_t p) {
    pack_panel<type, To>(read, n, k, p * kColumns, static_cast<uint8_t*>(packed) + p * bytes);
  });
}

template <Type type, typename From, typename To>
static void pack_panels(const void* weight, int64_t n, int64_t k, void* packed, int threads) {
  const auto read = [=](int64_t row, int64_t k0, int64_t count, To* values) {
    const From* from = static_cast<const From*>(weight) + row * k + k0;
    for (int64_t i = 0; i < count; ++i) values[i] = converted<To>(from[i]);
  };
  pack_panels_of<type, To>(read, n, k, packed, threads);
}

template <Type type, typename To>
static void pack_floats(const void* weight, Type from, int64_t n, int64_t k, void* packed, int threads) {
  switch (from) {
    case Type::float32: return pack_panels<type, float, To>(weight, n, k, packed, threads);
    case Type::bfloat16: return pack_panels<type, BFloat16, To>(weight, n, k, packed, threads);
    default: return pack_panels<type, Float16, To>(weight, n, k, packed, threads);
  }
}

static void pack(const void* weight, Type from, Type type, int64_t n, int64_t k, void* packed, int threads) {
  switch (type) {
    case Type::float32: return pack_floats<Type::float32, float>(weight, from, n, k, packed, threads);
    case Type::bfloat16: return pack_floats<Type::bfloat16, BFloat16>(weight, from, n, k, packed, threads);
    case Type::float16: return pack_floats<Type::float16, Float16>(weight, from, n, k, packed, threads);
    case Type::int8:
    case Type::fp8: return pack_panels<Type::int8, int8_t, int8_t>(weight, n, k, packed, threads);
    case Type::int4:
    case Type::fp4: return pack_panels<Type::int4, int8_t, int8_t>(weight, n, k, packed, threads);
  }
}

// The values of a block, as `pack` takes them.
template <Block kind>
INLINE void decode_block(const uint8_t* block, int8_t* values) {
  constexpr int kLess = block_type(kind) != Type::int8 ? 8 : kind == Block::q5_0 ? 16 : kind == Block::q6_k ? 32 : 0;
  const auto value = [](int code) { return static_cast<int8_t>(code - kLess); };
  if constexpr (kind == Block::q8_0) {
    __builtin_memcpy(values, block + 2, 32);
  } else if constexpr (kind == Block::q6_k) {
    for (int64_t half = 0; half < 2; ++half, values += 128) {
      const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
      for (int i = 0; i < 32; ++i) {
        values[i] = value((low[i] & 15) | (high[i] & 3) << 4);
        values[i + 32] = value((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
        values[i + 64] = value(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
        values[i + 96] = value(low[i + 32] >> 4 | high[i] >> 6 << 4);
      }
    }
  } else if constexpr (block_weights(kind) == kSuperGroup) {
    const uint8_t* bytes = block + block_bytes(kind) - 128;
    for (int part = 0; part < 4; ++part, bytes += 32, values += 64) {
      for (int i = 0; i < 32; ++i) {
        const int fifth = kind == Block::q5_k ? block[16 + i] >> 2 * part : 0;
        values[i] = value((bytes[i] & 15) | (fifth & 1) << 4);
        values[i + 32] = value(bytes[i] >> 4 | (fifth >> 1 & 1) << 4);
      }
    }
  } else {
    const uint8_t* bytes = block + block_bytes(kind) - 16;
    uint32_t fifth = 0;
    if constexpr (block_type(kind) == Type::int8) __builtin_memcpy(&fifth, bytes - 4, sizeof fifth);
    for (int i = 0; i < 16; ++i) {
      values[i] = value((bytes[i] & 15) | static_cast<int>(fifth >> i & 1) << 4);
      values[i + 16] = value(bytes[i] >> 4 | static_cast<int>(fifth >> (i + 16) & 1) << 4);
    }
  }
}

template <Block kind>
static void pack_blocks_of(const void* blocks, int64_t n, int64_t k, void* packed, int threads) {
  constexpr int64_t each = block_weights(kind), bytes = block_bytes(kind);
  const auto read = [=](int64_t row, int64_t k0, int64_t count, int8_t* values) {
    const uint8_t* from = static_cast<const uint8_t*>(blocks) + (row * k + k0) / each * bytes;
    for (int64_t i = 0; i < count; i += each, from += bytes) decode_block<kind>(from, values + i);
  };
  pack_panels_of<layout_of(block_type(kind)), int8_t>(read, n, k, packed, threads);
}

static void pack_blocks(const void* blocks, Block kind, int64_t n, int64_t k, void* packed, int threads) {
  switch (kind) {
    case Block::q4_0: return pack_blocks_of<Block::q4_0>(blocks, n, k, packed, threads);
    case Block::q4_1: return pack_blocks_of<Block::q4_1>(blocks, n, k, packed, threads);
    case Block::q5_0: return pack_blocks_of<Block::q5_0>(blocks, n, k, packed, threads);
    case Block::q5_1: return pack_blocks_of<Block::q5_1>(blocks, n, k, packed, threads);
    case Block::q8_0: return pack_blocks_of<Block::q8_0>(blocks, n, k, packed, threads);
    case Block::q4_k: return pack_blocks_of<Block::q4_k>(blocks, n, k, packed, threads);
    case Block::q5_k: return pack_blocks_of<Block::q5_k>(blocks, n, k, packed, threads);
    case Block::q6_k: return pack_blocks_of<Block::q6_k>(blocks, n, k, packed, threads);
    case Block::mxfp4: return pack_blocks_of<Block::mxfp4>(blocks, n, k, packed, threads);
  }
}

// The values of floats of kExponent and kMantissa bits, in the low bits of integers with others above them.
template <int kExponent, int kMantissa>
INLINE Vec small_floats(IntVec codes) {
  constexpr int kBias = (1 << (kExponent - 1)) - 1, kShiftUp = 23 - kMantissa, kSign = 31 - kExponent - kMantissa;
  const IntVec size = codes & ((1 << (kExponent + kMantissa)) - 1);
  const Vec normal = bits<Vec>((size << kShiftUp) + ((127 - kBias) << 23));
  // Subnormal numbers, without the use of float32's: (1 + mantissa) * least - least.
  constexpr int kLeast = (128 - kBias) << 23;
  const Vec subnormal = bits<Vec>((size << kShiftUp) + kLeast) - bits<Vec>(IntVec{} + kLeast);
  const Vec value = select(size < (1 << kMantissa), subnormal, normal);
  return bits<Vec>(bits<IntVec>(value) | ((codes << kSign) & static_cast<int32_t>(0x80000000)));
}

INLINE Vec fp8_values(IntVec codes) { return small_floats<4, 3>(codes); }
INLINE Vec fp4_values(IntVec codes) { return small_floats<2, 1>(codes); }

// Weights begin .. end of a row.
static void unpack_part(const void* packed, Type type, int64_t k, int64_t row, int64_t begin, int64_t end, float* values) {
  const auto* panel = static_cast<const uint8_t*>(packed) + row / kColumns * panel_stride(type, k);
  for (int64_t i = begin; i < end; ++i, ++values) {
    const int64_t from = place(type, i, row % kColumns);
    switch (type) {
      case Type::float32: *values = static_cast<const float*>(static_cast<const void*>(panel))[from]; break;
      case Type::bfloat16: *values = to_float(static_cast<const BFloat16*>(static_cast<const void*>(panel))[from]); break;
      case Type::float16: *values = to_float(static_cast<const Float16*>(static_cast<const void*>(panel))[from]); break;
      case Type::int8: *values = static_cast<float>(static_cast<int8_t>(panel[from])); break;
      case Type::int4: *values = static_cast<float>((from % 2 ? panel[from / 2] >> 4 : panel[from / 2] & 15) - 8); break;
      case Type::fp8: *values = fp8_values(IntVec{} + panel[from])[0]; break;
      case Type::fp4: *values = fp4_values(IntVec{} + (from % 2 ? panel[from / 2] >> 4 : panel[from / 2]))[0]; break;
    }
  }
}

static void unpack(const void* packed, Type type, int64_t, int64_t k, int64_t row, float* values) {
  unpack_part(packed, type, k, row, 0, k, values);
}

template <Type type, typename T>
static void copy_rows(const void* packed, int64_t k, const int64_t* rows, int64_t count, T* values, int threads) {
  for_items(count, threads, [=](int64_t item) {
    const auto* panel = static_cast<const uint8_t*>(packed) + rows[item] / kColumns * panel_stride(type, k);
    T* to = values + item * k;
    constexpr int64_t run = run_of(type), bytes = sizeof(T);
    for (int64_t i = 0; i < k; i += run) {
      const uint8_t* from = panel + place(type, i, rows[item] % kColumns) * bytes;
      __builtin_memcpy(to + i, from, (i + run <= k ? run : k - i) * bytes);
    }
  });
}

static void unpack_rows(const void* packed, Type type, int64_t k, const int64_t* rows, int64_t count, void* values,
                        int threads) {
  switch (type) {
    case Type::float32: return copy_rows<Type::float32>(packed, k, rows, count, static_cast<float*>(values), threads);
    case Type::bfloat16: return copy_rows<Type::bfloat16>(packed, k, rows, count, static_cast<BFloat16*>(values), threads);
    default: return copy_rows<Type::float16>(packed, k, rows, count, static_cast<Float16*>(values), threads);
  }
}

// --- scales ---

// Bytes as integers, as many as lanes. GCC 12 converts such vectors element by element.
template <typename Byte>
INLINE IntVec widened(const void* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
  return bits<IntVec>(std::is_signed_v<Byte> ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(static_cast<const __m128i*>(from));
  return bits<IntVec>(std::is_signed_v<Byte> ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
  typedef Byte Bytes __attribute__((vector_size(kLanes)));
  Bytes bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, IntVec);
#endif
}

// `lanes` bytes as integers; zeros in other lanes.
template <typename Byte>
INLINE IntVec load_bytes(const void* from, int lanes) {
  if (lanes == kLanes) return widened<Byte>(from);
  uint8_t bytes[kLanes] = {};
  __builtin_memcpy(bytes, from, lanes);
  return widened<Byte>(bytes);
}

// Scales of `lanes` columns, from element `at` on; something finite in other lanes.
INLINE Vec load_scales(const LinearArgs& args, int64_t at, int lanes) {
  const auto some = [lanes](const auto* from) { return lanes == kLanes ? load(from) : load_some(from, lanes); };
  switch (args.scale_type) {
    case ScaleType::float32: return some(static_cast<const float*>(args.scales) + at);
    case ScaleType::bfloat16: return some(static_cast<const BFloat16*>(args.scales) + at);
    case ScaleType::float16:
    case ScaleType::minimums: return some(static_cast<const Float16*>(args.scales) + at);
    case ScaleType::int8: return __builtin_convertvector(load_bytes<int8_t>(static_cast<const int8_t*>(args.scales) + at, lanes), Vec);
    case ScaleType::exponents:
    case ScaleType::six_bits: break;
  }
  const IntVec wide = load_bytes<uint8_t>(static_cast<const uint8_t*>(args.scales) + at, lanes);
  return bits<Vec>(wide << 23 | ((wide == 0) & (1 << 22)));
}

// The scales of a panel's columns from `first` on, for the group of k0, if there are groups; and what is subtracted for each 1
// of x.
struct BlockScales {
  Vec of[kVectors] = {}, less[kVectors] = {};

  BlockScales(const LinearArgs& args, int64_t k0, int64_t first) {
    for (int v = 0; v < kVectors && args.group; ++v) {
      const int64_t column = first + v * kLanes, left = args.n - column;
      const int lanes = static_cast<int>(left < 0 ? 0 : left < kLanes ? left : kLanes);
      if (args.scale_type == ScaleType::six_bits) {
        set_six_bits(args, v, k0, column, lanes);
      } else {
        const int64_t at = k0 / args.group * args.n + column;
        __builtin_prefetch(static_cast<const uint8_t*>(args.scales) + (at + kAhead * args.n) * scale_bytes(args.scale_type), 0, 2);
        of[v] = load_scales(args, at, lanes);
        if (args.scale_type == ScaleType::int8) of[v] *= factors(args, k0 / kSuperGroup, column, lanes);
        if (args.scale_type == ScaleType::minimums) less[v] = factors(args, k0 / kMinimumGroup, column, lanes);
      }
    }
  }

 private:
  static constexpr int64_t kAhead = 4;  // groups: their scales lie far apart, often in few sets of a cache

  static int64_t scale_bytes(ScaleType type) {
    return type == ScaleType::float32 ? 4 : type == ScaleType::exponents || type == ScaleType::int8 ? 1 : 2;
  }

  static Vec factors(const LinearArgs& args, int64_t row, int64_t column, int lanes) {
    const Float16* from = static_cast<const Float16*>(args.factors) + row * args.n + column;
    return lanes == kLanes ? load(from) : load_some(from, lanes);
  }

  // Of eight groups the first four have the low six bits of bytes 0 to 3 as scales, and of 4 to 7 as minimums. The others have
  // the halves of bytes 8 to 11, and above them what the first ones leave.
  void set_six_bits(const LinearArgs& args, int v, int64_t k0, int64_t column, int lanes) {
    const int64_t super = k0 / kSuperGroup, group = k0 % kSuperGroup / kMinimumGroup;
    const uint8_t* rows = static_cast<const uint8_t*>(args.scales) + super * kSixBitBytes * args.n + column;
    const auto byte = [&](int64_t i) { return load_bytes<uint8_t>(rows + i * args.n, lanes); };
    __builtin_prefetch(rows + (kSixBitBytes + group) * args.n, 0, 2);
    __builtin_prefetch(group < 4 ? rows + (kSixBitBytes + group + 8) * args.n : rows, 0, 2);
    IntVec scale, minimum;
    if (group < 4) {
      scale = byte(group) & 63, minimum = byte(group + 4) & 63;
    } else {
      const IntVec both = byte(group + 4);
      scale = (both & 15) | byte(group - 4) >> 6 << 4, minimum = both >> 4 | byte(group) >> 6 << 4;
    }
    of[v] = __builtin_convertvector(scale, Vec) * factors(args, 2 * super, column, lanes);
    less[v] = __builtin_convertvector(minimum, Vec) * factors(args, 2 * super + 1, column, lanes);
  }
};

// A weight row with its scales.
template <typename T>
static void scaled_row(const LinearArgs& args, int64_t row, T* out) {
  const int64_t first = row / kColumns * kColumns, v = row % kColumns / kLanes, lane = row % kLanes;
  const int64_t step = args.group ? args.group : kBlock;
  for (int64_t k0 = 0; k0 < args.k; k0 += step) {
    float values[kBlock];
    const int64_t end = k0 + step < args.k ? k0 + step : args.k;
    unpack_part(args.weight, args.weight_type, args.k, row, k0, end, values);
    const BlockScales scales(args, k0, first);
    const float scale = args.group ? scales.of[v][lane] : load_scales(args, row, 1)[0], less = scales.less[v][lane];
    int zero = args.weight_type == Type::int4 && has_minimums(args) ? -8 : 0;
    if (args.zeros) zero = args.zeros[(args.group ? k0 / args.group * args.n : 0) + row];
    for (int64_t i = k0; i < end; ++i) out[i] = converted<T>((values[i - k0] - static_cast<float>(zero)) * scale - less);
  }
}

template <typename T>
static void write_scaled_rows(const LinearArgs& args, const int64_t* rows, int64_t count, T* out) {
  for_items(count, args.threads, [&, rows, out](int64_t item) { scaled_row(args, rows[item], out + item * args.k); });
}

static void scaled_rows(const LinearArgs& args, const int64_t* rows, int64_t count) {
  switch (args.x_type) {
    case Type::float32: return write_scaled_rows(args, rows, count, static_cast<float*>(args.out));
    case Type::bfloat16: return write_scaled_rows(args, rows, count, static_cast<BFloat16*>(args.out));
    default: return write_scaled_rows(args, rows, count, static_cast<Float16*>(args.out));
  }
}

// --- the inner loops: a tile of R rows of x times a block of a panel, added to sums[R][kColumns], or these if it is the `first` ---

// Weights come from memory while the block before them is multiplied.
template <typename T>
INLINE void prefetch_next_block(const T* here) {
  __builtin_prefetch(here + kBlock * kColumns, 0, 2);
}

// A sum of floats or integers, which are bits here.
template <typename Sum>
INLINE void add_to(float* to, bool first, Sum sum) {
  store(to, bits<Vec>(first ? sum : bits<Sum>(load(to)) + sum));
}

// Of R rows and P panels, `apart` weights from one to the next. The sums are added to totals[P][R][kColumns], or are these if
// `first`; the totals of panels are `totals_apart` from each other. Weights of 16 bits are widened in registers.
template <int R, int P, typename W>
static void tile_floats(const float* x, int64_t stride, const W* panel, int64_t apart, int64_t k, bool first, float* totals,
                        int64_t totals_apart) {
  Vec total[P][R][kVectors];
#pragma GCC unroll 12
  for (int i = 0; i < P * R * kVectors; ++i) total[i / (R * kVectors)][i / kVectors % R][i % kVectors] = Vec{};
  for (int64_t i = 0; i < k; ++i, panel += kColumns) {
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const W* from = panel + p * apart;
      Vec w[kVectors];
      for (int v = 0; v < kVectors; ++v) {
        w[v] = load(from + v * kLanes);
        if (v * kLanes * sizeof(W) % 64 == 0) prefetch_next_block(from + v * kLanes);
      }
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Vec factor = broadcast(x[r * stride + i]);
        for (int v = 0; v < kVectors; ++v) total[p][r][v] += factor * w[v];
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < P * R * kVectors; ++i) {
    float* to = totals + i / (R * kVectors) * totals_apart + i % (R * kVectors) * kLanes;
    add_to(to, first, total[i / (R * kVectors)][i / kVectors % R][i % kVectors]);
  }
}

// The same for weights of `type`.
template <int R, int P>
static void tile_of_floats(Type type, const float* x, int64_t stride, const void* panel, int64_t apart, int64_t k, bool first,
                           float* totals, int64_t totals_apart) {
  const auto add = [=](const auto* weights) { tile_floats<R, P>(x, stride, weights, apart, k, first, totals, totals_apart); };
  switch (type) {
    case Type::bfloat16: return add(static_cast<const BFloat16*>(panel));
    case Type::float16: return add(static_cast<const Float16*>(panel));
    default: return add(static_cast<const float*>(panel));
  }
}

#if defined(__AVX512BF16__)
// Rows of sums are `sum_stride` apart.
template <int R>
static void tile_pairs(const BFloat16* x, int64_t stride, const BFloat16* panel, int64_t k, bool first, float* sums,
                       int64_t sum_stride = kColumns) {
  __m512 total[R][kVectors] = {};
  for (int64_t i = 0; i < k; i += 2, panel += 2 * kColumns) {
    __m512bh w[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      w[v] = bits<__m512bh>(_mm512_loadu_si512(panel + v * 2 * kLanes));
      prefetch_next_block(panel + v * 2 * kLanes);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * stride + i, sizeof pair);
      const __m512bh factor = bits<__m512bh>(_mm512_set1_epi32(pair));
      for (int v = 0; v < kVectors; ++v) total[r][v] = _mm512_dpbf16_ps(total[r][v], w[v], factor);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) add_to(sums + r * sum_stride + v * kLanes, first, bits<Vec>(total[r][v]));
  }
}
#endif

#if defined(__AVX512VNNI__)
// Totals of the very type that the instruction adds to: GCC 12 stores others to memory each time.
INLINE IntVec add_products(IntVec total, __m512i x, __m512i w, uint8_t) {
  return bits<IntVec>(_mm512_dpbusd_epi32(bits<__m512i>(total), x, w));
}
INLINE IntVec add_products(IntVec total, __m512i x, __m512i w, int16_t) {
  return bits<IntVec>(_mm512_dpwssd_epi32(bits<__m512i>(total), x, w));
}

// Quads of uint8 and int8, or pairs of int16.
template <int R, typename X, typename W>
static void tile_integers(const X* x, int64_t stride, const W* panel, int64_t k, bool first, float* sums) {
  constexpr int kTogether = 4 / sizeof(X);
  IntVec total[R][kVectors] = {};
  for (int64_t i = 0; i < k; i += kTogether, panel += kTogether * kColumns) {
    __m512i w[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      w[v] = _mm512_loadu_si512(panel + v * kTogether * kLanes);
      prefetch_next_block(panel + v * kTogether * kLanes);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t several;
      __builtin_memcpy(&several, x + r * stride + i, sizeof several);
      const __m512i factor = _mm512_set1_epi32(several);
      for (int v = 0; v < kVectors; ++v) total[r][v] = add_products(total[r][v], factor, w[v], X{});
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) add_to(sums + r * kColumns + v * kLanes, first, total[r][v]);
  }
}
#endif

#if defined(__AVX512BW__)
typedef __m512i Bytes;
INLINE Bytes load_wide(const void* from) { return _mm512_loadu_si512(from); }
INLINE Bytes four_times(int32_t four) { return _mm512_set1_epi32(four); }
INLINE Bytes low_halves(Bytes w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
INLINE Bytes high_halves(Bytes w) { return low_halves(_mm512_srli_epi16(w, 4)); }
INLINE Bytes looked_up(const uint8_t* table, Bytes halves) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(static_cast<const void*>(table)))), halves);
}
#if defined(__AVX512VNNI__)
constexpr int kAboveZero = 128;  // what signed weights get, to be multiplied as bytes without a sign
INLINE Bytes above_zero(Bytes w) { return _mm512_xor_si512(w, _mm512_set1_epi8(-128)); }
INLINE IntVec add_bytes(IntVec total, Bytes w, Bytes x) { return add_products(total, w, x, uint8_t{}); }
INLINE IntVec add_halves(IntVec total, Bytes low, Bytes high, Bytes first, Bytes second) {
  return add_bytes(add_bytes(total, low, first), high, second);
}
#else
constexpr int kAboveZero = 0;
INLINE Bytes above_zero(Bytes w) { return w; }
INLINE IntVec pairs_added(IntVec total, Bytes pairs) { return total + bits<IntVec>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1))); }
INLINE IntVec add_bytes(IntVec total, Bytes w, Bytes x) {  // pairs of at most 2 * 128 * 127
  const Bytes signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
  return pairs_added(total, _mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_x));
}
INLINE IntVec add_halves(IntVec total, Bytes low, Bytes high, Bytes first, Bytes second) {  // at most 4 * 24 * 127
  return pairs_added(total, _mm512_add_epi16(_mm512_maddubs_epi16(low, first), _mm512_maddubs_epi16(high, second)));
}
#endif
#elif defined(__AVX2__)
typedef __m256i Bytes;
constexpr int kAboveZero = 0;
INLINE Bytes load_wide(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
INLINE Bytes four_times(int32_t four) { return _mm256_set1_epi32(four); }
INLINE Bytes above_zero(Bytes w) { return w; }
INLINE Bytes low_halves(Bytes w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
INLINE Bytes high_halves(Bytes w) { return low_halves(_mm256_srli_epi16(w, 4)); }
INLINE Bytes looked_up(const uint8_t* table, Bytes halves) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(static_cast<const __m128i*>(static_cast<const void*>(table)))), halves);
}
INLINE IntVec pairs_added(IntVec total, Bytes pairs) { return total + bits<IntVec>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }
INLINE IntVec add_bytes(IntVec total, Bytes w, Bytes x) {  // pairs of at most 2 * 128 * 127
  return pairs_added(total, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
}
INLINE IntVec add_halves(IntVec total, Bytes low, Bytes high, Bytes first, Bytes second) {  // at most 4 * 24 * 127
  return pairs_added(total, _mm256_add_epi16(_mm256_maddubs_epi16(low, first), _mm256_maddubs_epi16(high, second)));
}
#elif defined(__aarch64__)
typedef int8x16_t Bytes;
constexpr int kAboveZero = 0;
INLINE Bytes load_wide(const void* from) { return vld1q_s8(static_cast<const int8_t*>(from)); }
INLINE Bytes four_times(int32_t four) { return vreinterpretq_s8_s32(vdupq_n_s32(four)); }
INLINE Bytes above_zero(Bytes w) { return w; }
INLINE Bytes low_halves(Bytes w) { return vandq_s8(w, vdupq_n_s8(15)); }
INLINE Bytes high_halves(Bytes w) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(w), 4)); }
INLINE Bytes looked_up(const uint8_t* table, Bytes halves) {
  return vreinterpretq_s8_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s8(halves)));
}
INLINE IntVec add_bytes(IntVec total, Bytes w, Bytes x) {
#if defined(__ARM_FEATURE_DOTPROD)
  return bits<IntVec>(vdotq_s32(bits<int32x4_t>(total), w, x));
#else
  const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
  return total + bits<IntVec>(vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
INLINE IntVec add_halves(IntVec total, Bytes low, Bytes high, Bytes first, Bytes second) {
  return add_bytes(add_bytes(total, low, first), high, second);
}
#endif

#if (defined(__AVX2__) && !defined(__AVX512VNNI__)) || defined(__aarch64__)
template <int R>
static void tile_quads(const int8_t* x, int64_t stride, const int8_t* panel, int64_t k, bool first, float* sums) {
  IntVec total[R][kVectors] = {};
  for (int64_t i = 0; i < k; i += 4, panel += 4 * kColumns) {
    Bytes w[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      w[v] = load_wide(panel + v * 4 * kLanes);
      prefetch_next_block(panel + v * 4 * kLanes);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t four;
      __builtin_memcpy(&four, x + r * stride + i, sizeof four);
      for (int v = 0; v < kVectors; ++v) total[r][v] = add_bytes(total[r][v], w[v], four_times(four));
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) add_to(sums + r * kColumns + v * kLanes, first, total[r][v]);
  }
}
#endif

constexpr uint8_t kFp4Doubled[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};  // twice e2m1, plus 12

// A group of rows of int8.
struct GroupRows {
  const int8_t* x;
  int64_t stride;
  const float* numbers;  // of each row's group: its scale, and the sum of its values, scaled
  int64_t numbers_stride;
};

// A group of a panel's columns.
struct GroupWeights {
  const uint8_t* panel;
  Vec scales[kVectors], less[kVectors];  // what an integer is multiplied by, and what is subtracted for each 1 of x
};

// totals[R][kColumns] += the products of a group.
#if defined(__AVX2__) || defined(__aarch64__)
template <int R, Type kWeight>
static void add_group(const GroupRows& rows, const GroupWeights& weights, int64_t k, float* totals) {
  constexpr bool kHalves = kWeight != Type::int8;
  const uint8_t* panel = weights.panel;
  IntVec sums[R][kVectors] = {};
  for (int64_t i = 0; i < k; i += kHalves ? 8 : 4, panel += 4 * kColumns) {
    Bytes w[kVectors], high[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      w[v] = load_wide(panel + v * 4 * kLanes);
      prefetch_next_block(panel + v * 4 * kLanes);
      if constexpr (kHalves) high[v] = high_halves(w[v]), w[v] = low_halves(w[v]);
      if constexpr (kWeight == Type::fp4) high[v] = looked_up(kFp4Doubled, high[v]), w[v] = looked_up(kFp4Doubled, w[v]);
      if constexpr (!kHalves) w[v] = above_zero(w[v]);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t fours[kHalves ? 2 : 1];
      __builtin_memcpy(fours, rows.x + r * rows.stride + i, sizeof fours);
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kHalves) {
          sums[r][v] = add_halves(sums[r][v], w[v], high[v], four_times(fours[0]), four_times(fours[1]));
        } else {
          sums[r][v] = add_bytes(sums[r][v], w[v], four_times(fours[0]));
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const float scale = rows.numbers[r * rows.numbers_stride], sum = rows.numbers[r * rows.numbers_stride + 1];
    for (int v = 0; v < kVectors; ++v) {
      float* to = totals + r * kColumns + v * kLanes;
      // Two operations that can be fused in one way only, so that they round alike whatever R is.
      const Vec rest = load(to) - weights.less[v] * sum;
      store(to, rest + __builtin_convertvector(sums[r][v], Vec) * (weights.scales[v] * scale));
    }
  }
}
#else
constexpr int kAboveZero = 0;
template <int R, Type>
static void add_group(const GroupRows&, const GroupWeights&, int64_t, float*) {}
#endif

// add_group for `count` rows, at most R.
template <int R>
static void add_group_of(Type type, int count, const GroupRows& rows, const GroupWeights& weights, int64_t k, float* totals) {
  if constexpr (R > 1) {
    if (count < R) return add_group_of<R - 1>(type, count, rows, weights, k, totals);
  }
  switch (type) {
    case Type::int8: return add_group<R, Type::int8>(rows, weights, k, totals);
    case Type::int4: return add_group<R, Type::int4>(rows, weights, k, totals);
    default: return add_group<R, Type::fp4>(rows, weights, k, totals);
  }
}

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// The processor's tiles as add_tiles uses them: 0 to 3 sums, two by two; 4 and 5 rows of x; 6 and 7 weights.
class TileShapes {
 public:
  TileShapes() = default;
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;
  ~TileShapes() { _tile_release(); }

  // For `rows` rows of x, 1 to 2 * kTileRows.
  void set(int rows) {
    if (rows == rows_) return;
    rows_ = rows;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, zero[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } shapes;
    const int first = rows < kTileRows ? rows : kTileRows, second = rows > kTileRows ? rows - kTileRows : first;
    const int counts[8] = {first, first, second, second, first, second, kTileRows, kTileRows};
    for (int i = 0; i < 8; ++i) {
      shapes.row_bytes[i] = kTileBytes;
      shapes.rows[i] = static_cast<uint8_t>(counts[i]);
    }
    asm volatile("" : : "r"(&shapes) : "memory");  // the intrinsic tells the compiler of eight bytes that it reads
    _tile_loadconfig(&shapes);
  }

 private:
  int rows_ = 0;
};

// Tiles of sums += 64 bytes of each row of x times 16 rows of a panel; `both`: more than kTileRows rows.
template <Operand kOperand>
INLINE void multiply_tiles(bool both, const uint8_t* x, int64_t stride, const uint8_t* panel) {
  constexpr int kPanelBytes = kColumns * 4;
  _tile_loadd(4, x, stride);
  _tile_loadd(6, panel, kPanelBytes);
  _tile_loadd(7, panel + kTileBytes, kPanelBytes);
  if (kOperand == Operand::pairs) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  } else {
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
  }
  if (!both) return;
  _tile_loadd(5, x + kTileRows * stride, stride);
  if (kOperand == Operand::pairs) {
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  } else {
    _tile_dpbssd(2, 5, 6);
    _tile_dpbssd(3, 5, 7);
  }
}

INLINE void clear_tiles() {
  asm volatile("" ::: "memory");  // the intrinsics do not tell the compiler what they read
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

INLINE void store_tiles(bool both, float* sums, int64_t sum_bytes) {
  constexpr int kHalf = kColumns / 2;
  _tile_stored(0, sums, sum_bytes);
  _tile_stored(1, sums + kHalf, sum_bytes);
  if (!both) return;
  sums += kTileRows * sum_bytes / 4;
  _tile_stored(2, sums, sum_bytes);
  _tile_stored(3, sums + kHalf, sum_bytes);
}

// What is fetched into the second cache while tiles multiply: `bytes` bytes with each 64 bytes of the rows of x.
struct Fetch {
  const uint8_t* from = nullptr;
  int64_t bytes = 0;
};

// sums[rows][kColumns] += x[rows] times a panel's block of `row_bytes` bytes per row of x; sums begin with 0 if `first`. Rows of
// sums are `sum_bytes` apart.
template <Operand kOperand>
static void add_tiles(int rows, const uint8_t* x, int64_t stride, const uint8_t* panel, int64_t row_bytes, bool first, float* sums,
                      int64_t sum_bytes = kColumns * 4, Fetch fetch = {}) {
  constexpr int kPanelBytes = kColumns * 4, kHalf = kColumns / 2;
  const bool both = rows > kTileRows;
  clear_tiles();
  if (!first) {
    float* more = sums + kTileRows * sum_bytes / 4;
    _tile_loadd(0, sums, sum_bytes);
    _tile_loadd(1, sums + kHalf, sum_bytes);
    if (both) {
      _tile_loadd(2, more, sum_bytes);
      _tile_loadd(3, more + kHalf, sum_bytes);
    }
  }
  for (int64_t at = 0; at < row_bytes; at += kTileBytes, panel += kTileRows * kPanelBytes) {
    for (int64_t line = 0; line < fetch.bytes; line += 64) __builtin_prefetch(fetch.from + line, 0, 2);
    fetch.from += fetch.bytes;
    multiply_tiles<kOperand>(both, x + at, stride, panel);
  }
  store_tiles(both, sums, sum_bytes);
}
#else
struct TileShapes {
  void set(int) {}
};
struct Fetch {
  const uint8_t* from = nullptr;
  int64_t bytes = 0;
};
template <Operand kOperand>
static void add_tiles(int, const uint8_t*, int64_t, const uint8_t*, int64_t, bool, float*, int64_t = 0, Fetch = {}) {}
#endif

// The sums of a tile of rows, added to `sums` unless `first`. `type`: of the weights, float32 if they were converted.
template <int R>
static void tile(Operand operand, Type type, int rows, const void* x, int64_t stride, const void* panel, int64_t k, float* sums,
                 bool first = true) {
  if constexpr (R > 1) {
    if (rows < R) return tile<R - 1>(operand, type, rows, x, stride, panel, k, sums, first);
  }
  switch (operand) {
    case Operand::float32: return tile_of_floats<R, 1>(type, static_cast<const float*>(x), stride, panel, 0, k, first, sums, 0);
    case Operand::pairs:
#if defined(__AVX512BF16__)
      return tile_pairs<R>(static_cast<const BFloat16*>(x), stride, static_cast<const BFloat16*>(panel), k, first, sums);
#endif
    case Operand::quads:
#if defined(__AVX512VNNI__)
      return tile_integers<R>(static_cast<const uint8_t*>(x), stride, static_cast<const int8_t*>(panel), k, first, sums);
#elif defined(__AVX2__) || defined(__aarch64__)
      return tile_quads<R>(static_cast<const int8_t*>(x), stride, static_cast<const int8_t*>(panel), k, first, sums);
#endif
    case Operand::words:
#if defined(__AVX512VNNI__)
      return tile_integers<R>(static_cast<const int16_t*>(x), stride, static_cast<const int16_t*>(panel), k, first, sums);
#endif
      break;
    case Operand::groups: break;  // add_group
  }
}

// --- conversions of a block of a panel ---

// Two rows of small numbers as operands: floats, or the low and high halves of pairs of bfloat16, in which they are exact.
INLINE void store_rows(Operand operand, Vec a, Vec b, void* to, int v) {
  if (operand == Operand::float32) {
    store(static_cast<float*>(to) + v * kLanes, a);
    store(static_cast<float*>(to) + kColumns + v * kLanes, b);
  } else {
    const BitVec pair = bits<BitVec>(a) >> 16 | (bits<BitVec>(b) & 0xffff0000);
    __builtin_memcpy(static_cast<uint32_t*>(to) + v * kLanes, &pair, sizeof pair);
  }
}

// int8 or fp8. `values` takes bytes with their signs, and the vector of the panel's row in which they are.
template <typename Values>
static void convert_bytes(const uint8_t* panel, int64_t k, Operand operand, uint8_t* to, Values values) {
  const int64_t row_bytes = kColumns * operand_bytes(operand);
  for (int64_t i = 0; i < k; i += 4, panel += 4 * kColumns, to += 4 * row_bytes) {
    for (int v = 0; v < kVectors; ++v) {
      IntVec four;
      __builtin_memcpy(&four, panel + v * 4 * kLanes, sizeof four);
      __builtin_prefetch(panel + v * 4 * kLanes + kBlock * kColumns, 0, 2);
      store_rows(operand, values(four << 24 >> 24, v), values(four << 16 >> 24, v), to, v);
      store_rows(operand, values(four << 8 >> 24, v), values(four >> 24, v), to + 2 * row_bytes, v);
    }
  }
}

// int4 or fp4. `values` takes four bits.
template <typename Values>
static void convert_nibbles(const uint8_t* panel, int64_t k, Operand operand, uint8_t* to, Values values) {
  const int64_t row_bytes = kColumns * operand_bytes(operand);
  for (int64_t i = 0; i < k; i += 8, panel += 4 * kColumns, to += 8 * row_bytes) {
    for (int v = 0; v < kVectors; ++v) {
      IntVec eight;
      __builtin_memcpy(&eight, panel + v * 4 * kLanes, sizeof eight);
      __builtin_prefetch(panel + v * 4 * kLanes + kBlock * kColumns / 2, 0, 2);
      for (int half = 0; half < 2; ++half) {
        const IntVec four = eight >> 4 * half & 0x0f0f0f0f;
        uint8_t* rows = to + half * 4 * row_bytes;
        store_rows(operand, values(four & 15, v), values(four >> 8 & 15, v), rows, v);
        store_rows(operand, values(four >> 16 & 15, v), values(four >> 24 & 15, v), rows + 2 * row_bytes, v);
      }
    }
  }
}

template <typename T>
static void convert_halves(const T* panel, int64_t k, float* to) {
  for (int64_t i = 0; i < k * kColumns; i += kLanes) {
    prefetch_next_block(panel + i);
    store(to + i, load(panel + i));
  }
}

// Whether tiles multiply. Groups that are smaller than a tile's row do not fit them.
INLINE bool by_tiles(const LinearArgs& args, Operand operand) {
  return kTiles && operand != Operand::float32 && operand != Operand::groups && (args.group == 0 || args.group >= 32);
}

// The zero points of a panel's columns from `first` on, for the group of k0.
struct ZeroPoints {
  IntVec of[kVectors] = {};

  ZeroPoints(const LinearArgs& args, int64_t k0, int64_t first, int offset) {
    for (int v = 0; v < kVectors; ++v) {
      const int64_t column = first + v * kLanes, left = args.n - column;
      of[v] = IntVec{} + offset;
      if (args.zeros == nullptr || left <= 0) continue;
      const int8_t* from = args.zeros + (args.group ? k0 / args.group * args.n : 0) + column;
      of[v] += load_bytes<int8_t>(from, static_cast<int>(left < kLanes ? left : kLanes));
    }
  }
  Vec operator()(IntVec values, int v) const { return __builtin_convertvector(values - of[v], Vec); }
};

// The block of k0 .. k0 + count of a panel, which begins with column `first`, as the inner loop reads it: in the panel, or
// converted into `buffer`, as are weights of x's type that are not to be read `in_place`.
static const void* block(const LinearArgs& args, Operand operand, bool in_place, const uint8_t* panel, int64_t first, int64_t k0,
                         int64_t count, uint8_t* buffer) {
  if (by_tiles(args, operand) && count % 32 && args.weight_type != args.x_type) {  // a tile's rest
    __builtin_memset(buffer + count * kColumns * 2, 0, (rounded_up(count, 32) - count) * kColumns * 2);
  }
  switch (args.weight_type) {
    case Type::float32: return panel + k0 * kColumns * 4;
    case Type::bfloat16:
      if (in_place) return panel + k0 * kColumns * 2;
      convert_halves(static_cast<const BFloat16*>(static_cast<const void*>(panel)) + k0 * kColumns, count,
                     static_cast<float*>(static_cast<void*>(buffer)));
      return buffer;
    case Type::float16:
      if (in_place) return panel + k0 * kColumns * 2;
      convert_halves(static_cast<const Float16*>(static_cast<const void*>(panel)) + k0 * kColumns, count,
                     static_cast<float*>(static_cast<void*>(buffer)));
      return buffer;
    case Type::int8:
      panel += kColumns * 4 + k0 * kColumns;
      if (operand == Operand::quads || operand == Operand::groups) return panel;
      convert_bytes(panel, count, operand, buffer, ZeroPoints(args, k0, first, 0));
      return buffer;
    case Type::int4:
      if (operand == Operand::groups) return panel + k0 / 2 * kColumns;
      convert_nibbles(panel + k0 / 2 * kColumns, count, operand, buffer,
                      ZeroPoints(args, k0, first, has_minimums(args) ? 0 : 8));
      return buffer;
    case Type::fp8:
      convert_bytes(panel + kColumns * 4 + k0 * kColumns, count, operand, buffer, [](IntVec codes, int) { return fp8_values(codes); });
      return buffer;
    case Type::fp4:
      if (operand == Operand::groups) return panel + k0 / 2 * kColumns;
      convert_nibbles(panel + k0 / 2 * kColumns, count, operand, buffer, [](IntVec codes, int) { return fp4_values(codes); });
      return buffer;
  }
  return nullptr;
}

// --- rows of x as operands ---

INLINE Operand operand_of(const LinearArgs& args) {
  if (args.rows_in_int8) return !kQuads ? Operand::float32 : args.group ? Operand::groups : Operand::quads;
  return kPairs && args.x_type == Type::bfloat16 ? Operand::pairs : Operand::float32;
}

// Rows this many bytes apart, or multiples of it, share few sets of a cache.
constexpr int64_t kBadStride = 1024;

// Whether the inner loop can read x where it is, and does it fast.
INLINE bool direct(const LinearArgs& args, Operand operand) {
  if (args.in_scales != nullptr || args.rows_in_int8) return false;
  if (by_tiles(args, operand) && args.k % 32) return false;
  if (args.rows > (by_tiles(args, operand) ? 2 * kTileRows : 4) && args.x_stride * operand_bytes(operand) % kBadStride == 0) return false;
  return operand == Operand::pairs ? args.k % 2 == 0 : args.x_type == Type::float32;
}

INLINE int64_t prepared_bytes(Operand operand, int64_t k) {
  const int64_t bytes = rounded_up(rounded_up(k, kLanes) * operand_bytes(operand), 64);
  return bytes % kBadStride ? bytes : bytes + 64;
}

// Of rows as operands, and of their scales.
INLINE int64_t operands_bytes(const LinearArgs& args, Operand operand) {
  return direct(args, operand) ? 0 : args.rows * (prepared_bytes(operand, args.k) + 4);
}

INLINE int64_t num_groups(const LinearArgs& args) { return (args.k + args.group - 1) / args.group; }

// Of what is known of each group of a row: its sum, or its scale and its sum.
INLINE int64_t group_numbers(const LinearArgs& args, Operand operand) { return operand == Operand::groups ? 2 : has_minimums(args) ? 1 : 0; }

static int64_t scratch_bytes(const LinearArgs& args) {
  const Operand operand = operand_of(args);
  const int64_t numbers = group_numbers(args, operand);
  return operands_bytes(args, operand) + (numbers ? numbers * args.rows * num_groups(args) * 4 : 0);
}

template <typename T>
INLINE Vec scaled(const LinearArgs& args, const T* x, int64_t i) {
  if (i + kLanes <= args.k) return args.in_scales ? load(x + i) * load(args.in_scales + i) : load(x + i);
  const int left = static_cast<int>(args.k - i);
  return args.in_scales ? load_some(x + i, left) * load_some(args.in_scales + i, left) : load_some(x + i, left);
}

constexpr float kTiny = 1e-36f;  // values up to this become zeros: 127 over a smaller one may be infinite

// Values first .. end of a row of x, from a multiple of the lanes on, in steps of 1 / 127 of the largest one: integers from -127
// to 127, and floats with them.
struct Steps {
  float step, sum = 0.f;  // NaN where something is not finite

  template <typename T>
  Steps(const LinearArgs& args, Operand operand, const T* x, int64_t first, int64_t end, void* to) {
    Vec most{};
    IntVec finite = IntVec{} == 0, total{};
    for (int64_t i = first; i < end; i += kLanes) {
      const Vec size = bits<Vec>(bits<IntVec>(scaled(args, x, i)) & 0x7fffffff);
      most = maximum(size, most);
      finite &= size <= 3.4028235e38f;
    }
    const bool good = largest(select(finite, Vec{}, broadcast(1.f))) == 0.f;
    const float top = largest(most), factor = top > kTiny && good ? 127.f / top : 0.f;
    step = good ? top / 127.f : __builtin_nanf("");
    for (int64_t i = first; i < end; i += kLanes) {
      const Vec shifted = (good ? scaled(args, x, i) : Vec{}) * factor + 12582912.f;  // 1.5 * 2^23: rounds to an integer
      const IntVec integers = bits<IntVec>(shifted) - 0x4b400000;
      if (operand == Operand::float32) {
        store(static_cast<float*>(to) + i, (shifted - 12582912.f) * (args.group ? step : 1.f));
        continue;
      }
      typedef uint8_t Narrow __attribute__((vector_size(kLanes)));
      const Narrow bytes = __builtin_convertvector(bits<BitVec>(integers) + (operand == Operand::quads ? kShift : 0), Narrow);
      __builtin_memcpy(static_cast<uint8_t*>(to) + i, &bytes, sizeof bytes);
      total += integers;
    }
    for (int i = 0; i < kLanes; ++i) sum += static_cast<float>(total[i]);
  }
};

// A row of x as operands at `to`, with zeros up to a multiple of the lanes or 64 bytes. Returns the row's scale. `numbers` are
// those of its groups.
template <typename T>
static float prepare_row(const LinearArgs& args, Operand operand, const T* x, void* to, float* numbers) {
  const int64_t filled = rounded_up(args.k, kLanes) * operand_bytes(operand);
  __builtin_memset(static_cast<uint8_t*>(to) + filled, 0, rounded_up(filled, 64) - filled);
  if (args.rows_in_int8 && args.group == 0) return Steps(args, operand, x, 0, args.k, to).step;
  for (int64_t k0 = 0; args.rows_in_int8 && k0 < args.k; k0 += args.group) {
    const Steps made(args, operand, x, k0, k0 + args.group < args.k ? k0 + args.group : args.k, to);
    if (operand == Operand::groups) *numbers++ = made.step, *numbers++ = made.step * made.sum;
  }
  for (int64_t i = 0; !args.rows_in_int8 && i < args.k; i += kLanes) {
    const Vec v = scaled(args, x, i);
    if (operand == Operand::pairs) {
      store(static_cast<BFloat16*>(to) + i, v);
    } else {
      store(static_cast<float*>(to) + i, v);
    }
  }
  return 1.f;
}

static void prepare_rows(const LinearArgs& args, Operand operand, int64_t row_bytes, float* numbers) {
  auto* rows = static_cast<uint8_t*>(args.scratch);
  auto* scales = static_cast<float*>(static_cast<void*>(rows + args.rows * row_bytes));
  for_items(args.rows, args.rows * args.k < 16384 ? 1 : args.threads, [&, operand, row_bytes, numbers](int64_t r) {
    const auto prepare = [&](const auto* x) {
      float* of_row = operand == Operand::groups ? numbers + 2 * r * num_groups(args) : nullptr;
      scales[r] = prepare_row(args, operand, x + r * args.x_stride, rows + r * row_bytes, of_row);
    };
    switch (args.x_type) {
      case Type::float32: return prepare(static_cast<const float*>(args.x));
      case Type::bfloat16: return prepare(static_cast<const BFloat16*>(args.x));
      default: return prepare(static_cast<const Float16*>(args.x));
    }
  });
}

// The sums of each kMinimumGroup of a row of x.
template <typename T>
static void sum_groups(const LinearArgs& args, const T* x, float* sums) {
  for (int64_t k0 = 0; k0 < args.k; k0 += kMinimumGroup) {
    Vec total{};
    for (int64_t i = k0; i < k0 + kMinimumGroup; i += kLanes) total += scaled(args, x, i);
    float sum = 0.f;
    for (int i = 0; i < kLanes; ++i) sum += total[i];
    sums[k0 / kMinimumGroup] = sum;
  }
}

// Of rows as they are multiplied: of prepared ones, `row_bytes` apart, if they are rounded to integers.
static void sum_rows(const LinearArgs& of, int64_t row_bytes, float* sums) {
  LinearArgs args = of;
  if (args.rows_in_int8) args.in_scales = nullptr;  // which prepared rows were multiplied by
  for_items(args.rows, args.rows * args.k < 16384 ? 1 : args.threads, [&, row_bytes, sums](int64_t r) {
    float* to = sums + r * num_groups(args);
    if (args.rows_in_int8) {
      const void* row = static_cast<const uint8_t*>(args.scratch) + r * row_bytes;
      return sum_groups(args, static_cast<const float*>(row), to);
    }
    switch (args.x_type) {
      case Type::float32: return sum_groups(args, static_cast<const float*>(args.x) + r * args.x_stride, to);
      case Type::bfloat16: return sum_groups(args, static_cast<const BFloat16*>(args.x) + r * args.x_stride, to);
      default: return sum_groups(args, static_cast<const Float16*>(args.x) + r * args.x_stride, to);
    }
  });
}

// --- an item: some rows of x times some panels ---

template <typename T>
static void finish_row(const LinearArgs& args, const float* sums, float row_scale, int64_t first, T* out, const T* bias) {
  const int64_t count = args.n - first < kColumns ? args.n - first : kColumns;
  for (int64_t c = 0; c < count; c += kLanes) {
    const int lanes = static_cast<int>(count - c < kLanes ? count - c : kLanes);
    Vec v = load(sums + c) * row_scale;
    if (args.scales && !args.group) v *= load_scales(args, first + c, lanes);
    if (lanes == kLanes) {
      if (bias) v += load(bias + first + c);
      store(out + first + c, v);
    } else {
      if (bias) v += load_some(bias + first + c, lanes);
      store_some(out + first + c, v, lanes);
    }
  }
}

// totals += sums of a block, times its scales, less what scales subtract for each 1 of `x_sum`; the first block sets them.
static void add_block(const float* sums, bool first, const BlockScales& scales, float x_sum, float* totals) {
  for (int v = 0; v < kVectors; ++v) {
    add_to(totals + v * kLanes, first, load(sums + v * kLanes) * scales.of[v] - scales.less[v] * x_sum);
  }
}

struct Rows {  // of x, as operands
  const uint8_t* data;
  int64_t bytes;        // from one to the next
  const float* scales;  // of the rows, or null
  const float* numbers; // of groups of the rows, or null

  // Of row `r`, over the block from k0 on.
  float sum(const LinearArgs& args, int64_t r, int64_t k0) const {
    return numbers == nullptr ? 0.f : numbers[r * num_groups(args) + k0 / args.group];
  }
};

struct Range {
  int64_t begin, end;
};

// add_panel_block where the processor has tiles; `weights` are the block as operands. What is multiplied next, `next`, is fetched
// evenly by all tiles of rows but the first, which fetches what follows in the panel if nothing has fetched it.
static void add_block_by_tiles(const LinearArgs& args, Operand operand, const Rows& x, Range rows, int64_t p, Range k,
                               const uint8_t* weights, bool fetched, const uint8_t* next, float* totals, TileShapes& shapes) {
  constexpr int64_t kStepBytes = kTileBytes * kColumns;  // of a block
  const int64_t bytes = rounded_up((k.end - k.begin) * operand_bytes(operand), kTileBytes);
  const BlockScales scales(args, k.begin, p * kColumns);
  const int64_t others = (rows.end - rows.begin - 1) / (2 * kTileRows);
  const int64_t share = next != nullptr && others > 0 ? rounded_up((kStepBytes + others - 1) / others, 64) : 0;
  for (int64_t r = rows.begin; r < rows.end; r += 2 * kTileRows, totals += 2 * kTileRows * kColumns) {
    const int count = static_cast<int>(rows.end - r < 2 * kTileRows ? rows.end - r : 2 * kTileRows);
    const uint8_t* from = x.data + r * x.bytes + k.begin * operand_bytes(operand);
    shapes.set(count);
    if (args.group) {  // each block has scales of its own
      alignas(64) float sums[2 * kTileRows * kColumns];
      add_tiles<Operand::pairs>(count, from, x.bytes, weights, bytes, true, sums);
      for (int i = 0; i < count; ++i) {
        add_block(sums + i * kColumns, k.begin == 0, scales, x.sum(args, r + i, k.begin), totals + i * kColumns);
      }
    } else {
      Fetch fetch{next, share};
      if (r == rows.begin) {
        fetch = {weights + 2 * kStepBytes, fetched ? 0 : kStepBytes};
      } else if (share > 0) {
        next += bytes / kTileBytes * share;
      }
      const auto add = operand == Operand::pairs ? add_tiles<Operand::pairs> : add_tiles<Operand::quads>;
      add(count, from, x.bytes, weights, bytes, k.begin == 0, totals, kColumns * 4, fetch);
    }
  }
}

// Outputs of rows, from column `first` on, come into the first cache to be written soon: a row's are far from the next one's.
INLINE void fetch_outputs(const LinearArgs& args, Range rows, int64_t first) {
  const int64_t size = args.x_type == Type::float32 ? 4 : 2;
  const auto* out = static_cast<const uint8_t*>(args.out) + first * size;
  for (int64_t r = rows.begin; r < rows.end; ++r) __builtin_prefetch(out + r * args.out_stride * size, 1, 3);
}

// add_panel_block for rows of int8; `weights` are the group in the panel.
static void add_panel_group(const LinearArgs& args, const Rows& x, Range rows, int64_t p, Range k, const uint8_t* weights,
                            float* totals) {
  const BlockScales scales(args, k.begin, p * kColumns);
  const bool is_fp4 = args.weight_type == Type::fp4;
  const int offset = args.weight_type == Type::int8 ? kAboveZero : is_fp4 ? 12 : has_minimums(args) ? 0 : 8;
  const ZeroPoints zeros(args, k.begin, p * kColumns, offset);
  GroupWeights group{weights, {}, {}};
  for (int v = 0; v < kVectors; ++v) {
    group.scales[v] = is_fp4 ? scales.of[v] * 0.5f : scales.of[v];
    group.less[v] = __builtin_convertvector(zeros.of[v], Vec) * group.scales[v] + scales.less[v];
  }
  const int64_t count = rows.end - rows.begin, tiles = (count + kRows - 1) / kRows, tile_rows = (count + tiles - 1) / tiles;
  const int64_t stride = 2 * num_groups(args);
  if (k.begin == 0) __builtin_memset(totals, 0, count * kColumns * sizeof(float));
  for (int64_t r = rows.begin; r < rows.end; r += tile_rows, totals += tile_rows * kColumns) {
    const int left = static_cast<int>(rows.end - r < tile_rows ? rows.end - r : tile_rows);
    const auto* from = static_cast<const int8_t*>(static_cast<const void*>(x.data + r * x.bytes + k.begin));
    const GroupRows of{from, x.bytes, x.numbers + r * stride + 2 * (k.begin / args.group), stride};
    add_group_of<kRows>(args.weight_type, left, of, group, k.end - k.begin, totals);
  }
}

// The sums of one panel for `rows` of x, into totals[rows][kColumns] of that panel. `next`: the block that follows, or null.
static void add_panel_block(const LinearArgs& args, Operand operand, const Rows& x, Range rows, int64_t p, Range k, bool fetched,
                            const uint8_t* next, float* totals, TileShapes& shapes) {
  alignas(64) uint8_t buffer[kBlock * kColumns * 4];
  alignas(64) float sums[kRows * kColumns];
  const uint8_t* panel = static_cast<const uint8_t*>(args.weight) + p * panel_stride(args.weight_type, args.k);
  const int64_t count = rows.end - rows.begin;
  const bool in_place = args.weight_type == args.x_type && (operand != Operand::float32 || count <= kWidenedRows);
  const void* weights = block(args, operand, in_place, panel, p * kColumns, k.begin, k.end - k.begin, buffer);
  if (by_tiles(args, operand)) {
    return add_block_by_tiles(args, operand, x, rows, p, k, static_cast<const uint8_t*>(weights), fetched, next, totals, shapes);
  }
  if (operand == Operand::groups) return add_panel_group(args, x, rows, p, k, static_cast<const uint8_t*>(weights), totals);
  const BlockScales scales(args, k.begin, p * kColumns);
  const int64_t tiles = (count + kRows - 1) / kRows, tile_rows = (count + tiles - 1) / tiles;
  const bool scaled = args.group != 0;  // block by block
  for (int64_t r = rows.begin; r < rows.end; r += tile_rows) {
    const int left = static_cast<int>(rows.end - r < tile_rows ? rows.end - r : tile_rows);
    const uint8_t* from = x.data + r * x.bytes + k.begin * operand_bytes(operand);
    float* to = totals + (r - rows.begin) * kColumns;
    if (k.end == args.k) fetch_outputs(args, {r, r + left}, p * kColumns);
    tile<kRows>(operand, in_place ? args.weight_type : Type::float32, left, from, x.bytes / operand_bytes(operand), weights,
                k.end - k.begin, scaled ? sums : to, scaled || k.begin == 0);
    for (int i = 0; i < left && scaled; ++i) {
      add_block(sums + i * kColumns, k.begin == 0, scales, x.sum(args, r + i, k.begin), to + i * kColumns);
    }
  }
}

// add_panel_block for R rows or fewer and the panels, P at once: the sums of one panel alone would wait for each other.
template <int R, int P>
static void add_few_rows(const LinearArgs& args, const Rows& x, Range rows, Range panels, Range k, float (*totals)[kTotals]) {
  const int64_t count = rows.end - rows.begin, stride = panel_stride(args.weight_type, args.k);
  const int64_t size = args.weight_type == Type::float32 ? 4 : 2;
  if constexpr (R > 1) {
    if (count < R) return add_few_rows<R - 1, panels_at_once(R - 1)>(args, x, rows, panels, k, totals);
  }
  const auto* from = static_cast<const float*>(static_cast<const void*>(x.data + rows.begin * x.bytes)) + k.begin;
  for (; panels.begin + P <= panels.end; panels.begin += P, totals += P) {
    const uint8_t* panel = static_cast<const uint8_t*>(args.weight) + panels.begin * stride + k.begin * kColumns * size;
    tile_of_floats<R, P>(args.weight_type, from, x.bytes / 4, panel, stride / size, k.end - k.begin, k.begin == 0,
                         totals[0], kTotals);
  }
  if constexpr (P > 1) {
    if (panels.begin < panels.end) add_few_rows<R, P / 2>(args, x, rows, panels, k, totals);
  }
}

// The outputs of one panel from their totals.
static void finish_panel(const LinearArgs& args, Operand operand, const Rows& x, Range rows, int64_t p, float* totals) {
  const uint8_t* panel = static_cast<const uint8_t*>(args.weight) + p * panel_stride(args.weight_type, args.k);
  for (int64_t r = rows.begin; r < rows.end; ++r, totals += kColumns) {
    if (operand == Operand::quads) {  // x was shifted by kShift
      const auto* shifted = static_cast<const float*>(static_cast<const void*>(panel));
      for (int c = 0; c < kColumns; c += kLanes) {
        const IntVec exact = bits<IntVec>(load(totals + c)) - bits<IntVec>(load(shifted + c));
        store(totals + c, __builtin_convertvector(exact, Vec));
      }
    }
    const float scale = x.scales ? x.scales[r] : 1.f;
    const int64_t to = r * args.out_stride, first = p * kColumns;
    switch (args.x_type) {
      case Type::float32: finish_row(args, totals, scale, first, static_cast<float*>(args.out) + to, static_cast<const float*>(args.bias)); break;
      case Type::bfloat16:
        finish_row(args, totals, scale, first, static_cast<BFloat16*>(args.out) + to, static_cast<const BFloat16*>(args.bias));
        break;
      default: finish_row(args, totals, scale, first, static_cast<Float16*>(args.out) + to, static_cast<const Float16*>(args.bias)); break;
    }
  }
}

// With few rows, panel by panel or some side by side: weights are read in the order in which they lie. With many, block by block of
// k for all panels: the block of x stays in a cache meanwhile.
static void compute_item(const LinearArgs& args, Operand operand, const Rows& x, Range rows, Range panels) {
  alignas(64) float totals[kItemPanels][kTotals];
  TileShapes shapes;
  const bool in_place = operand == Operand::quads || args.weight_type == args.x_type;  // no block is converted
  int64_t step = args.group && args.group < kBlock ? args.group : kBlock;
  if (by_tiles(args, operand) && in_place && rows.end - rows.begin <= 2 * kTileRows) step = rounded_up(args.k, kBlock);
  const int64_t count = rows.end - rows.begin;
  const bool few = count <= kFewRows && operand == Operand::float32 && args.weight_type == args.x_type;
  const int64_t together = count >= kManyRows ? kItemPanels : few ? panels_at_once(count) : 1;
  const bool fetches = by_tiles(args, operand) && in_place && count > 2 * kTileRows;
  const auto place_of = [&](int64_t p, int64_t k) {
    const auto* panel = static_cast<const uint8_t*>(args.weight) + p * panel_stride(args.weight_type, args.k);
    return panel + (operand == Operand::quads ? kColumns * 4 : 0) + k * kColumns * operand_bytes(operand);
  };
  for (int64_t first = panels.begin; first < panels.end; first += together) {
    const int64_t last = first + together < panels.end ? first + together : panels.end;
    for (int64_t k = 0; k < args.k; k += step) {
      if (few) {
        add_few_rows<kFewRows, panels_at_once(kFewRows)>(args, x, rows, {first, last}, {k, k + step < args.k ? k + step : args.k}, totals);
        continue;
      }
      for (int64_t p = first; p < last; ++p) {
        const Range of{k, k + step < args.k ? k + step : args.k};
        const bool more = p + 1 < last || of.end < args.k;
        const uint8_t* next = !fetches || !more ? nullptr : p + 1 < last ? place_of(p + 1, k) : place_of(first, of.end);
        add_panel_block(args, operand, x, rows, p, of, fetches && (p > first || k > 0), next, totals[p - first], shapes);
        if (of.end == args.k) finish_panel(args, operand, x, rows, p, totals[p - first]);
      }
    }
    for (int64_t p = first; few && p < last; ++p) finish_panel(args, operand, x, rows, p, totals[p - first]);
  }
}

// The place of item `item` of `count`: threads that take items in turns each go on where their last one ended, so that what they
// fetch in advance is what they read next.
INLINE int64_t in_streams(int64_t item, int64_t count, int64_t threads) {
  const int64_t stream = item % threads, longer = count % threads;
  return stream * (count / threads) + (stream < longer ? stream : longer) + item / threads;
}

static void multiply(const LinearArgs& args) {
  const Operand operand = operand_of(args);
  Rows x{};
  auto* after = static_cast<float*>(static_cast<void*>(static_cast<uint8_t*>(args.scratch) + operands_bytes(args, operand)));
  float* numbers = group_numbers(args, operand) ? after : nullptr;
  if (direct(args, operand)) {
    x.data = static_cast<const uint8_t*>(args.x), x.bytes = args.x_stride * operand_bytes(operand);
  } else {
    x.bytes = prepared_bytes(operand, args.k);
    prepare_rows(args, operand, x.bytes, numbers);
    x.data = static_cast<const uint8_t*>(args.scratch);
    x.scales = static_cast<const float*>(static_cast<const void*>(x.data + args.rows * x.bytes));
  }
  if (group_numbers(args, operand) == 1) sum_rows(args, x.bytes, numbers);
  x.numbers = numbers;
  const bool tiles = by_tiles(args, operand);
  const int64_t most_rows = tiles ? kItemTileRows : kItemRows;
  const int64_t num_panels = rounded_up(args.n, kColumns) / kColumns, parts = (args.rows + most_rows - 1) / most_rows;
  const int64_t part_rows = tiles ? rounded_up((args.rows + parts - 1) / parts, 2 * kTileRows) : kItemRows;
  const int64_t run = num_panels / (kItemsPerThread * args.threads);
  const int64_t together = args.rows >= kManyRows ? kItemPanels : run > 1 ? run : 1;
  const int64_t groups = (num_panels + together - 1) / together;
  for_items(groups * parts, args.threads, [&, operand, num_panels, parts, part_rows, together, groups](int64_t item) {
    const int64_t row = item / groups * part_rows, group = parts == 1 ? in_streams(item, groups, args.threads) : item % groups;
    const int64_t panel = group * together;
    const Range rows{row, row + part_rows < args.rows ? row + part_rows : args.rows};
    compute_item(args, operand, x, rows, {panel, panel + together < num_panels ? panel + together : num_panels});
  });
}

static const LinearKernels kernels = {kColumns, packed_bytes, pack, pack_blocks, unpack, unpack_rows, scaled_rows, scratch_bytes, multiply};

}  // namespace linear

// Attention over the blocks of a cache: causal within each sequence.
//
// The keys of a sequence are cut into parts of kPart at absolute positions. The scores of a part are computed at once, and its
// softmax and weighted values by themselves; then the parts are merged in order. So a query's result depends neither on the
// other queries nor on how the work is divided: an item computes all parts for many queries of a KV head, or, for chunks of
// few queries, one part, and whoever finishes the last part of such a chunk merges them.
//
// The queries of a chunk that read the same KV head are the rows of matrix products: row r is query r / group of the chunk and
// head r % group of the KV head's. What no row sees is not read: a row of zeros stands for it.
//
// Of a cache of int8, the scale of a key becomes a factor of its scores, and that of a value a factor of its weights. Where the
// processor multiplies pairs of int16, queries in 16 bits and the part's weights are rounded to integers, relative to the largest
// of the row: sums are exact then.
namespace attention {

using linear::kColumns;
using linear::kRows;
using linear::Operand;
using linear::rounded_up;

constexpr int64_t kPart = 256;
constexpr int64_t kMostRows = 96;            // of an item
constexpr int64_t kMostDim = 576;            // of a head
constexpr int64_t kMostElements = 96 * 128;  // of an item's queries, and of its results
constexpr int64_t kAhead = 64;               // slots from what is fetched, into the second cache, to what is multiplied
constexpr int64_t kScoreStride = kPart + kLanes;
constexpr float kLowest = -__builtin_inff();

alignas(64) static const uint8_t zeros[kMostDim * 4] = {};

// What the products of queries of type T with cached elements C multiply.
template <typename T, typename C>
struct Operands {
  using Element = float;
};
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
template <>
struct Operands<BFloat16, BFloat16> {
  using Element = BFloat16;
};
template <typename T>
struct Operands<T, int8_t> {
  using Element = int16_t;
};
template <>
struct Operands<float, int8_t> {
  using Element = float;
};
#endif
template <typename T, typename C>
using ElementOf = typename Operands<T, C>::Element;

template <typename Element>
constexpr bool kInWords = std::is_same_v<Element, int16_t>;
template <typename Element>
constexpr bool kInPairs = std::is_same_v<Element, BFloat16>;
template <typename Element>  // the processor's tiles multiply, for one query as for many
constexpr bool kByTiles = kInPairs<Element> && linear::kTiles;
template <typename C>
constexpr bool kScaled = std::is_same_v<C, int8_t>;

// Of queries: sums of kMostDim products with int8 are below 2^31.
constexpr float kLargestWord = 0x7fffffff / (kMostDim * 128);
// Of weights: sums of kPart products with int8 are below 2^31.
constexpr float kLargestWeight = 32767;

// Elements of a row of queries: tiles read 64 bytes at a time.
template <typename Element>
constexpr int64_t query_stride_of(int64_t dim) { return rounded_up(dim, kByTiles<Element> ? 32 : kInWords<Element> ? kLanes : 2); }

// --- the division of work ---

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Floats of a row of results: the values, padded to kColumns; the largest score at [padded]; the sum of weights behind it.
INLINE int64_t padded_values(const AttentionArgs& args) { return rounded_up(args.value.dim, kColumns); }
INLINE int64_t result_stride(const AttentionArgs& args) { return padded_values(args) + 16; }

INLINE int64_t item_rows(const AttentionArgs& args) {
  const int64_t dim = args.key.dim > args.value.dim ? args.key.dim : args.value.dim;
  return least(kMostRows, kMostElements / rounded_up(dim, 32));
}

struct Chunk {
  int64_t first_token, first_position;
  int64_t rows;                    // of each KV head
  int64_t begin_part, end_part;    // that any row sees
  bool split;                      // each part is an item
  int64_t items_per_head;
};

INLINE Chunk chunk_of(const AttentionArgs& args, int64_t i) {
  Chunk chunk;
  const int64_t tokens = args.bounds[i + 1] - args.bounds[i];
  chunk.first_token = args.bounds[i];
  chunk.first_position = args.lens[i] - tokens;
  chunk.rows = args.lens[i] ? tokens * (args.heads / args.kv_heads) : 0;
  const int64_t first_seen = args.window ? chunk.first_position - args.window + 1 : 0;
  chunk.begin_part = first_seen > 0 ? first_seen / kPart : 0;
  chunk.end_part = (args.lens[i] + kPart - 1) / kPart;
  const int64_t tiles = (chunk.rows + item_rows(args) - 1) / item_rows(args), parts = chunk.end_part - chunk.begin_part;
  chunk.split = tiles == 1 && parts > 1;
  chunk.items_per_head = chunk.split ? parts : tiles;
  return chunk;
}

// A chunk's place in the scratch memory, one more for the end: all chunks' places come first, then the results of parts.
struct Place {
  int64_t first_item;
  int64_t results;    // of its parts, in bytes; [kv_heads][parts][rows][result_stride]
  int64_t unfinished; // counters of parts, int32 [kv_heads], in bytes
};

// Fills `places`, unless it is null. Returns the bytes of scratch memory.
static int64_t place_chunks(const AttentionArgs& args, Place* places) {
  Place place = {0, rounded_up((args.chunks + 1) * static_cast<int64_t>(sizeof(Place)), 64), 0};
  for (int64_t i = 0; i <= args.chunks; ++i) {
    if (i == args.chunks) {
      if (places) places[i] = place;
      break;
    }
    const Chunk chunk = chunk_of(args, i);
    place.unfinished = place.results;
    if (chunk.split) place.results += rounded_up(args.kv_heads * 4, 64);
    if (places) places[i] = place;
    if (chunk.split) place.results += args.kv_heads * chunk.items_per_head * chunk.rows * result_stride(args) * 4;
    place.first_item += args.kv_heads * chunk.items_per_head;
  }
  return place.results;
}

static int64_t scratch_bytes(const AttentionArgs& args) { return place_chunks(args, nullptr); }

// --- matrix products ---

template <int W, int... L>
INLINE Vec transposed_low(Vec a, Vec b, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(a, b, ((L & W) != 0 ? L - W + kLanes : L)...);
}
template <int W, int... L>
INLINE Vec transposed_high(Vec a, Vec b, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(a, b, ((L & W) != 0 ? L + kLanes : L + W)...);
}
template <int W = kLanes / 2>
INLINE void transpose(Vec* rows) {
  using Lanes = std::make_integer_sequence<int, kLanes>;
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if ((i & W) != 0) continue;
    const Vec a = rows[i], b = rows[i + W];
    rows[i] = transposed_low<W>(a, b, Lanes{});
    rows[i + W] = transposed_high<W>(a, b, Lanes{});
  }
  if constexpr (W > 1) transpose<W / 2>(rows);
}

// Transposes kColumns keys into a panel as linear.h has them, [dim][kColumns], or in pairs of dimensions: of int8, dimensions 0 and
// 2, and 1 and 3, of each four.
INLINE Vec load_words(const void* from, int64_t bytes) {  // the first `bytes`, or all
  Vec v{};
  if (bytes >= static_cast<int64_t>(sizeof v)) {
    __builtin_memcpy(&v, from, sizeof v);
  } else {
    __builtin_memcpy(&v, from, bytes);
  }
  return v;
}
template <typename C, typename Element>
static void pack_keys(const C* const* keys, int64_t dim, Element* panel) {
  constexpr int64_t kWordElements = 4 / sizeof(C), kStep = kLanes * kWordElements;
  for (int64_t d = 0; d < dim; d += kStep) {
    const int64_t bytes = (dim - d) * static_cast<int64_t>(sizeof(C));
    const int words = static_cast<int>(least(kLanes, (bytes + 3) / 4));
    for (int v = 0; v < kColumns; v += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        __builtin_prefetch(keys[v + i + kAhead] + d, 0, 2);
        rows[i] = load_words(keys[v + i] + d, bytes);
      }
      transpose(rows);
      for (int i = 0; i < words; ++i) {
        if constexpr (kWordElements == 1) {
          store(panel + (d + i) * kColumns + v, rows[i]);
        } else if constexpr (kInWords<Element>) {
          const WordVec both = bits<WordVec>(rows[i]), first = both << 8 >> 8, second = both >> 8;
          Element* to = panel + ((d / 2 + 2 * i) * kColumns + v) * 2;
          __builtin_memcpy(to, &first, sizeof first);
          __builtin_memcpy(to + 2 * kColumns, &second, sizeof second);
        } else if constexpr (kWordElements == 4) {
          const IntVec four = bits<IntVec>(rows[i]);
          float* to = panel + (d + 4 * i) * kColumns + v;
          store(to, __builtin_convertvector(four << 24 >> 24, Vec));
          store(to + kColumns, __builtin_convertvector(four << 16 >> 24, Vec));
          store(to + 2 * kColumns, __builtin_convertvector(four << 8 >> 24, Vec));
          store(to + 3 * kColumns, __builtin_convertvector(four >> 24, Vec));
        } else if constexpr (kInPairs<Element>) {
          __builtin_memcpy(panel + ((d / 2 + i) * kColumns + v) * 2, &rows[i], sizeof(Vec));
        } else {
          const BitVec both = bits<BitVec>(rows[i]);
          const HalfBits first = __builtin_convertvector(both & 0xffff, HalfBits), second = __builtin_convertvector(both >> 16, HalfBits);
          float* to = panel + (d + 2 * i) * kColumns + v;
          store(to, load(static_cast<const C*>(static_cast<const void*>(&first))));
          store(to + kColumns, load(static_cast<const C*>(static_cast<const void*>(&second))));
        }
      }
    }
  }
}

// out[R][kBlocks * kColumns] = weights[R][end] times that many columns of the values, from the row `begin` on. Rows of `out` are
// `out_stride` floats apart. Not kWhole: of the last kColumns only `columns` are there.
template <int R, int kBlocks, bool kWhole, typename C>
static void weigh(const float* weights, int64_t stride, const C* const* values, int64_t first, int64_t columns, int64_t begin,
                  int64_t end, float* out, int64_t out_stride) {
  constexpr int kVectors = kBlocks * linear::kVectors, kVectorBytes = kLanes * sizeof(C);
  constexpr int kLine = kVectorBytes < 32 ? 64 / kVectorBytes : 1;  // vectors of a line of the cache
  Vec total[R][kVectors] = {};
  for (int64_t j = begin; j < end; ++j) {
    const C* row = values[j] + first;
    for (int v = 0; v < kVectors; v += kLine) __builtin_prefetch(values[j + kAhead] + first + v * kLanes, 0, 2);
    Vec x[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      const int64_t left = columns - v * kLanes;
      x[v] = kWhole || left >= kLanes ? load(row + v * kLanes) : left > 0 ? load_some(row + v * kLanes, static_cast<int>(left)) : Vec{};
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vec factor = broadcast(weights[r * stride + j]);
      for (int v = 0; v < kVectors; ++v) total[r][v] += factor * x[v];
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) store(out + r * out_stride + v * kLanes, total[r][v]);
  }
}

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
INLINE Vec add_products(Vec total, __m512i x, __m512i y) {
  return bits<Vec>(_mm512_dpbf16_ps(bits<__m512>(total), bits<__m512bh>(x), bits<__m512bh>(y)));
}
INLINE IntVec add_products(IntVec total, __m512i x, __m512i y) { return linear::add_products(total, x, y, int16_t{}); }
INLINE __m512 to_floats(Vec total) { return bits<__m512>(total); }
INLINE __m512 to_floats(IntVec total) { return bits<__m512>(__builtin_convertvector(total, Vec)); }

// kColumns elements in 16 bits, or zeros where `mask` has none.
template <bool kWhole>
INLINE __m512i load_columns(const BFloat16* from, __mmask32 mask) {
  return kWhole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(mask, from);
}
template <bool kWhole>
INLINE __m512i load_columns(const int8_t* from, __mmask32 mask) {
  const __m256i bytes = kWhole ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)) : _mm256_maskz_loadu_epi8(mask, from);
  return _mm512_cvtepi8_epi16(bytes);
}

// The same in pairs of rows. `begin` and `end` are even.
template <int R, int kBlocks, bool kWhole, typename Element, typename C>
static void weigh(const Element* weights, int64_t stride, const C* const* values, int64_t first, int64_t columns, int64_t begin,
                  int64_t end, float* out, int64_t out_stride) {
  static_assert(linear::kVectors == 2);
  constexpr int kLine = kColumns * sizeof(C) < 64 ? 2 : 1;  // blocks of a line of the cache
  // Unpacked pairs have columns 0 to 3 of each 8 in one vector, 4 to 7 in the other.
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << columns) - 1);
  std::conditional_t<kInWords<Element>, IntVec, Vec> total[R][2 * kBlocks] = {};
  for (int64_t j = begin; j < end; j += 2) {
    const C *one = values[j] + first, *other = values[j + 1] + first;
    for (int v = 0; v < kBlocks; v += kLine) {
      __builtin_prefetch(values[j + kAhead] + first + v * kColumns, 0, 2);
      __builtin_prefetch(values[j + kAhead + 1] + first + v * kColumns, 0, 2);
    }
    __m512i x[2 * kBlocks];
    for (int v = 0; v < kBlocks; ++v) {
      const __m512i a = load_columns<kWhole>(one + v * kColumns, mask), b = load_columns<kWhole>(other + v * kColumns, mask);
      x[2 * v] = _mm512_unpacklo_epi16(a, b);
      x[2 * v + 1] = _mm512_unpackhi_epi16(a, b);
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, weights + r * stride + j, sizeof pair);
      const __m512i factor = _mm512_set1_epi32(pair);
      for (int v = 0; v < 2 * kBlocks; ++v) total[r][v] = add_products(total[r][v], x[v], factor);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kBlocks; ++v) {
      float* to = out + r * out_stride + v * kColumns;
      const __m512 a = to_floats(total[r][2 * v]), b = to_floats(total[r][2 * v + 1]);
      _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, low, b));
      _mm512_storeu_ps(to + kLanes, _mm512_permutex2var_ps(a, high, b));
    }
  }
}

// A query in integers, in the order of pack_keys, and zeros up to a multiple of kLanes. Returns what they are multiples of.
template <typename T>
static float pack_query(const T* from, int64_t dim, int16_t* to) {
  const float most = largest_size(from, dim), inverse = most > 1e-30f ? kLargestWord / most : 0.f;
  for (int64_t d = 0; d < dim; d += kLanes) {
    store(to + d, (d + kLanes <= dim ? load(from + d) : load_some(from + d, static_cast<int>(dim - d))) * inverse);
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(to + d));
    constexpr int kOrder = 0xd8;  // 0, 2, 1, 3
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + d), _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, kOrder), kOrder));
  }
  return most / kLargestWord;
}
#endif

INLINE const uint8_t* bytes_of(const void* from) { return static_cast<const uint8_t*>(from); }

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// The values of kColumns slots in columns first .. first + kColumns, as tiles: pairs of slots, of each 8 columns the first 4 in one
// half of the tiles' row and the others in the other half.
INLINE void pack_values(const BFloat16* const* values, int64_t first, int64_t columns, BFloat16* panel) {
  const __mmask32 mask = columns >= kColumns ? 0xffffffff : static_cast<__mmask32>((uint64_t{1} << columns) - 1);
  for (int64_t j = 0; j < kColumns; j += 2, panel += 2 * kColumns) {
    __builtin_prefetch(values[j + kAhead] + first, 0, 2);
    __builtin_prefetch(values[j + kAhead + 1] + first, 0, 2);
    const __m512i a = _mm512_maskz_loadu_epi16(mask, values[j] + first), b = _mm512_maskz_loadu_epi16(mask, values[j + 1] + first);
    _mm512_storeu_si512(panel, _mm512_unpacklo_epi16(a, b));
    _mm512_storeu_si512(panel + kColumns, _mm512_unpackhi_epi16(a, b));
  }
}

// weigh_rows for all rows of a part by tiles: `weights` [rows][stride] of `count` slots, a multiple of kColumns.
static void weigh_by_tiles(int64_t rows, const BFloat16* weights, int64_t stride, const BFloat16* const* values, int64_t dim,
                           int64_t count, float* out, int64_t out_stride, linear::TileShapes& shapes) {
  alignas(64) BFloat16 panel[kPart * kColumns];
  alignas(64) float sums[2 * linear::kTileRows * kColumns];
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (int64_t c = 0; c < dim; c += kColumns) {
    for (int64_t r = 0; r < rows; r += 2 * linear::kTileRows) {
      const int n = static_cast<int>(least(2 * linear::kTileRows, rows - r));
      const bool both = n > linear::kTileRows;
      const auto multiply = [&](int64_t j) {
        linear::multiply_tiles<Operand::pairs>(both, bytes_of(weights + r * stride + j), stride * 2, bytes_of(panel + j * kColumns));
      };
      shapes.set(n);
      linear::clear_tiles();
      for (int64_t j = 0; j < count; j += kColumns) {
        if (r == 0) pack_values(values + j, c, dim - c, panel + j * kColumns);
        if (j > 0) multiply(j - kColumns);  // what was packed just now is not in the cache yet
      }
      multiply(count - kColumns);
      linear::store_tiles(both, sums, kColumns * 4);
      for (int i = 0; i < n; ++i) {
        const __m512 a = _mm512_load_ps(sums + i * kColumns), b = _mm512_load_ps(sums + i * kColumns + kLanes);
        float* to = out + (r + i) * out_stride + c;
        _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, low, b));
        _mm512_storeu_ps(to + kLanes, _mm512_permutex2var_ps(a, high, b));
      }
    }
  }
}
#endif

// All columns for a tile of R rows. Few rows take more columns at once: a sum waits for the one before it.
template <int R, typename C, typename Element>
static void weigh_rows(int rows, const Element* weights, int64_t stride, const C* const* values, int64_t dim, int64_t begin, int64_t end,
                       float* out, int64_t out_stride) {
  if constexpr (R > 1) {
    if (rows < R) return weigh_rows<R - 1>(rows, weights, stride, values, dim, begin, end, out, out_stride);
  }
  int64_t c = 0;
  if constexpr (4 * R <= kRows) {
    for (; c + 4 * kColumns <= dim; c += 4 * kColumns) weigh<R, 4, true>(weights, stride, values, c, 0, begin, end, out + c, out_stride);
  }
  if constexpr (2 * R <= kRows) {
    for (; c + 2 * kColumns <= dim; c += 2 * kColumns) weigh<R, 2, true>(weights, stride, values, c, 0, begin, end, out + c, out_stride);
  }
  for (; c + kColumns <= dim; c += kColumns) weigh<R, 1, true>(weights, stride, values, c, 0, begin, end, out + c, out_stride);
  if (c < dim) weigh<R, 1, false>(weights, stride, values, c, dim - c, begin, end, out + c, out_stride);
}

// --- softmax ---

INLINE float exponential_of(float x) { return exponential(broadcast(x))[0]; }
// What scores are relative to: if all are -infinity, their weights are 0.
INLINE float base_of(float most) { return most == kLowest ? 0.f : most; }

// total = total * x + part * y, for rows of results. One function that is not inlined, so that it rounds alike everywhere.
__attribute__((noinline)) static void merge(const float* part, int64_t rows, int64_t stride, int64_t padded, float* total) {
  for (int64_t first = 0; first < rows; first += kLanes) {
    const int64_t count = least(kLanes, rows - first);
    float mosts[kLanes], xs[kLanes] = {}, ys[kLanes] = {};
    for (int64_t r = 0; r < count; ++r) {
      const float one = total[r * stride + padded], other = part[r * stride + padded];
      mosts[r] = other > one ? other : one;
      xs[r] = one - base_of(mosts[r]), ys[r] = other - base_of(mosts[r]);
    }
    store(xs, exponential(load(xs)));
    store(ys, exponential(load(ys)));
    for (int64_t r = 0; r < count; ++r, part += stride, total += stride) {
      const float x = xs[r], y = ys[r];
      for (int64_t c = 0; c < padded; c += kLanes) store(total + c, load(total + c) * x + load(part + c) * y);
      total[padded + 1] = total[padded + 1] * x + part[padded + 1] * y;
      total[padded] = mosts[r];
    }
  }
}

static void clear_results(int64_t rows, int64_t stride, int64_t padded, float* results) {
  __builtin_memset(results, 0, rows * stride * 4);
  for (int64_t r = 0; r < rows; ++r) results[r * stride + padded] = kLowest;
}

// --- an item ---

template <typename T, typename C>
struct Rows {  // some rows of a chunk and KV head
  const AttentionArgs& args;
  const Chunk& chunk;
  int64_t chunk_index, head;  // KV head
  int64_t begin, end;         // rows
  ElementOf<T, C>* query;     // [rows][query_stride]
  int64_t query_stride;
  float* factors;             // [rows], from products to scores

  int64_t group() const { return args.heads / args.kv_heads; }
  int64_t position(int64_t row) const { return chunk.first_position + row / group(); }
  int64_t first_seen(int64_t row) const {
    const int64_t first = position(row) - args.window + 1;
    return args.window && first > 0 ? first : 0;
  }
};

template <typename T, typename C>
static void read_query(const Rows<T, C>& rows) {
  using Element = ElementOf<T, C>;
  const AttentionArgs& args = rows.args;
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const int64_t token = rows.chunk.first_token + r / rows.group(), head = rows.head * rows.group() + r % rows.group();
    const T* from = static_cast<const T*>(args.query) + token * args.query_stride + head * args.query_head_stride;
    Element* to = rows.query + (r - rows.begin) * rows.query_stride;
    rows.factors[r - rows.begin] = args.scaling;
    if constexpr (kInWords<Element>) {
      rows.factors[r - rows.begin] *= pack_query(from, args.key.dim, to);
    } else if constexpr (kInPairs<Element>) {
      __builtin_memcpy(to, from, args.key.dim * sizeof(T));
      for (int64_t d = args.key.dim; d < rows.query_stride; ++d) to[d] = {0};
    } else {
      for (int64_t d = 0; d < args.key.dim; ++d) to[d] = to_float(from[d]);
    }
  }
}

// Calls `visit(j, stop, block, slot)` for runs of the positions `begin` .. `end` of a part in one block; block -1: there is none.
template <typename Visit>
INLINE void visit_blocks(const AttentionArgs& args, int64_t chunk_index, int64_t part, int64_t begin, int64_t end, const Visit& visit) {
  const int64_t* table = args.tables + chunk_index * args.width;
  for (int64_t j = begin; j < end;) {
    const int64_t position = part * kPart + j, block = table[position / args.block_size], slot = position % args.block_size;
    const int64_t stop = least(end, j + args.block_size - slot);
    const bool there = 0 <= block && block < args.num_blocks;
    if (!there) __atomic_store_n(args.fault, 1, __ATOMIC_RELAXED);
    visit(j, stop, there ? block : -1, slot);
    j = stop;
  }
}

// Pointers to the keys or values of the positions `begin` .. `end` of a part; to zeros for the rest of the part.
template <typename T, typename C>
static void find_slots(const CacheView& view, const Rows<T, C>& rows, int64_t part, int64_t begin, int64_t end, const C** slots) {
  const C* nothing = static_cast<const C*>(static_cast<const void*>(zeros));
  const C* base = static_cast<const C*>(view.data) + rows.head * view.head_stride;
  for (int64_t j = 0; j < begin; ++j) slots[j] = nothing;
  visit_blocks(rows.args, rows.chunk_index, part, begin, end, [&](int64_t j, int64_t stop, int64_t block, int64_t slot) {
    const C* from = block < 0 ? nothing : base + block * view.block_stride + slot * view.slot_stride;
    const int64_t step = block < 0 ? 0 : view.slot_stride;
    for (; j < stop; ++j, from += step) slots[j] = from;
  });
  for (int64_t j = end; j < kPart + kAhead; ++j) slots[j] = nothing;
}

// The scales of the same positions, and zeros.
template <typename T, typename C>
static void find_scales(const ScaleView& view, const Rows<T, C>& rows, int64_t part, int64_t begin, int64_t end, float* scales) {
  Float16 found[kPart] = {};
  const Float16* base = static_cast<const Float16*>(view.data) + rows.head * view.head_stride;
  visit_blocks(rows.args, rows.chunk_index, part, begin, end, [&](int64_t j, int64_t stop, int64_t block, int64_t slot) {
    if (block < 0) return;
    const Float16* from = base + block * view.block_stride + slot * view.slot_stride;
    for (; j < stop; ++j, from += view.slot_stride) found[j] = *from;
  });
  for (int64_t j = 0; j < kPart; j += kLanes) store(scales + j, load(found + j));
}

// Fetches the first rows of a part: those that follow are fetched kAhead slots before they are read.
template <typename C>
INLINE void fetch_first(const C* const* slots, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(C);
  for (int64_t j = 0; j < kAhead; ++j) {
    for (int64_t d = 0; d < dim; d += kLine) __builtin_prefetch(slots[j] + d, 0, 2);
  }
}

// Scales and masks a row's products with kColumns keys from `first` of the part on, of which it sees `low` .. `high`.
// Returns the largest score. `factor` is the row's; `scales` are of a part's keys, or null.
template <typename Element>
INLINE Vec finish_scores(const AttentionArgs& args, const float* sums, float factor, const float* scales, int64_t first, int64_t low,
                         int64_t high, Vec most, float* scores) {
  IntVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int c = 0; c < kColumns; c += kLanes) {
    const int64_t at = first + c;
    Vec score = load(sums + c);
    if constexpr (kInWords<Element>) score = __builtin_convertvector(bits<IntVec>(score), Vec);
    score = score * factor;
    if (scales != nullptr) score = score * load(scales + at);
    if (args.softcap != 0.f) score = hyperbolic_tangent(score / args.softcap) * args.softcap;
    if (at < low || at + kLanes > high) {
      const IntVec key = lane + static_cast<int32_t>(at);
      const IntVec seen = (key >= static_cast<int32_t>(low)) & (key < static_cast<int32_t>(high));
      score = select(seen, score, broadcast(kLowest));
    }
    most = maximum(most, score);
    store(scores + at, score);
  }
  return most;
}

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
// 2^x, with a relative error below 3e-6: what is rounded to bfloat16 needs no more.
INLINE Vec power_of_two(Vec x) {
  const Vec rest = bits<Vec>(_mm512_reduce_ps(bits<__m512>(x), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));  // 0 to 1
  Vec value = rest * 0.013426687568426132f + 0.0522424690425396f;
  value = value * rest + 0.2412802129983902f;
  value = value * rest + 0.6930448412895203f;
  value = value * rest + 1.f;
  return bits<Vec>(_mm512_scalef_ps(bits<__m512>(value), bits<__m512>(x)));
}

// A vector combined with itself until all lanes are that of all, in the order of sum().
template <int W, int... L>
INLINE Vec turned(Vec v, std::integer_sequence<int, L...>) {
  return __builtin_shufflevector(v, v, (L ^ W)...);
}
template <int W = kLanes / 2, typename Combine>
INLINE float combined(Vec v, const Combine& combine) {
  v = combine(v, turned<W>(v, std::make_integer_sequence<int, kLanes>{}));
  if constexpr (W > 1) return combined<W / 2>(v, combine);
  return v[0];
}

// weights[first .. last] = e^score, relative to the row's largest score; `row` are its products with the keys `first` .. `last` of a
// part, of which it sees `low` .. `high`. result[0] becomes the largest score, result[1] the sum of weights.
INLINE void weigh_row(const AttentionArgs& args, float* row, float factor, int64_t first, int64_t last, int64_t low, int64_t high,
                      BFloat16* weights, float* result) {
  const auto larger = [](Vec a, Vec b) { return bits<Vec>(_mm512_maskz_max_ps(0xffff, bits<__m512>(a), bits<__m512>(b))); };
  Vec most[linear::kVectors];
  for (Vec& each : most) each = broadcast(kLowest);
  if (args.softcap == 0.f && factor > 0.f) {  // the largest product has the largest score
    IntVec lane;
    for (int i = 0; i < kLanes; ++i) lane[i] = i;
    for (int64_t j = first; j < last; j += kColumns) {
      const bool whole = low <= j && j + kColumns <= high;
      for (int v = 0; v < linear::kVectors; ++v) {
        float* at = row + j + v * kLanes;
        Vec product = load(at);
        if (!whole) {
          const IntVec key = lane + static_cast<int32_t>(j + v * kLanes);
          const IntVec seen = (key >= static_cast<int32_t>(low)) & (key < static_cast<int32_t>(high));
          product = select(seen, product, broadcast(kLowest));
          store(at, product);
        }
        most[v] = larger(most[v], product);
      }
    }
  } else {
    for (int64_t j = first; j < last; j += kColumns) {
      most[0] = finish_scores<BFloat16>(args, row + j, factor, nullptr, j, low, high, most[0], row);
    }
    factor = 1.f;
  }
  const float top = combined(larger(most[0], most[1]), larger);
  constexpr float kLog2E = 1.44269504f;
  const Vec scale = broadcast(factor * kLog2E), base = broadcast(base_of(top));
  Vec total[linear::kVectors] = {};
  for (int64_t j = first; j < last; j += kColumns) {
    for (int v = 0; v < linear::kVectors; ++v) {
      const Vec weight = power_of_two((load(row + j + v * kLanes) - base) * scale);  // exactly 1 at the largest, whatever its size
      total[v] += weight;
      store(weights + j + v * kLanes, weight);
    }
  }
  result[0] = top * factor;
  result[1] = combined(total[0] + total[1], [](Vec a, Vec b) { return a + b; });
}

// products[rows][kScoreStride] = those of queries with a panel's keys; `rows` are R at most.
template <int R>
static void multiply_rows(int rows, const BFloat16* query, int64_t stride, const BFloat16* panel, float* products) {
  if constexpr (R > 1) {
    if (rows < R) return multiply_rows<R - 1>(rows, query, stride, panel, products);
  }
  linear::tile_pairs<R>(query, stride, panel, stride, true, products, kScoreStride);
}

// compute_part in pairs, by tiles if there are any, for one query as for many. Scores of some rows at a time stay in the first
// cache. What is packed or multiplied for tiles is not read at once: that would wait for the stores.
static void compute_part_in_pairs(const Rows<BFloat16, BFloat16>& rows, int64_t part, float* results, linear::TileShapes& shapes) {
  constexpr int64_t kTogether = linear::kTiles ? 2 * linear::kTileRows : 2 * kRows;  // rows
  constexpr int64_t kPacked = kMostElements / (kTogether + 1);   // the largest size of heads of which an item has more rows
  constexpr int64_t kWeightStride = kPart + kColumns;
  const AttentionArgs& args = rows.args;
  const int64_t count = rows.end - rows.begin, origin = part * kPart, dim = args.key.dim, stride = rows.query_stride;
  // What any row sees, and the whole panels around it.
  int64_t begin = rows.first_seen(rows.begin) - origin, end = rows.position(rows.end - 1) + 1 - origin;
  begin = begin < 0 ? 0 : begin, end = least(end, kPart);
  const int64_t first = begin / kColumns * kColumns, last = rounded_up(end, kColumns);
  const int64_t results_stride = result_stride(args), padded = padded_values(args), filled = rounded_up(dim, 2);
  // All of a part, or there are kTogether rows at most.
  const int64_t keys_together = linear::kTiles || count > kTogether ? kPacked * kPart / stride / kColumns * kColumns : kColumns;

  const BFloat16 *keys[kPart + kAhead], *values[kPart + kAhead];
  alignas(64) BFloat16 panels[kPacked * kPart];
  alignas(64) float scores[kTogether * kScoreStride];
  alignas(64) BFloat16 weights[kMostRows * kWeightStride];
  find_slots(args.key, rows, part, begin, end, keys);
  find_slots(args.value, rows, part, begin, end, values);
  fetch_first(keys + begin, dim);
  for (int64_t from = first; from < last; from += keys_together) {
    const int64_t to = least(last, from + keys_together);
    for (int64_t c = from; c < to; c += kColumns) {
      BFloat16* panel = panels + (c - from) * stride;
      if (stride > filled) __builtin_memset(panel + filled * kColumns, 0, (stride - filled) * kColumns * sizeof(BFloat16));
      pack_keys(keys + c, dim, panel);
    }
    for (int64_t r = 0; r < count; r += kTogether) {
      const int n = static_cast<int>(least(kTogether, count - r));
      const BFloat16* query = rows.query + r * stride;
      if constexpr (linear::kTiles) shapes.set(n);
      for (int64_t c = from; c < to; c += kColumns) {
        const BFloat16* panel = panels + (c - from) * stride;
        if constexpr (linear::kTiles) {
          linear::add_tiles<Operand::pairs>(n, bytes_of(query), stride * 2, bytes_of(panel), stride * 2, true, scores + c, kScoreStride * 4);
        } else {
          for (int i = 0; i < n; i += kRows) {
            multiply_rows<kRows>(n - i < kRows ? n - i : kRows, query + i * stride, stride, panel, scores + i * kScoreStride + c);
          }
        }
      }
      if (r == 0 && to == last) fetch_first(values + begin, args.value.dim);  // while weights are computed
      for (int64_t i = r; to == last && i < r + n; ++i) {
        weigh_row(args, scores + (i - r) * kScoreStride, rows.factors[i], first, last, rows.first_seen(rows.begin + i) - origin,
                  rows.position(rows.begin + i) + 1 - origin, weights + i * kWeightStride, results + i * results_stride + padded);
      }
    }
  }
#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
  weigh_by_tiles(count, weights + first, kWeightStride, values + first, args.value.dim, last - first, results, results_stride, shapes);
#else
  const int64_t tiles = (count + kRows - 1) / kRows, tile_rows = (count + tiles - 1) / tiles;
  for (int64_t r = 0; r < count; r += tile_rows) {
    weigh_rows<kRows>(static_cast<int>(least(tile_rows, count - r)), weights + r * kWeightStride, kWeightStride, values, args.value.dim,
                      begin / 2 * 2, rounded_up(end, 2), results + r * results_stride, results_stride);
  }
#endif
}
#endif

// results[rows] of one part, of which any row sees something, in floats or words.
template <typename T, typename C>
static void compute_part(const Rows<T, C>& rows, int64_t part, float* results) {
  using Element = ElementOf<T, C>;
  constexpr Operand kOperand = kInWords<Element> ? Operand::words : Operand::float32;
  const AttentionArgs& args = rows.args;
  const int64_t count = rows.end - rows.begin, origin = part * kPart;
  // What any row sees, and the whole panels around it.
  int64_t begin = rows.first_seen(rows.begin) - origin, end = rows.position(rows.end - 1) + 1 - origin;
  begin = begin < 0 ? 0 : begin, end = least(end, kPart);
  const int64_t first_panel = begin / kColumns * kColumns, last_panel = rounded_up(end, kColumns);
  const int64_t tiles = (count + kRows - 1) / kRows, tile_rows = (count + tiles - 1) / tiles;
  const int64_t padded = padded_values(args), stride = result_stride(args);

  const C *keys[kPart + kAhead], *values[kPart + kAhead];
  alignas(64) float key_scales[kPart], value_scales[kPart];
  alignas(64) Element panel[kMostDim * kColumns];
  alignas(64) float scores[kMostRows * kScoreStride];
  alignas(64) float sums[kRows * kColumns];
  alignas(64) Vec most[kMostRows];
  struct {
    int64_t low, high;  // slots of the part that a row sees
  } seen[kMostRows];
  for (int64_t r = 0; r < count; ++r) {
    most[r] = broadcast(kLowest);
    seen[r] = {rows.first_seen(rows.begin + r) - origin, rows.position(rows.begin + r) + 1 - origin};
  }
  find_slots(args.key, rows, part, begin, end, keys);
  find_slots(args.value, rows, part, begin, end, values);
  fetch_first(keys + begin, args.key.dim);
  if constexpr (kScaled<C>) {
    find_scales(args.key.scales, rows, part, begin, end, key_scales);
    find_scales(args.value.scales, rows, part, begin, end, value_scales);
  }
  const auto finish_row = [&](int64_t r, const float* products, int64_t c) {
    most[r] = finish_scores<Element>(args, products, rows.factors[r], kScaled<C> ? key_scales : nullptr, c, seen[r].low, seen[r].high,
                                     most[r], scores + r * kScoreStride);
  };
  const int64_t panel_rows = rounded_up(args.key.dim, kInWords<Element> ? 4 : 1);
  for (int64_t c = first_panel; c < last_panel; c += kColumns) {
    pack_keys(keys + c, args.key.dim, panel);
    for (int64_t r = 0; r < count; r += tile_rows) {
      const int n = static_cast<int>(least(tile_rows, count - r));
      linear::tile<kRows>(kOperand, Type::float32, n, rows.query + r * rows.query_stride, rows.query_stride, panel, panel_rows, sums);
      for (int i = 0; i < n; ++i) finish_row(r + i, sums + i * kColumns, c);
    }
  }
  fetch_first(values + begin, args.value.dim);
  // Weights take the place of scores; integers take the first half of it, and are multiples of their row's unit.
  float units[kMostRows];
  for (int64_t r = 0; r < count; ++r) {
    float* row = scores + r * kScoreStride;
    const float top = largest(most[r]);
    const Vec base = broadcast(base_of(top));
    Vec total[linear::kVectors] = {};  // independent, so that the processor computes them at once
    Vec heaviest{};
    for (int64_t j = first_panel; j < last_panel; j += kColumns) {
      for (int v = 0; v < linear::kVectors; ++v) {
        Vec weight = exponential_of_negative(load(row + j + v * kLanes) - base);
        total[v] += weight;
        if constexpr (kScaled<C>) weight = weight * load(value_scales + j + v * kLanes);
        if constexpr (kInWords<Element>) heaviest = maximum(weight, heaviest);
        store(row + j + v * kLanes, weight);
      }
    }
    if constexpr (kInWords<Element>) {
      const float most_weight = largest(heaviest), inverse = most_weight > 0.f ? kLargestWeight / most_weight : 0.f;
      units[r] = most_weight / kLargestWeight;
      auto* row_weights = static_cast<Element*>(static_cast<void*>(row));
      for (int64_t j = first_panel; j < last_panel; j += kLanes) store(row_weights + j, load(row + j) * inverse);
    }
    for (int v = 1; v < linear::kVectors; ++v) total[0] += total[v];
    results[r * stride + padded] = top;
    results[r * stride + padded + 1] = sum(total[0]);
  }
  const int64_t odd = kInWords<Element> ? 1 : 0;
  begin -= begin & odd, end += end & odd;
  const auto* weights = static_cast<const Element*>(static_cast<const void*>(scores));
  const int64_t weight_stride = kScoreStride * static_cast<int64_t>(sizeof(float) / sizeof(Element));
  for (int64_t r = 0; r < count; r += tile_rows) {
    const int n = static_cast<int>(least(tile_rows, count - r));
    weigh_rows<kRows>(n, weights + r * weight_stride, weight_stride, values, args.value.dim, begin, end, results + r * stride, stride);
  }
  if constexpr (kInWords<Element>) {
    for (int64_t r = 0; r < count; ++r) {
      for (float* to = results + r * stride; to < results + r * stride + padded; to += kLanes) store(to, load(to) * units[r]);
    }
  }
}

template <typename T, typename C>
static void finish(const Rows<T, C>& rows, const float* results) {
  const AttentionArgs& args = rows.args;
  const int64_t padded = padded_values(args), dim = args.value.dim;
  for (int64_t r = rows.begin; r < rows.end; ++r, results += result_stride(args)) {
    const int64_t head = rows.head * rows.group() + r % rows.group(), token = rows.chunk.first_token + r / rows.group();
    float factor = 1.f / results[padded + 1];
    if (args.sinks) {
      const float sink = args.sinks[head], most = results[padded] > sink ? results[padded] : sink, base = base_of(most);
      const float scale = exponential_of(results[padded] - base);
      factor = scale / (results[padded + 1] * scale + exponential_of(sink - base));
    }
    T* out = static_cast<T*>(args.out) + (token * args.heads + head) * dim;
    for (int64_t c = 0; c < dim; c += kLanes) {
      const Vec v = load(results + c) * factor;
      if (c + kLanes <= dim) {
        store(out + c, v);
      } else {
        store_some(out + c, v, static_cast<int>(dim - c));
      }
    }
  }
}

template <typename T, typename C>
static void compute_item(const AttentionArgs& args, const Chunk& chunk, const Place& place, int64_t chunk_index, int64_t item) {
  using Element = ElementOf<T, C>;
  alignas(64) Element query[kMostElements + kMostRows];
  float factors[kMostRows];
  alignas(64) float part_results[kMostElements + kMostRows * 16], total[kMostElements + kMostRows * 16];
  // KV heads of the same slots follow each other: they lie side by side in memory.
  const int64_t head = item % args.kv_heads, padded = padded_values(args), stride = result_stride(args);
  int64_t number = item / args.kv_heads;
  Rows<T, C> rows = {args, chunk, chunk_index, head, 0, chunk.rows, query, query_stride_of<Element>(args.key.dim), factors};
  linear::TileShapes shapes;
  if (!chunk.split) {
    rows.begin = number * item_rows(args);
    rows.end = least(rows.begin + item_rows(args), chunk.rows);
  }
  read_query(rows);
  const int64_t count = rows.end - rows.begin;
  const auto compute = [&](int64_t part, float* to) {
    if constexpr (kInPairs<Element>) {
      compute_part_in_pairs(rows, part, to, shapes);
    } else {
      compute_part(rows, part, to);
    }
  };
  if (!chunk.split) {
    int64_t part = rows.first_seen(rows.begin) / kPart;
    compute(part, total);
    while (++part <= rows.position(rows.end - 1) / kPart) {
      compute(part, part_results);
      merge(part_results, count, stride, padded, total);
    }
    return finish(rows, total);
  }
  auto* results = static_cast<float*>(static_cast<void*>(static_cast<uint8_t*>(args.scratch) + place.results));
  auto* unfinished = static_cast<int32_t*>(static_cast<void*>(static_cast<uint8_t*>(args.scratch) + place.unfinished));
  results += head * chunk.items_per_head * count * stride;
  compute(chunk.begin_part + number, results + number * count * stride);
  if (__atomic_sub_fetch(unfinished + head, 1, __ATOMIC_ACQ_REL) != 0) return;
  clear_results(count, stride, padded, total);
  for (number = 0; number < chunk.items_per_head; ++number) merge(results + number * count * stride, count, stride, padded, total);
  finish(rows, total);
}

template <typename T>
static void compute_item_of(const AttentionArgs& args, const Chunk& chunk, const Place& place, int64_t chunk_index, int64_t item) {
  if (args.key.scales.data != nullptr) return compute_item<T, int8_t>(args, chunk, place, chunk_index, item);
  return compute_item<T, T>(args, chunk, place, chunk_index, item);
}

static void attend(const AttentionArgs& args) {
  auto* places = static_cast<Place*>(args.scratch);
  place_chunks(args, places);
  for (int64_t i = 0; i < args.chunks; ++i) {
    const Chunk chunk = chunk_of(args, i);
    auto* unfinished = static_cast<int32_t*>(static_cast<void*>(static_cast<uint8_t*>(args.scratch) + places[i].unfinished));
    for (int64_t head = 0; chunk.split && head < args.kv_heads; ++head) unfinished[head] = static_cast<int32_t>(chunk.items_per_head);
  }
  const int64_t items = places[args.chunks].first_item;
  for_items(items, args.threads, [&, places, items](int64_t item) {
    item = items - 1 - item;  // the most work first: chunks of many tokens follow decodes, and their last queries see most
    int64_t low = 0, high = args.chunks;  // the chunk is in low .. high
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (places[middle].first_item <= item ? low : high) = middle;
    }
    const Chunk chunk = chunk_of(args, low);
    item -= places[low].first_item;
    switch (args.type) {
      case Type::float32: return compute_item_of<float>(args, chunk, places[low], low, item);
      case Type::bfloat16: return compute_item_of<BFloat16>(args, chunk, places[low], low, item);
      default: return compute_item_of<Float16>(args, chunk, places[low], low, item);
    }
  });
}

// --- writing ---

// Integers relative to the scale as it is stored. A scale that is 0 or NaN has zeros.
template <typename T>
static void quantize(const T* from, int64_t dim, int8_t* to, Float16* scale) {
  constexpr float kLargest = 127.f, kLargestScale = 65504.f;
  const float exact = largest_size(from, dim) / kLargest;
  *scale = from_float(Float16{}, exact > kLargestScale ? kLargestScale : exact);
  const float divisor = to_float(*scale);
  if (!(divisor > 0.f)) {
    __builtin_memset(to, 0, dim);
    return;
  }
  const auto quotient = [&](Vec x) { return maximum(minimum(x / divisor, broadcast(kLargest)), broadcast(-kLargest)); };
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(to + d, quotient(load(from + d)));
  const int left = static_cast<int>(dim - d);
  if (left > 0) store_some(to + d, quotient(load_some(from + d, left)), left);
}

template <typename T>
static void quantize_token(const WriteArgs& args, int64_t t) {
  const CacheView& to = args.to;
  const T* from = static_cast<const T*>(args.from) + t * args.token_stride;
  int8_t* values = static_cast<int8_t*>(to.data) + args.blocks[t] * to.block_stride + args.offsets[t] * to.slot_stride;
  const ScaleView& view = to.scales;
  Float16* scales = static_cast<Float16*>(view.data) + args.blocks[t] * view.block_stride + args.offsets[t] * view.slot_stride;
  for (int64_t head = 0; head < args.kv_heads; ++head) {
    quantize(from + head * args.head_stride, to.dim, values + head * to.head_stride, scales + head * view.head_stride);
  }
}

static void write(const WriteArgs& args) {
  const int64_t bytes = args.type == Type::float32 ? 4 : 2, row = args.to.dim * bytes;
  const bool together = args.head_stride == args.to.dim && args.to.head_stride == args.to.dim;  // heads follow each other
  for_items(args.tokens, args.tokens * args.kv_heads * row < 65536 ? 1 : args.threads, [&, bytes, row, together](int64_t t) {
    if (args.blocks[t] == 0) return;
    if (args.to.scales.data != nullptr) {
      switch (args.type) {
        case Type::float32: return quantize_token<float>(args, t);
        case Type::bfloat16: return quantize_token<BFloat16>(args, t);
        default: return quantize_token<Float16>(args, t);
      }
    }
    const auto* from = static_cast<const uint8_t*>(args.from) + t * args.token_stride * bytes;
    auto* to = static_cast<uint8_t*>(args.to.data) + (args.blocks[t] * args.to.block_stride + args.offsets[t] * args.to.slot_stride) * bytes;
    if (together) {
      __builtin_memcpy(to, from, args.kv_heads * row);
      return;
    }
    for (int64_t head = 0; head < args.kv_heads; ++head) {
      __builtin_memcpy(to + head * args.to.head_stride * bytes, from + head * args.head_stride * bytes, row);
    }
  });
}

static const AttentionKernels kernels = {write, scratch_bytes, attend};

}  // namespace attention

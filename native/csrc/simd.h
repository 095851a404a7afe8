// Vectors of float of the instruction set that a file is compiled for, and conversions from and to the types in memory.
//
// Included in a namespace of its own per instruction set (see kernels.cpp). `a * b + c` is one fused operation wherever the
// instruction set has it (-ffp-contract=fast), so that all code for one instruction set rounds alike.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));
typedef int16_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

#define INLINE __attribute__((always_inline)) static inline

template <typename To, typename From>
INLINE To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

INLINE Vec broadcast(float x) { return x - Vec{}; }

// --- float32 ---
INLINE Vec load(const float* from) {
  Vec v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}
INLINE void store(float* to, Vec v) { __builtin_memcpy(to, &v, sizeof v); }
INLINE float to_float(float x) { return x; }
INLINE float from_float(float, float x) { return x; }

// --- bfloat16 ---
INLINE float to_float(BFloat16 x) { return bits<float>(static_cast<uint32_t>(x.bits) << 16); }
INLINE Vec load(const BFloat16* from) {
  HalfBits half;
  __builtin_memcpy(&half, from, sizeof half);
  return bits<Vec>(__builtin_convertvector(half, BitVec) << 16);
}
INLINE BFloat16 from_float(BFloat16, float x) {  // to the nearest, ties to even
  uint32_t u = bits<uint32_t>(x);
  if ((u & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(u >> 16 | 0x40)};  // a quiet NaN
  return {static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
INLINE void store(BFloat16* to, Vec v) {
#if defined(__AVX512BF16__)
  // Takes subnormal numbers for zeros, unlike the other ways, which therefore are used only where it does not exist.
  const __m256bh half = _mm512_cvtneps_pbh(bits<__m512>(v));
  __builtin_memcpy(to, &half, sizeof half);
#else
  const BitVec u = bits<BitVec>(v);
  const BitVec nan = bits<BitVec>((u & 0x7fffffff) > 0x7f800000);
  const BitVec rounded = (u + 0x7fff + (u >> 16 & 1)) >> 16;
  const HalfBits half = __builtin_convertvector((nan & (u >> 16 | 0x40)) | (~nan & rounded), HalfBits);
  __builtin_memcpy(to, &half, sizeof half);
#endif
}

// --- float16 ---
// Conversions are masked where GCC 12 warns of those that are not.
#if defined(__x86_64__)
INLINE float to_float(Float16 x) { return _cvtsh_ss(x.bits); }
INLINE Float16 from_float(Float16, float x) { return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))}; }
INLINE Vec load(const Float16* from) {
#if defined(__AVX512F__)
  return bits<Vec>(_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#else
  return bits<Vec>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#endif
}
INLINE void store(Float16* to, Vec v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(bits<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
#else
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(bits<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
#endif
}
#else  // ARM
INLINE float to_float(Float16 x) { return static_cast<float>(bits<__fp16>(x.bits)); }
INLINE Float16 from_float(Float16, float x) { return {bits<uint16_t>(static_cast<__fp16>(x))}; }
INLINE Vec load(const Float16* from) {
  return bits<Vec>(vcvt_f32_f16(vld1_f16(reinterpret_cast<const __fp16*>(from))));
}
INLINE void store(Float16* to, Vec v) { vst1_f16(reinterpret_cast<__fp16*>(to), vcvt_f16_f32(bits<float32x4_t>(v))); }
#endif

// --- integers ---
INLINE Vec load(const int8_t* from) {
#if defined(__AVX512F__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return __builtin_convertvector(bits<IntVec>(_mm512_maskz_cvtepi8_epi32(0xffff, bytes)), Vec);
#elif defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return __builtin_convertvector(bits<IntVec>(_mm256_cvtepi8_epi32(bytes)), Vec);
#else
  ByteVec bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IntVec), Vec);
#endif
}
// To the nearest, ties to even, of what is in the integers' range.
INLINE IntVec rounded(Vec v) { return bits<IntVec>(v + 12582912.f) - 0x4b400000; }  // 1.5 * 2^23
INLINE void store(int8_t* to, Vec v) {
  const ByteVec bytes = __builtin_convertvector(rounded(v), ByteVec);
  __builtin_memcpy(to, &bytes, sizeof bytes);
}
INLINE void store(int16_t* to, Vec v) {
  const HalfBits half = __builtin_convertvector(bits<BitVec>(rounded(v)), HalfBits);
  __builtin_memcpy(to, &half, sizeof half);
}

// The first `count` < kLanes elements; the others are 0 when loaded and kept when stored.
template <typename T>
INLINE Vec load_some(const T* from, int count) {
  T whole[kLanes] = {};
  __builtin_memcpy(whole, from, count * sizeof(T));
  return load(whole);
}
template <typename T>
INLINE void store_some(T* to, Vec v, int count) {
  T whole[kLanes];
  store(whole, v);
  __builtin_memcpy(to, whole, count * sizeof(T));
}

// --- reductions, in an order that depends on kLanes alone ---
INLINE float sum(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}
INLINE float largest(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  float most = lanes[0];
  for (int i = 1; i < kLanes; ++i) most = lanes[i] > most ? lanes[i] : most;
  return most;
}
// The largest absolute value of a row; NaN if any is. As bits, NaN are the largest.
template <typename T>
INLINE float largest_size(const T* row, int64_t count) {
  IntVec most{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec x = i + kLanes <= count ? load(row + i) : load_some(row + i, static_cast<int>(count - i));
    const IntVec size = bits<IntVec>(x) & 0x7fffffff;
    most = size > most ? size : most;
  }
  int32_t top = most[0];
  for (int i = 1; i < kLanes; ++i) top = most[i] > top ? most[i] : top;
  return bits<float>(top);
}
INLINE Vec select(IntVec condition, Vec yes, Vec no) {
  return bits<Vec>((bits<IntVec>(yes) & condition) | (bits<IntVec>(no) & ~condition));
}
INLINE Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
INLINE Vec minimum(Vec a, Vec b) { return a < b ? a : b; }

// e^x = value * 2^power, value between 0.7 and 1.42.
INLINE Vec exponential_parts(Vec x, IntVec& power) {
  const Vec shifted = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: rounds to an integer
  power = bits<IntVec>(shifted) - 0x4b400000;
  const Vec whole = shifted - 12582912.f;
  Vec rest = whole * -0.693359375f + x;
  rest = whole * 2.12194440e-4f + rest;
  Vec value = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  value = value * rest + 8.3334519073e-3f;
  value = value * rest + 4.1665795894e-2f;
  value = value * rest + 1.6666665459e-1f;
  value = value * rest + 5.0000001201e-1f;
  return value * (rest * rest) + rest + 1.f;
}
// e^x with a relative error below 3e-7; 0 below -87.3, infinity above 88.7, NaN for NaN.
INLINE Vec exponential(Vec x) {
  IntVec power;
  Vec value = exponential_parts(minimum(maximum(x, broadcast(-88.f)), broadcast(89.f)), power);
  // 2^power in two factors, since power may be 128.
  const Vec half = bits<Vec>(((power >> 1) + 127) << 23);
  const Vec other = bits<Vec>((power - (power >> 1) + 127) << 23);
  value = value * half * other;
  value = select(x < -87.33654f, Vec{}, value);
  return select(x == x, value, x);
}
// The same for x <= 0, in fewer operations; 0 below -87.7.
INLINE Vec exponential_of_negative(Vec x) {
  IntVec power;
  const Vec value = exponential_parts(maximum(x, broadcast(-88.f)), power);
  return select(x == x, value * bits<Vec>((power + 127) << 23), x);
}
// tanh x with an absolute error below 3e-7.
INLINE Vec hyperbolic_tangent(Vec x) { return 1.f - 2.f / (exponential(x * 2.f) + 1.f); }

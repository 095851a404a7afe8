// Tokens from rows of logits: temperature, top-k, top-p, min-p and the draw, without sorting a row.
//
// A thread does a whole row, in an order that depends on the row alone. Top-k reads the row once: the k-th largest of the
// maxima of many groups is a bound that at least k logits reach and few others; only these are looked at closely. Top-p sums
// the weights by the distance of their logit to the largest one, in steps, and looks closely only at the step in which the
// nucleus ends. What is kept is decided by logits, not by weights, as their rounding may not be monotonic.
namespace sampling {

constexpr int64_t kBlock = 256;   // weights that are summed in float32; sums of blocks are added in float64
constexpr int kSteps = 88 * 32;   // of 1/32 in distance; the weight of what is 88 below the largest is 0
constexpr float kLowest = -__builtin_inff();

INLINE uint32_t mask_of(IntVec condition) {  // a bit for each lane
#if defined(__AVX512F__)
  return static_cast<uint32_t>(_mm512_movepi32_mask(bits<__m512i>(condition)));
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(bits<__m256>(condition)));
#elif defined(__aarch64__)
  return vaddvq_u32(bits<uint32x4_t>(condition & IntVec{1, 2, 4, 8}));
#endif
}

// A thread's memory for a row. Arrays have room for the vocabulary, in whole blocks.
struct Scratch {
  float* x;            // logits divided by the temperature; -infinity behind the last
  float* weights;      // e^(x - largest)
  float* values;       // that are selected from
  float* chosen;       // logits of tokens that are looked at closely
  float* their_weights;
  int32_t* ids;        // of these tokens, ascending
  double* sums;        // of blocks, or of steps
};

INLINE int64_t padded(int64_t vocab) { return (vocab + kBlock - 1) / kBlock * kBlock; }
INLINE int64_t num_sums(int64_t vocab) { return padded(vocab) / kBlock > kSteps ? padded(vocab) / kBlock : kSteps; }
INLINE int64_t row_bytes(int64_t vocab) { return (padded(vocab) * 6 * 4 + num_sums(vocab) * 8 + 63) / 64 * 64; }
INLINE int64_t workers(const SamplingArgs& args) {
  if (args.rows * args.vocab < 32768) return 1;
  return args.rows < args.threads ? args.rows : args.threads;
}
static int64_t scratch_bytes(const SamplingArgs& args) { return workers(args) * row_bytes(args.vocab); }

INLINE Scratch scratch_of(const SamplingArgs& args, int64_t worker) {
  auto* bytes = static_cast<uint8_t*>(args.scratch) + worker * row_bytes(args.vocab);
  auto* floats = static_cast<float*>(static_cast<void*>(bytes));
  const int64_t n = padded(args.vocab);
  return {floats, floats + n, floats + 2 * n, floats + 3 * n, floats + 4 * n, static_cast<int32_t*>(static_cast<void*>(floats + 5 * n)),
          static_cast<double*>(static_cast<void*>(floats + 6 * n))};
}

// --- reading a row ---

struct Top {
  float raw;   // the largest logit, NaN if there is any
  int64_t id;  // the lowest of those that have it
};

template <typename T>
static Top largest_logit(const T* logits, int64_t vocab) {
  constexpr int64_t kChains = 4;
  Vec most[kChains];
  for (int64_t c = 0; c < kChains; ++c) most[c] = broadcast(kLowest);
  IntVec unordered{};
  const auto take = [&](Vec v, int64_t chain) {
    unordered |= v != v;
    most[chain] = maximum(v, most[chain]);
  };
  int64_t i = 0;
  for (; i + kChains * kLanes <= vocab; i += kChains * kLanes) {
    for (int64_t c = 0; c < kChains; ++c) take(load(logits + i + c * kLanes), c);
  }
  float top = kLowest;
  for (; i < vocab; ++i) {
    const float v = to_float(logits[i]);
    if (v != v) return {v, 0};
    if (v > top) top = v;
  }
  if (mask_of(unordered)) return {__builtin_nanf(""), 0};
  for (int64_t c = 0; c < kChains; ++c) top = largest(most[c]) > top ? largest(most[c]) : top;
  for (i = 0; i + kLanes <= vocab; i += kLanes) {
    if (const uint32_t mask = mask_of(load(logits + i) == top)) return {top, i + __builtin_ctz(mask)};
  }
  while (i < vocab - 1 && to_float(logits[i]) != top) ++i;
  return {top, i};
}

// x = logits / temperature, and the lanes' maxima of each `group` vectors. Returns the largest logit, NaN if there is any.
template <typename T>
static float read_row(const T* logits, int64_t vocab, float temperature, int64_t group, float* x, float* maxima) {
  const Vec divisor = broadcast(temperature);
  Vec most_of_all = broadcast(kLowest);
  IntVec unordered{};
  for (int64_t i = 0; i < vocab;) {
    Vec most = broadcast(kLowest);
    for (int64_t g = 0; g < group && i < vocab; ++g, i += kLanes) {
      Vec v;
      if (i + kLanes <= vocab) {
        v = load(logits + i);
      } else {
        T whole[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) whole[lane] = i + lane < vocab ? logits[i + lane] : from_float(T{}, kLowest);
        v = load(whole);
      }
      unordered |= v != v;
      most_of_all = maximum(v, most_of_all);
      v = v / divisor;
      most = maximum(v, most);
      store(x + i, v);
    }
    store(maxima, most);
    maxima += kLanes;
  }
  for (int64_t i = (vocab + kLanes - 1) / kLanes * kLanes; i < padded(vocab); i += kLanes) store(x + i, broadcast(kLowest));
  return mask_of(unordered) ? __builtin_nanf("") : largest(most_of_all);
}

// --- selection ---

// Pivots: a fixed sequence of pseudo-random places.
struct Places {
  uint32_t state = 0x9e3779b9;
  int64_t below(int64_t count) {
    state ^= state << 13, state ^= state >> 17, state ^= state << 5;
    return static_cast<int64_t>(static_cast<uint64_t>(state) * static_cast<uint64_t>(count) >> 32);
  }
};

// The k-th largest of `count` >= k >= 1 values, which are moved.
static float kth_largest(float* values, int64_t count, int64_t k) {
  Places places;
  while (true) {
    const float pivot = values[places.below(count)];
    int64_t above = 0, equal = 0;
    for (int64_t i = 0; i < count; ++i) above += values[i] > pivot, equal += values[i] == pivot;
    if (above < k && k <= above + equal) return pivot;
    int64_t kept = 0;
    if (k <= above) {
      for (int64_t i = 0; i < count; ++i) {
        const float value = values[i];
        values[kept] = value, kept += value > pivot;
      }
    } else {
      k -= above + equal;
      for (int64_t i = 0; i < count; ++i) {
        const float value = values[i];
        values[kept] = value, kept += value < pivot;
      }
    }
    count = kept;
  }
}

struct Border {
  float x;       // the smallest logit that stays
  int64_t keep;  // how many of those that have it stay, the lowest ids
};

// Where the running sum of weights, largest logits first, exceeds `target`. Moves the values.
static Border weighted_border(float* x, float* weights, int64_t count, double target) {
  Places places;
  if (target < 0) target = 0;
  Border border = {kLowest, INT64_MAX};  // if rounding lets no sum exceed the target, all stay
  while (count > 0) {
    const float pivot = x[places.below(count)];
    double above = 0, equal = 0, one = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (x[i] > pivot) above += weights[i];
      if (x[i] == pivot) equal += weights[i], one = weights[i];
    }
    if (above <= target && target < above + equal) return {pivot, static_cast<int64_t>((target - above) / one) + 1};
    const bool up = above > target;
    if (!up) target -= above + equal, border.x = border.x == kLowest || pivot < border.x ? pivot : border.x;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float value = x[i], weight = weights[i];
      x[kept] = value, weights[kept] = weight;
      kept += up ? value > pivot : value < pivot;
    }
    count = kept;
  }
  return border;
}

// --- weights ---

INLINE double sum_of(const float* weights, int64_t count) {
  double total = 0;
  for (int64_t i = 0; i < count; ++i) total += weights[i];
  return total;
}

static void weigh(const float* x, int64_t count, float top, float* weights) {  // up to a multiple of the lanes
  for (int64_t i = 0; i < count; i += kLanes) store(weights + i, exponential(load(x + i) - broadcast(top)));
}

// Removes ties behind the border and what has less than min_p. All arrays in the order of ids.
static int64_t filter(const Border& border, float min_p, float* x, float* weights, int32_t* ids, int64_t count) {
  int64_t kept = 0, ties = 0;
  for (int64_t i = 0; i < count; ++i) {
    const bool tie = x[i] == border.x, stays = x[i] > border.x || (tie && ties < border.keep);
    ties += tie;
    x[kept] = x[i], weights[kept] = weights[i], ids[kept] = ids[i];
    kept += stays && weights[i] >= min_p;
  }
  return kept;
}

// The tokens that reach the k-th largest logit, into chosen, ids and their_weights. Returns how many.
static int64_t choose_k(const Scratch& at, int64_t vocab, int64_t group, int64_t k, float top) {
  const int64_t vectors = (vocab + kLanes - 1) / kLanes, groups = (vectors + group - 1) / group;
  for (int64_t i = 0; i < groups * kLanes; i += kLanes) store(at.chosen + i, load(at.values + i));
  const float bound = kth_largest(at.chosen, groups * kLanes, k);
  int64_t count = 0;
  for (int64_t g = 0; g < groups; ++g) {
    if (mask_of(load(at.values + g * kLanes) >= bound) == 0) continue;
    const int64_t end = (g + 1) * group < vectors ? (g + 1) * group : vectors;
    for (int64_t v = g * group; v < end; ++v) {
      for (uint32_t mask = mask_of(load(at.x + v * kLanes) >= bound); mask != 0; mask &= mask - 1) {
        const int64_t id = v * kLanes + __builtin_ctz(mask);
        if (id < vocab) at.chosen[count] = at.x[id], at.ids[count++] = static_cast<int32_t>(id);
      }
    }
  }
  __builtin_memcpy(at.values, at.chosen, count * sizeof(float));
  const float floor = kth_largest(at.values, count, k);
  count = filter({floor, INT64_MAX}, kLowest, at.chosen, at.chosen, at.ids, count);
  weigh(at.chosen, count, top, at.their_weights);
  return count;
}

INLINE IntVec steps_of(Vec x, float top) {
  return __builtin_convertvector(minimum((broadcast(top) - x) * 32.f, broadcast(kSteps - 1.f)), IntVec);
}

// The border of the nucleus of all tokens. Tokens of less than `least` hold less than what it leaves out, all together.
static Border nucleus(const Scratch& at, int64_t vocab, float top, double total, double share) {
  const double target = total * share;
  const float least = static_cast<float>((total - target) / static_cast<double>(vocab) / 2);
  double* sums = at.sums;
  __builtin_memset(sums, 0, kSteps * sizeof(double));
  for (int64_t i = 0; i < vocab; i += kLanes) {
    const Vec weight = load(at.weights + i);
    uint32_t mask = mask_of(weight > least);
    if (mask == 0) continue;
    const IntVec step = steps_of(load(at.x + i), top);
    for (; mask != 0; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      sums[step[lane]] += weight[lane];
    }
  }
  int step = 0;
  double before = 0;
  while (step < kSteps && before + sums[step] <= target) before += sums[step++];
  if (step == kSteps) return {kLowest, INT64_MAX};
  int64_t count = 0;
  for (int64_t i = 0; i < vocab; i += kLanes) {
    for (uint32_t mask = mask_of(steps_of(load(at.x + i), top) == step); mask != 0; mask &= mask - 1) {
      const int64_t id = i + __builtin_ctz(mask);
      if (at.weights[id] > least) at.chosen[count] = at.x[id], at.their_weights[count++] = at.weights[id];
    }
  }
  return weighted_border(at.chosen, at.their_weights, count, target - before);
}

// Weights of less than min_p, below the border, or behind it among ties become 0. Fills the sums of blocks.
static void mask_weights(const Scratch& at, int64_t vocab, const Border& border, float min_p) {
  int64_t left = border.keep;
  for (int64_t b = 0; b < padded(vocab); b += kBlock) {
    Vec sum_of_block{};
    for (int64_t i = b; i < b + kBlock; i += kLanes) {
      const Vec x = load(at.x + i), weight = load(at.weights + i);
      const uint32_t ties = mask_of(x == border.x);
      Vec kept = select((x >= border.x) & (weight >= min_p), weight, Vec{});
      if (ties != 0 && left < kLanes) {
        for (uint32_t mask = ties; mask != 0; mask &= mask - 1) {
          if (left-- <= 0) kept[__builtin_ctz(mask)] = 0.f;
        }
      } else {
        left -= __builtin_popcount(ties);
      }
      store(at.weights + i, kept);
      sum_of_block += kept;
    }
    at.sums[b / kBlock] = sum(sum_of_block);
  }
}

// --- the draw ---

// The first of `count` weights at which the running sum, from `before` on, exceeds `target`; else the last that is not 0.
static int64_t invert(const float* weights, int64_t count, double before, double target) {
  int64_t last = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (weights[i] == 0.f) continue;
    before += weights[i], last = i;
    if (before > target) break;
  }
  return last;
}

static int64_t invert_blocks(const Scratch& at, int64_t vocab, double noise) {
  const int64_t blocks = padded(vocab) / kBlock;
  double total = 0, before = 0;
  for (int64_t b = 0; b < blocks; ++b) total += at.sums[b];
  int64_t block = 0;
  double before_block = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    if (at.sums[b] == 0) continue;
    block = b, before_block = before, before += at.sums[b];
    if (before > total * noise) break;
  }
  return block * kBlock + invert(at.weights + block * kBlock, kBlock, before_block, total * noise);
}

// --- a row ---

static int64_t draw_from_k(const SamplingArgs& args, int64_t s, const Scratch& at, int64_t group, float top) {
  int64_t count = choose_k(at, args.vocab, group, args.top_k[s], top);
  Border border = {kLowest, INT64_MAX};
  if (args.top_p[s] < 1) {
    __builtin_memcpy(at.values, at.chosen, count * sizeof(float));
    __builtin_memcpy(at.weights, at.their_weights, count * sizeof(float));
    border = weighted_border(at.values, at.weights, count, args.top_p[s] * sum_of(at.their_weights, count));
  }
  count = filter(border, args.min_p[s], at.chosen, at.their_weights, at.ids, count);
  if (args.weights != nullptr) {
    float* weights = args.weights + s * args.vocab;
    __builtin_memset(weights, 0, args.vocab * sizeof(float));
    for (int64_t i = 0; i < count; ++i) weights[at.ids[i]] = at.their_weights[i];
  }
  return at.ids[invert(at.their_weights, count, 0, args.noise[s] * sum_of(at.their_weights, count))];
}

static int64_t draw_from_all(const SamplingArgs& args, int64_t s, const Scratch& at, float top) {
  weigh(at.x, padded(args.vocab), top, at.weights);
  Border border = {kLowest, INT64_MAX};
  if (args.top_p[s] < 1) {
    double total = 0;
    for (int64_t b = 0; b < padded(args.vocab); b += kBlock) {
      Vec sum_of_block{};
      for (int64_t i = b; i < b + kBlock; i += kLanes) sum_of_block += load(at.weights + i);
      total += sum(sum_of_block);
    }
    border = nucleus(at, args.vocab, top, total, args.top_p[s]);
  }
  mask_weights(at, args.vocab, border, args.min_p[s]);
  if (args.weights != nullptr) __builtin_memcpy(args.weights + s * args.vocab, at.weights, args.vocab * sizeof(float));
  return invert_blocks(at, args.vocab, args.noise[s]);
}

template <typename T>
static void sample_row(const SamplingArgs& args, int64_t row, const Scratch& at) {
  const T* logits = static_cast<const T*>(args.logits) + row * args.stride;
  const int64_t s = args.setting_of_row[row];
  if (s < 0) {
    const Top top = largest_logit(logits, args.vocab);
    args.tops[row] = top.raw;
    args.tokens[row] = top.raw - top.raw == 0.f ? top.id : 0;
    return;
  }
  const bool by_k = args.top_k[s] < args.vocab;
  // Some eight times as many maxima as places, of at most 64 vectors each.
  int64_t group = args.vocab / (8 * args.top_k[s]);
  group = group < 1 ? 1 : group > 64 ? 64 : group;
  args.tops[row] = read_row(logits, args.vocab, args.temperature[s], group, at.x, at.values);
  const float top = args.tops[row] / args.temperature[s];
  if (top - top != 0.f) {
    args.tokens[row] = 0;
    if (args.weights != nullptr) __builtin_memset(args.weights + s * args.vocab, 0, args.vocab * sizeof(float));
  } else {
    args.tokens[row] = by_k ? draw_from_k(args, s, at, group, top) : draw_from_all(args, s, at, top);
  }
}

static void sample(const SamplingArgs& args) {
  int64_t next = 0;
  for_items(workers(args), args.threads, [&args, &next](int64_t worker) {
    const Scratch at = scratch_of(args, worker);
    for (int64_t row; (row = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < args.rows;) {
      switch (args.type) {
        case Type::float32: sample_row<float>(args, row, at); break;
        case Type::bfloat16: sample_row<BFloat16>(args, row, at); break;
        default: sample_row<Float16>(args, row, at); break;
      }
    }
  });
}

static const SamplingKernels kernels = {scratch_bytes, sample};

}  // namespace sampling

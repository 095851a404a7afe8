// Recurrences and convolutions, token by token: the result does not depend on where a sequence is cut into calls. Heads, the columns of
// a head, and channels are independent.
namespace recurrent {

// Vectors of a head's columns, as many as registers hold.
constexpr int kStrip = kLanes == 16 ? 8 : 4;
constexpr int64_t kMostDense = 8192;  // floats of a strip that are copied: 32 KiB
constexpr int64_t kItemChannels = 256;  // of a convolution, a multiple of kLanes

template <typename T>
INLINE T* part_of(const ChunkStates& states, int64_t chunk, int64_t part) {
  const int64_t block = states.tables[chunk * states.columns + states.blocks[part]];
  return reinterpret_cast<T*>(states.memory + block * states.block_stride + states.offsets[part]);
}

// x [n] times `scale`, over its length if it `normalizes`.
template <typename T>
INLINE void scaled(const T* x, int64_t n, bool normalizes, float scale, float* out) {
  if (normalizes) {
    Vec squares{};
    for (int64_t i = 0; i < n; i += kLanes) {
      const Vec part = i + kLanes <= n ? load(x + i) : load_some(x + i, static_cast<int>(n - i));
      squares = part * part + squares;
    }
    scale /= __builtin_sqrtf(sum(squares) + 1e-6f);
  }
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * scale);
  for (; i < n; ++i) out[i] = to_float(x[i]) * scale;
}

// The state of a head [k_dim, v_dim].
INLINE float* head_of(const GatedDeltaArgs& args, int64_t chunk, int64_t head) {
  const int64_t each = args.v_heads / args.states.parts;  // heads of a part
  return part_of<float>(args.states, chunk, head / each) + head % each * args.k_dim * args.v_dim;
}

// Columns of one head for all tokens of a chunk: whole vectors, or the first `count` elements of one. While the first token is
// computed, which waits for memory, as large a part of `next` is fetched, the state that this thread computes next, or null. For
// several tokens the columns are copied to where they are dense: the rows of a state share few places in a cache.
template <typename T, int kVectors, bool kWhole>
static void delta_strip(const GatedDeltaArgs& args, int64_t chunk, int64_t head, int64_t column, const float* next,
                        int count = kLanes) {
  const int64_t k_dim = args.k_dim, v_dim = args.v_dim, k_head = head / (args.v_heads / args.k_heads);
  const int64_t first = args.states.starts[chunk], end = first + args.states.lengths[chunk];
  if (first == end) return;
  float query[kMostKeyDim], key[kMostKeyDim], dense[kMostDense];
  const auto get = [count](const auto* from) { return kWhole ? load(from) : load_some(from, count); };
  const auto put = [count](auto* to, Vec v) { kWhole ? store(to, v) : store_some(to, v, count); };
  float* const place = head_of(args, chunk, head) + column;
  const bool copies = end - first > 1 && k_dim * kVectors * kLanes <= kMostDense;
  float* const state = copies ? dense : place;
  const int64_t stride = copies ? kVectors * kLanes : v_dim;
  const bool continues = args.states.continues[chunk] != 0;
  if (copies || !continues) {
    for (int64_t i = 0; i < k_dim; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        put(state + i * stride + v * kLanes, continues ? get(place + i * v_dim + v * kLanes) : Vec{});
      }
    }
  }
  const char* ahead = reinterpret_cast<const char*>(next == nullptr ? nullptr : next + column * k_dim);
  const auto fetch = [&ahead] {  // for a row, each of which is read twice
    if (ahead == nullptr) return;
    for (int byte = 0; byte < kVectors * kLanes * 2; byte += 64) __builtin_prefetch(ahead + byte, 0, 2);
    ahead += kVectors * kLanes * 2;
  };
  for (int64_t token = first; token < end; ++token) {
    scaled(static_cast<const T*>(args.q) + token * args.q_stride + k_head * k_dim, k_dim, args.normalizes, args.scale, query);
    scaled(static_cast<const T*>(args.k) + token * args.k_stride + k_head * k_dim, k_dim, args.normalizes, 1.f, key);
    const T* value = static_cast<const T*>(args.v) + token * args.v_stride + head * v_dim + column;
    const int64_t of_gate = token * args.v_heads + head;
    const float decay = exponential(broadcast(args.g[of_gate]))[0];
    Vec by_key[kVectors] = {}, by_query[kVectors] = {}, delta[kVectors];
    float both = 0.f;
    for (int64_t i = 0; i < k_dim; ++i) {
      fetch();
      both = query[i] * key[i] + both;
      for (int v = 0; v < kVectors; ++v) {
        const Vec row = get(state + i * stride + v * kLanes);
        by_key[v] = row * key[i] + by_key[v];
        by_query[v] = row * query[i] + by_query[v];
      }
    }
    T* out = static_cast<T*>(args.out) + of_gate * v_dim + column;
    for (int v = 0; v < kVectors; ++v) {
      delta[v] = (get(value + v * kLanes) - by_key[v] * decay) * args.beta[of_gate];
      put(out + v * kLanes, delta[v] * both + by_query[v] * decay);
    }
    for (int64_t i = 0; i < k_dim; ++i) {
      fetch();
      for (int v = 0; v < kVectors; ++v) {
        float* row = state + i * stride + v * kLanes;
        put(row, delta[v] * key[i] + get(row) * decay);
      }
    }
    ahead = nullptr;
  }
  for (int64_t i = 0; copies && i < k_dim; ++i) {
    for (int v = 0; v < kVectors; ++v) put(place + i * v_dim + v * kLanes, get(state + i * stride + v * kLanes));
  }
}

// An item is a head, which lies in memory in one piece; or a strip of one, where there are few heads for each thread.
template <typename T>
static void delta_of(const GatedDeltaArgs& args) {
  const int64_t width = kStrip * kLanes, strips = (args.v_dim + width - 1) / width, heads = args.states.chunks * args.v_heads;
  const int64_t each = heads >= 4 * args.threads ? strips : 1;
  for_items(heads * strips / each, args.threads, [&, width, strips, heads, each](int64_t item) {
    const int64_t head = item * each / strips, then = item + args.threads;
    const int64_t chunk = head / args.v_heads, of_chunk = head % args.v_heads;
    const float* next = each == strips && then < heads ? head_of(args, then / args.v_heads, then % args.v_heads) : nullptr;
    const int64_t begin = item * each % strips * width, end = begin + each * width < args.v_dim ? begin + each * width : args.v_dim;
    int64_t column = begin;
    for (; column + width <= end; column += width) delta_strip<T, kStrip, true>(args, chunk, of_chunk, column, next);
    for (; column + kLanes <= end; column += kLanes) delta_strip<T, 1, true>(args, chunk, of_chunk, column, next);
    if (column < end) delta_strip<T, 1, false>(args, chunk, of_chunk, column, next, static_cast<int>(end - column));
  });
}

static void gated_delta(const GatedDeltaArgs& args) {
  switch (args.type) {
    case Type::float32: return delta_of<float>(args);
    case Type::bfloat16: return delta_of<BFloat16>(args);
    default: return delta_of<Float16>(args);
  }
}

// Weights of `count` channels in float32, column by column.
template <typename T, int kKernel>
INLINE void columns_of(const T* weight, int64_t count, float (&columns)[kKernel][kItemChannels]) {
  for (int64_t c = 0; c < count; ++c) {
    for (int j = 0; j < kKernel; ++j) columns[j][c] = to_float(weight[c * kKernel + j]);
  }
  for (int j = 0; j < kKernel; ++j) {
    for (int64_t c = count; c < kItemChannels && c < count + kLanes; ++c) columns[j][c] = 0.f;
  }
}

// `count` channels of a part, from its channel `first` on, for all chunks.
template <typename T, int kKernel>
static void conv_item(const ConvArgs& args, int64_t part, int64_t first, int64_t count) {
  const int64_t each = args.channels / args.states.parts, channel = part * each + first;
  const T *x = static_cast<const T*>(args.x) + channel, *bias = static_cast<const T*>(args.bias);
  T* out = static_cast<T*>(args.out) + channel;
  float columns[kKernel][kItemChannels];
  columns_of<T, kKernel>(static_cast<const T*>(args.weight) + channel * kKernel, count, columns);
  for (int64_t chunk = 0; chunk < args.states.chunks; ++chunk) {
    const int64_t begin = args.states.starts[chunk], end = begin + args.states.lengths[chunk];
    if (begin == end) continue;
    const bool continues = args.states.continues[chunk] != 0;
    T* state = part_of<T>(args.states, chunk, part) + first;
    elementwise::for_vectors<T>(count, [&](int64_t c, auto get, auto put) {
      Vec window[kKernel] = {}, weight[kKernel];
      const Vec offset = bias != nullptr ? get(bias + channel + c) : Vec{};
#pragma GCC unroll 4
      for (int j = 0; j < kKernel; ++j) {
        weight[j] = load(columns[j] + c);
        if (continues && j + 1 < kKernel) window[j] = get(state + j * each + c);
      }
      for (int64_t token = begin; token < end; ++token) {
        window[kKernel - 1] = get(x + token * args.x_stride + c);
        Vec value = offset;
#pragma GCC unroll 4
        for (int j = 0; j < kKernel; ++j) value = window[j] * weight[j] + value;
        if (args.silu) {
          value = elementwise::rounded<T>(value);
          value = value / (1.f + exponential(-value));
        }
        put(out + token * args.channels + c, value);
#pragma GCC unroll 4
        for (int j = 0; j + 1 < kKernel; ++j) window[j] = window[j + 1];
      }
#pragma GCC unroll 4
      for (int j = 0; j + 1 < kKernel; ++j) put(state + j * each + c, window[j]);
    });
  }
}

template <typename T, int kKernel>
static void conv_of(const ConvArgs& args) {
  const int64_t each = args.channels / args.states.parts, items = (each + kItemChannels - 1) / kItemChannels;
  for_items(args.states.parts * items, args.threads, [&, each, items](int64_t item) {
    const int64_t first = item % items * kItemChannels;
    conv_item<T, kKernel>(args, item / items, first, first + kItemChannels < each ? kItemChannels : each - first);
  });
}

template <typename T>
static void conv_with(const ConvArgs& args) {
  switch (args.kernel) {
    case 2: return conv_of<T, 2>(args);
    case 3: return conv_of<T, 3>(args);
    default: return conv_of<T, 4>(args);
  }
}

static void conv(const ConvArgs& args) {
  switch (args.type) {
    case Type::float32: return conv_with<float>(args);
    case Type::bfloat16: return conv_with<BFloat16>(args);
    default: return conv_with<Float16>(args);
  }
}

constexpr RecurrentKernels kernels = {gated_delta, conv};

}  // namespace recurrent

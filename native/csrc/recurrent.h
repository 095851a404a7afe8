// Recurrences, token by token: the result does not depend on where a sequence is cut into calls. A head's columns are independent,
// so items are strips of them, as wide as registers hold.
namespace recurrent {

constexpr int kStrip = 4;  // vectors

// x [n] times `scale`, over its length if it `normalizes`.
INLINE void scaled(const float* x, int64_t n, bool normalizes, float scale, float* out) {
  if (normalizes) {
    Vec squares{};
    for (int64_t i = 0; i < n; i += kLanes) {
      const Vec part = i + kLanes <= n ? load(x + i) : load_some(x + i, static_cast<int>(n - i));
      squares = part * part + squares;
    }
    scale /= __builtin_sqrtf(sum(squares) + 1e-6f);
  }
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
}

// Columns of one head for all tokens: of each of its vectors the first `count` elements.
template <int kVectors>
static void delta_strip(const GatedDeltaArgs& args, int64_t sequence, int64_t head, int64_t column, int count) {
  const int64_t k_dim = args.k_dim, v_dim = args.v_dim, k_head = head / (args.v_heads / args.k_heads);
  float* state = args.states + (sequence * args.v_heads + head) * k_dim * v_dim + column;
  float query[kMostKeyDim], key[kMostKeyDim];
  const auto get = [count](const float* from) { return count == kLanes ? load(from) : load_some(from, count); };
  const auto put = [count](float* to, Vec v) { count == kLanes ? store(to, v) : store_some(to, v, count); };
  for (int64_t token = 0; token < args.tokens; ++token) {
    const int64_t at = sequence * args.tokens + token, of_key = (at * args.k_heads + k_head) * k_dim;
    const int64_t of_gate = at * args.v_heads + head, of_value = of_gate * v_dim + column;
    scaled(args.q + of_key, k_dim, args.normalizes, args.scale, query);
    scaled(args.k + of_key, k_dim, args.normalizes, 1.f, key);
    const float decay = exponential(broadcast(args.g[of_gate]))[0];
    Vec by_key[kVectors] = {}, by_query[kVectors] = {}, delta[kVectors];
    float both = 0.f;
    for (int64_t i = 0; i < k_dim; ++i) {
      both = query[i] * key[i] + both;
      for (int v = 0; v < kVectors; ++v) {
        const Vec row = get(state + i * v_dim + v * kLanes) * decay;
        by_key[v] = row * key[i] + by_key[v];
        by_query[v] = row * query[i] + by_query[v];
      }
    }
    for (int v = 0; v < kVectors; ++v) {
      delta[v] = (get(args.v + of_value + v * kLanes) - by_key[v]) * args.beta[of_gate];
      put(args.out + of_value + v * kLanes, delta[v] * both + by_query[v]);
    }
    for (int64_t i = 0; i < k_dim; ++i) {
      for (int v = 0; v < kVectors; ++v) {
        float* row = state + i * v_dim + v * kLanes;
        put(row, delta[v] * key[i] + get(row) * decay);
      }
    }
  }
}

static void gated_delta(const GatedDeltaArgs& args) {
  const int64_t width = kStrip * kLanes, strips = (args.v_dim + width - 1) / width;
  for_items(args.batch * args.v_heads * strips, args.threads, [&, width, strips](int64_t item) {
    const int64_t head = item / strips % args.v_heads, sequence = item / strips / args.v_heads;
    int64_t column = item % strips * width;
    if (column + width <= args.v_dim) return delta_strip<kStrip>(args, sequence, head, column, kLanes);
    for (; column < args.v_dim; column += kLanes) {
      const int64_t left = args.v_dim - column;
      delta_strip<1>(args, sequence, head, column, left < kLanes ? static_cast<int>(left) : kLanes);
    }
  });
}

constexpr RecurrentKernels kernels = {gated_delta};

}  // namespace recurrent

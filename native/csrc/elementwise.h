// Operations on each element or row: norms, rotary embeddings, gates. Computed in float32 and rounded to the type once, where not
// said otherwise. A row's result depends on neither the other rows nor the threads.
namespace elementwise {

constexpr int64_t kSmall = 1 << 14;      // elements that one thread does sooner than two
constexpr int64_t kItemElements = 2048;  // of an item, about

// Call `rows(begin, end)` for ranges that cover [0, count), of rows of n elements each.
template <typename Rows>
INLINE void for_rows(int64_t count, int64_t n, int threads, const Rows& rows) {
  if (threads == 1 || count * n <= kSmall) return rows(static_cast<int64_t>(0), count);
  const int64_t each = n < kItemElements ? kItemElements / (n > 0 ? n : 1) : 1;
  for_items((count + each - 1) / each, threads, [&, count, each](int64_t item) {
    rows(item * each, (item + 1) * each < count ? (item + 1) * each : count);
  });
}

// `body(i, load, store)` for the vectors of [0, n), the last one in part.
template <typename T, typename Body>
INLINE void for_vectors(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    body(i, [](const T* from) { return load(from); }, [](T* to, Vec v) { store(to, v); });
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    body(i, [rest](const T* from) { return load_some(from, rest); }, [rest](T* to, Vec v) { store_some(to, v, rest); });
  }
}

template <typename T>
INLINE Vec rounded(Vec v) {
  T stored[kLanes];
  store(stored, v);
  return load(stored);
}

// --- norms ---

// sum of squares of a row, in kLanes * 2 partial sums
template <typename T>
INLINE float squares(const T* x, int64_t n) {
  Vec even = {}, odd = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const Vec a = load(x + i), b = load(x + i + kLanes);
    even += a * a;
    odd += b * b;
  }
  for (; i < n; i += kLanes) {
    const Vec a = n - i >= kLanes ? load(x + i) : load_some(x + i, static_cast<int>(n - i));
    even += a * a;
  }
  return sum(even + odd);
}

template <typename T, bool kRounds>
INLINE void scale_row(const NormArgs& args, const T* x, float factor, const T* gate, T* out) {
  const T* weight = static_cast<const T*>(args.weight);
  for_vectors<T>(args.n, [&](int64_t i, auto load, auto store) {
    Vec value = load(x + i) * factor;
    if (kRounds) value = rounded<T>(value);
    if (weight != nullptr) value = value * (load(weight + i) + args.offset);
    if (gate != nullptr) {
      const Vec g = load(gate + i);
      if (kRounds) value = rounded<T>(value);
      value = value * (g / (1.f + exponential(-g)));
    }
    store(out + i, value);
  });
}

template <typename T>
static void norm_rows(const NormArgs& args) {
  for_rows(args.outer * args.inner, args.n, args.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(args.x) + row / args.inner * args.outer_stride + row % args.inner * args.inner_stride;
      if (args.residual != nullptr) {
        const T* other = static_cast<const T*>(args.residual) + row * args.n;
        T* total = static_cast<T*>(args.total) + row * args.n;
        for_vectors<T>(args.n, [&](int64_t i, auto load, auto store) { store(total + i, load(x + i) + load(other + i)); });
        x = total;
      }
      const float mean = squares(x, args.n) / static_cast<float>(args.n);
      const float factor = 1.f / __builtin_sqrtf(mean + args.eps);
      T* out = static_cast<T*>(args.out) + row * args.n;
      const T* gate = args.gate != nullptr ? static_cast<const T*>(args.gate) + row * args.n : nullptr;
      args.rounds_first ? scale_row<T, true>(args, x, factor, gate, out) : scale_row<T, false>(args, x, factor, gate, out);
    }
  });
}

static void norm(const NormArgs& args) {
  switch (args.type) {
    case Type::float32: return norm_rows<float>(args);
    case Type::bfloat16: return norm_rows<BFloat16>(args);
    default: return norm_rows<Float16>(args);
  }
}

// --- rotary embeddings ---

template <typename T>
INLINE void rotate_halves(const T* x, const T* cos, const T* sin, int64_t rotated, bool of_pairs, T* out) {
  const int64_t half = rotated / 2, second = of_pairs ? 0 : half;
  for_vectors<T>(half, [&](int64_t i, auto load, auto store) {
    const Vec a = load(x + i), b = load(x + half + i);
    store(out + i, a * load(cos + i) - b * load(sin + i));
    store(out + half + i, b * load(cos + second + i) + a * load(sin + second + i));
  });
}

template <typename T>
INLINE void rotate_neighbours(const T* x, const T* cos, const T* sin, int64_t rotated, T* out) {
  for (int64_t i = 0; i < rotated; i += 2) {
    const float a = to_float(x[i]), b = to_float(x[i + 1]);
    out[i] = from_float(T{}, a * to_float(cos[i]) - b * to_float(sin[i]));
    out[i + 1] = from_float(T{}, b * to_float(cos[i + 1]) + a * to_float(sin[i + 1]));
  }
}

template <typename T>
INLINE void rotate_token(const RotateArgs& args, const RotatedHeads& part, int64_t batch, int64_t token) {
  const int64_t at = batch * args.cos_batch_stride + token * args.cos_token_stride;
  const T *cos = static_cast<const T*>(args.cos) + at, *sin = static_cast<const T*>(args.sin) + at;
  const T* x = static_cast<const T*>(part.x) + batch * part.batch_stride + token * part.token_stride;
  T* out = static_cast<T*>(part.out) + (batch * args.tokens + token) * part.heads * part.dim;
  for (int64_t head = 0; head < part.heads; ++head, x += part.head_stride, out += part.dim) {
    if (args.rotation == Rotation::neighbours) {
      rotate_neighbours(x, cos, sin, args.rotated, out);
    } else {
      rotate_halves(x, cos, sin, args.rotated, args.rotation == Rotation::halves_of_pairs, out);
    }
    for (int64_t i = args.rotated; i < part.dim; ++i) out[i] = x[i];
  }
}

template <typename T>
static void rotate_tokens(const RotateArgs& args) {
  const int64_t elements = args.parts[0].heads * args.parts[0].dim + args.parts[1].heads * args.parts[1].dim;
  for_rows(args.batch * args.tokens, elements, args.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (const RotatedHeads& part : args.parts) rotate_token<T>(args, part, row / args.tokens, row % args.tokens);
    }
  });
}

static void rotate(const RotateArgs& args) {
  switch (args.type) {
    case Type::float32: return rotate_tokens<float>(args);
    case Type::bfloat16: return rotate_tokens<BFloat16>(args);
    default: return rotate_tokens<Float16>(args);
  }
}

// --- gates ---

// The error function with an absolute error below 5e-7 (Abramowitz and Stegun, 7.1.26).
INLINE Vec error_function(Vec x) {
  const Vec size = maximum(x, -x);
  const Vec t = 1.f / (size * 0.3275911f + 1.f);
  Vec sum = t * 1.061405429f - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const Vec value = 1.f - sum * t * exponential(-size * size);
  return select(x < 0.f, -value, value);
}

template <Gate kGate>
INLINE Vec activated(Vec x) {
  switch (kGate) {
    case Gate::silu: return x / (exponential(-x) + 1.f);
    case Gate::gelu: return x * 0.5f * (error_function(x * 0.70710678f) + 1.f);
    case Gate::gelu_tanh: return x / (exponential((x * x * 0.044715f + 1.f) * x * -1.59576912f) + 1.f);
  }
}

template <typename T, Gate kGate>
static void gate_rows(const GateArgs& args) {
  for_rows(args.rows, args.n, args.threads, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(args.gate_x) + row * args.stride;
      const T* up = static_cast<const T*>(args.up_x) + row * args.stride;
      T* out = static_cast<T*>(args.out) + row * args.n;
      for_vectors<T>(args.n, [&](int64_t i, auto load, auto store) { store(out + i, activated<kGate>(load(gate + i)) * load(up + i)); });
    }
  });
}

template <typename T>
static void gate_of(const GateArgs& args) {
  switch (args.gate) {
    case Gate::silu: return gate_rows<T, Gate::silu>(args);
    case Gate::gelu: return gate_rows<T, Gate::gelu>(args);
    case Gate::gelu_tanh: return gate_rows<T, Gate::gelu_tanh>(args);
  }
}

static void gate(const GateArgs& args) {
  switch (args.type) {
    case Type::float32: return gate_of<float>(args);
    case Type::bfloat16: return gate_of<BFloat16>(args);
    default: return gate_of<Float16>(args);
  }
}

// --- sums ---

template <typename T>
static void add_rows(const AddArgs& args) {
  for_rows(args.rows, args.n, args.threads, [&](int64_t begin, int64_t end) {
    const T* a = static_cast<const T*>(args.a) + begin * args.n;
    const T* b = static_cast<const T*>(args.b) + begin * args.n;
    T* out = static_cast<T*>(args.out) + begin * args.n;
    for_vectors<T>((end - begin) * args.n, [&](int64_t i, auto load, auto store) { store(out + i, load(a + i) + load(b + i)); });
  });
}

static void add(const AddArgs& args) {
  switch (args.type) {
    case Type::float32: return add_rows<float>(args);
    case Type::bfloat16: return add_rows<BFloat16>(args);
    default: return add_rows<Float16>(args);
  }
}

static const ElementwiseKernels kernels = {norm, rotate, gate, add};

}  // namespace elementwise

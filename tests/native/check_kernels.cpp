// Checks the kernels without torch and Python, against float64, on random inputs: linked with the objects of isa.cpp, kernels.cpp
// and pool.cpp it runs wherever they do, such as under qemu (test_other_processors.py). Prints what it checked; exits with 1 at
// the first difference. Memory behind the arrays holds NaN.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

using namespace pagetide;

namespace {

std::mt19937 generator(1);
double normal() { return std::normal_distribution<double>()(generator); }
int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(generator); }

void check(bool good, const char* what, const char* type, double difference) {
  if (good) return;
  std::printf("FAILED: %s of %s differs by %g\n", what, type, difference);
  std::exit(1);
}

// Elements of a type in memory, and their values. Rounding is the kernels' business: values are chosen to be exact.
struct Format {
  Type type;
  const char* name;
  int64_t bytes;
  double error;  // relative to the largest result
};
const Format kFormats[] = {{Type::float32, "float32", 4, 1e-5}, {Type::bfloat16, "bfloat16", 2, 0.02}, {Type::float16, "float16", 2, 2e-3}};

double exact(double value) { return std::round(std::fmin(std::fmax(value, -3.9), 3.9) * 32) / 32; }  // in 8 bits: all types have it

uint16_t half_bits(double value) {  // float16 of an exact value
  if (value == 0) return 0;
  int exponent;
  const double fraction = std::frexp(std::fabs(value), &exponent);  // in [0.5, 1)
  return static_cast<uint16_t>((value < 0 ? 0x8000 : 0) | (exponent + 14) << 10 | (static_cast<int>(fraction * 2048) - 1024));
}
double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return exponent == 31 ? std::nan("") : bits & 0x8000 ? -size : size;
}

struct Array {
  const Format& format;
  std::vector<uint8_t> bytes;
  Array(const Format& f, int64_t count) : format(f), bytes((count + 64) * f.bytes, 0xff) {}
  void* data() { return bytes.data(); }
  void set(int64_t i, double value) {
    const float single = static_cast<float>(value);
    uint32_t word;
    std::memcpy(&word, &single, 4);
    uint16_t half = format.type == Type::bfloat16 ? static_cast<uint16_t>(word >> 16) : half_bits(value);
    std::memcpy(bytes.data() + i * format.bytes, format.bytes == 4 ? static_cast<void*>(&word) : static_cast<void*>(&half), format.bytes);
  }
  double get(int64_t i) const {
    uint32_t word = 0;
    std::memcpy(&word, bytes.data() + i * format.bytes, format.bytes);
    if (format.type == Type::float16) return half_value(static_cast<uint16_t>(word));
    if (format.type == Type::bfloat16) word <<= 16;
    float single;
    std::memcpy(&single, &word, 4);
    return single;
  }
};

void* scratch(int64_t bytes) {
  static std::vector<void*> memory;
  for (void* old : memory) std::free(old);
  memory.assign(1, std::aligned_alloc(64, (bytes + 127) / 64 * 64));
  return memory[0];
}

void check_linear(const Format& format, Type weight_type, bool rows_in_int8, int64_t rows, int64_t n, int64_t k) {
  const LinearKernels& kernel = kernels()->linear;
  const bool whole = weight_type != Type::int8 && weight_type != Type::int4;
  const int64_t group = 32, groups = (k + group - 1) / group;
  Array x(format, rows * k), weight(format, n * k), bias(format, n), out(format, rows * n);
  std::vector<double> values(rows * k), weights(n * k);
  std::vector<int8_t> integers(n * k + 64, 127);
  std::vector<float> scales((weight_type == Type::int4 ? groups : 1) * n + 64, NAN);
  for (size_t i = 0; i < scales.size() - 64; ++i) scales[i] = static_cast<float>(integer(1, 64)) / 1024;
  for (int64_t i = 0; i < rows * k; ++i) x.set(i, values[i] = exact(normal()));
  for (int64_t i = 0; i < n * k; ++i) {
    integers[i] = static_cast<int8_t>(weight_type == Type::int4 ? integer(-8, 7) : integer(-127, 127));
    weights[i] = whole ? exact(normal()) : integers[i] * static_cast<double>(scales[(weight_type == Type::int4 ? i % k / group * n : 0) + i / k]);
    if (whole) weight.set(i, weights[i]);
  }
  for (int64_t i = 0; i < n; ++i) bias.set(i, exact(normal()));
  std::vector<uint8_t> memory(kernel.packed_bytes(weight_type, n, k) + 64);
  void* packed = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  kernel.pack(whole ? weight.data() : integers.data(), weight_type, weight_type, n, k, packed, 2);
  LinearArgs args{};
  args.x = x.data(), args.x_type = format.type, args.rows = rows, args.x_stride = k;
  args.weight = packed, args.weight_type = weight_type, args.n = n, args.k = k, args.group = weight_type == Type::int4 ? group : 0;
  args.scales = whole ? nullptr : scales.data(), args.rows_in_int8 = rows_in_int8;
  args.bias = bias.data(), args.out = out.data(), args.out_stride = n, args.threads = 2;
  args.scratch = scratch(kernel.scratch_bytes(args));
  kernel.multiply(args);
  double worst = 0, most = 0;
  const int64_t together = weight_type == Type::int4 ? group : k;  // inputs that are rounded by their largest
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<double> tops((k + together - 1) / together, 0);
    for (int64_t i = 0; i < k; ++i) tops[i / together] = std::fmax(tops[i / together], std::fabs(values[r * k + i]));
    for (int64_t j = 0; j < n; ++j) {
      double sum = bias.get(j);
      for (int64_t i = 0; i < k; ++i) {
        const double top = tops[i / together];
        const double value = rows_in_int8 ? std::round(values[r * k + i] * 127 / top) * top / 127 : values[r * k + i];
        sum += value * weights[j * k + i];
      }
      most = std::fmax(most, std::fabs(sum));
      const double difference = std::fabs(out.get(r * n + j) - sum);
      worst = difference > worst || std::isnan(difference) ? difference : worst;
    }
  }
  check(worst <= (rows_in_int8 ? 0.02 : format.error) * most, "a product", format.name, worst);
}

// K or V of a cache: elements of a format, or int8 with scales.
struct Cached {
  int64_t heads, dim;
  Array floats;
  std::vector<int8_t> integers;
  std::vector<uint16_t> scales;
  Cached(const Format& format, bool scaled, int64_t h, int64_t d, int64_t slots)
      : heads(h), dim(d), floats(format, slots * h * d), integers(scaled ? slots * h * d + 64 : 0, 127),
        scales(scaled ? slots * h : 0, 0x7fff) {}
  CacheView view(int64_t block_size) {
    CacheView view = {floats.data(), block_size * heads * dim, heads * dim, dim, dim};
    if (!scales.empty()) view.data = integers.data(), view.scales = {scales.data(), block_size * heads, heads, 1};
    return view;
  }
  double get(int64_t row, int64_t d) const {  // row: slot * heads + head
    return scales.empty() ? floats.get(row * dim + d) : integers[row * dim + d] * half_value(scales[row]);
  }
  // Writes random rows by the kernel, and checks them.
  void write(int64_t block, int64_t offset, int64_t block_size) {
    Array rows(floats.format, heads * dim);
    for (int64_t i = 0; i < heads * dim; ++i) rows.set(i, exact(normal()));
    WriteArgs args{};
    args.type = floats.format.type, args.from = rows.data(), args.token_stride = heads * dim, args.head_stride = dim;
    args.to = view(block_size);
    args.tokens = 1, args.kv_heads = heads, args.blocks = &block, args.offsets = &offset, args.threads = 1;
    kernels()->attention.write(args);
    for (int64_t i = 0; i < heads * dim; ++i) {
      const int64_t row = (block * block_size + offset) * heads + i / dim;
      const double difference = std::fabs(get(row, i % dim) - rows.get(i)), most = scales.empty() ? 0 : half_value(scales[row]) * 0.55;
      check(difference <= most, "what is written", floats.format.name, difference);
    }
  }
};

void check_attention(const Format& format, int64_t window, float softcap, bool with_sinks, bool scaled) {
  constexpr int64_t kBlocks = 64, kSize = 16, kKvHeads = 2, kHeads = 6, kDim = 40, kValueDim = 24, kWidth = 40;
  const AttentionKernels& kernel = kernels()->attention;
  const int32_t lens[] = {1, 300, 560, 70}, queries[] = {1, 1, 37, 70}, bounds[] = {0, 1, 2, 39, 109};
  const int64_t tokens = bounds[4];
  Cached key(format, scaled, kKvHeads, kDim, kBlocks * kSize), value(format, scaled, kKvHeads, kValueDim, kBlocks * kSize);
  Array query(format, tokens * kHeads * kDim), out(format, tokens * kHeads * kValueDim);
  std::vector<int64_t> tables(4 * kWidth, 0);
  int64_t next = 1;
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t b = 0; b * kSize < lens[i]; ++b) tables[i * kWidth + b] = kBlocks - next++;
    for (int64_t t = 0; t < lens[i]; ++t) {
      for (Cached* cached : {&key, &value}) cached->write(tables[i * kWidth + t / kSize], t % kSize, kSize);
    }
  }
  for (int64_t i = 0; i < tokens * kHeads * kDim; ++i) query.set(i, exact(normal()));
  const float sinks[kHeads] = {0.5f, -1.f, 2.f, 0.f, 1.f, -3.f};
  AttentionArgs args{};
  int fault = 0;
  args.type = format.type, args.query = query.data(), args.query_stride = kHeads * kDim, args.query_head_stride = kDim;
  args.key = key.view(kSize), args.value = value.view(kSize);
  args.num_blocks = kBlocks, args.block_size = kSize, args.heads = kHeads, args.kv_heads = kKvHeads;
  args.tables = tables.data(), args.chunks = 4, args.width = kWidth, args.bounds = bounds, args.lens = lens;
  args.scaling = 0.2f, args.window = window, args.softcap = softcap, args.sinks = with_sinks ? sinks : nullptr;
  args.out = out.data(), args.fault = &fault, args.threads = 2;
  args.scratch = scratch(kernel.scratch_bytes(args));
  kernel.attend(args);
  double worst = fault, most = 0;
  for (int64_t i = 0; i < 4; ++i) {
    for (int64_t q = 0; q < queries[i]; ++q) {
      const int64_t last = lens[i] - queries[i] + q, first = window && last >= window ? last - window + 1 : 0;
      for (int64_t h = 0; h < kHeads; ++h) {
        double total = with_sinks ? std::exp(sinks[h]) : 0, sums[kValueDim] = {};
        for (int64_t t = first; t <= last; ++t) {
          const int64_t slot = (tables[i * kWidth + t / kSize] * kSize + t % kSize) * kKvHeads + h / (kHeads / kKvHeads);
          double score = 0;
          for (int64_t d = 0; d < kDim; ++d) score += query.get(((bounds[i] + q) * kHeads + h) * kDim + d) * key.get(slot, d);
          score *= args.scaling;
          if (softcap != 0) score = std::tanh(score / softcap) * softcap;
          total += std::exp(score);
          for (int64_t d = 0; d < kValueDim; ++d) sums[d] += std::exp(score) * value.get(slot, d);
        }
        for (int64_t d = 0; d < kValueDim; ++d) {
          const double difference = std::fabs(out.get(((bounds[i] + q) * kHeads + h) * kValueDim + d) - sums[d] / total);
          worst = difference > worst || std::isnan(difference) ? difference : worst;
          most = std::fmax(most, std::fabs(sums[d] / total));
        }
      }
    }
  }
  check(worst <= format.error * most, "attention", format.name, worst);
}

void check_sampling(const Format& format, int64_t vocab, int64_t top_k, double top_p, float min_p) {
  const int64_t setting[] = {0, -1};
  const float temperature = 0.75f;
  const double noise = 0.4;
  Array logits(format, 2 * vocab);
  for (int64_t i = 0; i < 2 * vocab; ++i) logits.set(i, exact(normal()));
  std::vector<float> weights(vocab + 64, NAN);
  int64_t tokens[2];
  float tops[2];
  SamplingArgs args{};
  args.logits = logits.data(), args.type = format.type, args.rows = 2, args.vocab = vocab, args.stride = vocab;
  args.setting_of_row = setting, args.temperature = &temperature, args.top_k = &top_k, args.top_p = &top_p, args.min_p = &min_p;
  args.noise = &noise, args.tokens = tokens, args.tops = tops, args.weights = weights.data(), args.threads = 2;
  args.scratch = scratch(kernels()->sampling.scratch_bytes(args));
  kernels()->sampling.sample(args);
  // A token stays if fewer than k are above it, and what is before it, ties by id, holds at most top_p of those.
  std::vector<double> x(vocab), e(vocab);
  double top = -INFINITY, most = -INFINITY, total = 0, kept = 0, before = 0, until = 0;
  for (int64_t i = 0; i < vocab; ++i) top = std::fmax(top, x[i] = logits.get(i)), most = std::fmax(most, logits.get(vocab + i));
  check(tops[0] == top && tops[1] == most && logits.get(vocab + tokens[1]) == most, "the largest logit", format.name, most);
  std::vector<bool> stays(vocab);
  for (int64_t i = 0; i < vocab; ++i) {
    int64_t above = 0;
    for (int64_t j = 0; j < vocab; ++j) above += x[j] > x[i];
    stays[i] = above < top_k, e[i] = std::exp((x[i] - top) / temperature);
    if (stays[i]) total += e[i];
  }
  const std::vector<bool> in_k = stays;
  for (int64_t i = 0; i < vocab; ++i) {
    double ahead = 0;
    for (int64_t j = 0; j < vocab; ++j) ahead += in_k[j] && (x[j] > x[i] || (x[j] == x[i] && j < i)) ? e[j] : 0;
    if (top_p < 1 && ahead > top_p * total) stays[i] = false;
    if (e[i] < min_p) stays[i] = false;
    check(stays[i] == (weights[i] > 0) && std::fabs(weights[i] - (stays[i] ? e[i] : 0)) < 1e-5, "a weight", format.name, weights[i] - e[i]);
    kept += stays[i] ? e[i] : 0;
  }
  for (int64_t i = 0; i < vocab; ++i) {
    if (i < tokens[0] && stays[i]) before += e[i];
    if (i <= tokens[0] && stays[i]) until += e[i];
  }
  check(stays[tokens[0]] && before <= noise * kept * (1 + 1e-5) && noise * kept <= until * (1 + 1e-5), "a draw", format.name, until);
}

}  // namespace

int main() {
  if (kernels() == nullptr) return 2;
  for (const Format& format : kFormats) {
    const int64_t shapes[][3] = {{1, 5, 3}, {1, 64, 256}, {4, 33, 300}, {17, 130, 514}, {70, 48, 96}};
    for (const auto& [rows, n, k] : shapes) {
      check_linear(format, format.type, false, rows, n, k);
      check_linear(format, Type::int8, false, rows, n, k);
      check_linear(format, Type::int8, true, rows, n, k);
      check_linear(format, Type::int4, false, rows, n, k);
      check_linear(format, Type::int4, true, rows, n, k);
    }
    for (const bool scaled : {false, true}) {
      check_attention(format, 0, 0, false, scaled);
      check_attention(format, 100, 5, true, scaled);
    }
    for (const int64_t vocab : {1, 17, 300, 1001}) {
      check_sampling(format, vocab, vocab, 2, 0);
      check_sampling(format, vocab, vocab < 20 ? 1 : 20, 2, 0);
      check_sampling(format, vocab, vocab < 20 ? 1 : 20, 0.80001, 0);
      check_sampling(format, vocab, vocab, 0.90001, 0);
      check_sampling(format, vocab, vocab, 0.6001, 0.1001f);
    }
  }
  std::printf("%s: products, attention and sampling agree with float64\n", kernels()->name);
  return 0;
}

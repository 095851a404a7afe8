// torch.ops.pagetide.sample: tokens from rows of logits.
#include <cfloat>
#include <tuple>
#include <vector>

#include "ops.h"

namespace pagetide {
namespace {

template <typename T>
const T* array(const Tensor& tensor, const char* name, ScalarType type, int64_t numel) {
  check_dense(tensor, name, type, numel);
  return static_cast<const T*>(tensor.const_data_ptr());
}

// Which of the settings are those of each row; -1: none. Checks their values.
std::vector<int64_t> settings_of_rows(const SamplingArgs& args, const int64_t* places, int64_t count) {
  std::vector<int64_t> setting(args.rows, -1);
  for (int64_t s = 0; s < count; ++s) {
    STD_TORCH_CHECK(0 <= places[s] && places[s] < args.rows && setting[places[s]] < 0, "places[", s, "] is ", places[s], " of ",
                    args.rows, " rows, or there is another for the same row");
    STD_TORCH_CHECK(args.temperature[s] > 0 && args.temperature[s] <= FLT_MAX, "temperature[", s, "] must be positive and finite, got ",
                    args.temperature[s]);
    STD_TORCH_CHECK(1 <= args.top_k[s] && args.top_k[s] <= args.vocab, "top_k[", s, "] is ", args.top_k[s], " of ", args.vocab);
    STD_TORCH_CHECK(args.top_p[s] == args.top_p[s], "top_p[", s, "] is not a number");
    STD_TORCH_CHECK(0 <= args.min_p[s] && args.min_p[s] <= 1, "min_p[", s, "] must be from 0 to 1, got ", args.min_p[s]);
    STD_TORCH_CHECK(0 <= args.noise[s] && args.noise[s] < 1, "noise[", s, "] must be in [0, 1), got ", args.noise[s]);
    setting[places[s]] = s;
  }
  return setting;
}

// logits [rows, vocab], and settings of the rows `places`; see SamplingArgs. Returns tokens int64 [rows]; tokens and largest
// logits float64 [2, rows]; and weights float32 [places, vocab], or [0, vocab] if they are not wanted.
std::tuple<Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& places, const Tensor& temperature, const Tensor& top_k,
                                          const Tensor& top_p, const Tensor& min_p, const Tensor& noise, bool want_weights) {
  SamplingArgs args{};
  args.type = type_of(logits, "logits");
  check_dense_rows(logits, "logits");
  STD_TORCH_CHECK(logits.dim() == 2, "logits have two dimensions: rows and the vocabulary");
  args.rows = logits.size(0), args.vocab = logits.size(1), args.stride = args.rows > 1 ? logits.stride(0) : args.vocab;
  STD_TORCH_CHECK(1 <= args.vocab && args.vocab < INT32_MAX / 2, "a vocabulary of ", args.vocab);
  const int64_t count = places.numel();
  const int64_t* at = array<int64_t>(places, "places", ScalarType::Long, count);
  args.temperature = array<float>(temperature, "temperature", ScalarType::Float, count);
  args.top_k = array<int64_t>(top_k, "top_k", ScalarType::Long, count);
  args.top_p = array<double>(top_p, "top_p", ScalarType::Double, count);
  args.min_p = array<float>(min_p, "min_p", ScalarType::Float, count);
  args.noise = array<double>(noise, "noise", ScalarType::Double, count);
  const std::vector<int64_t> setting = settings_of_rows(args, at, count);
  args.setting_of_row = setting.data();
  Tensor tokens = torch::stable::new_empty(logits, {args.rows}, ScalarType::Long);
  Tensor both = torch::stable::new_empty(logits, {2, args.rows}, ScalarType::Double);
  Tensor weights = torch::stable::new_empty(logits, {want_weights ? count : 0, args.vocab}, ScalarType::Float);
  if (args.rows == 0) return {tokens, both, weights};
  std::vector<float> tops(args.rows);
  args.logits = logits.const_data_ptr();
  args.tokens = static_cast<int64_t*>(tokens.mutable_data_ptr());
  args.tops = tops.data();
  args.weights = want_weights ? static_cast<float*>(weights.mutable_data_ptr()) : nullptr;
  args.threads = threads();
  Tensor scratch = empty_bytes(logits, kernels()->sampling.scratch_bytes(args));
  args.scratch = scratch.mutable_data_ptr();
  kernels()->sampling.sample(args);
  auto* packed = static_cast<double*>(both.mutable_data_ptr());
  for (int64_t row = 0; row < args.rows; ++row) {
    packed[row] = static_cast<double>(args.tokens[row]);
    packed[args.rows + row] = tops[row];
  }
  return {tokens, both, weights};
}

}  // namespace
}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def(
      "sample(Tensor logits, Tensor places, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor noise, "
      "bool want_weights) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) { m.impl("sample", TORCH_BOX(&pagetide::sample)); }

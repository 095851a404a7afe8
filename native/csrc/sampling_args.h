// Tokens from rows of logits. A row draws with its settings, or else takes its largest logit.

struct SamplingArgs {
  const void* logits;  // [rows, vocab] of `type`, rows `stride` elements apart
  Type type;
  int64_t rows, vocab, stride;   // vocab < 2^31
  const int64_t* setting_of_row; // [rows]: an index into the next five; -1: the row does not draw
  const float* temperature;      // positive
  const int64_t* top_k;          // 1 .. vocab; vocab: off
  const double* top_p;           // the share that the nucleus must exceed; from 1 on: off
  const float* min_p;            // 0: off
  const double* noise;           // in [0, 1)
  int64_t* tokens;  // [rows]; 0 if the row's largest logit, divided by the temperature, is not finite
  float* tops;      // [rows], the largest logits; NaN if there is any
  float* weights;   // by setting, [settings, vocab]: proportional to what the row draws from; or null
  void* scratch;    // `scratch_bytes(args)` bytes, aligned to 64
  int threads;
};

struct SamplingKernels {
  int64_t (*scratch_bytes)(const SamplingArgs& args);
  void (*sample)(const SamplingArgs& args);
};

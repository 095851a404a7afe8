// Recurrences over the tokens of sequences. All in float32.

// The gated delta rule: for each token, of a head's state S [k_dim, v_dim],
//   S = e^g S;  S += k (beta (v - k S));  out = q S
struct GatedDeltaArgs {
  const float *q, *k;     // [batch, tokens, k_heads, k_dim], dense; a head serves v_heads / k_heads consecutive ones of v
  const float* v;         // [batch, tokens, v_heads, v_dim], dense
  const float *g, *beta;  // [batch, tokens, v_heads], dense
  float* states;          // [batch, v_heads, k_dim, v_dim], dense: before the first token, and then behind the last
  float* out;             // as v
  int64_t batch, tokens, k_heads, v_heads, k_dim, v_dim;
  bool normalizes;  // q and k are divided by their lengths first
  float scale;      // of q
  int threads;
};

constexpr int64_t kMostKeyDim = 512;

struct RecurrentKernels {
  void (*gated_delta)(const GatedDeltaArgs& args);
};

// Recurrences and convolutions over the tokens of sequences. Their states lie in blocks of an arena, and are changed there.

// A packed row of chunks, and the state of a layer for the sequence of each: equal parts of the state's first dimension (heads,
// channels), part p in block tables[chunk][blocks[p]] from byte offsets[p] on. Each state belongs to one chunk.
struct ChunkStates {
  char* memory;
  int64_t block_stride, columns;       // bytes; of a table
  const int64_t* tables;               // [chunks, columns]
  const int64_t *starts, *lengths;     // [chunks]: tokens of the packed row
  const int64_t* continues;            // [chunks]: 0 if the state before the first token is zeros
  int64_t chunks, parts;
  const int64_t *blocks, *offsets;     // [parts]
};

// The gated delta rule: for each token, of a head's state S [k_dim, v_dim],
//   S = e^g S;  S += k (beta (v - k S));  out = q S
// computed in float32, as the states and gates are.
struct GatedDeltaArgs {
  Type type;                            // of q, k, v and out
  const void *q, *k;                    // [tokens, k_heads, k_dim]; a head serves v_heads / k_heads consecutive ones of v
  const void* v;                        // [tokens, v_heads, v_dim]
  int64_t q_stride, k_stride, v_stride;  // elements from token to token; the rest is dense
  const float *g, *beta;                // [tokens, v_heads], dense
  void* out;                            // as v, dense
  ChunkStates states;                   // of [v_heads, k_dim, v_dim] float32
  int64_t k_heads, v_heads, k_dim, v_dim;
  bool normalizes;  // q and k are divided by their lengths first
  float scale;      // of q
  int threads;
};

// out[t][c] = bias[c] + sum over j of weight[c][j] * x[t - kernel + 1 + j][c], of which what lies before a chunk is in its state.
struct ConvArgs {
  Type type;              // of all tensors, and of the states
  const void* x;          // [tokens, channels]
  int64_t x_stride;       // elements from token to token
  const void* weight;     // [channels, kernel], dense
  const void* bias;       // [channels], or null
  void* out;              // as x, dense
  ChunkStates states;     // of [channels, kernel]: in each part, kernel rows of its channels, the last of which is not used
  int64_t channels, kernel;
  bool silu;              // out becomes out / (1 + e^-out)
  int threads;
};

constexpr int64_t kMostKeyDim = 512, kLeastKernel = 2, kMostKernel = 4;

struct RecurrentKernels {
  void (*gated_delta)(const GatedDeltaArgs& args);
  void (*conv)(const ConvArgs& args);
};

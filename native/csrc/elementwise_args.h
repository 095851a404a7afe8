// Operations on each element or row: norms, rotary embeddings, gates. All tensors of a call have one type.

struct NormArgs {
  Type type;
  const void* x;  // [outer, inner, n], contiguous in n
  int64_t outer, inner, n, outer_stride, inner_stride;
  const void* residual;  // [outer, inner, n], dense, added to x first; or null
  void* total;           // their sum, dense; null without a residual
  const void* weight;    // [n], or null
  const void* gate;      // [outer * inner, n], dense: the result is multiplied by gate / (1 + e^-gate); or null
  float offset;          // added to the weight
  float eps;
  bool rounds_first;  // the normalised row is rounded to `type` before it is multiplied with the weight
  void* out;          // dense
  int threads;
};

// How the elements of a head pair up, and whether cos and sin have an element for each of a head or for each pair.
enum class Rotation : int { halves, halves_of_pairs, neighbours };

struct RotatedHeads {
  const void* x;  // [batch, tokens, heads, dim], contiguous in dim
  int64_t heads, dim, batch_stride, token_stride, head_stride;
  void* out;  // dense
};

struct RotateArgs {
  Type type;
  Rotation rotation;
  int64_t batch, tokens;
  RotatedHeads parts[2];  // queries and keys
  const void *cos, *sin;  // [batch, tokens, `rotated` or half as many], with the same strides, contiguous in the last
  int64_t rotated;        // the first elements of a head, even; the others stay as they are
  int64_t cos_batch_stride, cos_token_stride;
  int threads;
};

enum class Gate : int { silu, gelu, gelu_tanh };

struct GateArgs {
  Type type;
  Gate gate;
  int64_t rows, n, stride;  // of both x, in elements
  const void *gate_x, *up_x;
  void* out;  // [rows, n], dense
  int threads;
};

struct AddArgs {
  Type type;
  int64_t rows, n;
  const void *a, *b;  // [rows, n], dense
  void* out;          // a, b or other memory
  int threads;
};

struct ElementwiseKernels {
  void (*norm)(const NormArgs& args);
  void (*rotate)(const RotateArgs& args);
  void (*gate)(const GateArgs& args);
  void (*add)(const AddArgs& args);
};

// Attention over the blocks of a cache, and writing to them. Strides are in elements; the last dimension's is 1.

struct ScaleView {  // float16 [blocks, block_size, kv_heads]; without data there are none
  void* data;
  int64_t block_stride, slot_stride, head_stride;
};

struct CacheView {  // [blocks, block_size, kv_heads, dim]
  void* data;
  int64_t block_stride, slot_stride, head_stride;
  int64_t dim;
  ScaleView scales = {};  // with them, elements are int8 and stand for themselves times the scale of their token and head
};

struct WriteArgs {
  Type type;         // of `from`, and of `to` without scales
  const void* from;  // [tokens, kv_heads, dim]
  int64_t token_stride, head_stride;
  CacheView to;
  int64_t tokens, kv_heads;
  const int64_t* blocks;   // [tokens]; a token of block 0 is padding, and not written
  const int64_t* offsets;  // [tokens], the slot in the block
  int threads;
};

struct AttentionArgs {
  Type type;          // of query and out, and of key and value without scales
  const void* query;  // [tokens, heads, key.dim]
  int64_t query_stride, query_head_stride;
  CacheView key, value;
  int64_t num_blocks, block_size, heads, kv_heads;
  const int64_t* tables;  // [chunks, width], the blocks of each chunk's sequence
  int64_t chunks, width;
  const int32_t* bounds;  // [chunks + 1]: chunk i is tokens bounds[i] .. bounds[i + 1], the last ones of its sequence
  const int32_t* lens;    // [chunks], tokens of the sequence; 0: the chunk is padding, and out stays as it is
  float scaling;
  int64_t window;      // keys that a query sees, its own included; 0: all
  float softcap;       // 0: none
  const float* sinks;  // [heads], or null
  void* out;           // [tokens, heads, value.dim], contiguous
  void* scratch;       // `scratch_bytes(args)` bytes, aligned to 64
  int* fault;          // becomes 1 if a table names a block that does not exist; the results are then undefined
  int threads;
};

struct AttentionKernels {
  void (*write)(const WriteArgs& args);
  int64_t (*scratch_bytes)(const AttentionArgs& args);
  void (*attend)(const AttentionArgs& args);
};

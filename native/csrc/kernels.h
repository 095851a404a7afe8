// The kernels as plain functions over memory, one table of them per instruction set. No kernel allocates memory that it keeps,
// throws, or checks its arguments: ops.cpp does.
#pragma once

#include <cstdint>

namespace pagetide {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

enum class Type : int { float32, bfloat16, float16, int8, int4, fp8, fp4 };

#include "attention_args.h"
#include "elementwise_args.h"
#include "linear_args.h"
#include "recurrent_args.h"
#include "sampling_args.h"

struct Kernels {
  const char* name;
  LinearKernels linear;
  AttentionKernels attention;
  ElementwiseKernels elementwise;
  SamplingKernels sampling;
  RecurrentKernels recurrent;
};

// Of the best instruction set that this processor has, or of that which PAGETIDE_NATIVE names if it has it; null if it has none.
const Kernels* kernels();

}  // namespace pagetide

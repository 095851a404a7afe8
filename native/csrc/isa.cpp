// All kernels for one instruction set. build.py compiles this file once for each, with its flags and PAGETIDE_ISA as its name.
// Nothing of the standard library but types is used here: the linker merges inline functions of all files, and would give a
// processor code for another one.
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"
#include "pool.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

namespace pagetide {
namespace PAGETIDE_ISA {

#include "simd.h"

#include "linear.h"

#include "attention.h"

#include "elementwise.h"

#include "sampling.h"

#include "recurrent.h"

}  // namespace PAGETIDE_ISA

extern const Kernels JOIN(kernels_, PAGETIDE_ISA);
const Kernels JOIN(kernels_, PAGETIDE_ISA) = {TEXT(PAGETIDE_ISA), PAGETIDE_ISA::linear::kernels, PAGETIDE_ISA::attention::kernels,
                                              PAGETIDE_ISA::elementwise::kernels, PAGETIDE_ISA::sampling::kernels,
                                              PAGETIDE_ISA::recurrent::kernels};

}  // namespace pagetide

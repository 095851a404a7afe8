// Chooses the kernels by what the processor has.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#if defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#endif

namespace pagetide {

#if defined(__x86_64__)
extern const Kernels kernels_avx512_bf16, kernels_avx512, kernels_avx2;
#if defined(WITH_avx512_amx)
extern const Kernels kernels_avx512_amx;
#endif

namespace {

#if defined(WITH_avx512_amx)
// Ask Linux for the state of AMX's tiles, which a process has only on request.
bool gets_tiles() {
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

const Kernels* choose() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  const struct {
    const Kernels* kernels;
    bool runs;
  } known[] = {
#if defined(WITH_avx512_amx)
      {&kernels_avx512_amx, bf16 && __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") && gets_tiles()},
#endif
      {&kernels_avx512_bf16, bf16}, {&kernels_avx512, avx512}, {&kernels_avx2, avx2}};
  const char* wanted = std::getenv("PAGETIDE_NATIVE");
  const Kernels* best = nullptr;
  for (const auto& one : known) {
    if (!one.runs) continue;
    if (best == nullptr) best = one.kernels;
    if (wanted != nullptr && std::strcmp(wanted, one.kernels->name) == 0) return one.kernels;
  }
  return best;
}

}  // namespace
#else
extern const Kernels kernels_neon, kernels_neon_dot;

namespace {
// Whether the processor multiplies and adds four bytes at once. Elsewhere than on Linux it is one of Apple's, all of which do.
bool has_dot() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
  return true;
#endif
}

const Kernels* choose() {
  const char* wanted = std::getenv("PAGETIDE_NATIVE");
  return has_dot() && (wanted == nullptr || std::strcmp(wanted, "neon") != 0) ? &kernels_neon_dot : &kernels_neon;
}
}  // namespace
#endif

const Kernels* kernels() {
  static const Kernels* const chosen = choose();
  return chosen;
}

}  // namespace pagetide

// torch.ops.pagetide.instructions(): the instruction set of the kernels, empty if this processor has none of theirs;
// panel_columns(): the number of outputs with weights that lie together; sources(): the digest of the sources that it is built from.
#include <string>

#include "ops.h"

namespace pagetide {
namespace {

std::string sources() { return PAGETIDE_SOURCES; }

std::string instructions() { return kernels() != nullptr ? kernels()->name : ""; }

thread_local int64_t own_threads = 0;

// For the calling thread; 0: torch's number again.
void set_threads(int64_t count) {
  STD_TORCH_CHECK(0 <= count && count <= INT16_MAX, "a kernel uses 1 to ", INT16_MAX, " threads, or 0 for torch's number, got ", count);
  own_threads = count;
}

int64_t num_threads() { return threads(); }

int64_t panel_columns() { return kernels()->linear.panel_columns; }

}  // namespace

int threads() { return own_threads > 0 ? static_cast<int>(own_threads) : static_cast<int>(torch::stable::get_num_threads()); }

}  // namespace pagetide

STABLE_TORCH_LIBRARY(pagetide, m) {
  m.def("sources() -> str");
  m.def("instructions() -> str");
  m.def("panel_columns() -> int");
  m.def("set_threads(int count) -> ()");
  m.def("num_threads() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CompositeExplicitAutograd, m) {
  m.impl("sources", TORCH_BOX(&pagetide::sources));
  m.impl("instructions", TORCH_BOX(&pagetide::instructions));
  m.impl("panel_columns", TORCH_BOX(&pagetide::panel_columns));
  m.impl("set_threads", TORCH_BOX(&pagetide::set_threads));
  m.impl("num_threads", TORCH_BOX(&pagetide::num_threads));
}

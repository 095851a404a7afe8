// torch.ops.pagetide.shards_sum, shards_gather, shards_stop: what the shards of a model compute together, in memory that their
// processes share.
//
// The memory, all in little words of the processor's own order:
//
//   line 0                 stopped: collectives of generations below it raise | changes, sleepers: for waits that sleep
//   line 1 .. size         arrived of shard i: the numbers of its last collectives in generations that are even and odd
//   slots                  for each shard two parts of `slot` bytes, used by turns
//
// A shard copies its data into its slot, says the number of the collective in its line, and waits until all have. The slots of
// the collective after the next are written only when all have arrived at the next one, and so have read these.
//
// After a stop all shards meet in the next generation, with larger numbers. One that is late still tells by the other word of the
// lines whether all had arrived at its collective of the old generation: either all complete that one, or none does. No shard is
// two generations ahead of another one, so the words are not used again before.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "ops.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagetide {
namespace {

constexpr int64_t kLine = 64;
constexpr int kMostShards = 63;
constexpr int64_t kHeader = (kMostShards + 1) * kLine;
constexpr int kGenerationShift = 40;  // of a number; the lower bits count the collectives of the generation
constexpr long kSleepNs = 20'000'000;  // then look again: a stop from outside wakes no shard

struct Head {
  std::atomic<uint64_t> stopped;
  std::atomic<uint32_t> changes, sleepers;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free && sizeof(Head) <= kLine);

#if defined(__linux__)
// Of all that sleep: they look again.
void wake(Head& head) {
  if (head.sleepers.load() == 0) return;
  head.changes.fetch_add(1);
  syscall(SYS_futex, &head.changes, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void wake(Head&) {}
#endif

class Meeting {
 public:
  Meeting(const Tensor& memory, int64_t rank, int64_t size, int64_t slot, int64_t number, int64_t spin_us)
      : rank_(rank), size_(size), slot_(slot), number_(static_cast<uint64_t>(number)), spin_us_(spin_us) {
    STD_TORCH_CHECK(1 <= size && size <= kMostShards && 0 <= rank && rank < size, "shard ", rank, " of ", size, ", at most ", kMostShards);
    check_dense(memory, "memory", ScalarType::Byte, kHeader + 2 * size * slot);
    base_ = static_cast<char*>(memory.mutable_data_ptr());
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(base_) % kLine == 0 && slot % kLine == 0, "memory and slots are whole lines");
  }

  const char* slot_of(int64_t rank) { return slot_at(rank); }

  // Fill this shard's slot, say so, and wait for the others. False if it was stopped before all have.
  bool meet(const void* data, int64_t bytes) {
    // A shard that was stopped in an earlier collective fills no slot again: others may still read that one's.
    if (stopped()) return false;
    if (bytes > 0) std::memcpy(slot_at(rank_), data, bytes);
    arrived(rank_).store(number_);
    if (all_arrived()) {  // of several that arrive at once the last one sees that
      wake(head());
      return true;
    }
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_);
    for (int looks = 0; !all_arrived(); ++looks) {
      if (stopped()) return all_arrived();
      for (int i = 0; i < 8; ++i) pause();
      if (looks % 8 == 7 && std::chrono::steady_clock::now() >= end) sleep();
    }
    return true;
  }

 private:
  Head& head() { return *reinterpret_cast<Head*>(base_); }
  char* slot_at(int64_t rank) { return base_ + kHeader + (2 * rank + static_cast<int64_t>(number_ & 1)) * slot_; }
  std::atomic<uint64_t>& arrived(int64_t rank) {
    return reinterpret_cast<std::atomic<uint64_t>*>(base_ + (1 + rank) * kLine)[number_ >> kGenerationShift & 1];
  }
  bool stopped() { return head().stopped.load() > (number_ >> kGenerationShift); }
  bool all_arrived() {
    for (int64_t rank = 0; rank < size_; ++rank) {
      if (arrived(rank).load() < number_) return false;
    }
    return true;
  }

#if defined(__linux__)
  void sleep() {
    head().sleepers.fetch_add(1);
    const uint32_t seen = head().changes.load();
    if (!all_arrived() && !stopped()) {
      const timespec most{0, kSleepNs};
      syscall(SYS_futex, &head().changes, FUTEX_WAIT, seen, &most, nullptr, 0);
    }
    head().sleepers.fetch_sub(1);
  }
#else
  void sleep() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
#endif

  char* base_;
  int64_t rank_, size_, slot_;
  uint64_t number_;
  int64_t spin_us_;
};

inline float to_float(float x) { return x; }
inline float to_float(torch::headeronly::BFloat16 x) { return static_cast<float>(x); }
inline float to_float(torch::headeronly::Half x) { return static_cast<float>(x); }

// out = the sum over the shards, in the order of ranks.
template <typename T>
void sum(Meeting& meeting, int64_t size, int64_t count, T* out) {
  const T* first = reinterpret_cast<const T*>(meeting.slot_of(0));
  const T* second = reinterpret_cast<const T*>(meeting.slot_of(size > 1 ? 1 : 0));
  if (size == 2) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(to_float(first[i]) + to_float(second[i]));
    return;
  }
  constexpr int64_t kPart = 512;
  float total[kPart];
  for (int64_t begin = 0; begin < count; begin += kPart) {
    const int64_t length = std::min(kPart, count - begin);
    for (int64_t i = 0; i < length; ++i) total[i] = to_float(first[begin + i]);
    for (int64_t rank = 1; rank < size; ++rank) {
      const T* part = reinterpret_cast<const T*>(meeting.slot_of(rank)) + begin;
      for (int64_t i = 0; i < length; ++i) total[i] += to_float(part[i]);
    }
    for (int64_t i = 0; i < length; ++i) out[begin + i] = static_cast<T>(total[i]);
  }
}

#if defined(__x86_64__)
// `sum` of float16, whose conversions cost ten times as much without these instructions.
__attribute__((target("avx,f16c"))) void sum_halves(Meeting& meeting, int64_t size, int64_t count, torch::headeronly::Half* out) {
  constexpr int64_t kWide = 8;
  for (int64_t i = 0; i < count; i += kWide) {
    const int64_t bytes = 2 * std::min(kWide, count - i);
    __m256 total = _mm256_setzero_ps();
    for (int64_t rank = 0; rank < size; ++rank) {
      __m128i part = _mm_setzero_si128();
      const char* from = meeting.slot_of(rank) + 2 * i;
      if (bytes == 2 * kWide) {
        part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
      } else {
        std::memcpy(&part, from, bytes);
      }
      total = rank == 0 ? _mm256_cvtph_ps(part) : _mm256_add_ps(total, _mm256_cvtph_ps(part));
    }
    const __m128i rounded = _mm256_cvtps_ph(total, _MM_FROUND_TO_NEAREST_INT);
    if (bytes == 2 * kWide) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), rounded);
    } else {
      std::memcpy(out + i, &rounded, bytes);
    }
  }
}
#endif

void sum(Meeting& meeting, int64_t size, int64_t count, torch::headeronly::Half* out) {
#if defined(__x86_64__)
  static const bool has_f16c = __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c");
  if (has_f16c) return sum_halves(meeting, size, count, out);
#endif
  sum<torch::headeronly::Half>(meeting, size, count, out);
}

// x becomes the sum over the shards, which fits a slot. False if the collective was stopped: then x is as it was.
bool shards_sum(Tensor x, Tensor memory, int64_t rank, int64_t size, int64_t slot, int64_t number, int64_t spin_us) {
  Meeting meeting(memory, rank, size, slot, number, spin_us);
  check_dense(x, "x", x.scalar_type(), x.numel());
  const int64_t count = x.numel(), bytes = count * (x.scalar_type() == ScalarType::Float ? 4 : 2);
  STD_TORCH_CHECK(bytes <= slot, bytes, " bytes do not fit a slot of ", slot);
  const Type type = type_of(x, "x");
  if (!meeting.meet(x.const_data_ptr(), bytes)) return false;
  switch (type) {
    case Type::float32: sum(meeting, size, count, static_cast<float*>(x.mutable_data_ptr())); break;
    case Type::bfloat16: sum(meeting, size, count, static_cast<torch::headeronly::BFloat16*>(x.mutable_data_ptr())); break;
    default: sum(meeting, size, count, static_cast<torch::headeronly::Half*>(x.mutable_data_ptr())); break;
  }
  return true;
}

// out uint8 [size, slot bytes or less], or [0] where it is not wanted: the x uint8 [bytes] of each shard, of up to `slot` bytes.
bool shards_gather(const Tensor& x, Tensor out, Tensor memory, int64_t rank, int64_t size, int64_t slot, int64_t number, int64_t spin_us) {
  Meeting meeting(memory, rank, size, slot, number, spin_us);
  const int64_t bytes = x.numel();
  check_dense(x, "x", ScalarType::Byte, bytes);
  STD_TORCH_CHECK(bytes <= slot, bytes, " bytes do not fit a slot of ", slot);
  const bool wanted = out.numel() > 0;
  const int64_t width = wanted ? out.numel() / size : 0;
  check_dense(out, "out", ScalarType::Byte, width * size);
  STD_TORCH_CHECK(width <= slot, "out has more than a slot for each shard");
  if (!meeting.meet(x.const_data_ptr(), bytes)) return false;
  for (int64_t r = 0; wanted && r < size; ++r) {
    std::memcpy(static_cast<char*>(out.mutable_data_ptr()) + r * width, meeting.slot_of(r), width);
  }
  return true;
}

// All collectives of generations below `generation` are stopped, those too that wait.
void shards_stop(Tensor memory, int64_t generation) {
  check_dense(memory, "memory", ScalarType::Byte, std::max(kHeader, memory.numel()));
  Head& head = *reinterpret_cast<Head*>(memory.mutable_data_ptr());
  const auto least = static_cast<uint64_t>(generation);
  uint64_t seen = head.stopped.load();
  while (seen < least && !head.stopped.compare_exchange_weak(seen, least)) {
  }
  wake(head);
}

}  // namespace
}  // namespace pagetide

STABLE_TORCH_LIBRARY_FRAGMENT(pagetide, m) {
  m.def("shards_sum(Tensor(a!) x, Tensor(b!) memory, int rank, int size, int slot, int number, int spin_us) -> bool");
  m.def("shards_gather(Tensor x, Tensor(a!) out, Tensor(b!) memory, int rank, int size, int slot, int number, int spin_us) -> bool");
  m.def("shards_stop(Tensor(a!) memory, int generation) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pagetide, CPU, m) {
  m.impl("shards_sum", TORCH_BOX(&pagetide::shards_sum));
  m.impl("shards_gather", TORCH_BOX(&pagetide::shards_gather));
  m.impl("shards_stop", TORCH_BOX(&pagetide::shards_stop));
}

// The state of a loop is one word, the ticket: (generation, most workers, items left). Whoever lowers `items left` has an item.
// A loop cannot end while one of its items is taken and not done, so that the thread with that item may read the loop's function and
// context; a thread that comes too late finds no item left and touches nothing.
#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <system_error>
#include <thread>

namespace pagetide {
namespace {

constexpr auto kSpin = std::chrono::microseconds(100);  // of a worker without items, and of a caller while others finish its items
constexpr int kMostWorkers = 0xfff;
constexpr int64_t kMostItems = 0xffffffff;

// Wait until `changed()`: spin, then sleep until `word` is notified with a value other than `seen`.
template <typename Word, typename Changed>
void wait_until(std::atomic<Word>& word, std::atomic<int>& sleepers, const Changed& changed) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  while (!changed()) {
    for (int i = 0; i < 16; ++i) pause();
    if (std::chrono::steady_clock::now() < end) continue;
    const Word seen = word.load();
    sleepers.fetch_add(1);
    if (!changed()) word.wait(seen);
    sleepers.fetch_sub(1);
  }
}

class Pool {
 public:
  void run(int64_t count, int threads, ItemFunction function, const void* context) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock.owns_lock() || count > kMostItems) threads = 1;
    if (threads > 1 && count > 1) threads = 1 + workers_for(static_cast<int>(std::min<int64_t>(threads, count)) - 1);
    if (threads <= 1 || count <= 1) {
      for (int64_t item = 0; item < count; ++item) function(context, item);
      return;
    }
    function_ = function, context_ = context, count_ = count;
    unfinished_.store(count, std::memory_order_relaxed);
    const uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 44) + 1;
    ticket_.store(generation << 44 | static_cast<uint64_t>(threads - 1) << 32 | static_cast<uint64_t>(count));
    if (sleeping_workers_.load() > 0) ticket_.notify_all();
    take_items();
    if (unfinished_.load() != 0) {
      wait_until(unfinished_, sleeping_callers_, [this] { return unfinished_.load() == 0; });
    }
  }

 private:
  // Start workers up to `wanted`. Returns how many of them there are.
  int workers_for(int wanted) {
    if (wanted > kMostWorkers) wanted = kMostWorkers;
    while (started_ < wanted) {
      try {
        std::thread(&Pool::work, this, started_).detach();
      } catch (const std::system_error&) {
        break;  // no more threads: fewer do it
      }
      ++started_;
    }
    return std::min(started_, wanted);
  }

  void work(int index) {
    const auto ready = [this, index] {
      const uint64_t ticket = ticket_.load();
      return static_cast<uint32_t>(ticket) != 0 && index < static_cast<int>(ticket >> 32 & kMostWorkers);
    };
    while (true) {
      wait_until(ticket_, sleeping_workers_, ready);
      take_items();
    }
  }

  void take_items() {
    uint64_t ticket = ticket_.load();
    while (static_cast<uint32_t>(ticket) != 0) {
      if (!ticket_.compare_exchange_weak(ticket, ticket - 1)) continue;
      function_(context_, count_ - static_cast<uint32_t>(ticket));
      if (unfinished_.fetch_sub(1) == 1 && sleeping_callers_.load() > 0) unfinished_.notify_all();
      ticket = ticket_.load();
    }
  }

  std::mutex mutex_;  // held by the caller of the loop that runs
  int started_ = 0;
  ItemFunction function_ = nullptr;
  const void* context_ = nullptr;
  int64_t count_ = 0;
  alignas(64) std::atomic<uint64_t> ticket_{0};
  alignas(64) std::atomic<int64_t> unfinished_{0};
  std::atomic<int> sleeping_workers_{0};
  std::atomic<int> sleeping_callers_{0};
};

Pool* pool = nullptr;  // never destroyed: workers wait on it until the process ends
std::once_flag once;

// A forked child has none of the parent's threads, and its locks may be held by them.
void renew_pool() { pool = new Pool; }

}  // namespace

void run_items(int64_t count, int threads, ItemFunction function, const void* context) {
  std::call_once(once, [] {
    renew_pool();
    pthread_atfork(nullptr, nullptr, renew_pool);
  });
  pool->run(count, threads, function, context);
}

}  // namespace pagetide

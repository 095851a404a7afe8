// A pool of threads for short loops over independent items. See pool.cpp.
#pragma once

#include <cstdint>

namespace pagetide {

// Of a thread that spins: let the other one of its core go on.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using ItemFunction = void (*)(const void* context, int64_t item);

// Call `function(context, item)` for each item in [0, count), on at most `threads` threads, of which the caller is one. Free
// threads take the next item, so make items small. A caller that finds the pool in use computes all of its items by itself.
// Items must not throw, and must not call this function.
void run_items(int64_t count, int threads, ItemFunction function, const void* context);

// `run_items` for a callable with a const operator()(int64_t item).
template <typename Items>
void for_items(int64_t count, int threads, const Items& items) {
  run_items(count, threads, [](const void* context, int64_t item) { (*static_cast<const Items*>(context))(item); }, &items);
}

}  // namespace pagetide

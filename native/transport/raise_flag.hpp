// How a flag is raised by the processor: on its own board, or on one that is mapped here.
#pragma once

#include <cstdint>

#include "transport/transport.hpp"

namespace pgasdl {

// Where a count stops: what came beyond is lost, and the owner is told when it waits for the count.
inline constexpr std::uint32_t kCountLost = UINT32_MAX;

// Atomic with every other addition, and with the owner, who takes what is there. All of them change
// the word by read-modify-write, so whoever sees a count sees what came before each part of it.
[[gnu::noinline]] inline void add_to_flag(FlagWord& word, std::uint32_t more) {
  std::uint32_t old = word.load(std::memory_order_relaxed);
  while (!word.compare_exchange_weak(old, old > kCountLost - more ? kCountLost : old + more,
                                     std::memory_order_release, std::memory_order_relaxed)) {
  }
}

// Everything before it is visible to whoever acquires the word. Any thread; wakes nobody.
inline void raise_flag(FlagWord& word, std::uint32_t value, bool add) {
  if (add) [[unlikely]] {
    add_to_flag(word, value);
  } else {
    word.store(value, std::memory_order_release);
  }
}

}  // namespace pgasdl

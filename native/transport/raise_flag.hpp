// Raises flags by the processor, on this rank's board or on a peer's board that is mapped here.
#pragma once

#include <cstdint>

#include "transport/transport.hpp"

namespace pgasdl {

// A count stops here. The rest is lost, and the owner's wait for the count reports it.
inline constexpr std::uint32_t kCountLost = UINT32_MAX;

// Atomic with other additions and with the owner, which takes counts. All change the word by
// read-modify-write, so acquiring a count makes everything visible that came before each addition.
[[gnu::noinline]] inline void add_to_flag(FlagWord& word, std::uint32_t more) {
  std::uint32_t old = word.load(std::memory_order_relaxed);
  while (!word.compare_exchange_weak(old, old > kCountLost - more ? kCountLost : old + more,
                                     std::memory_order_release, std::memory_order_relaxed)) {
  }
}

// A reader that acquires the word sees everything written before. Any thread; wakes nobody.
inline void raise_flag(FlagWord& word, std::uint32_t value, bool add) {
  if (add) [[unlikely]] {
    add_to_flag(word, value);
  } else {
    word.store(value, std::memory_order_release);
  }
}

}  // namespace pgasdl

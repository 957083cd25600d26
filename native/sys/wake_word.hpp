// One wake word per rank, in memory that every rank of the machine maps: a rank that has waited
// long enough arms its own and sleeps (on a futex), whoever raises a flag there wakes it.
//
// The waker pays one relaxed load. It stores the flag, then loads the word; the sleeper arms the
// word, then loads the flag. That neither misses the other needs a full fence on both sides; the
// waker's is replaced by the sleeper's membarrier(2), which makes every registered process pass a
// fence. Where membarrier is missing the sleep is short instead.
#pragma once

#include <atomic>
#include <cstdint>

#include "sys/clock.hpp"

namespace pgasdl {

struct alignas(64) WakeWord {
  // Odd while armed. A waker makes it even, and who arms it next gets another value: whoever armed
  // it before the wake and sleeps only now is not kept by others that armed it again.
  std::atomic<std::uint32_t> state{0};

  // Any thread of any rank, after the flag was stored (release).
  void wake() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if ((state.load(std::memory_order_relaxed) & 1) != 0) wake_sleepers();
  }
  void wake_sleepers();
  // Any thread of the owner. After arm() poll once more, then sleep() on what it returned. wake()
  // wakes all of them. False: the limit passed.
  std::uint32_t arm();
  bool sleep(std::uint32_t armed, Nanoseconds limit);
};

// Once per process, before the first arm(). False: no membarrier here, sleeps are kept short.
bool register_wake_words();

}  // namespace pgasdl

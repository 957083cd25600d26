// One wake word per rank, in memory that every rank of the machine maps: a rank that has waited
// long enough arms its own word and sleeps (on a futex); a rank that raises a flag there wakes it.
//
// The waker pays one relaxed load. It stores the flag, then loads the word; the sleeper arms the
// word, then loads the flag. For neither to miss the other, both need a full fence between; the
// sleeper's membarrier(2), which makes every registered process pass a fence, replaces the waker's.
// Where membarrier is missing, sleeps are short instead.
#pragma once

#include <atomic>
#include <cstdint>

#include "sys/clock.hpp"

namespace pgasdl {

struct alignas(64) WakeWord {
  // Odd while armed. A waker makes it even, and the next arm() yields another value: so a thread
  // that armed before the wake does not fall asleep when another one has armed the word again.
  std::atomic<std::uint32_t> state{0};

  // Any thread of any rank, after it has stored the flag (release).
  void wake() {
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if ((state.load(std::memory_order_relaxed) & 1) != 0) wake_sleepers();
  }
  void wake_sleepers();
  // Any thread of the owner. After arm(), poll once more, then pass its result to sleep(). wake()
  // wakes all sleepers. False: the limit passed.
  std::uint32_t arm();
  bool sleep(std::uint32_t armed, Nanoseconds limit);
};

// Once per process, before the first arm(). False: there is no membarrier, so sleeps are short.
bool register_wake_words();

}  // namespace pgasdl

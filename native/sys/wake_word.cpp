#include "sys/wake_word.hpp"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>

namespace pgasdl {
namespace {

// Bounds every sleep, in case a wake-up gets lost.
constexpr Nanoseconds kLongestSleep = std::chrono::milliseconds(50);
constexpr Nanoseconds kLongestWithoutBarrier = std::chrono::microseconds(200);

std::uint32_t* word(std::atomic<std::uint32_t>& value) {
  return reinterpret_cast<std::uint32_t*>(&value);
}

}  // namespace

bool register_wake_words() {
  static const bool registered =
      syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, 0, 0) == 0;
  return registered;
}

void WakeWord::wake_sleepers() {
  std::uint32_t seen = state.load(std::memory_order_relaxed);
  while ((seen & 1) != 0) {
    if (!state.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                     std::memory_order_relaxed)) {
      continue;
    }
    // Only the waker that disarms it makes the system call.
    syscall(SYS_futex, word(state), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
    return;
  }
}

std::uint32_t WakeWord::arm() {
  const std::uint32_t armed = state.fetch_or(1, std::memory_order_seq_cst) | 1;
  if (register_wake_words()) syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
  return armed;
}

bool WakeWord::sleep(std::uint32_t armed, Nanoseconds limit) {
  limit = std::min(limit, register_wake_words() ? kLongestSleep : kLongestWithoutBarrier);
  timespec wait{};
  wait.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
  wait.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
  return syscall(SYS_futex, word(state), FUTEX_WAIT, armed, &wait, nullptr, 0) == 0 ||
         errno != ETIMEDOUT;
}

}  // namespace pgasdl

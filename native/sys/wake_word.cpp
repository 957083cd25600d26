#include "sys/wake_word.hpp"

#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>

namespace pgasdl {
namespace {

// Bounds every sleep, whatever happened to the wake-up.
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
  // Only the one that takes the 1 makes the system call.
  if (armed.exchange(0, std::memory_order_acq_rel) != 0) {
    syscall(SYS_futex, word(armed), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }
}

void WakeWord::arm() {
  armed.store(1, std::memory_order_seq_cst);
  if (register_wake_words()) syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL_EXPEDITED, 0, 0);
}

void WakeWord::sleep(Nanoseconds limit) {
  limit = std::min(limit, register_wake_words() ? kLongestSleep : kLongestWithoutBarrier);
  timespec wait{};
  wait.tv_sec = static_cast<time_t>(limit.count() / 1'000'000'000);
  wait.tv_nsec = static_cast<long>(limit.count() % 1'000'000'000);
  syscall(SYS_futex, word(armed), FUTEX_WAIT, 1, &wait, nullptr, 0);
}

}  // namespace pgasdl

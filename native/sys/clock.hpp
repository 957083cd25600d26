// Monotonic time and deadlines. Every wait in pgasdl takes a Deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace pgasdl {

using Nanoseconds = std::chrono::nanoseconds;
using Clock = std::chrono::steady_clock;

// A cheap counter for the flight record: time stamp ticks where the processor has them.
inline std::uint64_t ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#else
  return static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
#endif
}

// The time until which a call may wait. Reads the clock only when asked.
class Deadline {
 public:
  static Deadline in(double seconds) {
    if (seconds <= 0) return once();
    const auto now = Clock::now();
    if (seconds > 1e9) return {Clock::time_point::max(), now};
    return {now + std::chrono::duration_cast<Nanoseconds>(std::chrono::duration<double>(seconds)),
            now};
  }
  static Deadline once() { return {Clock::time_point::min(), {}}; }

  bool one_try() const { return at_ == Clock::time_point::min(); }
  bool passed() const { return one_try() || Clock::now() >= at_; }
  Nanoseconds left() const {
    if (one_try()) return Nanoseconds(0);
    if (at_ == Clock::time_point::max()) return Nanoseconds::max();
    auto now = Clock::now();
    return now >= at_ ? Nanoseconds(0) : Nanoseconds(at_ - now);
  }
  // The deadline of the next piece of the same wait.
  Deadline next_piece(Nanoseconds from_now) {
    auto other = Clock::now() + from_now;
    Deadline piece{other < at_ ? other : at_, since_};
    piece.continues_ = std::exchange(continues_, true);
    piece.continued_ = other < at_;
    return piece;
  }
  // True for every piece after the first.
  bool continues() const { return continues_; }
  // True for every piece before the last.
  bool continued() const { return continued_; }
  // When the whole wait began.
  Clock::time_point since() const { return since_; }

 private:
  Deadline(Clock::time_point at, Clock::time_point since) : at_(at), since_(since) {}
  Clock::time_point at_;
  Clock::time_point since_;
  bool continues_ = false;
  bool continued_ = false;
};

}  // namespace pgasdl

// How pgasdl waits: spin briefly, then yield, then sleep on the wake word of the rank.
//
// With a core for each rank, the event comes while spinning; with fewer cores, a waiter that keeps
// its core stops the rank it waits for from running.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>

#include "pgas/counters.hpp"
#include "pgas/liveness.hpp"
#include "sys/clock.hpp"

namespace pgasdl {

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Waiter {
 public:
  Waiter(Liveness& liveness, Counters& counters, const Transport& transport, const Options& options)
      : liveness_(liveness),
        counters_(counters),
        transport_(transport),
        spin_(std::chrono::nanoseconds(static_cast<std::int64_t>(options.spin_us * 1e3))),
        yield_(std::chrono::nanoseconds(static_cast<std::int64_t>(options.yield_us * 1e3))) {}

  // Announces an event that no wake word reports, such as the end of work on a GPU: while there is
  // any, waits look from time to time.
  void expect(int more) { n_expected_.fetch_add(more, std::memory_order_relaxed); }
  // Announces such an event for a scope.
  class Expectation {
   public:
    explicit Expectation(Waiter* waiter) : waiter_(waiter) {
      if (waiter_ != nullptr) waiter_->expect(1);
    }
    Expectation(const Expectation&) = delete;
    Expectation& operator=(const Expectation&) = delete;
    ~Expectation() {
      if (waiter_ != nullptr) waiter_->expect(-1);
    }

   private:
    Waiter* const waiter_;
  };

  // Returns when ready() is true, or at the deadline; throws if a loss is reported meanwhile.
  // `slow` runs from time to time and throws if ready() can never become true. `what` names the
  // wait, `cause` counts it unless the first polls end it.
  template <typename Ready, typename Slow>
  Outcome until(Ready&& ready, Slow&& slow, Deadline deadline, WaitCause cause, const char* what) {
    if (ready()) return Outcome::kDone;
    return until_later(ready, slow, deadline, cause, what);
  }
  template <typename Ready>
  Outcome until(Ready&& ready, Deadline deadline, WaitCause cause, const char* what) {
    return until(ready, [] {}, deadline, cause, what);
  }

 private:
  class Stopwatch {
   public:
    Stopwatch(Counters& counters, WaitCause cause, bool continues, std::uint64_t began)
        : counters_(counters), cause_(cause), continues_(continues), began_(began) {}
    Stopwatch(const Stopwatch&) = delete;
    Stopwatch& operator=(const Stopwatch&) = delete;
    ~Stopwatch() { counters_.add_wait(cause_, continues_, ticks() - began_); }

   private:
    Counters& counters_;
    const WaitCause cause_;
    const bool continues_;
    const std::uint64_t began_;
  };
  // Says what the rank waits for, until the wait has ended or failed.
  class Note {
   public:
    Note(Liveness& liveness, WaitCause cause, const Deadline& deadline, const char* what)
        : liveness_(cause == WaitCause::kUncounted ? nullptr : &liveness) {
      if (liveness_ != nullptr) liveness_->note_wait(what, deadline.since());
    }
    Note(const Note&) = delete;
    Note& operator=(const Note&) = delete;
    ~Note() {
      if (liveness_ != nullptr) liveness_->note_wait({});
    }
    Outcome time_is_over(const Deadline& deadline) {
      // Else the next piece waits for the same.
      if (!deadline.continued() && liveness_ != nullptr) liveness_->note_timeout();
      liveness_ = nullptr;
      return Outcome::kTimeout;
    }

   private:
    Liveness* liveness_;
  };
  // Out of line: a wait whose event is there at the first look needs none of it.
  template <typename Ready, typename Slow>
  [[gnu::noinline]] Outcome until_later(Ready& ready, Slow& slow, Deadline deadline,
                                        WaitCause cause, const char* what) {
    check(what);
    const auto ready_after_all = [&] {
      try {
        slow();
      } catch (const Error& error) {
        // The rank that left may have done its part just before, or left because of a loss.
        if (ready()) return true;
        if (error.kind() == ErrorKind::kPeerLost) liveness_.raise_alarm(what);
        throw;
      }
      return false;
    };
    if (deadline.one_try()) {
      // A caller that always makes one try also learns of losses.
      if (liveness_.somebody_gone() && ready_after_all()) return Outcome::kDone;
      return Outcome::kTimeout;
    }
    // Ticks are read rarely, since that costs as much as several polls; the clock is not read at
    // all, since on some machines it is a system call.
    constexpr int kPollsPerLook = 64;
    // The first polls have no pauses: a pause takes as long as a cache line needs to get here.
    constexpr int kEagerLooks = 4;
    const std::uint64_t spin = ticks_of(spin_);
    const std::uint64_t began = ticks();
    std::optional<Stopwatch> stopwatch;  // a wait that ends in the first polls is not counted
    const auto count = [&] { stopwatch.emplace(counters_, cause, deadline.continues(), began); };
    for (int look = 0; ticks() - began < spin; ++look) {
      if (look == kEagerLooks) count();
      for (int poll = 0; poll < kPollsPerLook; ++poll) {
        if (look >= kEagerLooks) pause_briefly();
        if (ready()) return Outcome::kDone;
        if (liveness_.alarmed()) [[unlikely]]
          check(what);
      }
    }
    if (!stopwatch) count();
    learn_ticks();
    const auto start = Clock::now();
    // A piece of a long message arrives at each look, so sleeping would delay all later pieces.
    // After a long wait the sender is probably idle, and the wait spares its core.
    const bool receives = transport_.receives_in_progress();
    const bool eager = receives && start - deadline.since() < kLong;
    const Nanoseconds yield = eager ? std::max(yield_, kReceiving) : yield_;
    const std::uint64_t ticks_to_yield = ticks_of(yield);
    const bool sleeps = spin != 0 && is_woken();
    for (std::uint64_t now = ticks(), yields = now; now - yields < ticks_to_yield;) {
      if (sleeps && now - crowded_.load(std::memory_order_relaxed) < ticks_of(kCrowdStays)) break;
      std::this_thread::yield();
      if (ready()) return Outcome::kDone;
      check(what);
      const std::uint64_t before = std::exchange(now, ticks());
      if (now - before > ticks_of(kCrowded)) crowded_.store(now, std::memory_order_relaxed);
    }
    Note note(liveness_, cause, deadline, what);
    for (;;) {
      if (ready_after_all()) return Outcome::kDone;
      WakeWord* wake_word = liveness_.wake_word();
      const std::uint32_t armed = wake_word != nullptr ? wake_word->arm() : 0;
      // Stays armed either way: another thread of this rank may be asleep on it.
      if (ready()) return Outcome::kDone;
      check(what);
      const Nanoseconds left = deadline.left();
      if (left.count() <= 0) return note.time_is_over(deadline);
      if (is_woken()) {
        wake_word->sleep(armed, left);
      } else {
        // The longer the wait so far, the less another sleep matters: two percent of it. A flag
        // that comes by a store ends the sleep.
        const Nanoseconds period =
            std::clamp<Nanoseconds>((Clock::now() - start) / 50, kShortestSleep, kLongestSleep);
        const Nanoseconds pause = std::min<Nanoseconds>(left, period);
        if (wake_word != nullptr) {
          wake_word->sleep(armed, pause);
        } else {
          std::this_thread::sleep_for(pause);
        }
        const auto woke = Clock::now();
        const Nanoseconds look = eager ? period : kShortestSleep;
        while (receives && Clock::now() - woke < look) {
          if (ready()) return Outcome::kDone;
          check(what);
          std::this_thread::yield();
        }
      }
      if (ready()) return Outcome::kDone;
    }
  }
  // Whether every event that this rank may wait for ends a sleep.
  bool is_woken() const {
    return liveness_.wake_word() != nullptr && !transport_.needs_progress() &&
           n_expected_.load(std::memory_order_relaxed) == 0;
  }
  std::uint64_t ticks_of(Nanoseconds time) const {
    return static_cast<std::uint64_t>(static_cast<double>(time.count()) *
                                      ticks_per_ns_.load(std::memory_order_relaxed));
  }
  // Learns the length of a tick from the time since the waiter was made.
  void learn_ticks() {
    if (ticks_known_.load(std::memory_order_relaxed)) return;
    const std::chrono::duration<double, std::nano> elapsed = Clock::now() - made_;
    if (elapsed < std::chrono::milliseconds(10)) return;
    ticks_per_ns_.store(static_cast<double>(ticks() - made_ticks_) / elapsed.count(),
                        std::memory_order_relaxed);
    ticks_known_.store(true, std::memory_order_relaxed);
  }
  // With other work on its core a yield takes until that has had its turn, some milliseconds, while
  // a sleeper runs as soon as it is woken. A yield this long shows other work; so for a while waits
  // sleep without a yield, where something wakes them.
  static constexpr Nanoseconds kCrowded = std::chrono::microseconds(200);
  static constexpr Nanoseconds kCrowdStays = std::chrono::milliseconds(50);
  static constexpr Nanoseconds kShortestSleep = std::chrono::microseconds(100);
  static constexpr Nanoseconds kReceiving = std::chrono::milliseconds(20);
  static constexpr Nanoseconds kLong = std::chrono::seconds(1);
  static constexpr Nanoseconds kLongestSleep = std::chrono::milliseconds(1);
  void check(const char* what) {
    if (liveness_.alarmed()) liveness_.raise_alarm(what);
  }
  Liveness& liveness_;
  Counters& counters_;
  const Transport& transport_;
  const Nanoseconds spin_;
  const Clock::time_point made_ = Clock::now();
  const std::uint64_t made_ticks_ = ticks();
  // Starts as if a tick were a nanosecond, which makes waits too short rather than too long.
  std::atomic<double> ticks_per_ns_{1.0};
  std::atomic<bool> ticks_known_{false};
  std::atomic<std::uint64_t> crowded_{0};  // when a yield took long, in ticks
  const Nanoseconds yield_;
  std::atomic<int> n_expected_{0};
};

}  // namespace pgasdl

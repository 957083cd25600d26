// Sleeping and waking. A sleep is bounded, so a lost wake-up costs 50 ms and does not hang: the
// tests count such waits. A loaded machine makes some waits slow; a bug makes nearly all slow.

#include <atomic>
#include <chrono>

#include "plans.hpp"
#include "sys/wake_word.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

constexpr double kLost = 0.04;  // seconds; the bound of a sleep is 0.05

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Counts slow waits; fails when they are too many of `rounds` to be an accident.
class SlowCount {
 public:
  SlowCount(const char* what, int rounds) : what_(what), most_(rounds / 2) {}
  ~SlowCount() { std::printf("%s: %d slow, at most %d\n", what_, slow_.load(), most_); }
  void add(double seconds) {
    if (seconds < kLost) return;
    const int slow = 1 + slow_.fetch_add(1);
    CHECK_NOTE(slow <= most_, "%s: %d waits took a whole sleep: wake-ups are lost", what_, slow);
  }

 private:
  const char* what_;
  const int most_;
  std::atomic<int> slow_{0};
};

// A wake-up before the sleep ends it, even if the word was armed again since.
void woken_before_it_sleeps() {
  WakeWord word;
  const std::uint32_t armed = word.arm();
  word.wake();
  CHECK(word.sleep(armed, std::chrono::seconds(1)));
  const std::uint32_t again = word.arm();
  CHECK(word.sleep(armed, std::chrono::seconds(1)));
  CHECK(word.arm() == again);  // two threads that arm it wait for the same wake-up
  CHECK(!word.sleep(again, Nanoseconds(0)));
}

// Two threads hand a number back and forth; each sleeps whenever it is not its turn.
void bare(int rounds) {
  SlowCount slow("a bare wake word", rounds);
  WakeWord words[2];
  std::atomic<int> turn{0};
  const auto player = [&](int me) {
    for (int round = me; round < rounds; round += 2) {
      while (turn.load(std::memory_order_acquire) != round) {
        const std::uint32_t armed = words[me].arm();
        if (turn.load(std::memory_order_acquire) == round) break;
        const auto begin = Clock::now();
        words[me].sleep(armed, std::chrono::seconds(1));
        slow.add(seconds_since(begin));
      }
      turn.store(round + 1, std::memory_order_release);
      words[1 - me].wake();
    }
  };
  std::thread other(player, 1);
  player(0);
  other.join();
}

// Likewise through notifications, with several threads asleep on each rank's one wake word: each
// pair of threads has its own notification.
void ping_pong(int pairs, int rounds) {
  SlowCount slow("notify_waitsome", rounds * pairs);
  Settings settings;
  settings.options = sleepy();
  run(2, settings, [&](Local& local) {
    const auto segment = local.segment(64);
    const auto player = [&](std::uint64_t id) {
      for (int round = 1; round <= rounds; ++round) {
        if (local.rank() == 0) local.notify(1, *segment, id);
        const auto begin = Clock::now();
        local.await(*segment, id);
        slow.add(seconds_since(begin));
        if (local.rank() == 1) local.notify(0, *segment, id);
      }
    };
    std::vector<std::thread> threads;
    for (int pair = 1; pair < pairs; ++pair) {
      threads.emplace_back(player, static_cast<std::uint64_t>(pair));
    }
    player(0);
    for (std::thread& thread : threads) thread.join();
    local.barrier();
  });
}

// One thread of a rank sleeps on a rare notification while another is kept busy: frequent sleeps
// and wake-ups of one thread must not corrupt the wake word for the other.
void rare_among_busy(int rounds) {
  SlowCount slow("a rare notification", rounds);
  Settings settings;
  settings.options = sleepy();
  run(2, settings, [&](Local& local) {
    const auto segment = local.segment(64);
    std::atomic<bool> over{false};
    std::atomic<std::int64_t> raised{0};
    std::thread busy([&] {
      // Bounces its own notification, at the pace of the scheduler.
      while (!over.load()) {
        std::uint32_t found = 0;
        if (local.rank() == 0) local.notify(1, *segment, 0);
        if (local.context.notify_waitsome(*segment, 0, 1, Deadline::in(0.01), found) ==
            Outcome::kDone) {
          (void)local.context.notify_reset(*segment, 0);
          if (local.rank() == 1) local.notify(0, *segment, 0);
        }
      }
    });
    for (int round = 0; round < rounds; ++round) {
      if (local.rank() == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
      if (local.rank() == 0) local.notify(1, *segment, 1);
      const auto begin = Clock::now();
      local.await(*segment, 1);
      slow.add(seconds_since(begin));
      if (local.rank() == 1) local.notify(0, *segment, 1);
    }
    local.barrier();
    over.store(true);
    busy.join();
    local.barrier();
  });
}

// The progress thread ends a plan for which the program sleeps: this must wake the program.
void plans_by_thread(std::uint64_t count, int rounds) {
  SlowCount slow("a plan that the progress thread ended", rounds);
  Settings settings;
  settings.options = sleepy();
  run(2, settings, [&](Local& local) {
    Exchange exchange(local, Kind::kTree, count);
    local.executor.start_thread();
    for (int round = 0; round < rounds; ++round) {
      local.executor.start(exchange.plan());
      CHECK(local.executor.wait(exchange.plan(), soon()) == Executor::Waited::kDone);
      // Measures not the length of the wait, which includes the work, but how late it ends.
      const double now = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
      slow.add(now - local.context.recorder().seconds(exchange.plan().ended()));
    }
  });
}

}  // namespace

int main() {
  if (!register_wake_words()) std::puts("no membarrier here: sleeps are short, losses not seen");
  woken_before_it_sleeps();
  bare(6000);
  ping_pong(1, 1500);
  ping_pong(3, 500);
  rare_among_busy(400);
  plans_by_thread(200'000, 100);
  plans_by_thread(4'000'000, 30);  // reductions that take several calls of progress()
  std::puts("ok");
}

// When a silent peer counts as stopped, on a clock that the test advances.

#include "check.hpp"
#include "pgas/heartbeats.hpp"

namespace {

using namespace pgasdl;
using std::chrono::milliseconds;

constexpr milliseconds kPeriod{200};
constexpr double kLimit = 2.9;  // seconds, between two looks

// One thread that watches `peers` others, all of which beat unless they were stopped.
class Watcher {
 public:
  explicit Watcher(std::size_t peers)
      : beats_(peers, 1), beating_(peers, true), heartbeats_(peers, kPeriod, kLimit, now_) {}

  void stop(std::size_t peer) { beating_[peer] = false; }
  void go_on(std::size_t peer) { beating_[peer] = true; }

  // Advances the time, then looks. Returns how many count as stopped.
  std::size_t look_after(milliseconds passed) {
    now_ += passed;
    std::size_t stopped = 0;
    heartbeats_.look(now_);
    for (std::size_t peer = 0; peer < beats_.size(); ++peer) {
      if (beating_[peer]) ++beats_[peer];
      if (heartbeats_.stopped(peer, beats_[peer])) ++stopped;
    }
    return stopped;
  }

 private:
  Clock::time_point now_{};
  std::vector<std::uint64_t> beats_;
  std::vector<bool> beating_;
  Heartbeats heartbeats_;
};

void a_stopped_peer_is_noticed_just_after_the_limit() {
  Watcher watcher(3);
  watcher.look_after(kPeriod);
  watcher.stop(1);
  for (int look = 0; look < 14; ++look) CHECK(watcher.look_after(kPeriod) == 0);
  CHECK(watcher.look_after(kPeriod) == 1);
}

void short_stops_do_not_add_up() {
  Watcher watcher(2);
  for (int stop = 0; stop < 20; ++stop) {
    watcher.stop(1);
    for (int look = 0; look < 12; ++look) CHECK(watcher.look_after(kPeriod) == 0);
    watcher.go_on(1);
    CHECK(watcher.look_after(kPeriod) == 0);
  }
}

// All processes were stopped and continue one after another: none is lost.
void a_stop_of_the_whole_job_is_nobodys() {
  Watcher watcher(4);
  watcher.look_after(kPeriod);
  for (std::size_t peer = 0; peer < 4; ++peer) watcher.stop(peer);
  CHECK(watcher.look_after(milliseconds(3'600'000)) == 0);
  for (std::size_t peer = 0; peer < 4; ++peer) {
    CHECK(watcher.look_after(kPeriod) == 0);
    watcher.go_on(peer);
  }
  for (int look = 0; look < 100; ++look) CHECK(watcher.look_after(kPeriod) == 0);
}

// A watcher that gets little processor time gives the others more time in proportion.
void a_starved_watcher_is_patient() {
  Watcher watcher(1);
  watcher.look_after(kPeriod);
  watcher.stop(0);
  for (int look = 0; look < 9; ++look) CHECK(watcher.look_after(milliseconds(2000)) == 0);
  CHECK(watcher.look_after(milliseconds(2000)) == 1);
}

// A rank without a first beat is not silent; from its first beat on it is watched.
void who_has_not_begun_is_not_stopped() {
  Heartbeats heartbeats(1, kPeriod, kLimit, {});
  Clock::time_point now{};
  const auto look = [&](std::uint64_t seen) {
    heartbeats.look(now += kPeriod);
    return heartbeats.stopped(0, seen);
  };
  for (int i = 0; i < 100; ++i) CHECK(!look(0));
  for (int i = 0; i < 15; ++i) CHECK(!look(1));
  CHECK(look(1));
  CHECK(!look(2));
}

// A neighbour that has come so far that it sends beats, and stops before its first one.
void who_has_begun_owes_a_first_beat() {
  Heartbeats heartbeats(1, kPeriod, kLimit, {});
  Clock::time_point now{};
  const auto look = [&](std::uint64_t seen) {
    heartbeats.look(now += kPeriod);
    return heartbeats.stopped(0, seen, true);
  };
  for (int i = 0; i < 43; ++i) CHECK(!look(0));
  CHECK(look(0));
  for (int i = 0; i < 15; ++i) CHECK(!look(1));
  CHECK(look(1));
}

}  // namespace

int main() {
  a_stopped_peer_is_noticed_just_after_the_limit();
  short_stops_do_not_add_up();
  a_stop_of_the_whole_job_is_nobodys();
  a_starved_watcher_is_patient();
  who_has_not_begun_is_not_stopped();
  who_has_begun_owes_a_first_beat();
}

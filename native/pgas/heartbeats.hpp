// Measures how long each peer's heartbeat has stood still, for one thread that looks from time to
// time. The caller passes the time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "sys/clock.hpp"

namespace pgasdl {

class Heartbeats {
 public:
  using Moment = Clock::time_point;

  Heartbeats(std::size_t peers, std::chrono::milliseconds period, double stopped_after, Moment now)
      : longest_look_(kLongestLook * std::chrono::duration<double>(period).count()),
        stopped_after_(stopped_after),
        beats_(peers),
        last_look_(now) {}

  // Begins a look at all peers. If this thread itself was held up (the whole job was stopped, a
  // laptop slept, the machine is busy), the peers have not necessarily stopped: a long gap counts
  // only in part, so peers get longer on a busy machine.
  void look(Moment now) {
    const double passed = std::chrono::duration<double>(now - last_look_).count();
    passed_ = std::min(passed, longest_look_);
    last_look_ = now;
  }

  // Whether a peer whose heartbeat is now `seen` has been silent for too long. 0: not started,
  // which takes a while, but not for ever if the peer has `begun`.
  bool stopped(std::size_t peer, std::uint64_t seen, bool begun = false) {
    Beat& beat = beats_[peer];
    if (seen != beat.last || (seen == 0 && !begun)) {
      beat = {seen, 0};
      return false;
    }
    beat.silent += passed_;
    return beat.silent > (seen == 0 ? kFirst : 1) * stopped_after_;
  }

  // Restarts the count, for a peer that is known to live.
  void restart(std::size_t peer) { beats_[peer].silent = 0; }

 private:
  // A gap between two looks counts for at most this many heartbeat periods.
  static constexpr double kLongestLook = 1.5;
  // The first beat may come so much later than another one.
  static constexpr double kFirst = 3;
  struct Beat {
    std::uint64_t last = 0;
    double silent = 0;  // seconds
  };

  double longest_look_;  // seconds
  double stopped_after_;
  std::vector<Beat> beats_;
  Moment last_look_;
  double passed_ = 0;
};

}  // namespace pgasdl

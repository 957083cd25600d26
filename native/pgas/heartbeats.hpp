// For how long each peer's heartbeat has stood still, as one thread counts it that looks at them
// now and then. Time comes in as an argument.
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

  // Begins a look at all peers. If this thread itself stood still (the whole job was stopped, a
  // laptop slept) or comes but slowly to its turn, the others did not necessarily stop: the busier
  // a machine is, the longer they get.
  void look(Moment now) {
    const double passed = std::chrono::duration<double>(now - last_look_).count();
    passed_ = std::min(passed, longest_look_);
    last_look_ = now;
  }

  // Whether a peer whose heartbeat is `seen` now has been silent for too long. 0: it has not begun.
  bool stopped(std::size_t peer, std::uint64_t seen) {
    Beat& beat = beats_[peer];
    if (seen != beat.last || seen == 0) {
      beat = {seen, 0};
      return false;
    }
    beat.silent += passed_;
    return beat.silent > stopped_after_;
  }

  // Counts anew: it is known to live.
  void restart(std::size_t peer) { beats_[peer].silent = 0; }

 private:
  // So many periods count of the time between two looks, at most.
  static constexpr double kLongestLook = 1.5;
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

// A queue over several rails: its number of pieces under way, and what complete() has to throw.
#pragma once

#include "transport/faults.hpp"

namespace pgasdl {

class RailQueue {
 public:
  void began() { n_under_way_.fetch_add(1, std::memory_order_relaxed); }
  void ended() { n_under_way_.fetch_sub(1, std::memory_order_release); }
  bool complete() {
    faults_.raise();
    return n_under_way_.load(std::memory_order_acquire) == 0;
  }
  void add_fault(const Error& error, Rank peer) { faults_.add(error, peer); }
  void drop_faults(Rank peer) { faults_.drop(peer); }

 private:
  std::atomic<std::uint64_t> n_under_way_{0};
  PeerFaults faults_;
};

}  // namespace pgasdl

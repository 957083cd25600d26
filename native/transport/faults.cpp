#include "transport/faults.hpp"

#include <algorithm>

namespace pgasdl {

void PeerFaults::add(const Error& error, Rank peer) {
  const std::lock_guard lock(mutex_);
  const bool known = std::any_of(faults_.begin(), faults_.end(),
                                 [&](const Fault& other) { return other.peer == peer; });
  if (!known) faults_.push_back({peer, PeerFault(error)});
  n_faults_.store(faults_.size(), std::memory_order_release);
}

void PeerFaults::drop(Rank peer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(faults_, [&](const Fault& fault) { return fault.peer == peer; });
  n_faults_.store(faults_.size(), std::memory_order_release);
}

void PeerFaults::throw_oldest() {
  const std::lock_guard lock(mutex_);
  if (faults_.empty()) return;
  const Error fault = faults_.front().what.error();
  faults_.pop_front();
  n_faults_.store(faults_.size(), std::memory_order_release);
  throw fault;
}

}  // namespace pgasdl

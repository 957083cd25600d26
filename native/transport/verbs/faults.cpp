#include "transport/verbs/faults.hpp"

#include <algorithm>

namespace pgasdl {

void VerbsFaults::add(const Error& error, Rank peer) {
  const std::lock_guard lock(mutex_);
  const bool known = std::any_of(faults_.begin(), faults_.end(),
                                 [&](const Fault& other) { return other.peer == peer; });
  if (!known) faults_.push_back({peer, VerbsFault(error)});
  n_faults_.store(faults_.size(), std::memory_order_release);
}

void VerbsFaults::drop(Rank peer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(faults_, [&](const Fault& fault) { return fault.peer == peer; });
  n_faults_.store(faults_.size(), std::memory_order_release);
}

void VerbsFaults::throw_oldest() {
  const std::lock_guard lock(mutex_);
  if (faults_.empty()) return;
  const Error fault = faults_.front().what.error();
  faults_.pop_front();
  n_faults_.store(faults_.size(), std::memory_order_release);
  throw fault;
}

}  // namespace pgasdl

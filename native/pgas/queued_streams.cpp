#include "pgas/queued_streams.hpp"

#include <utility>

namespace pgasdl {

QueuedStreams::~QueuedStreams() {
  for (auto& [queue, last] : last_) {
    if (last.moment == nullptr || last.moment->over()) continue;
    for (auto& segment : last.kept) keep_for_good(std::move(segment));
  }
}

void QueuedStreams::mark(Last& last, cuda::Stream stream) {
  try {
    last.moment->mark(stream);
  } catch (...) {
    // Nothing tells any more when it has ended.
    for (auto& segment : std::exchange(last.kept, {})) keep_for_good(std::move(segment));
    throw;
  }
}

bool QueuedStreams::ended(QueueId queue) {
  Kept let_go;  // outside of the lock
  const std::lock_guard lock(mutex_);
  const auto found = last_.find(queue);
  if (found == last_.end() || found->second.moment == nullptr) return true;
  if (!found->second.moment->reached()) return false;
  let_go = end(found->second);
  return true;
}

bool QueuedStreams::look() {
  if (n_pending_.load(std::memory_order_relaxed) == 0) [[likely]]
    return true;
  std::vector<Kept> let_go;
  const std::lock_guard lock(mutex_);
  for (auto& [queue, last] : last_) {
    if (last.moment != nullptr && last.moment->over()) let_go.push_back(end(last));
  }
  return n_pending_.load(std::memory_order_relaxed) == 0;
}

QueuedStreams::Kept QueuedStreams::end(Last& last) {
  last.moment.reset();
  n_pending_.fetch_sub(1, std::memory_order_relaxed);
  return std::exchange(last.kept, {});
}

}  // namespace pgasdl

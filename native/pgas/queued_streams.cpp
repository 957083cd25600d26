#include "pgas/queued_streams.hpp"

#include <utility>

namespace pgasdl {

QueuedStreams::~QueuedStreams() {
  for (auto& [queue, last] : last_) {
    if (last.moment == nullptr || last.moment->over()) continue;
    for (auto& segment : last.kept) keep_for_good(std::move(segment));
  }
}

QueuedStreams::Last& QueuedStreams::enter(QueueId queue, const Kept& touched) {
  const std::lock_guard lock(mutex_);
  Last& last = last_[queue];
  last.kept.insert(last.kept.end(), touched.begin(), touched.end());
  if (last.moment == nullptr) n_pending_.fetch_add(1, std::memory_order_relaxed);
  last.entered = true;
  return last;
}

// `moment`: the end of the work that was enqueued; null keeps the previous one.
void QueuedStreams::leave(Last& last, std::unique_ptr<DeviceMoment> moment) {
  Kept let_go;
  const std::lock_guard lock(mutex_);
  last.entered = false;
  if (moment != nullptr) last.moment.swap(moment);
  if (last.moment == nullptr) let_go = end(last);
}

void QueuedStreams::mark(Last& last, std::unique_ptr<DeviceMoment> moment, cuda::Stream stream) {
  try {
    moment->mark(stream);
  } catch (...) {
    // Nothing shows its end any more.
    Kept kept;
    {
      const std::lock_guard lock(mutex_);
      kept.swap(last.kept);
    }
    for (auto& segment : kept) keep_for_good(std::move(segment));
    leave(last, nullptr);
    throw;
  }
  leave(last, std::move(moment));
}

bool QueuedStreams::ended(QueueId queue) {
  Kept let_go;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  const auto found = last_.find(queue);
  if (found == last_.end()) return true;
  Last& last = found->second;
  if (last.entered) return false;
  if (last.moment == nullptr) return true;
  if (!last.moment->reached()) return false;
  let_go = end(last);
  return true;
}

bool QueuedStreams::look() {
  if (n_pending_.load(std::memory_order_relaxed) == 0) [[likely]]
    return true;
  std::vector<Kept> let_go;
  const std::lock_guard lock(mutex_);
  for (auto& [queue, last] : last_) {
    const bool passed = !last.entered && last.moment != nullptr && last.moment->over();
    if (passed) let_go.push_back(end(last));
  }
  return n_pending_.load(std::memory_order_relaxed) == 0;
}

QueuedStreams::Kept QueuedStreams::end(Last& last) {
  last.moment.reset();
  n_pending_.fetch_sub(1, std::memory_order_relaxed);
  return std::exchange(last.kept, {});
}

}  // namespace pgasdl

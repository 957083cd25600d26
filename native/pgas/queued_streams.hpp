// Requests that were enqueued on streams on behalf of queues: a queue's order holds whichever way
// its requests take, and wait(queue) covers them all.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "memory/device_stream.hpp"
#include "pgas/segment.hpp"
#include "transport/transport.hpp"

namespace pgasdl {

class QueuedStreams {
 public:
  using Kept = std::vector<std::shared_ptr<const Segment>>;

  QueuedStreams() = default;
  QueuedStreams(const QueuedStreams&) = delete;
  QueuedStreams& operator=(const QueuedStreams&) = delete;
  ~QueuedStreams();

  // All that was enqueued for the queue has ended. Cheap while there is nothing.
  bool passed(QueueId queue) {
    return n_pending_.load(std::memory_order_relaxed) == 0 || ended(queue);
  }
  // From time to time: lets go of what has ended. True if nothing is left.
  bool look();
  // Enqueues on a stream what comes after all that was enqueued for the queue before. Segments that
  // it touches are kept until it has ended: memory that is unmapped under a stream ends the
  // process's use of the GPU.
  template <typename Enqueue>
  void enqueue(QueueId queue, const StreamOrder& order, Kept touched, Enqueue&& enqueue) {
    const std::lock_guard lock(mutex_);
    Last& last = last_[queue];
    if (last.moment != nullptr) last.moment->hold(order.stream);
    if (last.moment == nullptr || last.moment->device() != order.device) {
      auto moment = std::make_unique<DeviceMoment>(order.device);
      if (last.moment == nullptr) n_pending_.fetch_add(1, std::memory_order_relaxed);
      last.moment = std::move(moment);
    }
    last.kept.insert(last.kept.end(), touched.begin(), touched.end());
    try {
      enqueue();
    } catch (...) {
      try {
        mark(last, order.stream);  // some of it may be under way
      } catch (const Error&) {
        // The first error says more.
      }
      throw;
    }
    mark(last, order.stream);
  }

 private:
  bool ended(QueueId queue);
  struct Last {
    std::unique_ptr<DeviceMoment> moment;  // null: passed
    Kept kept;
  };
  static void mark(Last& last, cuda::Stream stream);
  Kept end(Last& last);

  std::mutex mutex_;
  std::map<QueueId, Last> last_;
  std::atomic<int> n_pending_{0};
};

}  // namespace pgasdl

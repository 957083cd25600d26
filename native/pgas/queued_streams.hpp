// Requests that streams carry out for queues: a queue keeps its order whether the host or a stream
// carries out a request, and wait(queue) covers both.
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

  // All that was enqueued for the queue has ended. Cheap if nothing was.
  bool passed(QueueId queue) {
    return n_pending_.load(std::memory_order_relaxed) == 0 || ended(queue);
  }
  // Releases what has ended; called from time to time. True if nothing is left.
  bool look();
  // Enqueues work on a stream, after all that was enqueued for the queue before. Keeps the segments
  // that it touches until it has ended: unmapping memory under a stream breaks the GPU's context.
  template <typename Enqueue>
  void enqueue(QueueId queue, const StreamOrder& order, Kept touched, Enqueue&& enqueue) {
    const std::lock_guard in_turn(enqueuing_);
    auto moment = std::make_unique<DeviceMoment>(order.device);
    Last& last = enter(queue, touched);
    // Outside mutex_: the driver may hold these calls up for as long as some stream waits.
    try {
      if (last.moment != nullptr) last.moment->hold(order.stream);
    } catch (...) {
      leave(last, nullptr);
      throw;
    }
    try {
      enqueue();
    } catch (...) {
      try {
        mark(last, std::move(moment), order.stream);  // part of it may be under way
      } catch (const Error&) {
        // The first error says more.
      }
      throw;
    }
    mark(last, std::move(moment), order.stream);
  }

 private:
  struct Last {
    std::unique_ptr<DeviceMoment> moment;  // null: reached
    Kept kept;
    bool entered = false;  // more is being enqueued: nothing is released meanwhile
  };
  bool ended(QueueId queue);
  Last& enter(QueueId queue, const Kept& touched);
  void leave(Last& last, std::unique_ptr<DeviceMoment> moment);
  void mark(Last& last, std::unique_ptr<DeviceMoment> moment, cuda::Stream stream);
  Kept end(Last& last);

  std::mutex enqueuing_;  // serialises enqueue(); locked before mutex_
  std::mutex mutex_;
  std::map<QueueId, Last> last_;
  std::atomic<int> n_pending_{0};  // queues with a moment, or entered
};

}  // namespace pgasdl

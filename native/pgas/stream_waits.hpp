// Streams that wait for notifications. A stream cannot be told that none will come, so this rank
// ends a wait itself after the deadline or a loss, by raising a value; the next call that orders
// work on a stream throws the reason.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <optional>

#include "memory/device_stream.hpp"
#include "pgas/segment.hpp"
#include "sys/clock.hpp"
#include "sys/error.hpp"

namespace pgasdl {

class StreamWaits {
 public:
  StreamWaits() = default;
  StreamWaits(const StreamWaits&) = delete;
  StreamWaits& operator=(const StreamWaits&) = delete;
  ~StreamWaits();

  // Enqueues a stream's wait for a notification. Throws kClosed if nothing would end it.
  template <typename Enqueue>
  void wait(const StreamOrder& order, std::shared_ptr<const Segment> segment,
            std::uint32_t notification, Deadline deadline, Enqueue&& enqueue) {
    add(order, {std::move(segment), {{notification, deadline}}, nullptr}, enqueue);
  }
  // Enqueues work that ends by itself; keeps its segment until then, as for a wait.
  template <typename Enqueue>
  void touch(const StreamOrder& order, std::shared_ptr<const Segment> segment, Enqueue&& enqueue) {
    add(order, {std::move(segment), std::nullopt, nullptr}, enqueue);
  }
  // Ends waits that will not end by themselves: late ones, or all after a `loss`. Called from time
  // to time; true if none is left.
  bool look(const Error* loss);
  // Accepts no more work.
  void close();
  // Throws the reason why a wait was ended, once.
  void require();

 private:
  struct Awaited {
    std::uint32_t notification;
    Deadline deadline;
  };
  struct Use {
    std::shared_ptr<const Segment> segment;
    std::optional<Awaited> awaited;
    std::unique_ptr<DeviceMoment> passed;  // null: still being enqueued, or it could not be marked
  };

  template <typename Enqueue>
  void add(const StreamOrder& order, Use use, Enqueue&& enqueue) {
    auto passed = std::make_unique<DeviceMoment>(order.device);
    const auto at = begin(std::move(use));
    // Outside mutex_: the driver may hold these calls up until look() ends some wait.
    try {
      enqueue();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      uses_.erase(at);
      throw;
    }
    try {
      passed->mark(order.stream);
    } catch (...) {
      // Nothing shows its end any more.
      const std::lock_guard lock(mutex_);
      if (at->awaited) at->awaited->deadline = Deadline::once();
      throw;
    }
    const std::lock_guard lock(mutex_);
    at->passed = std::move(passed);
  }
  std::list<Use>::iterator begin(Use use);
  void end_late(const Use& use, const Error* loss);

  std::mutex mutex_;
  std::list<Use> uses_;
  std::optional<Error> fault_;
  bool closed_ = false;
};

}  // namespace pgasdl

// Streams that wait for notifications. Nobody can tell a stream that none will come: so each wait
// ends by its deadline or when a rank is lost, by a value that this rank raises itself, and the
// next call that orders anything on a stream throws the reason.
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

  // Enqueues a wait for a notification on a stream. Throws kClosed where nobody would end it.
  template <typename Enqueue>
  void wait(const StreamOrder& order, std::shared_ptr<const Segment> segment,
            std::uint32_t notification, Deadline deadline, Enqueue&& enqueue) {
    add(order, {std::move(segment), {{notification, deadline}}, nullptr}, enqueue);
  }
  // Enqueues what ends by itself. Its segment is kept until then, as a wait's.
  template <typename Enqueue>
  void touch(const StreamOrder& order, std::shared_ptr<const Segment> segment, Enqueue&& enqueue) {
    add(order, {std::move(segment), std::nullopt, nullptr}, enqueue);
  }
  // From time to time: ends waits that will not end by themselves, all of them if there is a
  // `loss`. True if nothing is left.
  bool look(const Error* loss);
  // From now on none is taken.
  void close();
  // Throws what ended one, once.
  void require();

 private:
  struct Awaited {
    std::uint32_t notification;
    Deadline deadline;
  };
  struct Use {
    std::shared_ptr<const Segment> segment;
    std::optional<Awaited> awaited;
    std::unique_ptr<DeviceMoment> passed;  // null: it is being enqueued, or nothing tells
  };

  template <typename Enqueue>
  void add(const StreamOrder& order, Use use, Enqueue&& enqueue) {
    auto passed = std::make_unique<DeviceMoment>(order.device);
    const auto at = begin(std::move(use));
    // Without the lock: the driver may hold these calls up until a wait is over that look() ends.
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
      // Nothing tells any more when it has ended.
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

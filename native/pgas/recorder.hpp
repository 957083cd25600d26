// The flight record: a rank's last operations, always kept, printed when something fails.
#pragma once

#include <array>
#include <atomic>
#include <string>
#include <string_view>

#include "transport/transport.hpp"

namespace pgasdl {

enum class Operation : std::uint8_t {
  kWrite,
  kRead,
  kNotify,
  kWriteNotify,
  kReadNotify,
  kNotifyAdd,
  kWriteNotifyAdd,
  kAtomic,
  kWaitsome,
  kWaitCount,
  kReset,
  kWaitQueue,
  kBarrier,
  kAllgather,
  kPassiveSend,
  kPassiveReceive,
  kPlanStart,
  kPlanDone,
};
std::string_view name(Operation operation);

// Any thread may record. Two at the same moment may lose one record, but no word is torn.
class Recorder {
 public:
  // `at`: ticks that the caller has read already; reading them costs as much as the rest.
  void record(Operation operation, Rank peer, SegmentId segment, std::uint64_t detail,
              std::uint64_t bytes, std::uint64_t at = ticks()) {
    const std::uint64_t index = next_.load(std::memory_order_relaxed);
    next_.store(index + 1, std::memory_order_relaxed);
    Record& record = records_[index % kRecords];
    record.ticks.store(at, std::memory_order_relaxed);
    record.what.store(static_cast<std::uint64_t>(operation) << 56 |
                          (static_cast<std::uint64_t>(segment) & 0xffffff) << 32 |
                          static_cast<std::uint32_t>(peer),
                      std::memory_order_relaxed);
    record.detail.store(detail, std::memory_order_relaxed);
    record.bytes.store(bytes, std::memory_order_relaxed);
  }
  // One line per operation, oldest first, with microseconds before now.
  std::string dump(Rank rank) const;
  // The moment of a ticks() value, in seconds of the monotonic clock.
  double seconds(std::uint64_t at) const;
  // Constant, so that sums of ticks never become fewer seconds.
  double seconds_per_tick() const;

 private:
  double per_tick_so_far() const;
  static constexpr std::size_t kRecords = 256;
  struct Record {
    std::atomic<std::uint64_t> ticks, what, detail, bytes;
  };
  std::array<Record, kRecords> records_{};
  std::atomic<std::uint64_t> next_{0};
  const std::uint64_t start_ticks_ = ticks();
  const Clock::time_point start_ = Clock::now();
};

}  // namespace pgasdl

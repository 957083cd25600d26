// A plan bound to memory: every address resolved, every bound checked, ready to be executed any
// number of times. Execution number g ("generation") raises and awaits notifications of value g
// with the plan's tag, so that neither an old flag nor another plan's can be taken for its own.
#pragma once

#include <atomic>
#include <bit>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "exchange/plan.hpp"
#include "pgas/context.hpp"
#include "reduce/reduce.hpp"
#include "reduce/staging.hpp"

namespace pgasdl {

// Where a plan's buffer lies: the same segment and offset on every rank.
struct BufferBinding {
  std::shared_ptr<Segment> segment;
  std::uint64_t offset = 0;  // bytes
  DType dtype = DType::kF32;
};

class BoundPlan {
 public:
  // `ranks`: the world rank of each of the plan's ranks. `board`: the segment whose notifications
  // [first_notification, + plan.notifications) are this plan's on every rank. `tag`: what all ranks
  // must agree on (plan, count, dtype); a flag with another tag is an error, not a hang.
  BoundPlan(Context& context, const Plan& plan, std::vector<BufferBinding> buffers,
            std::vector<Rank> ranks, std::shared_ptr<Segment> board,
            std::uint64_t first_notification, std::uint32_t tag);

  // A notification has 20 bits for its generation, and 0 is none; after the last comes 1 again.
  static constexpr std::uint32_t kMostGenerations = (1u << 20) - 1;

  // Where the plan's own copy of a buffer lies; null if it has no such buffer.
  std::byte* base(const std::string& buffer) const;
  // Lets the plan's own copy of a buffer lie elsewhere from now on; not while it runs.
  void rebase(const std::string& buffer, std::byte* address);
  // Notifications of the board that other plans with the same numbering of executions raise: while
  // a wait lasts they tell whether a rank runs one of those instead of this one.
  void watch(std::uint64_t first, std::uint64_t count) {
    watched_first_ = first;
    watched_count_ = count;
  }

  const std::string& name() const { return name_; }
  bool running() const { return state_.load(std::memory_order_acquire) == State::kRunning; }
  bool done() const { return state_.load(std::memory_order_acquire) != State::kRunning; }
  std::uint32_t generation() const { return generation_; }
  // When the last execution began and ended, in ticks().
  std::uint64_t began() const { return began_; }
  std::uint64_t ended() const { return ended_; }
  void rethrow() const {
    if (state_.load(std::memory_order_acquire) == State::kFailed) std::rethrow_exception(fault_);
  }

 private:
  friend class Executor;
  enum class State : std::uint8_t { kIdle, kRunning, kFailed };
  struct Step {
    PlanStep::Kind kind;
    Rank peer = -1;
    bool flagged = false;
    Transfer transfer{};
    RemoteFlag flag{};
    const FlagWord* word = nullptr;
    std::int64_t notification = -1;
    std::vector<Destination> destinations;
    std::vector<Source> sources;
    std::vector<std::int32_t> own_destinations;  // buffer of each that is my own copy, else -1
    std::vector<std::int32_t> own_sources;
    std::uint64_t count = 0;
    std::uint64_t pass = 0;     // elements reduced per turn at most
    std::uint64_t staging = 0;  // bytes, of a plain copy into an inbox that peers load from
    double scale = 1;
    std::string hook;
    std::uint64_t offset = 0;  // kCall: of the span, in elements
  };
  struct Lane {
    std::vector<Step> steps;
    std::size_t at = 0;
    std::uint64_t progress = 0;                  // kReduce: elements done
    std::vector<Destination> part_destinations;  // of a reduction done in passes
    std::vector<Source> part_sources;
    enum class Call : std::uint8_t { kNone, kAsked, kAnswered } call = Call::kNone;
  };

  // Which notifications each stalled lane waits for, and who owes them.
  std::string missing() const;
  // Throws if a watched notification says that a rank runs another plan, or if a rank that owes
  // one has left.
  void look_around() const;
  // 0: the one after the last.
  void begin(std::uint32_t generation);
  // As far as it goes without blocking; true if anything moved.
  bool advance();
  bool advance_lane(Lane& lane);
  bool arrived(const Step& step) const;
  bool reduce_some(Lane& lane, const Step& step);
  std::uint32_t value() const { return (generation_ << kTagBits) | tag_; }

  static constexpr std::uint32_t kTagBits = 32 - std::bit_width(kMostGenerations);

  Context& context_;
  const std::string name_;
  const std::vector<std::string> buffer_names_;
  const std::vector<BufferBinding> buffers_;
  std::vector<std::byte*> own_;  // where this rank's copy of each buffer lies now
  const std::shared_ptr<Segment> board_;
  const std::uint64_t first_notification_;
  const std::uint32_t tag_;
  std::vector<Lane> lanes_;
  StagingCopy stage_;
  std::size_t lanes_left_ = 0;
  std::uint32_t generation_ = 0;  // 20 bits
  std::atomic<State> state_{State::kIdle};
  std::uint64_t watched_first_ = 0;
  std::uint64_t watched_count_ = 0;
  std::uint64_t began_ = 0;
  std::uint64_t ended_ = 0;
  std::exception_ptr fault_;
  bool call_pending_ = false;
};

}  // namespace pgasdl

// Numbers executions. The number is the generation of their notifications, by which a flag of one
// execution is told from another's.
//
// A handle, and each layer of an exchange, has a Numbering of its own. The allreduces of a group
// share one: they are exclusive, one after the other, whatever their size and plan.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <exception>
#include <memory>

#include "pgas/segment.hpp"

namespace pgasdl {

class Execution;

// A notification has 12 bits for its generation, of which 0 is none, and 20 for its tag.
inline constexpr std::uint32_t kGenerations = (1u << 12) - 1;
inline constexpr std::uint32_t kTagBits = 32 - std::bit_width(kGenerations);

// Why a rank gave up, as its last notification says: ranks run different collectives as an
// execution (the first bit, and the generation); or, by given_up(), a rank takes no more part: the
// one that tells, or one that it waited for. The second bit: that rank stays, so that nothing else
// tells.
inline constexpr std::uint32_t kMismatched = 1u << 31;
inline constexpr std::uint32_t kRenounced = 1u << 30;
inline constexpr std::uint32_t kReasonBits = 18;

// `generation`: of the first execution in which it takes no part; 0: of all.
inline constexpr std::uint32_t given_up(Rank reason, std::uint32_t generation) {
  return (generation << kReasonBits) | static_cast<std::uint32_t>(reason + 1);
}
inline constexpr Rank reason_of(std::uint32_t announced) {
  return static_cast<Rank>(announced & ((1u << kReasonBits) - 1)) - 1;
}
// Whether that concerns the execution of `generation`; 0: any.
inline constexpr bool concerns(std::uint32_t announced, std::uint32_t generation) {
  if (announced == 0 || (announced & kMismatched) != 0) return false;
  const std::uint32_t first = (announced & ~kRenounced) >> kReasonBits;
  return first == 0 || generation == 0 ||
         (generation + kGenerations - first) % kGenerations < kGenerations / 2;
}

class Numbering {
 public:
  // Its executions raise the notifications [first, first + count) of `board`, and nobody else does.
  // After them comes one for each of the plan's ranks: by which it tells why it gave up. `region`:
  // plans have as many each at most, in the order of their first executions; 0: not so.
  Numbering(std::shared_ptr<Segment> board, std::uint64_t first, std::uint64_t count,
            bool exclusive, std::uint64_t region = 0)
      : board_(std::move(board)),
        first_(first),
        count_(count),
        exclusive_(exclusive),
        region_(region) {}

  // One thread at a time is in a call that begins or ends an execution: the second is refused
  // before it has touched anything.
  class Entry {
   public:
    Entry(Numbering& numbering, const char* what) : numbering_(numbering) { numbering.enter(what); }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    ~Entry() { numbering_.leave(); }

   private:
    Numbering& numbering_;
  };
  void enter(const char* what);
  void leave() { inside_.store(false, std::memory_order_release); }

  const std::shared_ptr<Segment>& board() const { return board_; }
  std::uint64_t first() const { return first_; }
  // A rank that runs something else as this execution raises none from here on: at most it has
  // begun with the next plan. To look at all would leave no room in a cache for anything else.
  std::uint64_t reach() const {
    const std::uint64_t end = first_ + count_;
    return region_ == 0 ? end : std::min(end, std::max(first_, raised_end_) + 2 * region_);
  }
  std::uint64_t given_up_id(std::size_t of) const { return first_ + count_ + of; }
  bool exclusive() const { return exclusive_; }
  std::uint64_t number() const { return number_; }
  void set_number(std::uint64_t number) {
    number_ = number;
    generation_ = number == 0 ? 0 : static_cast<std::uint32_t>((number - 1) % kGenerations) + 1;
  }
  std::uint32_t generation() const { return generation_; }  // of the last that began
  // For an exclusive one: an execution has begun whose result was not taken.
  bool under_way() const { return current_.load(std::memory_order_acquire) != nullptr; }
  // For an exclusive one: an execution failed, and nothing can follow.
  bool failed() const { return fault_ != nullptr; }

 private:
  friend class Execution;
  friend class Executor;
  // The next execution begins.
  void advance();
  // One of a plan with phases begins. All ranks take part in each of those, so the slots of one are
  // free when the next one is over. Others, in between, may wait for few ranks.
  std::uint64_t next_turn() { return turns_++; }
  // It raises notifications below this one. Those that no execution raised need no sweep: most of
  // the group's many, which would leave no room in a cache for anything else.
  void raises(std::uint64_t end) { raised_end_ = std::max(raised_end_, end); }
  // Old flags go before their generation comes again.
  void sweep();

  const std::shared_ptr<Segment> board_;
  const std::uint64_t first_;
  const std::uint64_t count_;
  const bool exclusive_;
  const std::uint64_t region_;
  std::uint64_t number_ = 0;
  std::uint32_t generation_ = 0;
  std::uint64_t turns_ = 0;
  std::uint64_t raised_end_ = 0;
  std::atomic<const Execution*> current_{nullptr};
  std::exception_ptr fault_;
  std::atomic<bool> inside_{false};
};

}  // namespace pgasdl

// Numbers executions. The number is the generation of their notifications, which tells the flags of
// one execution from another's.
//
// A handle, and each layer of an exchange, has its own Numbering. The allreduces of a group share
// one: they exclude each other, whatever their size and plan.
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

// A notification has 12 bits for its generation, where 0 means none, and 20 for its tag.
inline constexpr std::uint32_t kGenerations = (1u << 12) - 1;
inline constexpr std::uint32_t kTagBits = 32 - std::bit_width(kGenerations);

// Why a rank gave up, in its last notification. First bit, with a generation: ranks run different
// collectives as that execution. Otherwise, by given_up(): a rank takes no more part, this one or
// one that it waited for. Second bit: that rank lives on, so that no loss will report it.
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
// Whether the announcement concerns the execution of `generation`; 0: any.
inline constexpr bool concerns(std::uint32_t announced, std::uint32_t generation) {
  if (announced == 0 || (announced & kMismatched) != 0) return false;
  const std::uint32_t first = (announced & ~kRenounced) >> kReasonBits;
  return first == 0 || generation == 0 ||
         (generation + kGenerations - first) % kGenerations < kGenerations / 2;
}

class Numbering {
 public:
  // Only its executions raise the notifications [first, first + count) of `board`. After them comes
  // one for each of the plan's ranks, which announces why that rank gave up. `region`: the most
  // notifications of each plan, if plans follow in the order of their first executions; else 0.
  Numbering(std::shared_ptr<Segment> board, std::uint64_t first, std::uint64_t count,
            bool exclusive, std::uint64_t region = 0)
      : board_(std::move(board)),
        first_(first),
        count_(count),
        exclusive_(exclusive),
        region_(region) {}

  // A claim of one thread on calls that begin or end an execution: a second thread is refused
  // before it has changed anything.
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
  // The end of the notifications to check for another collective: a rank that runs one has at most
  // begun with the next plan. To read all would evict everything else from a cache.
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
  std::uint32_t generation() const { return generation_; }  // of the last execution that began
  // For an exclusive one: the result of an execution that began was not taken.
  bool under_way() const { return current_.load(std::memory_order_acquire) != nullptr; }
  // For an exclusive one: an execution failed, and no other can follow.
  bool failed() const { return fault_ != nullptr; }

 private:
  friend class Execution;
  friend class Executor;
  // The next execution begins.
  void advance();
  // The turn of an execution of a plan with phases. All ranks take part in each of them, so the
  // slots of one are free when the next is over. Other executions in between may wait for few
  // ranks.
  std::uint64_t next_turn() { return turns_++; }
  // An execution raises notifications below `end`. A sweep skips those that none has raised, most
  // of the group's: to read them would evict everything else from a cache.
  void raises(std::uint64_t end) { raised_end_ = std::max(raised_end_, end); }
  // Clears old flags before their generation comes again.
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

#include "executor/numbering.hpp"

#include "sys/error.hpp"

namespace pgasdl {
namespace {

// Executions between two sweeps. Ranks are never that far apart: a flag whose generation lies
// further ahead is from the round before.
constexpr std::uint32_t kSweep = (kGenerations + 1) / 4;

}  // namespace

void Numbering::enter(const char* what) {
  if (inside_.exchange(true, std::memory_order_acquire)) {
    throw Error(ErrorKind::kMismatch, text("two threads of this rank are in ", what,
                                           " at once: the second was refused, the first goes on; "
                                           "give each thread a group, or a handle, of its own"));
  }
}

void Numbering::advance() {
  ++number_;
  generation_ = generation_ == kGenerations ? 1 : generation_ + 1;
  if (number_ % kSweep == 0) sweep();
}

void Numbering::sweep() {
  for (std::uint64_t id = first_; id < raised_end_; ++id) {
    FlagWord& word = board_->local().board[id];
    std::uint32_t seen = word.load(std::memory_order_relaxed);
    if (seen == 0) continue;
    const std::uint32_t ahead = ((seen >> kTagBits) + kGenerations - generation()) % kGenerations;
    if (ahead < kSweep || ahead >= 3 * kSweep - 1) continue;
    // Keeps a flag that arrives just now.
    word.compare_exchange_strong(seen, 0, std::memory_order_relaxed);
  }
}

}  // namespace pgasdl

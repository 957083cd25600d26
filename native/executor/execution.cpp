#include "executor/execution.hpp"

#include <algorithm>
#include <thread>
#include <utility>

#include "executor/executor.hpp"
#include "reduce/copy.hpp"

namespace pgasdl {
namespace {

constexpr std::uint64_t kBriefBytes = 256 << 10;

}  // namespace

Execution::Execution(Executor& executor, std::vector<std::unique_ptr<BoundPlan>> phases,
                     std::shared_ptr<Numbering> numbering)
    : executor_(executor),
      phases_(std::move(phases)),
      numbering_(std::move(numbering)),
      brief_(phases_[0]->bytes_moved() <= kBriefBytes),
      directory_(phases_[0]->directory()) {
  const std::uint64_t needed = numbering_->given_up_id(phases_[0]->ranks().size());
  const Segment& board = *numbering_->board();
  if (needed > board.notifications()) {
    throw Error(ErrorKind::kPlan,
                text("plan ", name(), " needs the notifications up to ", needed, " of segment ",
                     board.id(), ", which has ", board.notifications()));
  }
}

void Execution::require_idle() const {
  switch (state()) {
    case State::kIdle:
      break;
    case State::kFailed:
      std::rethrow_exception(fault_);
    case State::kClosed:
      throw Error(ErrorKind::kClosed, text("plan ", name(), ": this collective was closed"));
    case State::kDone:
      if (streamed()) break;  // a stream takes its result
      [[fallthrough]];
    default:
      throw Error(ErrorKind::kPlan, text("plan ", name(), " is started while its execution ",
                                         number_, " is under way: wait for it first"));
  }
  if (numbering_->exclusive()) {
    if (numbering_->fault_) std::rethrow_exception(numbering_->fault_);
    if (numbering_->under_way() && numbering_->current_.load() != this) {
      throw Error(ErrorKind::kMismatch,
                  text("plan ", name(), " is started while execution ", numbering_->number(),
                       " of the same group is under way: call that again first"));
    }
  }
}

void Execution::reserve(const Array& array) {
  if (!array.places.empty() && array.places.size() != phases_[0]->n_buffers()) {
    throw Error(ErrorKind::kPlan, text("plan ", name(), " has ", phases_[0]->n_buffers(),
                                       " buffers, ", array.places.size(), " addresses were given"));
  }
  const std::uint64_t entry =
      directory_ == nullptr ? 0 : directory_->entry_of(array.target, array.bytes);
  if (numbering_->exclusive()) numbering_->current_.store(this, std::memory_order_release);
  numbering_->advance();
  number_ = numbering_->number();
  if (phases_.size() > 1) phase_ = numbering_->next_turn() % phases_.size();
  numbering_->raises(phase().end_notification());
  array_ = array;
  streamed_.store(false, std::memory_order_relaxed);
  array_.places = {};
  if (!array.places.empty()) {
    phase().rebase(array.places);
  } else if (array.access == BufferAccess::kRebased) {
    phase().rebase(array.target);
  }
  if (directory_ != nullptr) directory_->announce(entry, numbering_->generation());
  phase().set_declined(directory_ != nullptr && entry == Directory::kElsewhere);
  state_.store(State::kRunning, std::memory_order_release);
}

void Execution::copy_in(Lock& lock) {
  if (copies_on_device()) {
    phase().array_copies()->begin(array_.source, array_.target, lock);
  } else {
    const Outside outside(lock);
    pgasdl::copy(phase().data(), array_.source, array_.bytes);
  }
}

void Execution::copy_out() { pgasdl::copy(array_.target, phase().data(), array_.bytes); }

bool Execution::by_stream(const Array& array) const {
  if (array.access == BufferAccess::kCopied && array.device != phase().device()) return false;
  return std::all_of(phases_.begin(), phases_.end(),
                     [](const auto& phase) { return phase->by_stream(); });
}

bool Execution::collect() {
  State done = State::kDone;
  if (!state_.compare_exchange_strong(done, State::kCollecting, std::memory_order_acq_rel)) {
    while (state() == State::kCollecting) std::this_thread::yield();
    return false;
  }
  if (array_.access == BufferAccess::kCopied && !copies_on_device()) copy_out();
  std::shared_ptr<const void> let_go;
  if (keeps_.load(std::memory_order_acquire)) let_go = executor_.let_go(*this);
  if (numbering_->exclusive()) numbering_->current_.store(nullptr, std::memory_order_release);
  State collecting = State::kCollecting;  // unless it was closed meanwhile
  (void)state_.compare_exchange_strong(collecting, State::kIdle, std::memory_order_acq_rel);
  return true;
}

std::shared_ptr<const void> Execution::end(State state, std::exception_ptr fault) {
  if (numbering_->exclusive() && numbering_->current_.load() == this) {
    numbering_->fault_ = fault;
    numbering_->current_.store(nullptr, std::memory_order_release);
  }
  fault_ = std::move(fault);
  interrupted_.store(false, std::memory_order_relaxed);
  keeps_.store(false, std::memory_order_relaxed);
  state_.store(state, std::memory_order_release);
  return std::move(keep_);
}

void Execution::interrupt(std::shared_ptr<const void> keep) {
  executor_.interrupt(*this, std::move(keep));
}

void Execution::await_streams() const {
  while (executor_.await_streamed(this, Deadline::in(1)) != Outcome::kDone) {
  }
}

void Execution::close() { executor_.close(*this); }

}  // namespace pgasdl

#include "pgas/stream_waits.hpp"

#include <utility>

namespace pgasdl {

StreamWaits::~StreamWaits() {
  for (Use& use : uses_) {
    if (use.passed == nullptr || !use.passed->over()) keep_for_good(std::move(use.segment));
  }
}

std::list<StreamWaits::Use>::iterator StreamWaits::begin(Use use) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorKind::kClosed, "this context is closed");
  return uses_.insert(uses_.end(), std::move(use));
}

bool StreamWaits::look(const Error* loss) {
  std::list<Use> let_go;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  for (auto at = uses_.begin(); at != uses_.end();) {
    const auto use = at++;
    if (use->passed != nullptr && use->passed->over()) {
      let_go.splice(let_go.end(), uses_, use);
    } else if (use->awaited && (loss != nullptr || use->awaited->deadline.passed())) {
      end_late(*use, loss);
    }
  }
  return uses_.empty();
}

void StreamWaits::end_late(const Use& use, const Error* loss) {
  const std::uint32_t notification = use.awaited->notification;
  FlagWord& word = use.segment->local().board[notification];
  std::uint32_t none = 0;
  if (!word.compare_exchange_strong(none, 1, std::memory_order_acq_rel)) return;
  const std::string what =
      text("a stream's wait for notification ", notification, " of segment ", use.segment->id(),
           " was ended, and what the stream did after it ", "is void: ");
  if (loss != nullptr) {
    fault_.emplace(loss->kind(), what + loss->what(), loss->rank());
  } else {
    fault_.emplace(ErrorKind::kTimeout, what + "it did not come in time");
  }
}

void StreamWaits::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

void StreamWaits::require() {
  const std::lock_guard lock(mutex_);
  if (fault_) {
    const Error fault = *std::exchange(fault_, {});
    throw fault;
  }
}

}  // namespace pgasdl

#include "executor/executor.hpp"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "sys/thread.hpp"

namespace pgasdl {
namespace {

// Between two looks at another thread's or a stream's progress.
constexpr auto kPause = std::chrono::microseconds(50);

constexpr const char* kStopped = "nobody goes on with it: its thread was stopped";

}  // namespace

Executor::~Executor() { stop_thread(); }

// Throws unless the execution may begin. Reserves its place among the live ones, besides the places
// of those that have begun and are not yet listed.
Lock Executor::admit(const Execution& execution) {
  for (;;) {
    Lock lock(mutex_);
    execution.require_idle();
    if (!execution.entered_) {
      if (live_.capacity() - live_.size() <= n_coming_) [[unlikely]]
        live_.reserve(live_.size() + n_coming_ + 1);
      return lock;
    }
    lock.unlock();  // another thread is about to close it
    std::this_thread::sleep_for(kPause);
  }
}

void Executor::start(Execution& execution, const Array& array, const StreamOrder* after) {
  context_.require_usable();
  std::unique_ptr<DeviceMoment> gate;
  if (after != nullptr) {
    refuse_capture(*after, "a collective");
    start_thread();  // the program may be busy elsewhere
    gate = DeviceMoment::of(*after);
  }
  {
    Lock lock = admit(execution);
    if (after != nullptr) execution.gate_.swap(gate);
    execution.reserve(array);
    ++n_coming_;
    if (array.access == BufferAccess::kCopied && after == nullptr) copy_in(execution, lock);
    execution.phase().begin(execution.numbering_->generation(), execution.array_.mark);
    record(Operation::kPlanStart, execution, execution.began());
    if (after != nullptr) execution.gated_ = true;
    if (after != nullptr || execution.phase().device() != kHost) expect(execution);
    // The first steps mostly go through at once; a small plan may even end here.
    (void)advance(execution, lock);
    --n_coming_;
    if (execution.state() == Execution::State::kRunning) {
      live_.push_back(&execution);
      note_live();
    }
  }
  if (threaded_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(idle_mutex_);
    idle_.notify_one();
  }
}

void Executor::copy_in(Execution& execution, Lock& lock) {
  std::exception_ptr fault;
  execution.entered_ = true;
  try {
    execution.copy_in(lock);
  } catch (const std::exception&) {
    fault = std::current_exception();
  }
  if (fault) {
    --n_coming_;
    quiet(execution, lock);
    (void)execution.end(Execution::State::kFailed, fault);
    std::rethrow_exception(fault);
  }
  execution.entered_ = false;
}

bool Executor::enqueue(Execution& execution, const Array& array, const StreamOrder& order,
                       Deadline deadline) {
  context_.require_usable();
  refuse_capture(order, "a collective");
  if (!execution.by_stream(array)) return false;
  start_thread();
  {
    const std::lock_guard in_turn(enqueuing_);
    Lock lock = admit(execution);
    released_.reserve(released_.size() + live_.size() + 1);
    execution.reserve(array);
    BoundPlan& plan = execution.phase();
    plan.begin(execution.numbering_->generation(), execution.array_.mark);
    record(Operation::kPlanStart, execution, execution.began());
    execution.stream_until_ = deadline;
    execution.streamed_.store(true, std::memory_order_release);
    expect(execution);
    live_.push_back(&execution);
    note_live();
    const bool copied = array.access == BufferAccess::kCopied;
    std::exception_ptr fault;
    execution.entered_ = true;
    try {
      const Outside outside(lock);
      plan.enqueue(order, copied ? array.source : nullptr, copied ? array.target : nullptr,
                   array.bytes);
    } catch (const std::exception&) {
      fault = std::current_exception();
    }
    execution.entered_ = false;
    if (!fault && !threaded_.load(std::memory_order_acquire)) {
      fault = std::make_exception_ptr(error_of(execution, ErrorKind::kClosed, kStopped));
    }
    if (fault) {
      std::erase(live_, &execution);
      give_up(execution, fault, lock);
      std::rethrow_exception(fault);
    }
  }
  const std::lock_guard lock(idle_mutex_);
  idle_.notify_one();
  return true;
}

// A GPU takes part, so no wake word reports the end.
void Executor::expect(Execution& execution) {
  if (!std::exchange(execution.expected_, true)) context_.waiter().expect(1);
}

void Executor::expect_no_more(Execution& execution) {
  if (std::exchange(execution.expected_, false)) context_.waiter().expect(-1);
}

bool Executor::advance(Execution& execution, Lock& lock) {
  BoundPlan& plan = execution.phase();
  std::exception_ptr fault;
  bool moved = false;
  execution.entered_ = true;
  try {
    moved = step(execution, lock);
    gather_calls(execution);
  } catch (const std::exception&) {
    fault = std::current_exception();  // a step was made half way
  }
  execution.entered_ = false;
  if (fault) {
    give_up(execution, std::move(fault), lock);
    return true;
  }
  if (!execution.gated_ && plan.over()) {
    record(Operation::kPlanDone, execution, execution.ended());
    plan.count_traffic();
    expect_no_more(execution);
    execution.state_.store(Execution::State::kDone, std::memory_order_release);
  }
  return moved;
}

bool Executor::step(Execution& execution, Lock& lock) {
  BoundPlan& plan = execution.phase();
  if (execution.gated_) {
    if (!execution.gate_->reached()) return false;
    if (plan.device() == kHost) expect_no_more(execution);
    if (execution.array_.access == BufferAccess::kCopied) execution.copy_in(lock);
    execution.gated_ = false;
  }
  const bool moved = plan.advance(lock);
  // A rank's stream raises its flags even if the rank has given up.
  if (plan.device() != kHost && plan.over()) plan.require_nobody_gave_up(*execution.numbering_);
  return moved;
}

// Stops the execution, and reports that to waits here and to the peers, which cannot end it either.
void Executor::give_up(Execution& execution, std::exception_ptr fault, Lock& lock) {
  execution.fault_ = std::move(fault);
  Numbering& numbering = *execution.numbering_;
  if (numbering.exclusive()) numbering.fault_ = execution.fault_;
  // Waits for copies that have begun, which end soon: after that the caller's array is not used.
  if (ArrayCopies* const copies = execution.phase().array_copies()) {
    execution.entered_ = true;
    {
      const Outside outside(lock);
      copies->wait();
    }
    copies->drain();
    execution.entered_ = false;
  }
  const std::uint32_t why = reason(execution);
  try {
    execution.phase().announce_given_up(numbering, why);
  } catch (const std::exception&) {
    // Without memory for notices, the peers' waits end by their deadlines.
  }
  // Only after the announcement.
  if (execution.phase().enqueued() && !execution.phase().release()) {
    released_.push_back(&execution);
  } else {
    expect_no_more(execution);
  }
  execution.state_.store(Execution::State::kFailed, std::memory_order_release);
}

Error Executor::error_of(const Execution& execution, ErrorKind kind, const char* why) {
  return {kind, text(execution.phase().missing(), "; a stream makes it: ", why)};
}

// Coded as Numbering describes.
std::uint32_t Executor::reason(const Execution& execution) const {
  const std::uint32_t generation = execution.phase().generation_;
  Rank rank = context_.rank();
  try {
    std::rethrow_exception(execution.fault_);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kMismatch) return kMismatched | generation;
    if (error.rank() >= 0) rank = error.rank();
  } catch (const std::exception&) {
    // This rank alone failed.
  }
  // On hosts the end of the rank tells the peers, and comes soon. If this told them before, they
  // would end, too, and others would name them instead of the rank that failed first.
  const bool stays =
      execution.phase().device() != kHost && context_.liveness().health(rank) == Health::kHealthy;
  return (stays ? kRenounced : 0) | given_up(rank, generation);
}

// Streams of executions that were given up may reach their waits after peers raised other values.
void Executor::release_again() {
  std::erase_if(released_, [this](Execution* execution) {
    if (!execution->phase().release()) return false;
    expect_no_more(*execution);
    return true;
  });
  note_live();
}

// Gives up every execution that cannot end: peers may wait for one that no thread awaits here.
void Executor::check_peers(const Execution* awaited) {
  const bool somebody_gone = context_.liveness().somebody_gone();
  Lock lock(mutex_);
  bool news = false;
  for (std::size_t i = 0; i < live_.size();) {
    Execution& execution = *live_[i];
    if (execution.entered_) {  // the next check looks at it
      ++i;
      continue;
    }
    try {
      if (somebody_gone) execution.phase().require_peers(*execution.numbering_);
      if (&execution == awaited || execution.streamed()) {
        execution.phase().require_same_plan(*execution.numbering_);
      }
      ++i;
    } catch (const Error&) {
      std::erase(live_, &execution);
      give_up(execution, std::current_exception(), lock);
      news = true;
    }
  }
  WakeWord* wake_word = context_.liveness().wake_word();
  if (news && wake_word != nullptr) wake_word->wake();
}

void Executor::renounce(const Execution& execution) {
  const std::lock_guard lock(mutex_);
  execution.phase().announce_given_up(*execution.numbering_,
                                      kRenounced | given_up(context_.rank(), 0), true);
}

// Gives up executions that streams make, as streams cannot learn of it; kTimeout: only late ones.
void Executor::give_up_streamed(ErrorKind kind, const char* why) {
  Lock lock(mutex_);
  for (std::size_t i = 0; i < live_.size();) {
    Execution& execution = *live_[i];
    // An execution still being enqueued is looked at the next time.
    if (!execution.streamed() || execution.entered_ ||
        (kind == ErrorKind::kTimeout && !execution.stream_until_.passed())) {
      ++i;
      continue;
    }
    std::erase(live_, &execution);
    give_up(execution, std::make_exception_ptr(error_of(execution, kind, why)), lock);
  }
}

bool Executor::stream_makes(const Execution* execution) {
  const auto makes = [](const Execution& one) {
    return one.streamed() && one.state() == Execution::State::kRunning;
  };
  if (execution != nullptr) return makes(*execution);
  const std::lock_guard lock(mutex_);
  return std::any_of(live_.begin(), live_.end(), [&](const auto* one) { return makes(*one); });
}

// The thread advances them, and gives up late ones.
Outcome Executor::await_streamed(const Execution* execution, Deadline deadline) {
  if (context_.inherited()) return Outcome::kDone;
  while (stream_makes(execution)) {
    if (deadline.passed()) return Outcome::kTimeout;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return Outcome::kDone;
}

void Executor::record(Operation operation, const Execution& execution, std::uint64_t at) {
  const Numbering& numbering = *execution.numbering_;
  context_.recorder().record(operation, -1, numbering.board()->id(), numbering.generation(),
                             numbering.first(), at);
}

void Executor::gather_calls(Execution& execution) {
  BoundPlan& plan = execution.phase();
  if (!plan.call_pending_) [[likely]]
    return;
  plan.call_pending_ = false;
  for (std::size_t lane = 0; lane < plan.lanes_.size(); ++lane) {
    BoundPlan::Lane& at = plan.lanes_[lane];
    if (at.call != BoundPlan::Lane::Call::kAsked) continue;
    at.call = BoundPlan::Lane::Call::kTaken;
    const BoundPlan::Step& step = at.steps[at.at];
    calls_.push_back({&execution, execution.number_, lane, step.hook, step.offset, step.count});
  }
  note_calls();
}

bool Executor::waits(const Call& call) const {
  return call.after != nullptr && std::any_of(live_.begin(), live_.end(), [&](const auto* one) {
           return one == call.after && one->number_ == call.after_number;
         });
}

void Executor::note_calls() {
  const auto waiting =
      std::count_if(calls_.begin(), calls_.end(), [this](const Call& call) { return waits(call); });
  n_calls_.store(calls_.size() - static_cast<std::size_t>(waiting), std::memory_order_release);
}

bool Executor::progress() {
  if (n_live_.load(std::memory_order_relaxed) == 0) return false;
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  if (!released_.empty()) [[unlikely]]
    release_again();
  // Nothing advances after a report of a loss: writes might reach memory that has a new owner.
  if (context_.liveness().alarmed()) return false;
  Transport& transport = context_.transport();
  if (transport.needs_progress()) transport.progress();
  bool moved = false;
  bool news = false;
  for (std::size_t i = 0; i < live_.size();) {
    Execution& execution = *live_[i];
    if (execution.entered_) {
      ++i;
      continue;
    }
    const std::size_t calls = calls_.size();
    moved |= advance(execution, lock);
    const bool over = execution.state() != Execution::State::kRunning;
    news |= over || calls_.size() != calls;
    // Other executions may have come and gone meanwhile.
    if (over) {
      std::erase(live_, &execution);
    } else {
      ++i;
    }
  }
  note_live();
  if (!calls_.empty()) note_calls();
  // Another thread of this rank may sleep until this very event, which no peer's flag reports.
  WakeWord* wake_word = context_.liveness().wake_word();
  if (news && wake_word != nullptr) wake_word->wake();
  return moved;
}

void Executor::note_live() {
  n_live_.store(live_.size() + released_.size(), std::memory_order_relaxed);
}

Executor::Waited Executor::wait(Execution& execution, Deadline deadline) {
  context_.require_usable();
  const auto over = [&] { return execution.state() != Execution::State::kRunning; };
  const auto ready = [&] {
    if (over()) return true;
    // Repeats as long as anything moves: no wake-up reports this rank's own work.
    for (bool first = true; progress(); first = false) {
      if (over() || calls_wait()) return true;
      if (!first && deadline.passed()) break;
    }
    return over() || calls_wait();
  };
  const auto slow = [&] { check_peers(&execution); };
  try {
    const Outcome outcome =
        context_.waiter().until(ready, slow, deadline, WaitCause::kPlan, execution.title().c_str());
    if (!over()) return outcome == Outcome::kDone ? Waited::kCall : Waited::kTimeout;
  } catch (const Error&) {
    // A member that cannot end it ends the execution; another rank's loss only interrupts the wait.
    if (!lost(execution)) throw;
    std::exception_ptr fault = std::current_exception();
    try {
      // The member may have left because of what a third rank announced.
      const std::lock_guard lock(mutex_);
      execution.phase().require_same_plan(*execution.numbering_);
    } catch (const Error&) {
      fault = std::current_exception();
    }
    fail(execution, fault);
    std::rethrow_exception(fault);
  }
  switch (execution.state()) {
    case Execution::State::kFailed:
      fail(execution, execution.fault_);
      std::rethrow_exception(execution.fault_);
    case Execution::State::kClosed:
      throw Error(ErrorKind::kClosed, text("plan ", execution.name(), " was closed meanwhile"));
    default:
      execution.collect();
      return Waited::kDone;
  }
}

bool Executor::lost(const Execution& execution) {
  const std::lock_guard lock(mutex_);
  const auto& ranks = execution.phase().ranks();
  return std::any_of(ranks.begin(), ranks.end(), [&](Rank rank) {
    const Health health = context_.liveness().health(rank);
    return health != Health::kHealthy && health != Health::kClosed;
  });
}

std::string Executor::missing(const Execution& execution) {
  const std::lock_guard lock(mutex_);
  return execution.phase().missing();
}

bool Executor::take_call(Call& call) {
  if (!calls_wait()) return false;
  const std::lock_guard lock(mutex_);
  const auto next = std::find_if_not(calls_.begin(), calls_.end(),
                                     [this](const Call& each) { return waits(each); });
  if (next == calls_.end()) return false;
  call = std::move(*next);
  calls_.erase(next);
  note_calls();
  return true;
}

void Executor::put_back(Call call, const Execution* after) {
  const std::lock_guard lock(mutex_);
  const auto asked = std::find(live_.begin(), live_.end(), call.execution);
  if (asked == live_.end() || (*asked)->number_ != call.number) return;
  call.after = after;
  call.after_number = after != nullptr ? after->number_ : 0;
  calls_.insert(calls_.begin(), std::move(call));
  note_calls();
}

void Executor::answer(const Call& call, const StreamOrder* after) {
  std::unique_ptr<DeviceMoment> work_end;
  if (after != nullptr) work_end = DeviceMoment::of(*after);
  {
    const std::lock_guard lock(mutex_);
    // It may have been closed, or have failed, while the program worked.
    const auto asked = std::find(live_.begin(), live_.end(), call.execution);
    if (asked == live_.end() || (*asked)->number_ != call.number) return;
    BoundPlan::Lane& lane = (*asked)->phase().lanes_[call.lane];
    if (after != nullptr) {
      lane.work_end.swap(work_end);
      lane.work = BoundPlan::Lane::Work::kEnqueued;
    }
    lane.call = BoundPlan::Lane::Call::kAnswered;
  }
  progress();
}

void Executor::remove(const Execution& execution) {
  std::erase(live_, &execution);
  std::erase(released_, &execution);
  std::erase_if(calls_, [&](const Call& call) { return call.execution == &execution; });
  note_live();
  note_calls();
}

// Waits until no stream makes any part of it and no other thread has it. The lock is free in
// between: executions that a stream reaches before may have to be given up meanwhile.
Lock Executor::let_through(Execution& execution) {
  const auto through = [](const auto& phase) { return !phase->enqueued() || phase->release(); };
  for (;;) {
    Lock lock(mutex_);
    if (!execution.entered_) {
      remove(execution);
      if (std::all_of(execution.phases_.begin(), execution.phases_.end(), through)) return lock;
    }
    release_again();
    lock.unlock();
    std::this_thread::sleep_for(kPause);
  }
}

// Waits until none of its work is under way on a GPU; none will follow.
void Executor::quiet(Execution& execution, Lock& lock) {
  execution.entered_ = true;
  {
    const Outside outside(lock);
    for (const auto& phase : execution.phases_) phase->await_device();
  }
  for (const auto& phase : execution.phases_) phase->drain();
  // The caller may free its array, which Puts of an execution that has not ended may still read.
  context_.transport().take_over(context_.plan_queue());
  execution.entered_ = false;
  execution.gated_ = false;
  expect_no_more(execution);
}

void Executor::fail(Execution& execution, const std::exception_ptr& fault) {
  std::shared_ptr<const void> let_go;  // destroyed after the lock: it may need the program's own
  Lock lock = let_through(execution);
  const auto state = execution.state();
  if (state != Execution::State::kRunning && state != Execution::State::kFailed) return;
  quiet(execution, lock);
  let_go = execution.end(Execution::State::kFailed, fault);
}

void Executor::interrupt(Execution& execution, std::shared_ptr<const void> keep) {
  const std::lock_guard lock(mutex_);
  const bool failed = execution.state() == Execution::State::kFailed;
  if (failed && execution.directory_ != nullptr) execution.keep_.swap(keep);
  if (!execution.under_way()) return;
  execution.keep_.swap(keep);
  execution.keeps_.store(true, std::memory_order_release);
  execution.interrupted_.store(true, std::memory_order_release);
}

std::shared_ptr<const void> Executor::let_go(Execution& execution) {
  const std::lock_guard lock(mutex_);
  execution.keeps_.store(false, std::memory_order_relaxed);
  execution.interrupted_.store(false, std::memory_order_relaxed);
  return std::move(execution.keep_);
}

void Executor::close(Execution& execution) {
  if (context_.inherited()) return;  // the lock may be held by a thread that only the parent has
  std::shared_ptr<const void> let_go;
  Lock lock = let_through(execution);
  if (execution.state() == Execution::State::kClosed) return;
  quiet(execution, lock);
  let_go = execution.end(Execution::State::kClosed, nullptr);
}

void Executor::start_thread() {
  const std::lock_guard lock(idle_mutex_);
  if (thread_.joinable()) return;
  stopping_.store(false);
  threaded_.store(true, std::memory_order_release);
  thread_ = thread_without_signals([this] { run(); });
}

void Executor::stop_thread() {
  {
    const std::lock_guard lock(idle_mutex_);
    if (!thread_.joinable()) return;
    stopping_.store(true);
    idle_.notify_one();
  }
  thread_.join();
  threaded_.store(false, std::memory_order_release);
  give_up_streamed(ErrorKind::kClosed, kStopped);
}

void Executor::run() {
  pthread_setname_np(pthread_self(), "pgasdl-progress");
  const auto bounded = std::chrono::milliseconds(50);
  while (!stopping_.load()) {
    if (n_live_.load(std::memory_order_relaxed) == 0) {
      std::unique_lock lock(idle_mutex_);
      idle_.wait_for(lock, bounded, [&] {
        return stopping_.load() || n_live_.load(std::memory_order_relaxed) != 0;
      });
      continue;
    }
    try {
      (void)context_.waiter().until([&] { return progress() || stopping_.load(); },
                                    [&] { check_peers(nullptr); }, Deadline::in(0.05),
                                    WaitCause::kUncounted, "progress thread");
      give_up_streamed(ErrorKind::kTimeout, "it was not over in time");
    } catch (const std::exception& error) {
      // A loss, or no memory: waits report it; this thread pauses and tries again.
      give_up_streamed(ErrorKind::kPeerLost, error.what());
      std::this_thread::sleep_for(bounded);
    }
  }
}

}  // namespace pgasdl

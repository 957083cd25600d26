#include "exchange/executor.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>

namespace pgasdl {

Executor::~Executor() { stop_thread(); }

void Executor::start(BoundPlan& plan, std::uint32_t generation) {
  context_.require_usable();
  {
    const std::lock_guard lock(mutex_);
    plan.rethrow();
    if (plan.running()) {
      throw Error(ErrorKind::kPlan, text("plan ", plan.name(), " is started while its execution ",
                                         plan.generation(), " is under way: wait for it first"));
    }
    plan.begin(generation);
    context_.recorder().record(Operation::kPlanStart, -1, plan.board_->id(), plan.generation_,
                               plan.first_notification_);
    // Most often the first steps go through at once, and a small plan may even end here.
    plan.advance();
    gather_calls(plan);
    if (plan.done()) {
      record_end(plan);
      return;
    }
    live_.push_back(&plan);
    n_live_.store(live_.size(), std::memory_order_relaxed);
  }
  if (threaded_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(idle_mutex_);
    idle_.notify_one();
  }
}

void Executor::record_end(const BoundPlan& plan) {
  context_.recorder().record(Operation::kPlanDone, -1, plan.board_->id(), plan.generation_,
                             plan.first_notification_);
}

void Executor::gather_calls(BoundPlan& plan) {
  if (!plan.call_pending_) [[likely]]
    return;
  plan.call_pending_ = false;
  for (std::size_t lane = 0; lane < plan.lanes_.size(); ++lane) {
    BoundPlan::Lane& at = plan.lanes_[lane];
    if (at.call != BoundPlan::Lane::Call::kAsked) continue;
    const bool known = std::any_of(calls_.begin(), calls_.end(), [&](const Call& call) {
      return call.plan == &plan && call.lane == lane;
    });
    if (known) continue;
    const BoundPlan::Step& step = at.steps[at.at];
    calls_.push_back({&plan, lane, step.hook, step.offset, step.count});
  }
  n_calls_.store(calls_.size(), std::memory_order_release);
}

bool Executor::turn() {
  if (n_live_.load(std::memory_order_relaxed) == 0) return false;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  // Nothing moves on a rank that was told of a loss: what it would write may be nobody's any more.
  if (!lock.owns_lock() || context_.liveness().alarmed()) return false;
  Transport& transport = context_.transport();
  if (transport.needs_progress()) transport.progress();
  bool moved = false;
  bool news = false;
  for (std::size_t i = 0; i < live_.size();) {
    BoundPlan& plan = *live_[i];
    moved |= plan.advance();
    news |= plan.call_pending_ || plan.done();
    gather_calls(plan);
    if (plan.done()) {
      record_end(plan);
      live_[i] = live_.back();
      live_.pop_back();
    } else {
      ++i;
    }
  }
  n_live_.store(live_.size(), std::memory_order_relaxed);
  // Another thread of this rank may sleep until just that; no peer's flag tells it.
  Doorbell* doorbell = context_.liveness().doorbell();
  if (news && doorbell != nullptr) doorbell->ring();
  return moved;
}

Executor::Waited Executor::wait(BoundPlan& plan, Deadline deadline) {
  context_.require_usable();
  const auto ready = [&] {
    if (plan.done()) return true;
    turn();
    return plan.done() || n_calls_.load(std::memory_order_acquire) != 0;
  };
  const auto slow = [&] {
    {
      const std::lock_guard lock(mutex_);
      if (plan.running()) plan.look_around();
    }
    if (context_.liveness().everybody_left()) {
      throw Error(ErrorKind::kPeerLost, missing(plan) + "; every other rank has left");
    }
  };
  const Outcome outcome = context_.waiter().until(ready, slow, deadline, plan.name().c_str());
  if (plan.done()) {
    plan.rethrow();
    return Waited::kDone;
  }
  return outcome == Outcome::kDone ? Waited::kCall : Waited::kTimeout;
}

std::string Executor::missing(const BoundPlan& plan) {
  const std::lock_guard lock(mutex_);
  return plan.missing();
}

bool Executor::take_call(Call& call) {
  if (n_calls_.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock(mutex_);
  if (calls_.empty()) return false;
  call = std::move(calls_.front());
  calls_.erase(calls_.begin());
  n_calls_.store(calls_.size(), std::memory_order_release);
  return true;
}

void Executor::answer(const Call& call) {
  {
    const std::lock_guard lock(mutex_);
    call.plan->lanes_[call.lane].call = BoundPlan::Lane::Call::kAnswered;
  }
  turn();
}

void Executor::forget(BoundPlan& plan) {
  const std::lock_guard lock(mutex_);
  std::erase(live_, &plan);
  std::erase_if(calls_, [&](const Call& call) { return call.plan == &plan; });
  n_live_.store(live_.size(), std::memory_order_relaxed);
  n_calls_.store(calls_.size(), std::memory_order_release);
}

void Executor::start_thread() {
  if (thread_.joinable()) return;
  stopping_.store(false);
  threaded_.store(true, std::memory_order_release);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Executor::stop_thread() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(idle_mutex_);
    stopping_.store(true);
    idle_.notify_one();
  }
  thread_.join();
  threaded_.store(false, std::memory_order_release);
}

void Executor::run() {
  pthread_setname_np(pthread_self(), "pgasdl-turns");
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
      (void)context_.waiter().until([&] { return turn() || stopping_.load(); }, Deadline::in(0.05),
                                    "progress thread");
    } catch (const Error&) {
      // A loss: whoever waits for a plan is told; here there is nothing to do until it is handled.
      std::this_thread::sleep_for(bounded);
    }
  }
}

}  // namespace pgasdl

// A collective bound to memory, which runs any number of times: its phases, its numbering, its
// notifications, and how far it is. Whatever runs a plan - a call, a handle, a layer - owns these
// and adds nothing to their state.
//
//   idle --start--> running --(its steps end)--> done --wait--> idle
//                   running --(fault, or a member is lost)--> failed
//   any  --close--> closed
//
// A wait that ends by its deadline, by Ctrl-C or by an exception of the program's leaves the
// execution running; a wait that comes later goes on where it was, also if the steps ended
// meanwhile. An execution that failed or was closed is out of the executor for good, and nothing of
// it moves.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "executor/bound_plan.hpp"
#include "executor/numbering.hpp"
#include "memory/device_stream.hpp"
#include "sys/clock.hpp"

namespace pgasdl {

class Executor;

// How a plan gets at the caller's array.
enum class BufferAccess : std::uint8_t {
  kInPlace,  // it lies where the plan works
  kRebased,  // the plan is told where it lies
  kCopied,   // to where the plan works, and back
};

struct Array {
  BufferAccess access = BufferAccess::kInPlace;
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::uint64_t bytes = 0;
  int device = kHost;  // where it lies
  // For a plan with several arrays: where each of its buffers lies, 0: where it did. Until it
  // began.
  std::span<const std::uintptr_t> places{};
  // All ranks must agree on it, besides the plan's fingerprint.
  std::uint64_t mark = 0;
};

class Execution {
 public:
  enum class State : std::uint8_t { kIdle, kRunning, kDone, kCollecting, kFailed, kClosed };

  // `phases`: they take turns, with those of other executions of the same numbering.
  Execution(Executor& executor, std::vector<std::unique_ptr<BoundPlan>> phases,
            std::shared_ptr<Numbering> numbering);
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  ~Execution() { close(); }

  const std::string& name() const { return phases_[0]->name(); }
  const std::shared_ptr<Numbering>& numbering() const { return numbering_; }
  State state() const { return state_.load(std::memory_order_acquire); }
  // It has begun, and its result was not taken.
  bool under_way() const {
    const State state = this->state();
    return state == State::kRunning || state == State::kDone || state == State::kCollecting;
  }
  bool done() const { return state() == State::kDone; }
  // About the last phase; see BoundPlan.
  bool declined() const { return phase().declined(); }
  // All that this rank moves in one takes microseconds.
  bool brief() const { return brief_; }
  std::uint64_t number() const { return number_; }
  // When the last one began and ended, in ticks().
  std::uint64_t began() const { return phase().began(); }
  std::uint64_t ended() const { return phase().ended(); }

  // A call that was to end with the result did not: the same call goes on. `keep` holds the
  // caller's array until then; it is let go by a wait, or by close(), outside all locks. It keeps
  // an array that peers map also if it failed: they may still write there.
  void interrupt(std::shared_ptr<const void> keep);
  bool interrupted() const { return interrupted_.load(std::memory_order_acquire); }
  // True for one caller of those that come after an interruption: it goes on with the call.
  bool resume() { return interrupted() && interrupted_.exchange(false); }
  // A stream makes the last one that began, and has its result: nobody else will take it.
  bool streamed() const { return streamed_.load(std::memory_order_acquire); }
  // Until a stream that waits for it has the result, or it was given up.
  void await_streams() const;
  // The GPU that it works on or that the caller's array lies on, or kHost.
  int device() const { return array_.device != kHost ? array_.device : phase().device(); }

  // Out of the executor, whatever its state. Its memory may go once nobody else can write there.
  void close();

 private:
  friend class Executor;
  BoundPlan& phase() { return *phases_[phase_]; }
  const BoundPlan& phase() const { return *phases_[phase_]; }
  // Under the executor's lock. Throws unless the next one may begin.
  void require_idle() const;
  // Takes a number; it may begin.
  void reserve(const Array& array);
  void copy_in(Lock& lock);
  void copy_out();  // on the host
  // Copies that a GPU makes are begun, and looked after by whoever advances it.
  bool copies_on_device() const {
    return array_.access == BufferAccess::kCopied && device() != kHost;
  }
  // It is given up: the caller's array is the caller's again.
  void revoke();
  // Whether a stream can make it, and the copies of an array.
  bool by_stream(const Array& array) const;
  // Takes the result of what is done; false if another thread did.
  bool collect();
  // Under the executor's lock; what comes back is to be let go outside.
  std::shared_ptr<const void> end(State state, std::exception_ptr fault);

  Executor& executor_;
  const std::vector<std::unique_ptr<BoundPlan>> phases_;
  const std::shared_ptr<Numbering> numbering_;
  const bool brief_;
  Directory* const directory_;  // where peers look up the caller's array, if they do
  std::atomic<State> state_{State::kIdle};
  std::size_t phase_ = 0;
  std::uint64_t number_ = 0;
  Array array_;
  std::exception_ptr fault_;
  std::atomic<bool> interrupted_{false};
  std::atomic<bool> keeps_{false};
  std::shared_ptr<const void> keep_;
  std::unique_ptr<DeviceMoment> gate_;  // it begins then
  bool gated_ = false;
  bool entered_ = false;   // a thread has it to itself, and may have let go of the executor's lock
  bool expected_ = false;  // waits look for its end, which no wake word tells
  std::atomic<bool> streamed_{false};
  Deadline stream_until_ = Deadline::once();
};

}  // namespace pgasdl

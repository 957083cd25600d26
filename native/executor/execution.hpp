// A collective bound to memory, which runs any number of times. It owns its phases, numbering,
// notifications and progress; its users - a call, a handle, a layer - add no state.
//
//   idle --start--> running --(its steps end)--> done --wait--> idle
//                   running --(fault, or a member is lost)--> failed
//   any  --close--> closed
//
// If a wait ends by its deadline, by Ctrl-C or by an exception of the program, the execution goes
// on running; a later wait resumes it, even if its steps have ended meanwhile. An execution that
// failed or was closed is out of the executor for good, and nothing of it advances.
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

// How a plan reaches the caller's array.
enum class BufferAccess : std::uint8_t {
  kInPlace,  // the plan works on it where it lies
  kRebased,  // the plan gets its address
  kCopied,   // to the memory that the plan works on, and back
};

struct Array {
  BufferAccess access = BufferAccess::kInPlace;
  const std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::uint64_t bytes = 0;
  int device = kHost;  // where it lies
  // For a plan with several arrays: each buffer's address; 0: unchanged. Valid until start()
  // returns.
  std::span<const std::uintptr_t> places{};
  // A value that all ranks must agree on, besides the plan's fingerprint.
  std::uint64_t mark = 0;
};

class Execution {
 public:
  enum class State : std::uint8_t { kIdle, kRunning, kDone, kCollecting, kFailed, kClosed };

  // `phases` take turns with those of other executions of the same numbering.
  Execution(Executor& executor, std::vector<std::unique_ptr<BoundPlan>> phases,
            std::shared_ptr<Numbering> numbering);
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  ~Execution() { close(); }

  const std::string& name() const { return phases_[0]->name(); }
  const std::string& title() const { return phases_[0]->title(); }
  const std::shared_ptr<Numbering>& numbering() const { return numbering_; }
  State state() const { return state_.load(std::memory_order_acquire); }
  // It has begun, and its result was not taken.
  bool under_way() const {
    const State state = this->state();
    return state == State::kRunning || state == State::kDone || state == State::kCollecting;
  }
  bool done() const { return state() == State::kDone; }
  // See BoundPlan; of the last phase.
  bool declined() const { return phase().declined(); }
  // This rank moves so little in one execution that it takes microseconds.
  bool brief() const { return brief_; }
  std::uint64_t number() const { return number_; }
  // When the last execution began and ended, in ticks().
  std::uint64_t began() const { return phase().began(); }
  std::uint64_t ended() const { return phase().ended(); }

  // A call that was to return the result was interrupted, and will be continued. `keep` holds the
  // caller's array until then; a wait or close() releases it outside all locks. It also keeps an
  // array that peers map if the execution failed: they may still write there.
  void interrupt(std::shared_ptr<const void> keep);
  bool interrupted() const { return interrupted_.load(std::memory_order_acquire); }
  // True for one of the callers that come after an interruption: that one continues the call.
  bool resume() { return interrupted() && interrupted_.exchange(false); }
  // A stream makes the last execution and gets its result, so no wait takes it.
  bool streamed() const { return streamed_.load(std::memory_order_acquire); }
  // Waits until the streams that wait for it have the result, or until it was given up.
  void await_streams() const;
  // The GPU that it works on or that holds the caller's array, or kHost.
  int device() const { return array_.device != kHost ? array_.device : phase().device(); }

  // Removes it from the executor in any state. Its memory may go once no peer can write there.
  void close();

 private:
  friend class Executor;
  BoundPlan& phase() { return *phases_[phase_]; }
  const BoundPlan& phase() const { return *phases_[phase_]; }
  // Under the executor's lock. Throws unless the next execution may begin.
  void require_idle() const;
  // Takes a number; the execution may then begin.
  void reserve(const Array& array);
  void copy_in(Lock& lock);
  void copy_out();  // on the host
  // A GPU makes the copies; the thread that advances the execution looks after them.
  bool copies_on_device() const {
    return array_.access == BufferAccess::kCopied && device() != kHost;
  }
  // Whether a stream can make it, and the copies of an array.
  bool by_stream(const Array& array) const;
  // Takes the result of a finished execution; false if another thread took it.
  bool collect();
  // Under the executor's lock; the caller destroys the result outside of it.
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
  std::unique_ptr<DeviceMoment> gate_;  // the execution begins when it is reached
  bool gated_ = false;
  bool entered_ = false;   // one thread advances it, perhaps without the executor's lock
  bool expected_ = false;  // waits poll for its end, as no wake word reports it
  std::atomic<bool> streamed_{false};
  Deadline stream_until_ = Deadline::once();
};

}  // namespace pgasdl

// Runs bound plans: all of them, each as far as it goes, whenever somebody gives it a turn.
//
// Who gives turns is the user's choice: the training loop after each layer (CaffeGPI), or the
// progress thread (S-Caffe's helper thread). Any thread may call any member; plans advance under
// one lock, and a thread that finds it taken knows that somebody else is at it.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "exchange/bound_plan.hpp"

namespace pgasdl {

class Executor {
 public:
  explicit Executor(Context& context) : context_(context) {}
  ~Executor();

  // The plan's next execution begins; it must not be running. `generation`: for plans that share
  // their notifications with others, the number of this execution among all; 0: the plan's own.
  void start(BoundPlan& plan, std::uint32_t generation = 0);
  // A plan is under way.
  bool live() const { return n_live_.load(std::memory_order_relaxed) != 0; }
  // Advances every live plan without blocking; true if anything moved.
  bool turn();
  enum class Waited : std::uint8_t { kDone, kTimeout, kCall };
  // Until `plan` is done, or a Call of any plan waits for an answer. Rethrows a plan's fault.
  Waited wait(BoundPlan& plan, Deadline deadline);

  // Which notifications each stalled lane of `plan` waits for, and who owes them.
  std::string missing(const BoundPlan& plan);

  // Calls that wait for the program (weight updates): take one, do it, answer.
  struct Call {
    BoundPlan* plan;
    std::size_t lane;
    std::string hook;
    std::uint64_t offset;
    std::uint64_t count;
  };
  bool take_call(Call& call);
  bool calls_wait() const { return n_calls_.load(std::memory_order_acquire) != 0; }
  void answer(const Call& call);

  void start_thread();
  void stop_thread();
  // Takes a plan out, finished or not; its memory may go away afterwards.
  void forget(BoundPlan& plan);

 private:
  void run();
  void gather_calls(BoundPlan& plan);
  void record_end(const BoundPlan& plan);

  Context& context_;
  std::mutex mutex_;
  std::vector<BoundPlan*> live_;
  std::vector<Call> calls_;
  std::atomic<std::size_t> n_calls_{0};
  std::atomic<std::size_t> n_live_{0};
  std::thread thread_;
  std::mutex idle_mutex_;
  std::condition_variable idle_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> threaded_{false};
};

}  // namespace pgasdl

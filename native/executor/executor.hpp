// Runs executions: all of them, each as far as it goes, whenever somebody calls progress().
//
// The user chooses who calls it: the training loop after each layer (CaffeGPI), or the
// progress thread (S-Caffe's helper thread). Any thread may call any member; executions advance
// under one lock, and a thread that finds it taken knows that somebody else is at it. A thread that
// gives a GPU work lets go of the lock meanwhile (outside.hpp), and keeps the execution to itself.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "executor/execution.hpp"

namespace pgasdl {

class Executor {
 public:
  explicit Executor(Context& context) : context_(context) {}
  ~Executor();

  // The next one begins; `after`: as soon as a stream has done what was enqueued on it before.
  // Throws, and has changed nothing, if it is under way, or cannot go on.
  void start(Execution& execution, const Array& array = {}, const StreamOrder* after = nullptr);
  // Some execution is under way, or was given up and has yet to let its stream go on.
  bool live() const { return n_live_.load(std::memory_order_relaxed) != 0; }
  // Advances every live execution without blocking; true if anything moved.
  bool progress();
  enum class Waited : std::uint8_t { kDone, kTimeout, kCall };
  // Until the execution is over and its result taken, or a Call of any waits for an answer: then
  // answer it and wait again. Throws what made it fail, and what ends every wait.
  Waited wait(Execution& execution, Deadline deadline);

  // Lets a stream make the execution, and have its result, which nobody else takes. False: hosts
  // have a part in it. The stream goes on even if the execution fails, or is not over by the
  // deadline and given up: the next call for it then throws the reason. Needs the progress thread,
  // which looks after that, and starts it.
  bool enqueue(Execution& execution, const Array& array, const StreamOrder& order,
               Deadline deadline);
  // Until streams have made an execution, or every one, or it was given up.
  Outcome await_streamed(const Execution* execution, Deadline deadline);

  // Which notifications each stalled lane waits for, and who owes them.
  std::string missing(const Execution& execution);
  // Gives up what cannot end any more, as waits do from time to time.
  void check_peers(const Execution* awaited);
  // Tells the peers that this rank takes no more part in any execution like it, for a reason of its
  // own. Their boards must be there.
  void renounce(const Execution& execution);

  // Calls that wait for the program (weight updates): take one, do it, answer.
  struct Call {
    const Execution* execution;
    std::uint64_t number;  // of the execution
    std::size_t lane;
    std::string hook;
    std::uint64_t offset;
    std::uint64_t count;
  };
  bool take_call(Call& call);
  // It was not done: whoever takes calls gets it again.
  void put_back(const Call& call);
  bool calls_wait() const { return n_calls_.load(std::memory_order_acquire) != 0; }
  // `after`: the plan works on a GPU, where a stream has yet to do it.
  void answer(const Call& call, const StreamOrder* after = nullptr);

  void start_thread();
  // Executions that streams still wait for are given up, as nobody would end them.
  void stop_thread();

  // The work of Execution's functions of the same names, under the lock; see there.
  void interrupt(Execution& execution, std::shared_ptr<const void> keep);
  std::shared_ptr<const void> let_go(Execution& execution);  // what was kept for it
  void close(Execution& execution);

 private:
  void run();
  void expect(Execution& execution);
  void expect_no_more(Execution& execution);
  bool advance(Execution& execution, Lock& lock);  // true if it moved
  bool step(Execution& execution, Lock& lock);
  Lock admit(const Execution& execution);
  void copy_in(Execution& execution, Lock& lock);
  void give_up_streamed(ErrorKind kind, const char* why);
  static Error error_of(const Execution& execution, ErrorKind kind, const char* why);
  std::uint32_t reason(const Execution& execution) const;
  void note_live();
  bool stream_makes(const Execution* execution);
  void give_up(Execution& execution, std::exception_ptr fault, Lock& lock);
  void release_again();
  Lock let_through(Execution& execution);
  void gather_calls(Execution& execution);
  void remove(const Execution& execution);
  void quiet(Execution& execution, Lock& lock);
  void fail(Execution& execution, const std::exception_ptr& fault);
  bool lost(const Execution& execution);
  void record(Operation operation, const Execution& execution, std::uint64_t at);

  Context& context_;
  std::mutex enqueuing_;  // one after the other, as peers rely on the order on streams; comes first
  std::mutex mutex_;
  std::vector<Execution*> live_;
  std::size_t n_coming_ = 0;  // that will be live: there is a place for each
  // Given up, while a stream still makes them. There is a place for each live one, too.
  std::vector<Execution*> released_;
  std::vector<Call> calls_;
  std::atomic<std::size_t> n_calls_{0};
  std::atomic<std::size_t> n_live_{0};  // and released
  std::thread thread_;
  std::mutex idle_mutex_;
  std::condition_variable idle_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> threaded_{false};
};

}  // namespace pgasdl

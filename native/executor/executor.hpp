// Runs executions: each call of progress() advances all of them as far as possible.
//
// The user chooses who calls it: the training loop after each layer (CaffeGPI), or the progress
// thread (S-Caffe's helper thread). Any thread may call any member. Executions advance under one
// lock; a thread that finds it taken leaves the work to the holder. A thread that enqueues work on
// a GPU releases the lock meanwhile (outside.hpp), and keeps the execution to itself.
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

  // Begins the next execution; `after`: once a stream has done all that was enqueued on it so far.
  // Throws without any change if an execution is under way or cannot continue.
  void start(Execution& execution, const Array& array = {}, const StreamOrder* after = nullptr);
  // Some execution is under way, or was given up while its stream still has to be released.
  bool live() const { return n_live_.load(std::memory_order_relaxed) != 0; }
  // Advances every live execution without blocking; true if anything moved.
  bool progress();
  enum class Waited : std::uint8_t { kDone, kTimeout, kCall };
  // Waits until the execution is over and takes its result, or until a Call of any execution waits
  // for an answer: answer it and wait again. Throws the execution's fault and what ends every wait.
  Waited wait(Execution& execution, Deadline deadline);

  // Lets a stream make the execution and take its result. False: hosts have a part in it. The
  // stream continues even if the execution fails, or is late by the deadline and given up: the next
  // call for it then throws the reason. Starts the progress thread, which looks after that.
  bool enqueue(Execution& execution, const Array& array, const StreamOrder& order,
               Deadline deadline);
  // Waits until streams have made one execution, or all, or until they were given up.
  Outcome await_streamed(const Execution* execution, Deadline deadline);

  // Which notifications each stalled lane waits for, and which ranks owe them.
  std::string missing(const Execution& execution);
  // Gives up executions that can no longer end; waits call it from time to time.
  void check_peers(const Execution* awaited);
  // Tells the peers that this rank, for a reason of its own, takes no more part in any execution of
  // the same numbering. Their boards must exist.
  void renounce(const Execution& execution);

  // Calls that wait for the program (weight updates): take one, do the work, answer.
  struct Call {
    const Execution* execution;
    std::uint64_t number;  // of the execution
    std::size_t lane;
    std::string hook;
    std::uint64_t offset;
    std::uint64_t count;
    const Execution* after = nullptr;  // it waits until this one is over
    std::uint64_t after_number = 0;
  };
  bool take_call(Call& call);
  // The work was not done: take_call() gets the call again, once `after` is over.
  void put_back(Call call, const Execution* after = nullptr);
  bool calls_wait() const { return n_calls_.load(std::memory_order_acquire) != 0; }
  // `after`: the plan works on a GPU, and this stream has yet to do the work.
  void answer(const Call& call, const StreamOrder* after = nullptr);

  void start_thread();
  // Gives up executions that streams still wait for, as no thread would end them.
  void stop_thread();

  // These do the work of Execution's functions of the same names, under the lock.
  void interrupt(Execution& execution, std::shared_ptr<const void> keep);
  std::shared_ptr<const void> let_go(Execution& execution);  // returns what was kept for it
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
  bool waits(const Call& call) const;
  void note_calls();
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
  std::mutex enqueuing_;  // locked first: peers rely on the order on streams
  std::mutex mutex_;
  std::vector<Execution*> live_;
  std::size_t n_coming_ = 0;  // about to be live: each has a place reserved
  // Given up while a stream still makes them. A place is reserved for each live one.
  std::vector<Execution*> released_;
  std::vector<Call> calls_;
  std::atomic<std::size_t> n_calls_{0};  // those that wait for nothing but the program
  std::atomic<std::size_t> n_live_{0};   // includes released ones
  std::thread thread_;
  std::mutex idle_mutex_;
  std::condition_variable idle_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> threaded_{false};
};

}  // namespace pgasdl

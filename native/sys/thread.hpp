// Threads of the library.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace pgasdl {

// For its lifetime, the calling thread and threads that it starts take no signals, except those
// that a thread raises by its own faults: if blocked, they end the process without any handler.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP}) {
      sigdelset(&blocked, fault);
    }
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// Leaves signals to the threads of the program.
template <typename Run>
std::thread thread_without_signals(Run&& run) {
  const SignalsBlocked blocked;
  return std::thread(std::forward<Run>(run));
}

}  // namespace pgasdl

// Threads of the library's own.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <thread>
#include <utility>

namespace pgasdl {

// While it lives, the calling thread takes no signals, nor do those that it starts. But for what a
// thread raises by a fault of its own: blocked, that ends the process without any handler.
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

// Signals belong to the threads of the program.
template <typename Run>
std::thread thread_without_signals(Run&& run) {
  const SignalsBlocked blocked;
  return std::thread(std::forward<Run>(run));
}

}  // namespace pgasdl

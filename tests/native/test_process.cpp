// Noticing the end of other processes, with pidfds and where a sandbox refuses them; common
// ancestors of processes; the signals of the library's threads.

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <span>
#include <thread>

#include "check.hpp"
#include "sys/process.hpp"
#include "sys/thread.hpp"

namespace {

using namespace pgasdl;

// Runs `work` in a child process; a CHECK that fails there fails the test.
void in_child(const std::function<void()>& work) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    work();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void refuse_pidfds(int error) {
  std::array<sock_filter, 4> code{{
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_pidfd_open, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<unsigned>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  }};
  const sock_fprog program{code.size(), code.data()};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

pid_t start_sleeper() {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    for (;;) pause();
  }
  return pid;
}

void ends(const ProcessWatch& watch) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!watch.ended()) {
    CHECK(std::chrono::steady_clock::now() < deadline);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void watching(bool pidfds) {
  CHECK(!ProcessWatch() && !ProcessWatch().ended() && ProcessWatch().descriptor() == -1);
  const pid_t pid = start_sleeper();
  const ProcessWatch watch(pid);
  CHECK(watch && !watch.ended());
  CHECK((watch.descriptor() >= 0) == pidfds);
  CHECK(kill(pid, SIGKILL) == 0);
  ends(watch);  // a zombie has ended, too
  CHECK(waitpid(pid, nullptr, 0) == pid);
  CHECK(watch && watch.ended());
  const ProcessWatch late(pid);
  CHECK(late && late.ended() && late.descriptor() == -1);
}

// A process whose first thread has exited still runs.
void first_thread_leaves() {
  int pipe_ends[2];
  CHECK(pipe(pipe_ends) == 0);
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      CHECK(write(pipe_ends[1], "x", 1) == 1);
      for (;;) pause();
    }).detach();
    syscall(SYS_exit, 0);
  }
  char byte;
  CHECK(read(pipe_ends[0], &byte, 1) == 1);
  const ProcessWatch watch(pid);
  for (int look = 0; look < 20; ++look) {
    CHECK(!watch.ended());
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(kill(pid, SIGKILL) == 0);
  ends(watch);
  CHECK(waitpid(pid, nullptr, 0) == pid);
}

// A process that computes is not stopped, however seldom it gets a processor.
void runnable_threads() {
  const auto becomes = [](pid_t pid, bool runnable) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (has_runnable_thread(pid) != runnable) {
      CHECK(std::chrono::steady_clock::now() < deadline);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  };
  const pid_t sleeper = start_sleeper();
  const pid_t busy = fork();
  CHECK(busy >= 0);
  if (busy == 0) {
    std::thread([] {
      for (;;) pause();
    }).detach();
    for (;;) (void)getppid();
  }
  becomes(sleeper, false);
  becomes(busy, true);
  CHECK(kill(busy, SIGSTOP) == 0);
  becomes(busy, false);
  for (const pid_t pid : {sleeper, busy}) {
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(waitpid(pid, nullptr, 0) == pid);
    CHECK(!has_runnable_thread(pid));
  }
}

// Another process that gets the number of one that has ended is not killed.
void kills_no_stranger() {
  const pid_t pid = start_sleeper();
  const ProcessWatch watch(pid);
  CHECK(watch.kill());
  ends(watch);
  CHECK(waitpid(pid, nullptr, 0) == pid);
  std::ofstream last("/proc/sys/kernel/ns_last_pid");
  if (!(last << pid - 1 << std::flush)) {
    std::puts("numbers of processes cannot be chosen here");
    return;
  }
  const pid_t stranger = start_sleeper();
  CHECK(!watch.kill());
  CHECK(!ProcessWatch(stranger).ended());
  CHECK(kill(stranger, SIGKILL) == 0);
  CHECK(waitpid(stranger, nullptr, 0) == stranger);
}

// The process to name to Yama so that all of these may access a process's memory.
void ancestors() {
  const pid_t left = start_sleeper();
  const pid_t right = start_sleeper();
  const pid_t self = getpid();
  CHECK(common_ancestor({}) == 0);
  const auto above = [](std::initializer_list<pid_t> pids) {
    return common_ancestor(std::span(pids.begin(), pids.size()));
  };
  CHECK(above({left}) == left);
  CHECK(above({left, left}) == left);
  CHECK(above({left, right}) == self);
  CHECK(above({self, right}) == self);
  CHECK(above({left, right, getppid()}) == getppid());
  for (const pid_t pid : {left, right}) {
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(waitpid(pid, nullptr, 0) == pid);
  }
  CHECK(above({left, self}) == self);
  CHECK(above({left, right}) == 0);
}

// The library's threads take no signals of the program, and report their own faults.
void threads_without_signals() {
  const auto blocked = [](int signal) {
    sigset_t now;
    CHECK(pthread_sigmask(SIG_SETMASK, nullptr, &now) == 0);
    return sigismember(&now, signal) == 1;
  };
  bool takes_signals = true;
  bool reports_faults = false;
  std::thread thread = thread_without_signals([&] {
    takes_signals = !blocked(SIGINT) || !blocked(SIGTERM) || !blocked(SIGUSR1);
    reports_faults = !blocked(SIGSEGV) && !blocked(SIGBUS) && !blocked(SIGABRT);
  });
  CHECK(!blocked(SIGINT));
  thread.join();
  CHECK(!takes_signals);
  CHECK(reports_faults);
}

}  // namespace

int main() {
  threads_without_signals();
  watching(true);
  ancestors();
  runnable_threads();
  kills_no_stranger();
  for (const int error : {EPERM, ENOSYS}) {
    in_child([error] {
      refuse_pidfds(error);
      watching(false);
      first_thread_leaves();
    });
  }
}

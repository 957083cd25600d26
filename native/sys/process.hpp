// Descriptors, process handles, and the consequences of fork.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace pgasdl {

// A file descriptor with an owner.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// Detects the end of another process: by a pidfd, or where sandboxes or older kernels offer none,
// by its file in /proc, which also refers to the same process for ever but has to be polled.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(pid_t pid);
  // False if nothing is watched: default-made, or neither pidfd nor /proc is available.
  explicit operator bool() const { return gone_ || file_; }
  // A descriptor to poll, readable once the process has ended. -1: call ended() from time to time.
  int descriptor() const { return pidfd_ ? file_.get() : -1; }
  bool ended() const;
  // Kills it, but no other process that got its number. False: it has ended, or is not watched.
  bool kill() const;

 private:
  UniqueFd file_;
  pid_t pid_ = 0;
  bool pidfd_ = false;
  bool gone_ = false;  // before the watch began
};

// Whether a thread of the process runs or waits for a processor: not stopped, perhaps starved.
bool has_runnable_thread(pid_t pid);

// The nearest process that each of `pids` is or descends from; 0 if there is none. Ignores
// processes that are gone.
pid_t common_ancestor(std::span<const pid_t> pids);

// Equal for processes that can open each other's pidfd and reach each other's AF_UNIX sockets:
// combines the boot of the machine with the namespaces of processes and of the network.
std::string host_identity();

// The number of forks between the process that loaded the library and this one. Objects remember it
// when they are made, and refuse to work in a child.
std::uint64_t fork_depth();
// One counter per process: only the child of a fork can tell that it is one.
inline std::atomic<std::uint64_t> n_forks{0};
// An inline check for objects that remember a depth.
inline bool forked_since(std::uint64_t depth) {
  return n_forks.load(std::memory_order_relaxed) != depth;
}

}  // namespace pgasdl

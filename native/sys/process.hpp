// Descriptors, process handles, and what fork does to us.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <utility>

namespace pgasdl {

// A file descriptor that closes itself.
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

// Tells when another process has ended: by a pidfd, or where sandboxes or older kernels give none
// by its file in /proc, which is the same process for ever, too, but has to be looked at.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(pid_t pid);
  // Nothing is watched: default made, or neither pidfd nor /proc is to be had.
  explicit operator bool() const { return gone_ || file_; }
  // To poll: readable once it has ended. -1: ask ended() from time to time.
  int descriptor() const { return pidfd_ ? file_.get() : -1; }
  bool ended() const;
  // Kills it, never another process that got its number. False: it has ended, or is not watched.
  bool kill() const;

 private:
  UniqueFd file_;
  pid_t pid_ = 0;
  bool pidfd_ = false;
  bool gone_ = false;  // before it was looked at
};

// A thread of this process runs or waits for a processor: it is not stopped, but maybe starved.
bool has_runnable_thread(pid_t pid);

// The nearest process that each of `pids` is or descends from, 0 if there is none. Processes that
// are gone do not count.
pid_t common_ancestor(std::span<const pid_t> pids);

// An identity that is the same for processes that can open each other's pidfd and reach each
// other's AF_UNIX sockets: the boot of the machine, and the namespaces of processes and of the
// network.
std::string host_identity();

// How many forks lie between this process and the one that loaded the library. Objects remember it
// at birth and refuse to work in a child.
std::uint64_t fork_depth();
// One for the whole process: only the child of a fork can tell that it is one.
inline std::atomic<std::uint64_t> n_forks{0};
// For objects that remember one: an inline look.
inline bool forked_since(std::uint64_t depth) {
  return n_forks.load(std::memory_order_relaxed) != depth;
}

}  // namespace pgasdl

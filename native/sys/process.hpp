// Descriptors, process handles, and what fork does to us.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
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

// A descriptor that becomes readable when `pid` ends; empty when the process is gone already or the
// kernel has none to give.
UniqueFd open_pidfd(pid_t pid);

// What is the same for processes that can open each other's pidfd and reach each other's AF_UNIX
// sockets: the boot of the machine, and the namespaces of processes and of the network.
std::string host_identity();

// How many forks lie between this process and the one that loaded the library. Objects remember it
// at birth and refuse to work in a child.
std::uint64_t fork_depth();

}  // namespace pgasdl

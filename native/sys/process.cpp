#include "sys/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

namespace pgasdl {
namespace {

UniqueFd open_status(pid_t pid) {
  return UniqueFd(open(("/proc/" + std::to_string(pid) + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
}

struct Status {
  char state = 'X';  // X: reaped
  pid_t parent = 0;
  int n_threads = 0;
};

Status read_status(const UniqueFd& file) {
  Status status;
  char content[1024];
  const ssize_t length = pread(file.get(), content, sizeof content - 1, 0);
  if (length <= 0) return status;
  content[length] = 0;
  // The last ")", as a command's name may itself contain ") ".
  const char* fields = std::strrchr(content, ')');
  if (fields == nullptr) return status;
  std::sscanf(fields, ") %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %d",
              &status.state, &status.parent, &status.n_threads);
  return status;
}

// `pid`, its parent, and so on.
std::vector<pid_t> lineage(pid_t pid) {
  std::vector<pid_t> all;
  while (pid > 0) {
    const Status status = read_status(open_status(pid));
    if (status.state == 'X') break;
    all.push_back(pid);
    pid = status.parent;
  }
  return all;
}

}  // namespace

bool has_runnable_thread(pid_t pid) {
  const std::string threads = "/proc/" + std::to_string(pid) + "/task";
  std::error_code gone;
  for (std::filesystem::directory_iterator each(threads, gone), end; !gone && each != end;
       each.increment(gone)) {
    const UniqueFd file(open((each->path() / "stat").c_str(), O_RDONLY | O_CLOEXEC));
    if (read_status(file).state == 'R') return true;
  }
  return false;
}

ProcessWatch::ProcessWatch(pid_t pid)
    : file_(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))), pid_(pid), pidfd_(file_) {
  if (pidfd_) return;
  if (errno != ESRCH) file_ = open_status(pid);
  gone_ = !file_ && (errno == ESRCH || errno == ENOENT);
}

bool ProcessWatch::ended() const {
  if (gone_ || !file_) return gone_;
  if (pidfd_) {
    pollfd readable{file_.get(), POLLIN, 0};
    return poll(&readable, 1, 0) == 1;
  }
  // The first thread of a process may end before the others do.
  const Status status = read_status(file_);
  return status.state == 'X' || (status.state == 'Z' && status.n_threads <= 1);
}

bool ProcessWatch::kill() const {
  if (!file_ || ended()) return false;
  // Without a pidfd the process may end, and its number be reused, between check and signal.
  return (pidfd_ ? syscall(SYS_pidfd_send_signal, file_.get(), SIGKILL, nullptr, 0)
                 : ::kill(pid_, SIGKILL)) == 0;
}

pid_t common_ancestor(std::span<const pid_t> pids) {
  std::vector<pid_t> common;
  bool first = true;
  for (const pid_t pid : pids) {
    const std::vector<pid_t> line = lineage(pid);
    if (line.empty()) continue;
    if (std::exchange(first, false)) common = line;
    std::erase_if(common, [&](pid_t one) { return std::ranges::count(line, one) == 0; });
  }
  return common.empty() ? 0 : common.front();
}

std::string host_identity() {
  std::string identity;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> identity;
  for (const char* space : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    struct stat about{};
    if (stat(space, &about) != 0) continue;
    identity += ' ';
    identity += std::to_string(about.st_ino);
  }
  return identity;
}

std::uint64_t fork_depth() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { n_forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return n_forks.load(std::memory_order_relaxed);
}

}  // namespace pgasdl

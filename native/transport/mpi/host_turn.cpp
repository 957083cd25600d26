#include "transport/mpi/host_turn.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "sys/clock.hpp"
#include "sys/error.hpp"

namespace pgasdl {
namespace {

int open_folder(const char* path) { return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

// The job's own folder on this host, which ends with the job; without a launcher, /dev/shm.
int open_shared_folder() {
  const char* session = std::getenv("OMPI_MCA_orte_jobfam_session_dir");
  const int own = session == nullptr ? -1 : open_folder(session);
  return own < 0 ? open_folder("/dev/shm") : own;
}

}  // namespace

HostTurn::HostTurn(double seconds) : folder_(open_shared_folder()) {
  if (folder_ < 0) throw_system("cannot open /dev/shm", errno);
  const auto deadline = Deadline::in(seconds);
  while (flock(folder_, LOCK_EX | LOCK_NB) != 0 && !deadline.passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

HostTurn::~HostTurn() { close(folder_); }

}  // namespace pgasdl

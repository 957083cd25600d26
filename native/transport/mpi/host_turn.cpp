#include "transport/mpi/host_turn.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "sys/error.hpp"

namespace pgasdl {
namespace {

int open_folder(const char* path) { return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

// The job's own on this host, which goes with it. Without a launcher: that of shared memory.
int open_shared_folder() {
  const char* session = std::getenv("OMPI_MCA_orte_jobfam_session_dir");
  const int own = session == nullptr ? -1 : open_folder(session);
  return own < 0 ? open_folder("/dev/shm") : own;
}

}  // namespace

HostTurn::HostTurn() : folder_(open_shared_folder()) {
  if (folder_ < 0) throw_system("cannot open /dev/shm", errno);
  while (flock(folder_, LOCK_EX) != 0) {
    const int error = errno;
    if (error == EINTR) continue;
    close(folder_);
    throw_system("cannot lock a folder", error);
  }
}

HostTurn::~HostTurn() { close(folder_); }

}  // namespace pgasdl

#include "sys/error.hpp"

#include <cerrno>
#include <cstring>

namespace pgasdl {

void throw_system(const std::string& what, int error_number) {
  throw Error(ErrorKind::kSystem,
              text(what, ": ", std::strerror(error_number), " (errno ", error_number, ")"));
}

void throw_refused(const std::string& what, const char* call, int error_number) {
  if (error_number != EPERM && error_number != EACCES && error_number != ENOSYS) {
    throw_system(what, error_number);
  }
  throw Error(ErrorKind::kUnavailable,
              text(what, ": ", call, " is refused here (", std::strerror(error_number),
                   "): allow it where this runs (docker: --security-opt seccomp=unconfined or a "
                   "profile with ",
                   call, "; systemd: SystemCallFilter=", call,
                   "), or use a newer kernel; `pgasdl doctor` tells what else is refused"));
}

}  // namespace pgasdl

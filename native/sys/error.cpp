#include "sys/error.hpp"

#include <cstring>

namespace pgasdl {

void throw_system(const std::string& what, int error_number) {
  throw Error(ErrorKind::kSystem,
              text(what, ": ", std::strerror(error_number), " (errno ", error_number, ")"));
}

}  // namespace pgasdl

#include "reduce/copy.hpp"

#include <cstring>

namespace pgasdl {

void copy_longer(void* destination, const void* source, std::size_t bytes) {
  std::memcpy(destination, source, bytes);
}

}  // namespace pgasdl

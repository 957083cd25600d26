// The code of a datagram, against the authors' test vectors: the key has the bytes 0 to 15, the
// message has the first of 0, 1, 2 ...

#include <string>

#include "check.hpp"
#include "transport/siphash.hpp"

int main() {
  struct Vector {
    std::size_t bytes;
    std::uint64_t code;
  };
  constexpr Vector kVectors[] = {
      {0, 0x726fdb47dd0e0e31},  {1, 0x74f839c593dc67fd},  {7, 0xab0200f58b01d137},
      {8, 0x93f5f5799a932462},  {9, 0x9e0082df0ba9e4b0},  {15, 0xa129ca6149be45e5},
      {16, 0x3f2acc7f57c29bdb}, {63, 0x958a324ceb064572},
  };
  std::string counting;
  for (char byte = 0; byte < 64; ++byte) counting += byte;
  for (const Vector& vector : kVectors) {
    const std::uint64_t code =
        pgasdl::siphash(counting.substr(0, 16), counting.substr(0, vector.bytes));
    CHECK_NOTE(code == vector.code, "%zu bytes", vector.bytes);
  }
}

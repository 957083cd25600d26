#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pgasdl {

// Copies into memory that another core reads next, in whichever way is faster at present.
//
// If both cores share a last-level cache, plain stores leave the data there for the reader. If they
// do not, every plain store first fetches the line that it overwrites from the reader's cache;
// streamed stores do not. Hosts move virtual cores, so this cannot be decided once: both ways are
// timed, the better one is used, and the other is tried now and then. Not thread-safe: each copying
// thread has its own object.
class StagingCopy {
 public:
  // As copy(): a release store that follows orders every byte.
  void operator()(void* destination, const void* source, std::size_t bytes);

 private:
  enum Way : std::uint8_t { kPlain, kStreamed };
  Way choose();

  std::array<double, 2> ticks_per_byte_{};  // 0: not timed yet
  std::uint32_t copies_ = 0;
};

}  // namespace pgasdl

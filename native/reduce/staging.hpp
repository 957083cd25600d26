#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pgasdl {

/// Copies into memory that another core reads next, in the way that is faster here and now.
///
/// Where both cores share a last-level cache, plain stores leave the data there for the reader.
/// Where they do not, every plain store first fetches from the reader's cache the line that it is
/// going to overwrite; streamed stores do not. Hosts move virtual cores, so it cannot be decided
/// once: both ways are timed, the better one is taken, and the other tried now and then.
/// Not thread-safe: one for each that copies.
class StagingCopy {
 public:
  /// As copy(): a release store that follows orders every byte.
  void operator()(void* destination, const void* source, std::size_t bytes);

 private:
  enum Way : std::uint8_t { kPlain, kStreamed };
  Way choose();

  std::array<double, 2> ticks_per_byte_{};  // 0: not timed yet
  std::uint32_t copies_ = 0;
};

}  // namespace pgasdl

#include "reduce/copy.hpp"

#include <unistd.h>

#include <cstring>

#include "reduce/kernels.hpp"

namespace pgasdl {
namespace {

// Smaller copies skip the query for the last-level cache: they are memcpy and one comparison.
constexpr std::size_t kLeastStreamed = std::size_t{4} << 20;

// A copy of this size or more bypasses the caches. Its source and destination would fill half of
// the last-level cache, where memcpy's stores start to fetch lines only to overwrite them. On a Zen
// 3 with 32 MiB of L3, GB/s of memcpy / rep movsb / this: 4 MiB 32/26/20, 8 MiB 17/13/20, 16 MiB
// 9/8/14, 64 MiB 8/10/15; glibc's memcpy changes its method as well, but much later.
std::size_t streamed_from() {
  static const std::size_t threshold = [] {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (cache > 0 && static_cast<std::size_t>(cache) / 4 > kLeastStreamed) {
      return static_cast<std::size_t>(cache) / 4;
    }
#endif
    return 2 * kLeastStreamed;
  }();
  return threshold;
}

}  // namespace

void copy_longer(void* destination, const void* source, std::size_t bytes) {
  if (bytes == 0 || destination == source) return;
  if (bytes < kLeastStreamed || bytes < streamed_from()) {
    std::memcpy(destination, source, bytes);
  } else {
    best_kernels().stream(static_cast<char*>(destination), static_cast<const char*>(source), bytes);
  }
}

}  // namespace pgasdl

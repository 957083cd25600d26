#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pgasdl {

void copy_longer(void* destination, const void* source, std::size_t bytes);

/// memcpy, faster for large blocks, and for a word or two. `destination` equals `source` or does
/// not overlap it. A release store that follows orders every byte of the copy, as it does after
/// memcpy.
inline void copy(void* destination, const void* source, std::size_t bytes) {
  constexpr std::size_t kWord = sizeof(std::uint64_t);
  if (bytes < kWord || bytes > 2 * kWord) return copy_longer(destination, source, bytes);
  std::uint64_t first, last;  // which may be one, or overlap
  std::memcpy(&first, source, kWord);
  std::memcpy(&last, static_cast<const char*>(source) + bytes - kWord, kWord);
  std::memcpy(destination, &first, kWord);
  std::memcpy(static_cast<char*>(destination) + bytes - kWord, &last, kWord);
}

}  // namespace pgasdl

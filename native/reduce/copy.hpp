#pragma once

#include <cstddef>

namespace pgasdl {

/// memcpy, faster for large blocks. `destination` equals `source` or does not overlap it. A
/// release store that follows orders every byte of the copy, as it does after memcpy.
void copy(void* destination, const void* source, std::size_t bytes);

}  // namespace pgasdl

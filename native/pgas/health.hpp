// The states of a rank.
#pragma once

#include <cstdint>
#include <string_view>

namespace pgasdl {

// A known state. A rank leaves kHealthy once, for good.
enum class Health : std::uint8_t { kHealthy, kDied, kStopped, kFailed, kClosed };
std::string_view name(Health health);

}  // namespace pgasdl

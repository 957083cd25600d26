// Errors of the native layers. Normal outcomes (queue full, deadline passed) are values. Every
// failure that a caller cannot simply repeat is an Error, which the bindings turn into the Python
// exception of the same name.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pgasdl {

enum class ErrorKind : std::uint8_t {
  kRank,
  kSegment,
  kAlignment,
  kNotification,
  kQueue,
  kBuffer,
  kClosed,
  kPlan,
  kMismatch,
  kPeerLost,
  kUnavailable,
  kTimeout,  // of work that no call waits for
  kSystem,
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int rank = -1)
      : std::runtime_error(message), kind_(kind), rank_(rank) {}
  ErrorKind kind() const { return kind_; }
  int rank() const { return rank_; }  // the rank that was lost; -1: none or several

 private:
  ErrorKind kind_;
  int rank_;
};

// The answer of a call that may have to wait.
enum class [[nodiscard]] Outcome : std::uint8_t { kDone, kTimeout, kFull, kConnecting };

// The parts one after another, as text.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Throws kSystem: what was attempted, and the system's text for `error_number`.
[[noreturn]] void throw_system(const std::string& what, int error_number);

// Like throw_system, but if `error_number` means that a sandbox or an older kernel refuses the
// system call `call`: throws kUnavailable, with advice on how to allow it.
[[noreturn]] void throw_refused(const std::string& what, const char* call, int error_number);

}  // namespace pgasdl

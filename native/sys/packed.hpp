// Structs as strings of bytes, as ranks of one job exchange them: endpoints, descriptions of
// segments. All ranks run the same version on the same kind of processor.
#pragma once

#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "sys/error.hpp"

namespace pgasdl {

template <typename Struct>
std::string packed(const Struct& value) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

[[noreturn]] inline void throw_malformed(const char* what, int peer) {
  throw Error(ErrorKind::kMismatch,
              text("malformed ", what, " from rank ", peer, ": other version?"), peer);
}

// Takes a struct off `bytes`. kMismatch if they are too few: `what` names them, `peer` sent them.
template <typename Struct>
Struct take_packed(std::string_view& bytes, const char* what, int peer) {
  static_assert(std::is_trivially_copyable_v<Struct>);
  if (bytes.size() < sizeof(Struct)) throw_malformed(what, peer);
  Struct value;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}

// Converts all of `bytes` to a struct. Throws kMismatch if the size differs.
template <typename Struct>
Struct unpacked(std::string_view bytes, const char* what, int peer) {
  const auto value = take_packed<Struct>(bytes, what, peer);
  if (!bytes.empty()) throw_malformed(what, peer);
  return value;
}

}  // namespace pgasdl

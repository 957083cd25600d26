// The token by which ranks recognise their job's messages on sockets and in datagrams.
#pragma once

#include <string>

#include "sys/error.hpp"

namespace pgasdl {

constexpr std::size_t kTokenBytes = 16;

inline const std::string& checked_token(const std::string& token) {
  if (token.size() != kTokenBytes) throw Error(ErrorKind::kSystem, "the job token has 16 bytes");
  return token;
}

}  // namespace pgasdl

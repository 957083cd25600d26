// SipHash-2-4 (Aumasson and Bernstein, 2012): a message authentication code of 64 bits.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "transport/token.hpp"

namespace pgasdl {

// Without `key`, of kTokenBytes, nobody can make the code of another message or learn anything
// about the key, whatever messages and codes they have seen.
inline std::uint64_t siphash(std::string_view key, std::string_view message) {
  static_assert(std::endian::native == std::endian::little && kTokenBytes == 16);
  std::array<std::uint64_t, 2> k;
  std::memcpy(k.data(), key.data(), sizeof k);
  std::uint64_t a = k[0] ^ 0x736f6d6570736575, b = k[1] ^ 0x646f72616e646f6d,
                c = k[0] ^ 0x6c7967656e657261, d = k[1] ^ 0x7465646279746573;
  const auto mix = [&](int rounds) {
    for (; rounds > 0; --rounds) {
      a += b, b = std::rotl(b, 13) ^ a, a = std::rotl(a, 32);
      c += d, d = std::rotl(d, 16) ^ c;
      a += d, d = std::rotl(d, 21) ^ a;
      c += b, b = std::rotl(b, 17) ^ c, c = std::rotl(c, 32);
    }
  };
  const auto take = [&](std::uint64_t word) {
    d ^= word;
    mix(2);
    a ^= word;
  };
  const std::uint64_t bytes = message.size();
  for (; message.size() >= sizeof bytes; message.remove_prefix(sizeof bytes)) {
    std::uint64_t word;
    std::memcpy(&word, message.data(), sizeof word);
    take(word);
  }
  std::uint64_t last = bytes << 56;
  for (std::size_t i = 0; i < message.size(); ++i) {
    last |= std::uint64_t{static_cast<unsigned char>(message[i])} << 8 * i;
  }
  take(last);
  c ^= 0xff;
  mix(4);
  return a ^ b ^ c ^ d;
}

}  // namespace pgasdl

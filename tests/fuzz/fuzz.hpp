// Tools that the native fuzz targets share. Each defines LLVMFuzzerTestOneInput: with clang it is
// run by libFuzzer, with any compiler by replay.cpp over the files of its corpus.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "sys/error.hpp"

// Checked in every build: a target exists for these checks.
#define REQUIRE(condition)                                                         \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)

namespace pgasdl::fuzz {

inline constexpr const char* kToken = "sixteen bytes...";

// The bytes of one execution, taken from the front; zeros once there are no more.
class Input {
 public:
  Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  bool empty() const { return size_ == 0; }
  std::uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  std::string bytes(std::size_t most) {
    const std::size_t n = most < size_ ? most : size_;
    std::string taken(reinterpret_cast<const char*>(data_), n);
    data_ += n;
    size_ -= n;
    return taken;
  }
  // A peer's message: anything; or one that a peer does send, with some bytes changed. So no corpus
  // has to know the layout of structures, and few mutations find the limits of a field.
  std::string words(const std::string& genuine) {
    const std::uint8_t how = byte();
    if (how == 0) return bytes(byte());
    std::string changed = genuine;
    for (int change = 1; change < how % 16 && !empty(); ++change) {
      const std::size_t at = byte();
      if (at < changed.size()) changed[at] = static_cast<char>(byte());
    }
    if (how >= 0xf0) changed.resize(byte());
    return changed;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_;
};

// True: `call` returned. False: it threw an Error, the one exception that input from outside may
// cause. Any other exception leaves the target, and is a finding.
template <typename Call>
bool accepted(Call&& call) {
  try {
    call();
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace pgasdl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

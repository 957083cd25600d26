#pragma once

#include <cstddef>
#include <cstdint>

namespace pgasdl {

// kBytes is no number: bytes are only copied.
enum class DType : std::uint8_t { kF32, kF64, kF16, kBF16, kI32, kI64, kBytes };
inline constexpr std::size_t kDTypes = 6;  // that are numbers

enum class ReduceOp : std::uint8_t { kSum, kMin, kMax, kProd };
inline constexpr std::size_t kReduceOps = 4;

struct Source {
  const void* address;
  DType dtype;
};

struct Destination {
  void* address;
  DType dtype;
};

}  // namespace pgasdl

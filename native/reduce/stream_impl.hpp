#pragma once

// Copies that bypass the caches, compiled once per instruction set like the kernels.

#include <cstddef>
#include <cstdint>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace pgasdl {
namespace PGASDL_ISA_NAMESPACE {
namespace {

#if defined(__AVX512F__)
using Streamed = __m512i;
inline void stream_one(Streamed* to, const Streamed* from) {
  _mm512_stream_si512(to, _mm512_loadu_si512(from));
}
#elif defined(__AVX2__)
using Streamed = __m256i;
inline void stream_one(Streamed* to, const Streamed* from) {
  _mm256_stream_si256(to, _mm256_loadu_si256(from));
}
#elif defined(__SSE2__)
using Streamed = __m128i;
inline void stream_one(Streamed* to, const Streamed* from) {
  _mm_stream_si128(to, _mm_loadu_si128(from));
}
#endif

#if defined(__SSE2__)
void stream(char* to, const char* from, std::size_t bytes) {
  constexpr std::size_t kBlock = 128;
  constexpr std::size_t kCount = kBlock / sizeof(Streamed);
  const std::size_t head = -reinterpret_cast<std::uintptr_t>(to) % 64;
  if (bytes < head + kBlock) {
    __builtin_memcpy(to, from, bytes);
    return;
  }
  __builtin_memcpy(to, from, head);
  std::size_t i = head;
  for (; bytes - i >= kBlock; i += kBlock) {
    auto* line = reinterpret_cast<Streamed*>(to + i);
    const auto* source = reinterpret_cast<const Streamed*>(from + i);
    for (std::size_t u = 0; u < kCount; ++u) stream_one(line + u, source + u);
  }
  // Streamed stores are weakly ordered: without the fence a later flag could overtake them.
  _mm_sfence();
  __builtin_memcpy(to + i, from + i, bytes - i);
}
#else
void stream(char* to, const char* from, std::size_t bytes) { __builtin_memcpy(to, from, bytes); }
#endif

}  // namespace
}  // namespace PGASDL_ISA_NAMESPACE
}  // namespace pgasdl

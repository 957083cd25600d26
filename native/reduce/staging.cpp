#include "reduce/staging.hpp"

#include "reduce/copy.hpp"
#include "reduce/kernels.hpp"
#include "sys/clock.hpp"

namespace pgasdl {
namespace {

// Shorter copies measure latency, not bandwidth; longer ones bypass the caches in any case.
constexpr std::size_t kLeastTimed = std::size_t{16} << 10;
constexpr std::size_t kMost = std::size_t{1} << 20;

// Times the other way once in this many copies.
constexpr std::uint32_t kTryEvery = 64;

// The reader finds streamed data in memory, not in a cache, so streaming must be this much faster.
constexpr double kGain = 1.5;

}  // namespace

StagingCopy::Way StagingCopy::choose() {
  const auto [plain, streamed] = ticks_per_byte_;
  if (plain == 0) return kPlain;
  if (streamed == 0) return kStreamed;
  const Way better = plain > kGain * streamed ? kStreamed : kPlain;
  return ++copies_ % kTryEvery == 0 ? static_cast<Way>(1 - better) : better;
}

void StagingCopy::operator()(void* destination, const void* source, std::size_t bytes) {
  if (bytes < kLeastTimed || bytes > kMost) return copy(destination, source, bytes);
  const Way way = choose();
  const std::uint64_t before = ticks();
  if (way == kPlain) {
    copy(destination, source, bytes);
  } else {
    best_kernels().stream(static_cast<char*>(destination), static_cast<const char*>(source), bytes);
  }
  const double cost = static_cast<double>(ticks() - before) / static_cast<double>(bytes);
  // Falls at once and rises slowly: most reasons for a slow copy, such as a lost time slice, pass.
  double& known = ticks_per_byte_[way];
  known = known == 0 || cost < known ? cost : known + (cost - known) / 8;
}

}  // namespace pgasdl

// The time that the machine itself needs: the same exchanges with only loads, stores and the
// fastest kernels, for comparison with every measured figure.
//
// One object per rank over one segment that every rank maps. All members are collective: every rank
// calls them in the same order with the same arguments. One thread; the segment owns the memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "pgas/context.hpp"

namespace pgasdl {

// When each call began and ended on this rank, in nanoseconds of the monotonic clock, which all
// ranks of a machine share: a call lasts from the last rank's beginning to the last rank's end.
struct Calls {
  std::vector<std::int64_t> began;
  std::vector<std::int64_t> ended;
};

class Floor {
 public:
  // Throws kUnavailable unless every rank's copy of `segment` can be loaded and stored directly.
  // `oversubscribed`: there are more ranks than processors, so a wait must yield its processor.
  Floor(Context& context, std::shared_ptr<Segment> segment, bool oversubscribed);

  // The bytes that `segment` needs to exchange `payload` bytes; puts need a source and a target.
  static std::uint64_t bytes(Rank size, std::uint64_t payload);

  // Returns on all ranks within one latency: a barrier of raw flags.
  void sync();

  // The time between ranks 0 and 1, one way, in nanoseconds: one number per batch of `rounds` round
  // trips. Empty on other ranks.
  std::vector<double> line(std::uint32_t batches, std::uint32_t rounds);
  enum class Copy : std::uint8_t { kMemcpy, kPlain, kStream };
  std::vector<double> put(std::uint64_t bytes, Copy copy, std::uint32_t batches,
                          std::uint32_t rounds);

  // Averages `count` float32 over all ranks, as fast as loads and stores allow. Every call gets new
  // numbers first; if `paced`, it also begins on all ranks at once.
  enum class Kernel : std::uint8_t { kPlain, kPrefetch };
  // In the segments themselves: two handshakes, and between them each owner's pass over all copies.
  Calls in_place(std::uint64_t count, Kernel kernel, std::uint32_t calls, bool paced);
  // Arrays outside of segments: a copy into the segment, a flag, one pass over all copies; in
  // pieces of at most kMostPiece, staged past the caches (kStream) or through them.
  static constexpr std::uint64_t kMostPiece = 32768;
  Calls private_arrays(std::uint64_t count, std::uint64_t piece, Copy copy, std::uint32_t calls,
                       bool paced);
  // Likewise, but each owner reduces its block of a piece where the others have staged it, and all
  // ranks copy the result from their own staged memory.
  Calls private_blocks(std::uint64_t count, std::uint64_t piece, std::uint32_t calls, bool paced);
  // Several tensors one after another, each in place; all are available at the beginning.
  Calls layers(std::span<const std::uint64_t> counts, Kernel kernel, std::uint32_t calls,
               bool paced);

 private:
  using Word = std::atomic<std::uint64_t>;
  enum class Purpose : std::uint8_t { kSync, kPing, kReady, kDone };

  Word& word(Rank at, Purpose purpose, Rank from) const;
  std::byte* data(Rank of) const { return copies_[static_cast<std::size_t>(of)] + header_; }
  float* floats(Rank of) const { return reinterpret_cast<float*>(data(of)); }
  void require(std::uint64_t bytes) const;
  template <typename Ready>
  void spin(Ready&& ready) const;
  void tell_all(Purpose purpose, std::uint64_t value);
  void await_all(Purpose purpose, std::uint64_t value) const;
  void average(Kernel kernel, std::uint64_t first, std::uint64_t count) const;
  Calls timed(std::uint32_t calls, bool paced, const std::function<void(std::uint32_t)>& fill,
              const std::function<void()>& call);
  template <typename Move>
  std::vector<double> ping_pong(std::uint32_t batches, std::uint32_t rounds, Move&& move);

  Context& context_;
  const std::shared_ptr<Segment> segment_;
  const Rank rank_;
  const Rank size_;
  const std::uint64_t header_;
  const bool oversubscribed_;
  std::vector<std::byte*> copies_;
  std::uint64_t synced_ = 0;
  std::uint64_t pinged_ = 0;
  std::uint64_t ready_ = 0;
  std::uint64_t done_ = 0;
};

// The nanoseconds that two readings of the clock add to the time between them.
double clock_cost();

}  // namespace pgasdl

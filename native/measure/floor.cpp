#include "measure/floor.hpp"

#include <sched.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "memory/region.hpp"
#include "reduce/copy.hpp"
#include "reduce/kernels.hpp"
#include "reduce/reduce.hpp"

namespace pgasdl {
namespace {

// Two lines per word: the prefetcher of adjacent lines must not move one rank's word to another.
constexpr std::uint64_t kWordBytes = 128;
constexpr std::uint64_t kPurposes = 4;
constexpr std::uint64_t kPage = 4096;

// Owners never write to the same cache line.
constexpr std::uint64_t kLine = 16;  // float32

// How many pieces of an outside array the segment holds at once.
constexpr std::uint64_t kPieces = 4;

std::uint64_t header_bytes(Rank size) {
  const std::uint64_t words = kPurposes * static_cast<std::uint64_t>(size) * kWordBytes;
  return round_up(words, kPage);
}

std::int64_t now() { return Clock::now().time_since_epoch().count(); }

struct Block {
  std::uint64_t first;
  std::uint64_t count;
};

Block block_of(std::uint64_t count, Rank owner, Rank size) {
  const std::uint64_t lines = (count + kLine - 1) / kLine;
  const auto cut = [&](std::uint64_t rank) {
    return std::min(count, kLine * (lines * rank / static_cast<std::uint64_t>(size)));
  };
  // The first rank takes the remainder, as in plans.
  const auto place = static_cast<std::uint64_t>(size - 1 - owner);
  const std::uint64_t first = cut(place);
  return {first, cut(place + 1) - first};
}

void read_ahead(const float* at) { __builtin_prefetch(at, 1); }

}  // namespace

Floor::Floor(Context& context, std::shared_ptr<Segment> segment, bool oversubscribed)
    : context_(context),
      segment_(std::move(segment)),
      rank_(context.rank()),
      size_(context.size()),
      header_(header_bytes(context.size())),
      oversubscribed_(oversubscribed) {
  for (Rank peer = 0; peer < size_; ++peer) {
    std::byte* copy = segment_->local().data;
    if (peer != rank_) {
      const RemoteSegment* remote = segment_->remote(peer);
      copy = remote == nullptr ? nullptr : remote->data;
      if (remote != nullptr && remote->bytes != segment_->bytes()) copy = nullptr;
    }
    if (copy == nullptr || segment_->bytes() < header_) {
      throw Error(ErrorKind::kUnavailable,
                  text("the floor is measured in memory that all ranks map: segment ",
                       segment_->id(), " of rank ", peer, " is not, or is too small"));
    }
    copies_.push_back(copy);
  }
}

std::uint64_t Floor::bytes(Rank size, std::uint64_t payload) {
  const std::uint64_t pieces = kPieces * kMostPiece * sizeof(float);
  return header_bytes(size) + std::max<std::uint64_t>(round_up(payload, kPage), pieces);
}

void Floor::require(std::uint64_t bytes) const {
  if (header_ + bytes > segment_->bytes()) {
    throw Error(ErrorKind::kSegment, text("segment ", segment_->id(), " of ", segment_->bytes(),
                                          " bytes is too small for ", bytes, " and the flags"));
  }
}

Floor::Word& Floor::word(Rank at, Purpose purpose, Rank from) const {
  const std::uint64_t index =
      static_cast<std::uint64_t>(purpose) * static_cast<std::uint64_t>(size_) +
      static_cast<std::uint64_t>(from);
  return *reinterpret_cast<Word*>(copies_[static_cast<std::size_t>(at)] + index * kWordBytes);
}

template <typename Ready>
void Floor::spin(Ready&& ready) const {
  constexpr std::uint64_t kPollsPerYield = 64;
  constexpr std::uint64_t kPollsPerLook = 1 << 20;
  for (std::uint64_t polls = 1; !ready(); ++polls) {
    if (oversubscribed_ && polls % kPollsPerYield == 0) sched_yield();
    if (polls % kPollsPerLook == 0) [[unlikely]] {
      if (context_.liveness().alarmed()) context_.liveness().raise_alarm("measuring the floor");
      sched_yield();
    }
  }
}

void Floor::tell_all(Purpose purpose, std::uint64_t value) {
  for (Rank step = 1; step < size_; ++step) {
    word((rank_ + step) % size_, purpose, rank_).store(value, std::memory_order_release);
  }
}

void Floor::await_all(Purpose purpose, std::uint64_t value) const {
  for (Rank step = 1; step < size_; ++step) {
    const Word& flag = word(rank_, purpose, (rank_ + step) % size_);
    spin([&] { return flag.load(std::memory_order_acquire) >= value; });
  }
}

void Floor::sync() {
  ++synced_;
  tell_all(Purpose::kSync, synced_);
  await_all(Purpose::kSync, synced_);
}

template <typename Move>
std::vector<double> Floor::ping_pong(std::uint32_t batches, std::uint32_t rounds, Move&& move) {
  std::vector<double> one_way;
  sync();
  if (rank_ < 2 && size_ > 1) {
    const Rank peer = 1 - rank_;
    Word& theirs = word(peer, Purpose::kPing, rank_);
    const Word& mine = word(rank_, Purpose::kPing, peer);
    for (std::uint32_t batch = 0; batch < batches; ++batch) {
      const std::int64_t began = now();
      for (std::uint32_t round = 0; round < rounds; ++round) {
        ++pinged_;
        if (rank_ == 0) {
          move();
          theirs.store(pinged_, std::memory_order_release);
        }
        spin([&] { return mine.load(std::memory_order_acquire) >= pinged_; });
        if (rank_ == 1) {
          move();
          theirs.store(pinged_, std::memory_order_release);
        }
      }
      one_way.push_back(static_cast<double>(now() - began) / (2.0 * rounds));
    }
  }
  sync();
  return one_way;
}

std::vector<double> Floor::line(std::uint32_t batches, std::uint32_t rounds) {
  return ping_pong(batches, rounds, [] {});
}

std::vector<double> Floor::put(std::uint64_t bytes, Copy copy, std::uint32_t batches,
                               std::uint32_t rounds) {
  const std::uint64_t place = round_up(bytes, kPage);
  require(2 * place);
  const std::byte* source = data(rank_);
  std::byte* target = data(rank_ == 0 && size_ > 1 ? 1 : 0) + place;
  switch (copy) {
    case Copy::kMemcpy:
      return ping_pong(batches, rounds, [=] { std::memcpy(target, source, bytes); });
    case Copy::kPlain:
      return ping_pong(batches, rounds, [=] { pgasdl::copy(target, source, bytes); });
    case Copy::kStream:
      break;
  }
  return ping_pong(batches, rounds, [=] {
    best_kernels().stream(reinterpret_cast<char*>(target), reinterpret_cast<const char*>(source),
                          bytes);
  });
}

Calls Floor::timed(std::uint32_t calls, bool paced, const std::function<void(std::uint32_t)>& fill,
                   const std::function<void()>& call) {
  Calls times;
  times.began.reserve(calls);
  times.ended.reserve(calls);
  sync();
  for (std::uint32_t number = 0; number < calls; ++number) {
    fill(number);
    if (paced) sync();
    times.began.push_back(now());
    call();
    times.ended.push_back(now());
  }
  sync();
  return times;
}

// Averages all copies of elements [first, first + count), in place, on this rank alone.
void Floor::average(Kernel kernel, std::uint64_t first, std::uint64_t count) const {
  constexpr std::size_t kMost = 16;
  std::array<Source, kMost> sources;
  std::array<Destination, kMost> destinations;
  const auto ranks = static_cast<std::size_t>(size_);
  if (ranks > kMost) throw Error(ErrorKind::kUnavailable, "the floor is for at most 16 ranks");
  const double scale = 1.0 / static_cast<double>(size_);
  const auto part = [&](std::uint64_t from, std::uint64_t n) {
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      float* address = floats(static_cast<Rank>(rank)) + from;
      sources[rank] = {address, DType::kF32};
      destinations[rank] = {address, DType::kF32};
    }
    reduce({destinations.data(), ranks}, {sources.data(), ranks}, n, scale);
  };
  if (kernel == Kernel::kPlain) return part(first, count);
  // A page of every copy at a time, while the lines of the next page are being fetched: hardware
  // prefetchers stop at page boundaries.
  constexpr std::uint64_t kStep = kPage / sizeof(float);
  for (std::uint64_t done = 0; done < count; done += kStep) {
    const std::uint64_t n = std::min(kStep, count - done);
    const std::uint64_t next = std::min(count, done + 2 * kStep);
    for (std::uint64_t ahead = done + kStep; ahead < next; ahead += kLine) {
      for (Rank rank = 0; rank < size_; ++rank) read_ahead(floats(rank) + first + ahead);
    }
    part(first + done, n);
  }
}

Calls Floor::in_place(std::uint64_t count, Kernel kernel, std::uint32_t calls, bool paced) {
  const std::uint64_t counts[] = {count};
  return layers(counts, kernel, calls, paced);
}

Calls Floor::layers(std::span<const std::uint64_t> counts, Kernel kernel, std::uint32_t calls,
                    bool paced) {
  std::uint64_t total = 0;
  std::vector<Block> blocks;
  for (const std::uint64_t count : counts) {
    const Block mine = block_of(count, rank_, size_);
    blocks.push_back({total + mine.first, mine.count});
    total += round_up(count, kLine);
  }
  require(total * sizeof(float));
  float* own = floats(rank_);
  return timed(
      calls, paced,
      [&](std::uint32_t number) {
        std::fill_n(own, total, static_cast<float>(number + static_cast<std::uint32_t>(rank_)));
      },
      [&] {
        const std::uint64_t before = ready_;
        for (std::size_t layer = 0; layer < blocks.size(); ++layer) {
          tell_all(Purpose::kReady, ++ready_);
        }
        for (std::size_t layer = 0; layer < blocks.size(); ++layer) {
          if (blocks[layer].count > 0) {
            await_all(Purpose::kReady, before + layer + 1);
            average(kernel, blocks[layer].first, blocks[layer].count);
          }
          tell_all(Purpose::kDone, ++done_);
        }
        await_all(Purpose::kDone, done_);
      });
}

Calls Floor::private_arrays(std::uint64_t count, std::uint64_t piece_floats, Copy copy,
                            std::uint32_t calls, bool paced) {
  const std::uint64_t most = std::clamp<std::uint64_t>(piece_floats, kLine, kMostPiece);
  require(kPieces * most * sizeof(float));
  std::vector<float> array(count);
  constexpr std::size_t kMost = 16;
  const auto ranks = static_cast<std::size_t>(size_);
  if (ranks > kMost) throw Error(ErrorKind::kUnavailable, "the floor is for at most 16 ranks");
  const double scale = 1.0 / static_cast<double>(size_);
  const std::uint64_t pieces = (count + most - 1) / most;
  const auto length = [&](std::uint64_t piece) { return std::min(most, count - piece * most); };
  // A rank that announces piece k + 2 has read piece k of all others, so four places suffice.
  const auto stage = [&](std::uint64_t piece) {
    float* place = floats(rank_) + (piece % kPieces) * most;
    const float* from = &array[piece * most];
    if (copy == Copy::kStream) {
      best_kernels().stream(reinterpret_cast<char*>(place), reinterpret_cast<const char*>(from),
                            length(piece) * sizeof(float));
    } else {
      std::memcpy(place, from, length(piece) * sizeof(float));
    }
    tell_all(Purpose::kReady, ++ready_);
  };
  return timed(
      calls, paced,
      [&](std::uint32_t number) {
        // Pieces of the previous call may still be read.
        await_all(Purpose::kDone, done_);
        std::fill(array.begin(), array.end(),
                  static_cast<float>(number + static_cast<std::uint32_t>(rank_)));
      },
      [&] {
        const std::uint64_t before = ready_;
        stage(0);
        for (std::uint64_t piece = 0; piece < pieces; ++piece) {
          if (piece + 1 < pieces) stage(piece + 1);
          await_all(Purpose::kReady, before + piece + 1);
          std::array<Source, kMost> sources;
          float* own = &array[piece * most];
          for (std::size_t rank = 0; rank < ranks; ++rank) {
            const float* staged = floats(static_cast<Rank>(rank)) + (piece % kPieces) * most;
            sources[rank] = {static_cast<Rank>(rank) == rank_ ? own : staged, DType::kF32};
          }
          const Destination destination{own, DType::kF32};
          reduce({&destination, 1}, {sources.data(), ranks}, length(piece), scale);
        }
        tell_all(Purpose::kDone, ++done_);
      });
}

Calls Floor::private_blocks(std::uint64_t count, std::uint64_t piece_floats, std::uint32_t calls,
                            bool paced) {
  const std::uint64_t most = std::clamp<std::uint64_t>(piece_floats, kLine, kMostPiece);
  require(kPieces * most * sizeof(float));
  constexpr std::size_t kMost = 16;
  const auto ranks = static_cast<std::size_t>(size_);
  if (ranks > kMost) throw Error(ErrorKind::kUnavailable, "the floor is for at most 16 ranks");
  std::vector<float> array(count);
  const double scale = 1.0 / static_cast<double>(size_);
  const std::uint64_t pieces = (count + most - 1) / most;
  const auto block = [&](std::uint64_t piece, Rank owner) {
    return block_of(std::min(most, count - piece * most), owner, size_);
  };
  const auto staged = [&](std::uint64_t piece, Rank rank) {
    return floats(rank) + (piece % kPieces) * most;
  };
  // Copies the other owners' blocks to this rank's slot, or back.
  const auto copy = [&](std::uint64_t piece, bool back) {
    for (Rank step = 1; step < size_; ++step) {
      const auto [first, n] = block(piece, (rank_ + step) % size_);
      float* const mine = &array[piece * most] + first;
      float* const slot = staged(piece, rank_) + first;
      std::memcpy(back ? mine : slot, back ? slot : mine, n * sizeof(float));
    }
  };
  const auto reduce_own = [&](std::uint64_t piece) {
    const auto [first, n] = block(piece, rank_);
    std::array<Source, kMost> sources;
    std::array<Destination, kMost> destinations;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      const bool own = static_cast<Rank>(rank) == rank_;
      float* const all = own ? &array[piece * most] : staged(piece, static_cast<Rank>(rank));
      sources[rank] = {all + first, DType::kF32};
      destinations[rank] = {all + first, DType::kF32};
    }
    if (n != 0) reduce({destinations.data(), ranks}, {sources.data(), ranks}, n, scale);
  };
  return timed(
      calls, paced,
      [&](std::uint32_t number) {
        std::fill(array.begin(), array.end(),
                  static_cast<float>(number + static_cast<std::uint32_t>(rank_)));
      },
      [&] {
        copy(0, false);
        tell_all(Purpose::kReady, ++ready_);
        std::uint64_t awaited = ready_;
        for (std::uint64_t piece = 0; piece < pieces; ++piece) {
          if (piece + 1 < pieces) copy(piece + 1, false);
          await_all(Purpose::kReady, awaited++);
          reduce_own(piece);
          tell_all(Purpose::kReady, ++ready_);
          if (piece > 0) copy(piece - 1, true);
        }
        await_all(Purpose::kReady, awaited);
        copy(pieces - 1, true);
      });
}

double clock_cost() {
  std::array<std::int64_t, 101> costs;
  for (std::int64_t& cost : costs) {
    const std::int64_t before = now();
    cost = now() - before;
  }
  std::nth_element(costs.begin(), costs.begin() + costs.size() / 2, costs.end());
  return static_cast<double>(costs[costs.size() / 2]);
}

}  // namespace pgasdl

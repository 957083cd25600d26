#include "pgas/gossip.hpp"

#include <algorithm>

#include "memory/region.hpp"

namespace pgasdl {
namespace {

// Records change while the network reads them, and are written by it while they are read: bytes
// that only ever go from healthy to something else, and a counter. No sanitizer can know that.
#define PGASDL_RACY __attribute__((no_sanitize("thread")))

template <typename T>
PGASDL_RACY T read(const volatile T& from) {
  return from;
}
template <typename T>
PGASDL_RACY void write(volatile T& to, T value) {
  to = value;
}

// How many ranks before and behind exchange every beat: a loss is noticed unless all go at once.
constexpr Rank kNeighbours = 4;

}  // namespace

std::uint64_t Gossip::record_bytes(Rank size) {
  return round_up(sizeof(Record) + static_cast<std::uint64_t>(size), 64);
}

std::uint64_t Gossip::bytes(Rank size) {
  return record_bytes(size) * (static_cast<std::uint64_t>(size) + 1);
}

Gossip::Gossip(Transport& transport, QueueId queue, Rank rank, Rank size, Segment& control,
               std::uint64_t offset, std::vector<Rank> peers)
    : transport_(transport),
      queue_(queue),
      rank_(rank),
      size_(size),
      control_(control),
      offset_(offset),
      ranks_(std::move(peers)) {
  for (const Rank peer : ranks_) {
    const Rank ahead = (peer - rank_ + size_) % size_;
    peers_.push_back({peer, std::min(ahead, size_ - ahead) <= kNeighbours, 0, 0});
  }
}

// Number 0 is mine, the one that is written to others; rank r's is number r + 1.
Gossip::Record& Gossip::record(std::uint64_t number) const {
  return *reinterpret_cast<Record*>(control_.local().data + offset_ + number * record_bytes(size_));
}

void Gossip::renew(const std::atomic<Health>* states) {
  Record& mine = record(0);
  write(mine.beat, read(mine.beat) + 1);
  bool changed = false;
  for (Rank rank = 0; rank < size_; ++rank) {
    const Health state = states[rank].load(std::memory_order_relaxed);
    changed |= read(mine.states()[rank]) != state;
    write(mine.states()[rank], state);
  }
  version_ += changed ? 1 : 0;
}

bool Gossip::write_to(Rank peer) {
  const std::uint64_t target =
      offset_ + (static_cast<std::uint64_t>(rank_) + 1) * record_bytes(size_);
  const Transfer transfer{&control_.local(), offset_, control_.remote(peer), target,
                          record_bytes(size_)};
  return transport_.post_write(queue_, peer, {&transfer, 1}, nullptr);
}

bool Gossip::told_all(const std::atomic<Health>* states) const {
  return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
    return peer.told == version_ ||
           states[peer.rank].load(std::memory_order_relaxed) != Health::kHealthy;
  });
}

std::uint64_t Gossip::beat(Rank peer) const {
  return read(record(static_cast<std::uint64_t>(peer) + 1).beat);
}

Health Gossip::told(Rank peer, Rank of) const {
  const Health told = read(record(static_cast<std::uint64_t>(peer) + 1).states()[of]);
  return told <= Health::kClosed ? told : Health::kHealthy;  // else nothing was said
}

}  // namespace pgasdl

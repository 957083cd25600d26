#include "pgas/gossip.hpp"

#include <algorithm>

#include "memory/region.hpp"

namespace pgasdl {
namespace {

// Records change while the network reads them, and the network writes them while this rank reads:
// states that change once, and whole words. No sanitizer can know that this is sound.
#define PGASDL_RACY __attribute__((no_sanitize("thread")))

template <typename T>
PGASDL_RACY T read(const volatile T& from) {
  return from;
}
template <typename T>
PGASDL_RACY void write(volatile T& to, T value) {
  to = value;
}

// So many ranks before and behind are always neighbours.
constexpr Rank kNearest = 4;

constexpr int kHowShift = 8;  // in the words of a record
constexpr int kCauseShift = 32;

Health known(std::uint64_t said) {
  return said <= static_cast<std::uint64_t>(Health::kClosed) ? static_cast<Health>(said)
                                                             : Health::kHealthy;  // no state
}

std::uint64_t records_bytes(Rank size, std::size_t record) {
  return round_up(record * (static_cast<std::uint64_t>(size) + 1), 64);
}

std::uint64_t states_bytes(Rank size) { return round_up(static_cast<std::uint64_t>(size), 64); }

}  // namespace

std::vector<Rank> Gossip::distances(Rank size) {
  const auto near = [](Rank distance) {
    return distance <= kNearest || (distance & (distance - 1)) == 0;
  };
  std::vector<Rank> all;
  for (Rank distance = 1; distance < size; ++distance) {
    if (near(distance) || near(size - distance)) all.push_back(distance);
  }
  return all;
}

std::uint64_t Gossip::bytes(Rank size) {
  return records_bytes(size, sizeof(Record)) + states_bytes(size) * (distances(size).size() + 1);
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
  const std::vector<Rank> ahead = distances(size_);
  neighbours_.assign(ahead.size(), -1);
  for (const Rank peer : ranks_) {
    const auto place = [&](Rank distance) {
      const auto found = std::ranges::lower_bound(ahead, distance);
      return found != ahead.end() && *found == distance
                 ? static_cast<std::size_t>(found - ahead.begin())
                 : kNone;
    };
    peers_.push_back({peer, place((rank_ - peer + size_) % size_), 0, 0, false});
    const std::size_t here = place((peer - rank_ + size_) % size_);
    if (here != kNone) neighbours_[here] = peer;
  }
}

// Record 0 is this rank's, which is written to others; rank r's is number r + 1.
Gossip::Record& Gossip::record(std::uint64_t number) const {
  return reinterpret_cast<Record*>(control_.local().data + offset_)[number];
}

// States 0 are this rank's; those of the neighbour at place n are number n + 1.
volatile Health* Gossip::states(std::uint64_t number) const {
  return reinterpret_cast<volatile Health*>(control_.local().data + offset_ +
                                            records_bytes(size_, sizeof(Record)) +
                                            number * states_bytes(size_));
}

// The offset is the same in every rank's control segment.
std::uint64_t Gossip::offset_of(const volatile void* place) const {
  return static_cast<std::uint64_t>(static_cast<const volatile std::byte*>(place) -
                                    control_.local().data);
}

std::uint64_t Gossip::packed_words(Health own, Cause cause) {
  return static_cast<std::uint64_t>(own) | static_cast<std::uint64_t>(cause.how) << kHowShift |
         static_cast<std::uint64_t>(cause.rank + 1) << kCauseShift;
}

void Gossip::tell_lost(Rank peer, Health how) {
  transport_.send_farewell(peer, packed_words(Health::kHealthy, {peer, how}));
}

void Gossip::renew(const std::atomic<Health>* states, Cause cause) {
  volatile Health* const mine = this->states(0);
  bool changed = false;
  for (Rank rank = 0; rank < size_; ++rank) {
    const Health state = states[rank].load(std::memory_order_relaxed);
    changed |= read(mine[rank]) != state;
    write(mine[rank], state);
  }
  version_ += changed ? 1 : 0;
  write(record(0).words, packed_words(read(mine[rank_]), cause));
  write(record(0).beat, read(record(0).beat) + 1);
}

bool Gossip::leaves() const { return read(states(0)[rank_]) != Health::kHealthy; }

bool Gossip::due(const Peer& peer, const std::atomic<Health>* states) const {
  if (states[peer.rank].load(std::memory_order_relaxed) != Health::kHealthy) return false;
  if (peer.announced != version_) return peer.place != kNone || leaves();
  // A beat still under way is as good as another one and must not be disturbed: Soft-RoCE repeats
  // lost packets only after its connection has been quiet for a while.
  return peer.place != kNone && transport_.reached(queue_, peer.rank, peer.beat);
}

void Gossip::write_to(Peer& peer) {
  const LocalSegment& here = control_.local();
  const RemoteSegment* const there = control_.remote(peer.rank);
  const std::uint64_t own = static_cast<std::uint64_t>(rank_) + 1;
  const Transfer transfers[] = {
      {&here, offset_of(&record(0)), there, offset_of(&record(own)), sizeof(Record)},
      {&here, offset_of(states(0)), there,
       peer.place == kNone ? 0 : offset_of(states(peer.place + 1)), states_bytes(size_)}};
  if (peer.place != kNone) {
    const std::size_t n = peer.announced == version_ ? 1 : 2;
    if (!transport_.post_write(queue_, peer.rank, std::span(transfers, n), nullptr)) return;
    peer.beat = transport_.mark(queue_, peer.rank);
    peer.begun = true;
  } else if (const auto queue = transport_.connected(queue_, peer.rank)) {
    if (!transport_.post_write(*queue, peer.rank, std::span(transfers, 1), nullptr)) return;
  } else {
    transport_.send_farewell(peer.rank, read(record(0).words));
  }
  peer.announced = version_;
}

bool Gossip::begun(const std::atomic<Health>* states) const {
  return std::ranges::all_of(peers_, [&](const Peer& peer) {
    return peer.begun || peer.place == kNone ||
           states[peer.rank].load(std::memory_order_relaxed) != Health::kHealthy;
  });
}

bool Gossip::announced_all(const std::atomic<Health>* states) const {
  return std::ranges::none_of(
      peers_, [&](const Peer& peer) { return peer.announced != version_ && due(peer, states); });
}

std::uint64_t Gossip::beat(Rank peer) const {
  return read(record(static_cast<std::uint64_t>(peer) + 1).beat);
}

Gossip::Words Gossip::words(Rank peer) const {
  std::uint64_t said = read(record(static_cast<std::uint64_t>(peer) + 1).words);
  if (said == 0) said = transport_.farewell(peer);
  Words words{known(said & 0xff), {}};
  const Health how = known(said >> kHowShift & 0xff);
  const std::uint64_t first = said >> kCauseShift;
  if (first != 0 && first <= static_cast<std::uint64_t>(size_) && how != Health::kHealthy) {
    words.cause = {static_cast<Rank>(first) - 1, how};
  }
  return words;
}

bool Gossip::is_neighbour(Rank peer) const {
  return std::ranges::find(neighbours_, peer) != neighbours_.end();
}

Health Gossip::announced(std::size_t neighbour, Rank of) const {
  return known(static_cast<std::uint64_t>(read(states(neighbour + 1)[of])));
}

}  // namespace pgasdl

// Exchanges news of who is alive by writes, among ranks whose memory is not mapped here.
//
// A rank has neighbours: the nearest on both sides, and those 2^k ranks away. At every heartbeat it
// writes its record into their control segments, and after a change what it knows of all ranks.
// They do the same, so a loss reaches every rank within 1 + log2(P) / 2 heartbeats. A rank that
// leaves also informs every rank connected with it, since their connections end. So memory and
// connections grow with the logarithm of the number of ranks.
#pragma once

#include <atomic>
#include <vector>

#include "pgas/health.hpp"
#include "pgas/segment.hpp"

namespace pgasdl {

class Gossip {
 public:
  // Bytes of a control segment for a job of `size` ranks: this rank's news, and each other rank's.
  static std::uint64_t bytes(Rank size);
  // The distances to neighbours, modulo `size`.
  static std::vector<Rank> distances(Rank size);

  // `offset`: of those bytes in `control`, a multiple of 64. `peers`: ranks that are not mapped.
  Gossip(Transport& transport, QueueId queue, Rank rank, Rank size, Segment& control,
         std::uint64_t offset, std::vector<Rank> peers);

  // A rank that was lost before others that left because of it; -1: none.
  struct Cause {
    Rank rank = -1;
    Health how = Health::kHealthy;
  };
  // A rank's report about itself.
  struct Words {
    Health own = Health::kHealthy;
    Cause cause;
  };

  // One heartbeat: writes news to the neighbours, and if this rank leaves, to all ranks connected
  // with it. Passes a peer that cannot be written to to `lost`.
  template <typename Lost>
  void announce(const std::atomic<Health>* states, Cause cause, Lost&& lost) {
    renew(states, cause);
    for (Peer& peer : peers_) {
      if (!due(peer, states)) continue;
      try {
        write_to(peer);
      } catch (const Error& error) {
        // Other failures here (out of memory) say nothing about the peer; the post is tried again.
        if (error.kind() == ErrorKind::kPeerLost) lost(peer.rank);
      }
    }
  }
  // Says to a rank that it counts as lost, should it still read this.
  void tell_lost(Rank peer, Health how);
  // True once every neighbour that is healthy has been sent a beat.
  bool begun(const std::atomic<Health>* states) const;
  // True if no rank needs news.
  bool announced_all(const std::atomic<Health>* states) const;

  // The other ranks' reports. Beats are counted from 1; 0: none yet, or not a neighbour.
  const std::vector<Rank>& ranks() const { return ranks_; }
  std::uint64_t beat(Rank peer) const;
  Words words(Rank peer) const;
  const std::vector<Rank>& neighbours() const { return neighbours_; }
  bool is_neighbour(Rank peer) const;
  Health announced(std::size_t neighbour, Rank of) const;

 private:
  static constexpr std::size_t kNone = SIZE_MAX;
  struct Peer {
    Rank rank;
    std::size_t place;        // of this rank's states in its memory; kNone: not a neighbour
    std::uint64_t announced;  // the version of this rank's states that it knows
    std::uint64_t beat;       // the mark of the last beat
    bool begun;               // there was one
  };
  struct Record {
    volatile std::uint64_t beat;
    volatile std::uint64_t words;  // packed, so that they change together
  };
  Record& record(std::uint64_t number) const;
  volatile Health* states(std::uint64_t number) const;
  std::uint64_t offset_of(const volatile void* place) const;
  void renew(const std::atomic<Health>* states, Cause cause);
  static std::uint64_t packed_words(Health own, Cause cause);
  bool leaves() const;
  bool due(const Peer& peer, const std::atomic<Health>* states) const;
  void write_to(Peer& peer);

  Transport& transport_;
  const QueueId queue_;
  const Rank rank_;
  const Rank size_;
  Segment& control_;
  const std::uint64_t offset_;
  std::vector<Rank> ranks_;
  std::vector<Rank> neighbours_;  // by their place in this rank's memory; -1: mapped
  std::vector<Peer> peers_;
  std::uint64_t version_ = 0;
};

}  // namespace pgasdl

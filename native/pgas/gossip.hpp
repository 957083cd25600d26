// News of who is alive among ranks whose memory is not mapped here, by writes.
//
// A rank has neighbours: the nearest on both sides, and those 2^k ranks away. At every heartbeat it
// writes its record into their control segments, and when it learns of a loss, what it knows of all
// ranks. They do the same, so that a loss reaches everybody within as many heartbeats as half the
// bits of the number of ranks, and one. A rank that leaves also tells whoever is connected with it:
// their connections end. Memory and connections so grow with the logarithm of the ranks.
#pragma once

#include <atomic>
#include <vector>

#include "pgas/health.hpp"
#include "pgas/segment.hpp"

namespace pgasdl {

class Gossip {
 public:
  // Bytes of a control segment for a job of `size` ranks: what I tell, and what each told me.
  static std::uint64_t bytes(Rank size);
  // How far before and behind a rank its neighbours are, modulo `size`.
  static std::vector<Rank> distances(Rank size);

  // `offset`: of those bytes in `control`, a multiple of 64. `peers`: those that are not mapped.
  Gossip(Transport& transport, QueueId queue, Rank rank, Rank size, Segment& control,
         std::uint64_t offset, std::vector<Rank> peers);

  // A rank that was lost before others that left because of it; -1: none.
  struct Cause {
    Rank rank = -1;
    Health how = Health::kHealthy;
  };
  // A rank's words about itself.
  struct Words {
    Health own = Health::kHealthy;
    Cause cause;
  };

  // One heartbeat: writes what is new to my neighbours, and if I leave, to all that are connected
  // with me. A peer that cannot be written to is given to `lost`.
  template <typename Lost>
  void announce(const std::atomic<Health>* states, Cause cause, Lost&& lost) {
    renew(states, cause);
    for (Peer& peer : peers_) {
      if (!due(peer, states)) continue;
      try {
        write_to(peer);
      } catch (const Error& error) {
        // A failure here (no memory, say) is no peer's death, and the post is tried again.
        if (error.kind() == ErrorKind::kPeerLost) lost(peer.rank);
      }
    }
  }
  // Nobody has to be told anything.
  bool announced_all(const std::atomic<Health>* states) const;

  // The others' words. Beats are counted from 1; 0: none yet, or not this rank's neighbour.
  const std::vector<Rank>& ranks() const { return ranks_; }
  std::uint64_t beat(Rank peer) const;
  Words words(Rank peer) const;
  const std::vector<Rank>& neighbours() const { return neighbours_; }
  Health announced(std::size_t neighbour, Rank of) const;

 private:
  static constexpr std::size_t kNone = SIZE_MAX;
  struct Peer {
    Rank rank;
    std::size_t place;        // of my states in its memory; kNone: it is no neighbour
    std::uint64_t announced;  // version of my states that it knows
    std::uint64_t beat;       // mark of the last one
  };
  struct Record {
    volatile std::uint64_t beat;
    volatile std::uint64_t words;  // packed, so that they are seen together
  };
  Record& record(std::uint64_t number) const;
  volatile Health* states(std::uint64_t number) const;
  std::uint64_t offset_of(const volatile void* place) const;
  void renew(const std::atomic<Health>* states, Cause cause);
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
  std::vector<Rank> neighbours_;  // by their place in my memory; -1: it is mapped
  std::vector<Peer> peers_;
  std::uint64_t version_ = 0;
};

}  // namespace pgasdl

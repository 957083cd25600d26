// Who is alive among ranks whose memory is not mapped here, told by writes.
//
// Each rank has a record, its beat and its state vector, and writes it into the control segments of
// some neighbours at every heartbeat, and of everybody when it learns of a loss. A loss so reaches
// all ranks within two heartbeats of its detection, whoever is still connected with whom.
#pragma once

#include <atomic>
#include <vector>

#include "pgas/health.hpp"
#include "pgas/segment.hpp"

namespace pgasdl {

class Gossip {
 public:
  // Bytes of a control segment for a job of `size` ranks: my record, and what each rank told me.
  static std::uint64_t bytes(Rank size);

  // `offset`: of those bytes in `control`, a multiple of 64. `peers`: those that are not mapped.
  Gossip(Transport& transport, QueueId queue, Rank rank, Rank size, Segment& control,
         std::uint64_t offset, std::vector<Rank> peers);

  // One heartbeat: writes my record to my neighbours, and to whoever does not know the newest
  // states. A peer that cannot be written to is given to `lost`.
  template <typename Lost>
  void tell(const std::atomic<Health>* states, Lost&& lost) {
    renew(states);
    for (std::size_t number = 0; number < peers_.size(); ++number) {
      Peer& peer = peers_[number];
      if (states[peer.rank].load(std::memory_order_relaxed) != Health::kHealthy) continue;
      // A beat that is still under way says as much as another would, and is not to be disturbed:
      // soft-RoCE repeats what was lost only once its connection has been quiet for a while.
      if (peer.told == version_ &&
          (!peer.neighbour || !transport_.reached(queue_, peer.rank, peer.beat))) {
        continue;
      }
      try {
        if (!write_to(peer.rank)) continue;
        peer.told = version_;
        peer.beat = transport_.mark(queue_, peer.rank);
      } catch (const Error& error) {
        // What fails here (no memory, say) is no peer's death, and is tried again.
        if (error.kind() == ErrorKind::kPeerLost) lost(peer.rank);
      }
    }
  }
  // Everybody who is healthy was told the newest states.
  bool told_all(const std::atomic<Health>* states) const;

  // What the others told. Beats are counted from 1; 0: none yet, or not this rank's neighbour.
  const std::vector<Rank>& ranks() const { return ranks_; }
  std::uint64_t beat(Rank peer) const;
  Health told(Rank peer, Rank of) const;

 private:
  struct Peer {
    Rank rank;
    bool neighbour;
    std::uint64_t told;  // version of the states it knows
    std::uint64_t beat;  // mark of the last one
  };
  struct Record {
    volatile std::uint64_t beat;
    // followed by the state vector, one byte per rank
    volatile Health* states() { return reinterpret_cast<volatile Health*>(this + 1); }
  };
  static std::uint64_t record_bytes(Rank size);
  Record& record(std::uint64_t number) const;
  void renew(const std::atomic<Health>* states);
  bool write_to(Rank peer);

  Transport& transport_;
  const QueueId queue_;
  const Rank rank_;
  const Rank size_;
  Segment& control_;
  const std::uint64_t offset_;
  std::vector<Rank> ranks_;
  std::vector<Peer> peers_;
  std::uint64_t version_ = 0;
};

}  // namespace pgasdl

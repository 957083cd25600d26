// Ranks as threads of one process over one mapping. It exists to find bugs: the thread sanitizer
// sees every access, and a seeded adversary may delay transfers, reorder writes and flags, read a
// source only at delivery, refuse posts as a full queue does, and fail a chosen operation of a
// chosen rank.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "transport/held_flags.hpp"
#include "transport/transport.hpp"

namespace pgasdl {

struct LoopbackFaults {
  std::uint64_t seed = 0;
  std::uint32_t delay = 0;      // a pending operation moves on with probability 1 / (delay + 1)
  bool reorder = false;         // reorders writes of one queue to one peer; flags stay last
  bool late_source = false;     // reads sources at delivery, as a network card may
  std::uint32_t refuse = 0;     // a post is accepted with probability 1 / (refuse + 1)
  std::int32_t fail_rank = -1;  // this rank ...
  std::uint64_t fail_at = 0;    // ... throws at its n-th posted operation, counted from 1
  bool mapped = true;           // false: peers' memory cannot be loaded and stored directly
  // A rank's end breaks each queue's connection with it; complete() reports each once.
  bool breaks = false;
  // A fabric of several paths: flags at peers may overtake earlier requests as well, unless
  // `completion_first` sends them only after those have completed.
  bool any_order = false;
  bool completion_first = false;
  bool immediate() const { return delay == 0 && !reorder && !late_source && !any_order; }
};

// State that the ranks share. Outlives every LoopbackTransport made from it.
class LoopbackWorld {
 public:
  explicit LoopbackWorld(Rank size, LoopbackFaults faults = {});
  LoopbackWorld(const LoopbackWorld&) = delete;
  LoopbackWorld& operator=(const LoopbackWorld&) = delete;
  Rank size() const { return static_cast<Rank>(ranks_.size()); }

 private:
  friend class LoopbackTransport;
  struct Operation {
    QueueId queue;
    Rank peer;
    const std::byte* source;  // null: a flag
    std::byte* target;
    std::uint64_t bytes;
    int device;                       // does the copy; kHost if neither end lies on a device
    std::vector<std::byte> snapshot;  // of the source, unless it is read at delivery
    FlagWord* flag;
    std::uint32_t value;
    bool add;
    std::shared_ptr<void> keep;       // the memory at the peer
    std::shared_ptr<void> keep_here;  // and here: the program may drop a source before it is read
    bool own_flag = false;            // on this rank's board, after a read
    std::uint32_t number = 0;         // counts the operations of this queue to this peer
  };
  // The messages that one queue has sent to one peer.
  struct Connection {
    std::uint32_t posted = 0;
    HeldFlags<Operation> held;
  };
  struct RankState {
    std::mutex mutex;
    struct Published {
      RemoteSegment as_peers_see;  // keeps the memory until all have attached it
      std::size_t n_to_attach = 0;
    };
    std::map<SegmentId, Published> published;
    std::deque<Operation> pending;
    std::map<std::pair<QueueId, Rank>, Connection> connections;
    std::mt19937_64 random;
    std::uint64_t posted = 0;
    std::vector<WakeWord*> wake_words;
    std::set<std::pair<Rank, QueueId>> connected;  // recorded unless all memory is mapped
    std::set<std::pair<QueueId, Rank>> broken;     // not reported yet
  };
  void deliver_some(RankState& state);
  static void deliver(RankState& state, Operation& operation);
  void enqueue(RankState& state, Operation&& operation) const;
  static void release(RankState& state);

  const LoopbackFaults faults_;
  std::vector<RankState> ranks_;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<LoopbackWorld> world, Rank rank);
  ~LoopbackTransport() override;

  std::string_view name() const override { return "loopback"; }
  std::string endpoint() override { return {}; }
  void connect(Rank, const std::string&) override {}
  void set_wake_word(Rank peer, WakeWord* wake_word) override;
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, int device,
                       Deadline deadline) override;
  std::string refuses_device(int) const override { return ""; }

  bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                  const RemoteFlag* flag) override;
  bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                 const LocalFlag* flag) override;
  bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) override;
  bool complete(QueueId queue) override;
  std::size_t connections(QueueId queue) const override;
  // A rank whose memory is not mapped cannot be woken: its waits poll, as with a network card.
  bool needs_progress() const override {
    return !world_->faults_.immediate() || !world_->faults_.mapped;
  }
  void progress() override;
  bool forget(Rank peer) override;
  void take_over(QueueId queue) override;

 private:
  LoopbackWorld::RankState& mine() { return world_->ranks_[static_cast<std::size_t>(rank_)]; }
  bool room(QueueId queue, Rank peer);
  void submit(LoopbackWorld::Operation&& operation);

  const std::shared_ptr<LoopbackWorld> world_;
  const Rank rank_;
};

}  // namespace pgasdl

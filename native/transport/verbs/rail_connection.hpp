// One queue's operations to one peer over several rails.
//
// A write longer than a stripe is cut, and its stripes take turns over the rails that carry;
// everything else goes by the first of these. A flag goes by that rail, too, which keeps its order
// after all that it carries itself. While other rails carry earlier writes, the flag is held until
// these are done and a read after them, too: data that one adapter has acknowledged may not yet be
// where another one finds them. While a rail is being dropped nothing is posted; afterwards all
// that it has not carried is posted again.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "transport/verbs/connection.hpp"
#include "transport/verbs/rail_lane.hpp"
#include "transport/verbs/rail_queue.hpp"

namespace pgasdl {

class RailConnection {
 public:
  struct Limits {
    std::uint64_t stripe;
    std::size_t most_pieces;  // from so many on no operation begins
    double timeout_s;         // a peer that keeps its end of a dropped rail for longer is lost
  };
  // Sets of rails, as bits: those that both ranks have, and those of them that carry.
  RailConnection(std::span<VerbsTransport* const> rails, RailQueue& under_way, QueueId queue,
                 Rank peer, std::uint32_t common, std::uint32_t carrying, const Limits& limits);

  QueueId queue() const { return queue_; }
  Rank peer() const { return peer_; }
  RailConnection* next = nullptr;  // in the list of all of the transport's connections

  // --- data path, as in Transport
  bool write(std::span<const Transfer> transfers, const RemoteFlag* flag);
  bool read(std::span<const Transfer> transfers, const LocalFlag* flag, WakeWord* wake_word);
  bool atomic(const Atomic& atomic);
  bool connecting() const;
  std::uint64_t mark() const;
  bool reached(std::uint64_t mark) const { return done_.load(std::memory_order_acquire) >= mark; }

  // A rail that no longer carries, and why.
  struct Suspect {
    std::size_t rail;
    Error error;
  };
  bool busy() const {
    return n_pieces_.load(std::memory_order_relaxed) != 0 ||
           suspected_.load(std::memory_order_relaxed);
  }
  // Takes what is done and posts what may be posted, unless another thread does so.
  std::optional<Suspect> progress();

  // --- a rail is dropped, for all connections with a peer together
  void drop(std::size_t rail);
  // The peer has dropped its end after taking so many flags from it. Returns whether to announce to
  // the peer that this rank did so, too.
  bool peer_dropped(std::size_t rail, std::uint32_t taken, bool known);
  // Continues to drop rails; returns whether some are still being dropped. Fills `to_announce` with
  // rails whose news_of() has to be sent to the peer.
  bool look_after_drops(std::vector<std::size_t>& to_announce);
  VerbsRailNews news_of(std::size_t rail) const;  // except the round

  // Loses everything under way, which complete() reports; posts throw the error until clear().
  void fail(const Error& error);
  // Forgets everything under way; rails carry as at first.
  void clear(std::uint32_t carrying);
  // A rail carries again.
  void renew(std::size_t rail);

 private:
  bool admits();
  bool dropping() const;
  RailLane& first_lane();
  RailLane& next_lane();
  // No rail except the first has writes before `number` under way.
  bool others_are_clear(std::uint64_t number);
  bool others_are_fenced();
  // Fences the other rails, for flags of `number` or later.
  void fence_others(std::uint64_t number);
  void begin();
  void cut(RailPiece piece, const std::shared_ptr<RailReadFlag>& read_flag);
  void push();
  void suspect(std::size_t rail, const Error* error);
  void done(const RailPiece& piece);
  void forget(const RailPiece& piece);
  void settle(std::size_t rail);
  void fail_locked(const Error& error, bool lasting);
  void lose_all();

  RailQueue& under_way_;
  const QueueId queue_;
  const Rank peer_;
  const Limits limits_;
  mutable std::mutex mutex_;
  std::vector<RailLane> lanes_;
  std::deque<RailPiece> held_;  // flags
  std::size_t turn_ = 0;        // of stripes
  std::uint64_t number_ = 0;    // of the next piece
  std::deque<bool> window_;     // whether each piece from done_ on is done
  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::size_t> n_pieces_{0};
  std::optional<PeerFault> fault_;
  std::optional<Suspect> suspect_;
  std::atomic<bool> suspected_{false};  // suspect_ is set
};

}  // namespace pgasdl

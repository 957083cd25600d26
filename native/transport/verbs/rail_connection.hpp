// One queue's operations to one peer over several rails.
//
// A write longer than a stripe is cut, and its stripes go round over the rails that carry; all else
// goes by the first of these. A flag goes by that one, too, which keeps its order behind all that
// it carries itself; where other rails carry writes of before, it is held until these are done, and
// a read behind them, too: what one adapter has acknowledged may not yet be where another one finds
// it.
// While a rail is being dropped nothing is posted; then what it has not carried is posted again.
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
    std::size_t most_pieces;  // with so many no operation begins
    double timeout_s;         // a peer that does not give up its end of a rail for so long is lost
  };
  // Sets of rails, a bit for each: those that both ranks have, and of these those that carry.
  RailConnection(std::span<VerbsTransport* const> rails, RailQueue& under_way, QueueId queue,
                 Rank peer, std::uint32_t common, std::uint32_t carrying, const Limits& limits);

  QueueId queue() const { return queue_; }
  Rank peer() const { return peer_; }
  RailConnection* next = nullptr;  // of all of the transport's

  // --- data path, as of Transport
  bool write(std::span<const Transfer> transfers, const RemoteFlag* flag);
  bool read(std::span<const Transfer> transfers, const LocalFlag* flag, WakeWord* wake_word);
  bool atomic(const Atomic& atomic);
  bool connecting() const;
  std::uint64_t mark() const;
  bool reached(std::uint64_t mark) const { return done_.load(std::memory_order_acquire) >= mark; }

  // A rail that does not carry any longer, and why.
  struct Suspect {
    std::size_t rail;
    Error error;
  };
  bool busy() const {
    return n_pieces_.load(std::memory_order_relaxed) != 0 ||
           suspected_.load(std::memory_order_relaxed);
  }
  // Takes what is done, and posts what may be posted; unless another thread is at it.
  std::optional<Suspect> progress();

  // --- a rail is given up: all connections with a peer together
  void drop(std::size_t rail);
  // The peer has given up its end, and has taken so many flags by it; whether it is to be told that
  // this rank did, too.
  bool peer_dropped(std::size_t rail, std::uint32_t taken, bool known);
  // Goes on with the rails that are being dropped: whether some still are. For those in
  // `to_announce` the peer is to be sent news_of().
  bool look_after_drops(std::vector<std::size_t>& to_announce);
  VerbsRailNews news_of(std::size_t rail) const;  // but for the round

  // Everything under way is lost, of which complete() tells; posts throw this until clear().
  void fail(const Error& error);
  // Everything under way is forgotten, and rails carry as at first.
  void clear(std::uint32_t carrying);
  // A rail carries again.
  void renew(std::size_t rail);

 private:
  bool admits();
  bool dropping() const;
  RailLane& first_lane();
  RailLane& next_lane();
  // No rail but the first has writes of before `number` under way.
  bool others_are_clear(std::uint64_t number);
  bool others_are_fenced();
  // Fences them, for flags of `number` or later.
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
  std::deque<bool> window_;     // of the pieces from done_ on, whether they are
  std::atomic<std::uint64_t> done_{0};
  std::atomic<std::size_t> n_pieces_{0};
  std::optional<VerbsFault> fault_;
  std::optional<Suspect> suspect_;
  std::atomic<bool> suspected_{false};  // there is one
};

}  // namespace pgasdl

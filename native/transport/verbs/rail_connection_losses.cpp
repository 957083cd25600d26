// Lets a connection over several rails survive the loss of a rail, and ends it with the peer's.
#include <algorithm>

#include "transport/verbs/rail_connection.hpp"

namespace pgasdl {
namespace {

constexpr auto kTellAgain = std::chrono::milliseconds(20);
constexpr double kPartingSeconds = 1;  // an adapter that has not returned all by then is gone

double seconds_since(Clock::time_point moment) {
  return std::chrono::duration<double>(Clock::now() - moment).count();
}

}  // namespace

// A rail has failed to carry a request: the fault may be the rail's, the peer's, or the request's.
void RailConnection::suspect(std::size_t rail, const Error* error) {
  const RailLane& lane = lanes_[rail];
  const std::optional<VerbsBreak> broken = lane.rail().broken(queue_, peer_);
  const bool left = std::any_of(lanes_.begin(), lanes_.end(), [&](const RailLane& each) {
    return each.rail().round(peer_) == VerbsTransport::kRankLeft;
  });
  if (left) {
    return fail_locked(Error(ErrorKind::kPeerLost, text("rank ", peer_, " has left"), peer_), true);
  }
  if (!broken && error == nullptr) {
    return fail_locked(Error(ErrorKind::kPeerLost,
                             text("rank ", peer_, " has connected anew: what was under way to it ",
                                  "on queue ", queue_, " is lost"),
                             peer_),
                       false);
  }
  const Error why = broken ? broken->error : *error;
  const auto n_carrying = std::count_if(lanes_.begin(), lanes_.end(), [](const RailLane& each) {
    return each.course == RailLane::Course::kCarries;
  });
  if (n_carrying == 1 || (broken && broken->by_request)) return fail_locked(why, true);
  suspect_.emplace(Suspect{rail, why});
  suspected_.store(true, std::memory_order_relaxed);
}

void RailConnection::drop(std::size_t rail) {
  const std::lock_guard lock(mutex_);
  RailLane& lane = lanes_[rail];
  if (lane.course != RailLane::Course::kCarries) return;
  lane.course = RailLane::Course::kParting;
  lane.taken_there.reset();
  lane.since = lane.next_telling = Clock::now();
}

bool RailConnection::peer_dropped(std::size_t rail, std::uint32_t taken, bool known) {
  const std::lock_guard lock(mutex_);
  RailLane& lane = lanes_[rail];
  if (lane.being_dropped()) lane.taken_there = taken;
  return !known &&
         (lane.course == RailLane::Course::kTelling || lane.course == RailLane::Course::kDropped);
}

VerbsRailNews RailConnection::news_of(std::size_t rail) const {
  const std::lock_guard lock(mutex_);
  const RailLane& lane = lanes_[rail];
  const bool known = lane.taken_there.has_value() || lane.course == RailLane::Course::kDropped;
  return {static_cast<std::uint32_t>(rail), queue_, 0, lane.taken_here, known ? 1u : 0u};
}

bool RailConnection::look_after_drops(std::vector<std::size_t>& to_announce) {
  const std::lock_guard lock(mutex_);
  for (std::size_t rail = 0; rail < lanes_.size(); ++rail) {
    RailLane& lane = lanes_[rail];
    if (lane.course == RailLane::Course::kParting) {
      const bool at_once = seconds_since(lane.since) > kPartingSeconds;
      if (!lane.rail().parted(queue_, peer_, at_once, lane.taken_here)) continue;
      lane.course = RailLane::Course::kTelling;
      lane.next_telling = Clock::now();
    }
    if (lane.course != RailLane::Course::kTelling) continue;
    if (lane.next_telling <= Clock::now()) {
      to_announce.push_back(rail);
      lane.next_telling = Clock::now() + kTellAgain;
    }
    if (lane.taken_there) {
      settle(rail);
    } else if (seconds_since(lane.since) > kPartingSeconds + limits_.timeout_s) {
      lane.course = RailLane::Course::kDropped;
      fail_locked(Error(ErrorKind::kPeerLost,
                        text("rank ", peer_, " has not given up its end of the rail by ",
                             lane.rail().device().name(), " on queue ", queue_, ", which failed; ",
                             "ctx.reconnect(", peer_, ") tries again"),
                        peer_),
                  true);
    }
  }
  if (!fault_) push();
  return dropping();
}

// Neither end of the rail carries anything any more: posts again what has not arrived.
void RailConnection::settle(std::size_t rail) {
  RailLane& lane = lanes_[rail];
  lane.course = RailLane::Course::kDropped;
  std::vector<RailPiece> flags;
  lane.hand_back(
      *lane.taken_there, [&](const RailPiece& piece) { done(piece); },
      [&](RailPiece&& piece) {
        if (piece.kind == RailPiece::Kind::kAtomic) {
          under_way_.add_fault(
              Error(ErrorKind::kUnavailable,
                    text("an atomic at rank ", peer_, ": whether it was done is not known, since ",
                         "the rail that carried it, ", lane.rail().device().name(), ", failed")),
              peer_);
          return forget(piece);
        }
        if (piece.kind == RailPiece::Kind::kFence)
          return forget(piece);  // writes that are posted again get a new one
        if (piece.flag) {
          RailPiece flag{RailPiece::Kind::kFlag,
                         piece.number + (piece.kind == RailPiece::Kind::kWrite ? 1 : 0)};
          flag.flag = std::move(piece.flag);
          piece.flag.reset();
          flags.push_back(std::move(flag));
          if (piece.kind == RailPiece::Kind::kFlag) return;
          begin();
        }
        next_lane().add(std::move(piece));
      });
  held_.insert(held_.begin(), std::make_move_iterator(flags.begin()),
               std::make_move_iterator(flags.end()));
  if (!held_.empty() && !dropping()) fence_others(0);
}

void RailConnection::lose_all() {
  const auto lose = [&](const RailPiece& piece) { forget(piece); };
  for (RailLane& lane : lanes_) lane.clear(lose);
  for (const RailPiece& flag : held_) forget(flag);
  held_.clear();
}

void RailConnection::fail_locked(const Error& error, bool lasting) {
  if (n_pieces_.load(std::memory_order_relaxed) != 0) under_way_.add_fault(error, peer_);
  if (lasting && !fault_) fault_.emplace(error);
  lose_all();
}

void RailConnection::fail(const Error& error) {
  const std::lock_guard lock(mutex_);
  fail_locked(error, true);
}

void RailConnection::clear(std::uint32_t carrying) {
  const std::lock_guard lock(mutex_);
  lose_all();
  fault_.reset();
  suspect_.reset();
  for (std::size_t rail = 0; rail < lanes_.size(); ++rail) {
    lanes_[rail].course =
        (carrying >> rail & 1) != 0 ? RailLane::Course::kCarries : RailLane::Course::kDropped;
  }
}

void RailConnection::renew(std::size_t rail) {
  const std::lock_guard lock(mutex_);
  RailLane& lane = lanes_[rail];
  if (lane.size() != 0) {
    fail_locked(
        Error(ErrorKind::kPeerLost,
              text("rank ", peer_, " has connected anew: what was under way to it on queue ",
                   queue_, " is lost"),
              peer_),
        false);
  }
  lane.course = RailLane::Course::kCarries;
}

}  // namespace pgasdl

// The part of a connection of VerbsRails that one rail carries: pieces that wait for room, and
// pieces that were posted and are not known to be done. If a rail fails, it hands its pieces back,
// except those that its peer has reported as arrived.
//
// Both sides count a lane's flags (VerbsOptions::count_flags), because a flag that was raised must
// not be raised again. Whatever a rail posted before a flag that has arrived, has arrived, too.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "transport/verbs/verbs.hpp"

namespace pgasdl {

// A segment as each rail reaches it.
struct RailLocal {
  std::vector<LocalSegment> rails;
};
struct RailRemote {
  std::vector<RemoteSegment> rails;
};

// The flag of a read: the last of its pieces raises it.
struct RailReadFlag {
  std::shared_ptr<RailLocal> local;  // its memory
  FlagWord* word;
  std::uint32_t value;
  WakeWord* wake_word;
  std::size_t n_left;

  void raise() const {
    word->store(value, std::memory_order_release);
    if (wake_word != nullptr) wake_word->wake();
  }
};

struct RailFlag {
  std::shared_ptr<RailRemote> remote;
  std::uint32_t notification;
  std::uint32_t value;
  bool add;
};

// A piece is posted on one rail at a time: bytes, a flag, or a few bytes followed by the flag.
struct RailPiece {
  enum class Kind : std::uint8_t { kWrite, kRead, kAtomic, kFlag, kFence };
  Kind kind;
  // The number of this piece; for a flag or a fence, that of the first piece that may follow it.
  std::uint64_t number;
  bool is_numbered() const { return kind != Kind::kFlag && kind != Kind::kFence; }
  std::shared_ptr<RailLocal> local{};
  std::uint64_t local_offset = 0;
  std::shared_ptr<RailRemote> remote{};
  std::uint64_t remote_offset = 0;
  std::uint64_t bytes = 0;
  std::optional<RailFlag> flag{};
  std::shared_ptr<RailReadFlag> read_flag{};
  VerbsPosted posted{};  // once it was posted
};

// Guarded by its connection's lock.
class RailLane {
 public:
  RailLane(VerbsTransport& rail, std::size_t index, QueueId queue, Rank peer)
      : rail_(&rail), index_(index), queue_(queue), peer_(peer) {}

  // Whether the rail carries this connection; else how far dropping it has come.
  enum class Course : std::uint8_t { kCarries, kParting, kTelling, kDropped };
  Course course = Course::kCarries;
  std::uint32_t taken_here = 0;              // flags from the peer; from kTelling on
  std::optional<std::uint32_t> taken_there;  // likewise, as the peer reported
  Clock::time_point since;                   // when dropping it began
  Clock::time_point next_telling;

  bool being_dropped() const { return course == Course::kParting || course == Course::kTelling; }

  VerbsTransport& rail() const { return *rail_; }
  std::size_t size() const { return waiting_.size() + posted_.size(); }
  // Some write before `number`, or its fence, is not known to be done.
  bool has_before(std::uint64_t number) const;
  // There are writes since the last fence: even done, other adapters' flags may overtake them.
  bool needs_fence() const { return needs_fence_; }

  void add(RailPiece&& piece) {
    needs_fence_ = piece.kind == RailPiece::Kind::kWrite ||
                   (needs_fence_ && piece.kind != RailPiece::Kind::kFence);
    waiting_.push_back(std::move(piece));
  }
  // Posts what has room; throws if the rail's connection is broken.
  void push();
  // Notes an atomic that was posted.
  void posted(RailPiece&& piece) { posted_.push_back(std::move(piece)); }
  // Passes each finished piece to `done`; returns the fate of the first unfinished one.
  template <typename Done>
  VerbsFate reap(Done&& done);
  // Empties a lane whose connection is parted and whose peer took so many flags: pieces that
  // arrived go to `done`, and the rest to `again`, in order.
  template <typename Done, typename Again>
  void hand_back(std::uint32_t taken, Done&& done, Again&& again);
  // Passes all pieces to `drop`.
  template <typename Drop>
  void clear(Drop&& drop);

 private:
  bool post(RailPiece& piece);
  VerbsFate fate(RailPiece& piece) const { return rail_->fate(queue_, peer_, piece.posted); }

  VerbsTransport* rail_;
  std::size_t index_;
  QueueId queue_;
  Rank peer_;
  std::deque<RailPiece> waiting_;
  std::deque<RailPiece> posted_;
  bool needs_fence_ = false;
};

template <typename Done>
VerbsFate RailLane::reap(Done&& done) {
  while (!posted_.empty()) {
    const VerbsFate now = fate(posted_.front());
    if (now != VerbsFate::kDone) return now;
    done(posted_.front());
    posted_.pop_front();
  }
  return VerbsFate::kDone;
}

template <typename Done, typename Again>
void RailLane::hand_back(std::uint32_t taken, Done&& done, Again&& again) {
  std::size_t n_came = 0;
  for (std::size_t i = 0; i < posted_.size(); ++i) {
    const RailPiece& piece = posted_[i];
    if (piece.flag && static_cast<std::int32_t>(taken - piece.posted.flag) >= 0) n_came = i + 1;
  }
  for (std::size_t i = 0; i < posted_.size(); ++i) {
    const bool answers =
        posted_[i].kind == RailPiece::Kind::kRead || posted_[i].kind == RailPiece::Kind::kAtomic;
    const bool came = i < n_came && !answers;
    if (came || fate(posted_[i]) == VerbsFate::kDone) {
      done(posted_[i]);
    } else {
      again(std::move(posted_[i]));
    }
  }
  for (RailPiece& piece : waiting_) again(std::move(piece));
  posted_.clear();
  waiting_.clear();
}

template <typename Drop>
void RailLane::clear(Drop&& drop) {
  for (RailPiece& piece : posted_) drop(piece);
  for (RailPiece& piece : waiting_) drop(piece);
  posted_.clear();
  waiting_.clear();
}

}  // namespace pgasdl

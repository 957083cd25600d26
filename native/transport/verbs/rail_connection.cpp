#include "transport/verbs/rail_connection.hpp"

#include <algorithm>

namespace pgasdl {
namespace {

using Course = RailLane::Course;
using Kind = RailPiece::Kind;

std::shared_ptr<RailLocal> memory_of(const LocalSegment& segment) {
  const auto* held = static_cast<const std::shared_ptr<RailLocal>*>(segment.keep.get());
  if (held == nullptr || *held == nullptr) [[unlikely]] {
    throw Error(ErrorKind::kBuffer,
                "this memory was never registered with the RDMA devices: only a segment's can be "
                "sent or read into");
  }
  return *held;
}

std::shared_ptr<RailRemote> memory_of(const RemoteSegment& segment) {
  return std::static_pointer_cast<RailRemote>(segment.keep);
}

RailPiece piece_of(Kind kind, const Transfer& transfer) {
  RailPiece piece{kind, 0};
  piece.local = memory_of(*transfer.local);
  piece.local_offset = transfer.local_offset;
  piece.remote = memory_of(*transfer.remote);
  piece.remote_offset = transfer.remote_offset;
  piece.bytes = transfer.bytes;
  return piece;
}

std::vector<RailPiece> pieces_of(Kind kind, std::span<const Transfer> transfers) {
  std::vector<RailPiece> pieces;
  for (const Transfer& transfer : transfers) {
    if (transfer.bytes != 0) pieces.push_back(piece_of(kind, transfer));
  }
  return pieces;
}

}  // namespace

RailConnection::RailConnection(std::span<VerbsTransport* const> rails, RailQueue& under_way,
                               QueueId queue, Rank peer, std::uint32_t common,
                               std::uint32_t carrying, const Limits& limits)
    : under_way_(under_way), queue_(queue), peer_(peer), limits_(limits) {
  for (std::size_t rail = 0; rail < rails.size(); ++rail) {
    RailLane& lane = lanes_.emplace_back(*rails[rail], rail, queue, peer);
    if ((carrying >> rail & 1) != 0) continue;
    lane.course = (common >> rail & 1) != 0 ? Course::kParting : Course::kDropped;
    lane.since = Clock::now();
  }
}

// --- posting

bool RailConnection::dropping() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [](const RailLane& lane) { return lane.being_dropped(); });
}

RailLane& RailConnection::first_lane() {
  return *std::find_if(lanes_.begin(), lanes_.end(),
                       [](const RailLane& lane) { return lane.course == Course::kCarries; });
}

RailLane& RailConnection::next_lane() {
  do {
    turn_ = (turn_ + 1) % lanes_.size();
  } while (lanes_[turn_].course != Course::kCarries);
  return lanes_[turn_];
}

bool RailConnection::others_are_clear(std::uint64_t number) {
  const RailLane& first = first_lane();
  return std::none_of(lanes_.begin(), lanes_.end(), [&](const RailLane& lane) {
    return &lane != &first && lane.has_before(number);
  });
}

bool RailConnection::others_are_fenced() {
  const RailLane& first = first_lane();
  return std::none_of(lanes_.begin(), lanes_.end(), [&](const RailLane& lane) {
    return &lane != &first && lane.course == Course::kCarries && lane.needs_fence();
  });
}

void RailConnection::fence_others(std::uint64_t number) {
  const RailLane& first = first_lane();
  for (RailLane& lane : lanes_) {
    if (&lane == &first || lane.course != Course::kCarries || !lane.needs_fence()) continue;
    begin();
    lane.add(RailPiece{Kind::kFence, number});
  }
}

bool RailConnection::connecting() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(lanes_.begin(), lanes_.end(), [&](const RailLane& lane) {
    return lane.course == Course::kCarries && lane.rail().connecting(queue_, peer_);
  });
}

// Throws a lasting fault. True if all rails are connected, and there is room.
bool RailConnection::admits() {
  if (fault_) [[unlikely]]
    throw fault_->error();
  bool connected = true;
  for (std::size_t rail = 0; rail < lanes_.size(); ++rail) {
    const RailLane& lane = lanes_[rail];
    if (lane.course != Course::kCarries || !lane.rail().connecting(queue_, peer_)) continue;
    connected = false;
    try {
      (void)lane.rail().post_write(queue_, peer_, {}, nullptr);  // asks for a connection
    } catch (const Error& error) {
      suspect(rail, &error);
      if (fault_) throw fault_->error();
    }
  }
  return connected && n_pieces_.load(std::memory_order_relaxed) < limits_.most_pieces;
}

void RailConnection::begin() {
  n_pieces_.fetch_add(1, std::memory_order_relaxed);
  under_way_.began();
}

// Cuts a piece longer than a stripe into stripes, and gives each to its lane.
void RailConnection::cut(RailPiece piece, const std::shared_ptr<RailReadFlag>& read_flag) {
  const std::uint64_t end = piece.local_offset + piece.bytes;
  const bool whole = piece.bytes <= limits_.stripe;
  while (piece.local_offset < end) {
    RailPiece stripe = piece;
    stripe.bytes = std::min(end - piece.local_offset, limits_.stripe);
    stripe.number = number_++;
    stripe.read_flag = read_flag;
    if (read_flag != nullptr) ++read_flag->n_left;
    piece.local_offset += stripe.bytes;
    piece.remote_offset += stripe.bytes;
    window_.push_back(false);
    begin();
    (whole ? first_lane() : next_lane()).add(std::move(stripe));
  }
}

bool RailConnection::write(std::span<const Transfer> transfers, const RemoteFlag* flag) {
  const std::lock_guard lock(mutex_);
  if (!admits()) return false;
  std::vector<RailPiece> pieces = pieces_of(Kind::kWrite, transfers);
  std::optional<RailFlag> behind;
  if (flag != nullptr) {
    behind = RailFlag{memory_of(*flag->remote), flag->notification, flag->value, flag->add};
  }
  const bool one_message =
      pieces.empty() || (pieces.size() == 1 && pieces[0].bytes <= limits_.stripe);
  if (behind && one_message && held_.empty() && !dropping() && others_are_clear(number_) &&
      others_are_fenced()) {
    RailPiece piece = pieces.empty() ? RailPiece{Kind::kFlag, number_} : std::move(pieces[0]);
    if (piece.kind == Kind::kWrite) {
      piece.number = number_++;
      window_.push_back(false);
    }
    piece.flag = std::move(behind);
    begin();
    first_lane().add(std::move(piece));
  } else {
    for (RailPiece& piece : pieces) cut(std::move(piece), nullptr);
    if (behind) {
      if (!dropping()) fence_others(number_);
      RailPiece piece{Kind::kFlag, number_};
      piece.flag = std::move(behind);
      begin();
      held_.push_back(std::move(piece));
    }
  }
  push();
  return true;
}

bool RailConnection::read(std::span<const Transfer> transfers, const LocalFlag* flag,
                          WakeWord* wake_word) {
  const std::lock_guard lock(mutex_);
  if (!admits()) return false;
  std::vector<RailPiece> pieces = pieces_of(Kind::kRead, transfers);
  std::shared_ptr<RailReadFlag> read_flag;
  if (flag != nullptr) {
    FlagWord& word = flag->local->board[flag->notification];
    read_flag = std::make_shared<RailReadFlag>(
        RailReadFlag{memory_of(*flag->local), &word, flag->value, wake_word, 0});
    if (pieces.empty()) read_flag->raise();  // it need not wait
  }
  for (RailPiece& piece : pieces) cut(std::move(piece), read_flag);
  push();
  return true;
}

bool RailConnection::atomic(const Atomic& atomic) {
  const std::lock_guard lock(mutex_);
  if (fault_) throw fault_->error();
  RailLane& lane = lanes_[0];
  if (lane.course != Course::kCarries) {
    throw Error(ErrorKind::kUnavailable,
                text("atomics at rank ", peer_, ": they go by the first rail only, ",
                     lane.rail().device().name(), ", which was dropped; ctx.reconnect(", peer_,
                     ") takes it up again"));
  }
  if (n_pieces_.load(std::memory_order_relaxed) >= limits_.most_pieces) return false;
  RailPiece piece{Kind::kAtomic, number_};
  Atomic request = atomic;
  if (atomic.remote->data == nullptr) {  // else the memory is this rank's own
    piece.remote = memory_of(*atomic.remote);
    request.remote = &piece.remote->rails[0];
  }
  try {
    const auto posted = lane.rail().atomic(queue_, peer_, request);
    if (!posted) return false;
    piece.posted = *posted;
  } catch (const Error& error) {
    if (!lane.rail().broken(queue_, peer_)) throw;  // the request is at fault
    suspect(0, &error);
    if (fault_) throw fault_->error();
    return false;
  }
  ++number_;
  window_.push_back(false);
  begin();
  lane.posted(std::move(piece));
  return true;
}

// Releases held flags that may go, then posts what has room.
void RailConnection::push() {
  if (dropping()) return;
  while (!held_.empty() && others_are_clear(held_.front().number)) {
    first_lane().add(std::move(held_.front()));
    held_.pop_front();
  }
  for (std::size_t rail = 0; rail < lanes_.size(); ++rail) {
    if (lanes_[rail].course != Course::kCarries) continue;
    try {
      lanes_[rail].push();
    } catch (const Error& error) {
      suspect(rail, &error);
      if (fault_) return;
    }
  }
}

// --- completion

std::uint64_t RailConnection::mark() const {
  const std::lock_guard lock(mutex_);
  return number_;
}

std::optional<RailConnection::Suspect> RailConnection::progress() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return std::nullopt;
  for (std::size_t rail = 0; rail < lanes_.size(); ++rail) {
    if (lanes_[rail].course != Course::kCarries) continue;
    const VerbsFate now = lanes_[rail].reap([&](const RailPiece& piece) { done(piece); });
    if (now == VerbsFate::kGone || now == VerbsFate::kFailed) suspect(rail, nullptr);
  }
  if (!fault_) push();
  suspected_.store(false, std::memory_order_relaxed);
  return std::exchange(suspect_, std::nullopt);
}

void RailConnection::done(const RailPiece& piece) {
  if (piece.read_flag != nullptr && --piece.read_flag->n_left == 0) piece.read_flag->raise();
  forget(piece);
}

void RailConnection::forget(const RailPiece& piece) {
  if (piece.is_numbered()) {
    std::uint64_t done = done_.load(std::memory_order_relaxed);
    window_[piece.number - done] = true;
    for (; !window_.empty() && window_.front(); ++done) window_.pop_front();
    done_.store(done, std::memory_order_release);
  }
  n_pieces_.fetch_sub(1, std::memory_order_relaxed);
  under_way_.ended();
}

}  // namespace pgasdl

#include "transport/tcp/requests.hpp"

#include "sys/packed.hpp"
#include "transport/tcp/memory.hpp"

namespace pgasdl {
namespace {

constexpr std::size_t kDepth = 1024;       // frames that have not left
constexpr std::uint64_t kLong = 64 << 10;  // bytes of a write that asks by itself
constexpr std::uint64_t kMarkBits = 40;    // of a mark; above them is the generation
constexpr std::uint64_t kMarkMask = (1ull << kMarkBits) - 1;

}  // namespace

TcpRequests::TcpRequests(TcpSocket socket, int events, Rank peer, TcpQueue& queue,
                         std::uint32_t generation, const Listener& listener)
    : TcpStream(std::move(socket), events, peer),
      queue_(queue),
      generation_(generation),
      listener_(listener) {}

bool TcpRequests::admits() {
  if (renewed_) return false;
  if (ended()) throw Error(ErrorKind::kPeerLost, why_, peer());
  if (closing_.load(std::memory_order_relaxed)) return false;
  if (backlog() >= kDepth) flush_locked();
  return backlog() < kDepth;
}

void TcpRequests::post(const TcpFrame& frame, const std::byte* data,
                       std::shared_ptr<const void> keep) {
  ++n_posted_;
  queue_.n_posted.fetch_add(1, std::memory_order_relaxed);
  push(frame, data, std::move(keep));
}

bool TcpRequests::write(std::span<const Transfer> transfers, const RemoteFlag* flag) {
  const std::lock_guard lock(leave_mutex_);
  if (!admits()) return false;
  TcpFrame frame{.kind = TcpFrame::Kind::kWrite};
  const Transfer* last = nullptr;
  const auto post_last = [&] {
    if (last == nullptr) return post(frame, nullptr, nullptr);
    frame.memory = TcpMemories::number_of(*last->remote);
    frame.offset = last->remote_offset;
    frame.bytes = last->bytes;
    post(frame, last->local->data + last->local_offset, last->local->region);
  };
  std::uint64_t bytes = 0;
  for (const Transfer& transfer : transfers) {
    if (transfer.bytes == 0) continue;
    if (last != nullptr) post_last();
    last = &transfer;
    bytes += transfer.bytes;
  }
  if (flag != nullptr) {
    frame.flag = flag->add ? TcpFrame::Flag::kAdd : TcpFrame::Flag::kStore;
    frame.board = TcpMemories::number_of(*flag->remote);
    frame.notification = flag->notification;
    frame.value = flag->value;
  }
  if (last != nullptr || flag != nullptr) post_last();
  if (bytes >= kLong) ask_locked();
  flush_locked();
  return true;
}

bool TcpRequests::read(std::span<const Transfer> transfers, const LocalFlag* flag) {
  const std::lock_guard lock(leave_mutex_);
  if (!admits()) return false;
  const std::uint64_t first = n_posted_ + 1;
  const auto post_one = [&](const Transfer* transfer, const LocalFlag* raised) {
    Expected expected{};
    TcpFrame frame{.kind = TcpFrame::Kind::kRead};
    if (transfer != nullptr) {
      frame.memory = TcpMemories::number_of(*transfer->remote);
      frame.offset = transfer->remote_offset;
      frame.bytes = transfer->bytes;
      expected.target = transfer->local->data + transfer->local_offset;
      expected.bytes = transfer->bytes;
      expected.keep = transfer->local->region;
    }
    if (raised != nullptr) {
      expected.flag = &raised->local->board[raised->notification];
      expected.value = raised->value;
      expected.keep = raised->local->region;
    }
    expected.number = n_posted_ + 1;
    expected.first = first;
    expected_.push_back(std::move(expected));
    post(frame, nullptr, nullptr);
  };
  for (const Transfer& transfer : transfers) {
    if (transfer.bytes != 0) post_one(&transfer, nullptr);
  }
  if (flag != nullptr) post_one(nullptr, flag);
  ask_locked();
  flush_locked();
  return true;
}

bool TcpRequests::atomic(const Atomic& atomic) {
  const std::lock_guard lock(leave_mutex_);
  if (!admits()) return false;
  const bool adds = atomic.kind == Atomic::Kind::kFetchAdd;
  TcpFrame frame{.kind = adds ? TcpFrame::Kind::kAdd : TcpFrame::Kind::kSwap};
  frame.memory = TcpMemories::number_of(*atomic.remote);
  frame.offset = atomic.offset;
  frame.operand = atomic.operand;
  frame.compare = atomic.compare;
  expected_.push_back({nullptr, 0, atomic.old, nullptr, 0, nullptr, n_posted_ + 1, n_posted_ + 1});
  post(frame, nullptr, nullptr);
  ask_locked();
  flush_locked();
  return true;
}

void TcpRequests::drop(const std::string& why, bool renewed) {
  const std::lock_guard lock(leave_mutex_);
  dropped_ = true;
  renewed_ = renewed;
  end_locked(why);
}

bool TcpRequests::sent() {
  const std::lock_guard lock(leave_mutex_);
  if (backlog() != 0) flush_locked();
  return backlog() == 0;
}

void TcpRequests::ask() {
  const std::lock_guard lock(leave_mutex_);
  ask_locked();
  flush_locked();
}

void TcpRequests::ask_locked() {
  if (ended() || n_asked_ == n_posted_) return;
  n_asked_ = n_posted_;
  push({.kind = TcpFrame::Kind::kAsk});
}

std::uint64_t TcpRequests::mark() {
  const std::lock_guard lock(leave_mutex_);
  ask_locked();
  flush_locked();
  return generation_ << kMarkBits | (n_posted_ & kMarkMask);
}

bool TcpRequests::reached(std::uint64_t mark) const {
  if (ended() || mark >> kMarkBits != generation_) return true;
  return (n_taken_.load(std::memory_order_acquire) & kMarkMask) >= (mark & kMarkMask);
}

void TcpRequests::refused(const char* what) {
  const std::string why =
      text("rank ", peer(), " refused ", what, ": it has deleted its copy of the segment");
  queue_.faults.add(Error(ErrorKind::kSegment, why), peer());
}

void TcpRequests::over(std::uint64_t requests) {
  queue_.n_over.fetch_add(requests, std::memory_order_release);
}

// What the peer sent before by other connections may be here and not taken yet: among it, why it
// leaves. So the connection ends a little later.
void TcpRequests::closed(const std::string& why) {
  if (farewell() != 0) return end(why);
  if (!closing_.exchange(true)) listener_.closed(*this);
}

void TcpRequests::ended_locked(const std::string& why) {
  why_ = text("the connection with rank ", peer(), " ended: ", why);
  const std::uint64_t lost = n_posted_ - n_taken_.load(std::memory_order_relaxed);
  lost_answers_.store(!expected_.empty());  // before the fault
  if (lost != 0 && !dropped_) queue_.faults.add(Error(ErrorKind::kPeerLost, why_, peer()), peer());
  over(lost);
  expected_.clear();
  listener_.ended();
}

bool TcpRequests::Expected::answered_by(const TcpFrame& frame) const {
  using Kind = TcpFrame::Kind;
  if (old != nullptr) return frame.kind == Kind::kOld || frame.kind == Kind::kRefused;
  return (frame.kind == Kind::kData && frame.bytes == bytes) ||
         (frame.kind == Kind::kRefused && bytes != 0);
}

std::byte* TcpRequests::begin(const TcpFrame& frame, std::shared_ptr<const void>& keep) {
  using Kind = TcpFrame::Kind;
  if (frame.kind == Kind::kAcknowledge || frame.kind == Kind::kFarewell) return nullptr;
  const std::lock_guard lock(leave_mutex_);
  if (ended() || expected_.empty() || !expected_.front().answered_by(frame)) {
    throw Error(ErrorKind::kMismatch, "it answered what was not asked");
  }
  keep = expected_.front().keep;
  return expected_.front().target;
}

void TcpRequests::finish(const TcpFrame& frame) {
  if (frame.kind == TcpFrame::Kind::kFarewell) {
    farewell_.store(frame.operand, std::memory_order_relaxed);
    return;
  }
  std::shared_ptr<const void> keep;  // dropped without the lock
  {
    const std::lock_guard lock(leave_mutex_);
    if (ended()) return;
    if (frame.kind == TcpFrame::Kind::kAcknowledge) {
      const std::uint64_t before = n_taken_.load(std::memory_order_relaxed);
      // A read or an atomic that is acknowledged has been answered.
      const std::uint64_t most = expected_.empty() ? n_posted_ : expected_.front().number - 1;
      if (frame.operand < before || frame.operand > most) {
        throw_malformed("acknowledgement", peer());
      }
      if (frame.value != 0) refused("a write");
      n_taken_.store(frame.operand, std::memory_order_release);
      over(frame.operand - before);
    } else {
      Expected& first = expected_.front();
      if (frame.kind == TcpFrame::Kind::kRefused) {
        refused_ = first.number;
        refused("a read or an atomic");
      } else {
        if (first.old != nullptr) *first.old = frame.operand;
        // Bytes that were refused are not told of.
        if (first.flag != nullptr && refused_ < first.first)
          first.flag->store(first.value, std::memory_order_release);
      }
      keep = std::move(first.keep);
      expected_.pop_front();
    }
  }
  listener_.advanced();
}

}  // namespace pgasdl

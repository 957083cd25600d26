#include "transport/tcp/answers.hpp"

#include "sys/packed.hpp"
#include "transport/processor_atomic.hpp"
#include "transport/raise_flag.hpp"

namespace pgasdl {
namespace {

constexpr std::size_t kMost = 1 << 20;  // answers that have not left: the deepest queue's

}  // namespace

TcpAnswers::TcpAnswers(TcpSocket socket, int events, Rank peer, QueueId queue,
                       const TcpMemories& memories, const std::atomic<WakeWord*>& sleeper)
    : TcpStream(std::move(socket), events, peer),
      queue_(queue),
      memories_(memories),
      sleeper_(sleeper) {}

std::shared_ptr<const TcpMemory> TcpAnswers::checked(const TcpFrame& frame,
                                                     std::uint64_t bytes) const {
  auto memory = memories_.find(frame.memory);
  if (memory == nullptr || memory->data == nullptr) return nullptr;
  if (frame.offset > memory->bytes || bytes > memory->bytes - frame.offset) {
    throw Error(ErrorKind::kMismatch, text("rank ", peer(), " names bytes outside a segment"));
  }
  return memory;
}

std::byte* TcpAnswers::begin(const TcpFrame& frame, std::shared_ptr<const void>& keep) {
  using Kind = TcpFrame::Kind;
  if (frame.kind < Kind::kWrite || frame.kind > Kind::kAsk || frame.flag > TcpFrame::Flag::kAdd) {
    throw_malformed("request", peer());
  }
  if (frame.kind != Kind::kWrite || frame.bytes == 0) return nullptr;
  const auto memory = checked(frame, frame.bytes);
  keep = memory;
  return memory == nullptr ? nullptr : memory->data + frame.offset;
}

void TcpAnswers::finish(const TcpFrame& frame) {
  using Kind = TcpFrame::Kind;
  switch (frame.kind) {
    case Kind::kAsk:
      asked_ = true;
      return;
    case Kind::kWrite:
      if (frame.bytes != 0 && !stored()) {
        refused_ = true;
      } else if (frame.flag != TcpFrame::Flag::kNone) {
        raise(frame);
      }
      break;
    case Kind::kRead: {
      auto memory = frame.bytes == 0 ? nullptr : checked(frame, frame.bytes);
      if (frame.bytes != 0 && memory == nullptr) {
        answer({.kind = Kind::kRefused});
      } else {
        const std::byte* data = memory == nullptr ? nullptr : memory->data + frame.offset;
        answer({.kind = Kind::kData, .bytes = frame.bytes}, data, std::move(memory));
      }
      break;
    }
    case Kind::kAdd:
    case Kind::kSwap: {
      const auto memory = checked(frame, sizeof(std::uint64_t));
      if (frame.offset % sizeof(std::uint64_t) != 0) throw_malformed("atomic", peer());
      if (memory == nullptr) {
        answer({.kind = Kind::kRefused});
        break;
      }
      TcpFrame old{.kind = Kind::kOld};
      const bool adds = frame.kind == Kind::kAdd;
      processor_atomic({adds ? Atomic::Kind::kFetchAdd : Atomic::Kind::kCompareSwap, nullptr,
                        frame.offset, frame.operand, frame.compare, &old.operand},
                       memory->data);
      answer(old);
      break;
    }
    default:  // begin() refused it
      return;
  }
  ++n_taken_;
}

void TcpAnswers::raise(const TcpFrame& frame) const {
  const auto memory = memories_.find(frame.board);
  if (memory == nullptr) return;  // deleted: nobody waits for it
  // Marks of blocks come behind the notifications: see pgas/board.hpp.
  if (frame.notification >= memory->notifications) throw_malformed("notification", peer());
  raise_flag(memory->board[frame.notification], frame.value, frame.flag == TcpFrame::Flag::kAdd);
  if (WakeWord* sleeper = sleeper_.load(std::memory_order_acquire)) sleeper->wake();
}

void TcpAnswers::answer(TcpFrame frame, const std::byte* data, std::shared_ptr<const void> keep) {
  const std::lock_guard lock(leave_mutex_);
  if (backlog() >= kMost) return end_locked("it takes no answers");
  push(frame, data, std::move(keep));
  flush_locked();
}

void TcpAnswers::drained() {
  if (!std::exchange(asked_, false)) return;
  const std::uint32_t refused = std::exchange(refused_, false) ? 1 : 0;
  answer({.kind = TcpFrame::Kind::kAcknowledge, .operand = n_taken_, .value = refused});
}

void TcpAnswers::say_farewell(std::uint64_t word) {
  answer({.kind = TcpFrame::Kind::kFarewell, .operand = word});
}

}  // namespace pgasdl

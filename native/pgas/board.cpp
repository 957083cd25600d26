#include "pgas/board.hpp"

#include <algorithm>
#include <utility>

namespace pgasdl {
namespace {

bool scan(const FlagWord* board, std::uint32_t begin, std::uint32_t end, std::uint32_t& found) {
  for (std::uint32_t id = begin; id < end; ++id) {
    // Acquires only the word that is found, by a second load: sanitizers do not understand a fence.
    if (board[id].load(std::memory_order_relaxed) != 0 &&
        board[id].load(std::memory_order_acquire) != 0) {
      found = id;
      return true;
    }
  }
  return false;
}

std::uint32_t end_within(std::uint32_t begin, std::uint32_t size, std::uint32_t end) {
  return std::min(end, (begin / size + 1) * size);
}

}  // namespace

bool find_raised(const FlagWord* board, std::uint32_t notifications, std::uint32_t begin,
                 std::uint32_t end, std::uint32_t& found) {
  while (begin < end) {
    const std::uint32_t of_region = end_within(begin, kRegion, end);
    if (board[region_mark(notifications, begin)].load(std::memory_order_relaxed) == 0) {
      begin = of_region;
      continue;
    }
    while (begin < of_region) {
      const std::uint32_t of_block = end_within(begin, kBlock, end);
      if (board[block_mark(notifications, begin)].load(std::memory_order_relaxed) != 0 &&
          scan(board, begin, of_block, found)) {
        return true;
      }
      begin = of_block;
    }
  }
  return false;
}

void mark_raised(FlagWord* board, std::uint32_t notifications, std::uint32_t begin,
                 std::uint32_t end) {
  while (begin < end) {
    const std::uint32_t of_block = end_within(begin, kBlock, end);
    std::uint32_t found = 0;
    if (scan(board, begin, of_block, found)) set_marks(board, notifications, found);
    begin = of_block;
  }
}

struct ToldMarks::Told {
  Told(QueueId by, std::uint32_t over, std::size_t words)
      : queue(by), connection(over), bits(words) {}
  const QueueId queue;
  const std::uint32_t connection;
  std::vector<std::atomic<std::uint64_t>> bits;  // one for each mark
  Told* next = nullptr;
};

ToldMarks::~ToldMarks() {
  for (auto& peer : peers_) {
    for (Told* told = peer.load(); told != nullptr;) delete std::exchange(told, told->next);
  }
}

ToldMarks::Told* ToldMarks::find(Rank peer, QueueId queue, std::uint32_t connection) const {
  Told* told = peers_[static_cast<std::size_t>(peer)].load(std::memory_order_acquire);
  while (told != nullptr && (told->queue != queue || told->connection != connection)) {
    told = told->next;
  }
  return told;
}

bool ToldMarks::knows(Rank peer, QueueId queue, std::uint32_t connection,
                      std::uint32_t block) const {
  const Told* const told = find(peer, queue, connection);
  return told != nullptr &&
         (told->bits[block / 64].load(std::memory_order_relaxed) >> block % 64 & 1) != 0;
}

void ToldMarks::note(Rank peer, QueueId queue, std::uint32_t connection, std::uint32_t block,
                     std::uint32_t n_blocks) {
  Told* told = find(peer, queue, connection);
  if (told == nullptr) {
    // If another thread adds one, too, the marks noted in this one are sent a second time.
    told = new Told(queue, connection, (n_blocks + 63) / 64);
    auto& first = peers_[static_cast<std::size_t>(peer)];
    told->next = first.load(std::memory_order_relaxed);
    while (!first.compare_exchange_weak(told->next, told, std::memory_order_release,
                                        std::memory_order_relaxed)) {
    }
  }
  told->bits[block / 64].fetch_or(std::uint64_t{1} << block % 64, std::memory_order_relaxed);
}

}  // namespace pgasdl

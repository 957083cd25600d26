// Windows: made by all their members in one order, named, and freed by a later one.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "memory/region.hpp"
#include "transport/mpi/circle.hpp"

namespace pgasdl {
namespace {

// To zero. Shared memory forgets its pages, and those that nobody uses stay without.
void clear(std::byte* begin, std::uint64_t bytes) {
  const std::uint64_t pages = bytes / page_bytes() * page_bytes();
  if (pages == 0 || madvise(begin, pages, MADV_REMOVE) != 0) std::memset(begin, 0, pages);
  std::memset(begin + pages, 0, bytes - pages);
}

}  // namespace

MpiWindow::MpiWindow(std::shared_ptr<MpiWorld> owner) : world(std::move(owner)) {}
MpiWindow::~MpiWindow() { world->drop(*this); }

const std::vector<Rank>& MpiWindow::ranks() const { return circle->members; }
MpiWindowName MpiWindow::name() const { return {circle->key, number}; }

// MPI wants what is collective in the same order everywhere, and the threads of a rank that make
// windows of one circle come in any.
class MpiWorld::InOrder {
 public:
  InOrder(MpiCircle& circle, std::uint64_t number) : circle_(circle) {
    // All have come to those before, and are in MPI or on the way there; but for a thread of this
    // rank that gave up since the first member did not answer.
    auto deadline = Deadline::in(kPatience);
    while (circle_.n_made.load(std::memory_order_acquire) != number - 1) {
      if (circle_.making.load(std::memory_order_relaxed)) {
        deadline = Deadline::in(kPatience);
      } else if (deadline.passed()) {
        throw Error(ErrorKind::kSystem,
                    text("rank ", circle_.members.front(), " did not answer for ", kPatience,
                         " s while another thread gave up a segment of the same ranks, and counts "
                         "on it now: these ranks can make no more segments, end the job"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    circle_.making.store(true, std::memory_order_relaxed);
  }
  ~InOrder() {
    circle_.making.store(false, std::memory_order_relaxed);
    circle_.n_made.fetch_add(1, std::memory_order_release);
  }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;

 private:
  MpiCircle& circle_;
};

// All members are on the way here, and none leaves: nothing but MPI itself keeps us.
void MpiWorld::make(MpiWindow& window, LocalSegment& own, std::uint64_t number) {
  MpiCircle& circle = *window.circle;
  const Blocking blocking(*this, "the creation of a window");
  const InOrder in_order(circle, number);
  const auto lock = turn();
  if (circle.communicator == kNoHandle) {
    const std::vector<int> members(circle.members.begin(), circle.members.end());
    library_->check(
        library_->subset(communicator_, members.data(), static_cast<int>(members.size()),
                         static_cast<int>(circle.key & 0x3fff), &circle.communicator),
        "MPI_Comm_create_group", -1);
  }
  reclaim(circle, window.pending->told);
  window.number = number;
  allocate(window, own);
  for (std::size_t index = 0; index < circle.members.size(); ++index) {
    MpiWindow::Member& member = window.members[index];
    if (window.board == window.data) {
      member.base = library_->mapped(window.board, static_cast<int>(index));
    }
    window.helped |= !member.mapped();
  }
  if (window.helped) n_unmapped_.fetch_add(1, std::memory_order_relaxed);
  window.pending.reset();
}

// Before any peer can be told that the window is there: what comes for a name that nobody has is
// for a window that has gone.
void MpiWorld::give_name(MpiWindow& window, const LocalSegment& segment) {
  const std::lock_guard lock(mutex_);
  window.own = segment.data;
  window.own_bytes = segment.bytes;
  window.own_board = segment.board;
  window.own_notifications = segment.notifications;
  window.ready = true;
  own_[window.own] = &window;
  named_[window.name()] = &window;
  window.circle->live.insert(&window);
}

void MpiWorld::allocate(MpiWindow& window, LocalSegment& segment) {
  const MpiPending& pending = *window.pending;
  const MpiCircle& circle = *window.circle;
  const bool bound = std::any_of(pending.members.begin(), pending.members.end(),
                                 [](const MpiDescription& other) { return other.bound != 0; });
  const std::uint64_t page = page_bytes();
  const auto board_bytes = [&](const MpiDescription& of) {
    return std::uint64_t{of.notifications} * sizeof(FlagWord);
  };
  const std::uint64_t board_offset = bound ? 0 : round_up(segment.bytes, page);
  const std::uint64_t bytes =
      board_offset + board_bytes(pending.members[static_cast<std::size_t>(window.own_index)]);
  std::byte* base = segment.region->data();
  std::uint64_t shift = 0;
  if (pending.created) {
    if (!bound) {
      segment.region = Region::create_private(bytes);
      base = segment.region->data();
      segment.data = base;
      segment.board = reinterpret_cast<FlagWord*>(base + board_offset);
    }
    window.region = segment.region;
    library_->check(library_->create(base, bytes, circle.communicator, &window.board),
                    "MPI_Win_create", -1);
  } else {
    // A page more, to begin at one.
    void* memory = nullptr;
    const bool near =
        std::includes(near_.begin(), near_.end(), circle.members.begin(), circle.members.end());
    window.shared = near && !bound;
    library_->check(
        library_->allocate(bytes + page, near, circle.communicator, &memory, &window.board),
        "MPI_Win_allocate", -1);
    const auto at = reinterpret_cast<std::uint64_t>(memory);
    shift = round_up(at, page) - at;
    base = static_cast<std::byte*>(memory) + shift;
    clear(base, bytes);
    segment.board = reinterpret_cast<FlagWord*>(base + board_offset);
    if (!bound) segment.data = base;
    segment.region.reset();
  }
  library_->check(library_->open(window.board), "MPI_Win_lock_all", -1);
  window.data = window.board;
  if (bound) {
    library_->check(
        library_->create(segment.data, segment.bytes, circle.communicator, &window.data),
        "MPI_Win_create", -1);
    library_->check(library_->open(window.data), "MPI_Win_lock_all", -1);
  }
  give_name(window, segment);
  // Tells also that everybody's memory is zero by now, open, and can be named.
  std::vector<std::uint64_t> shifts(circle.members.size());
  library_->check(library_->allgather(shift, shifts.data(), circle.communicator), "MPI_Allgather",
                  -1);
  for (std::size_t index = 0; index < shifts.size(); ++index) {
    const std::uint64_t begin = shifts[index];
    const std::uint64_t after = bound ? 0 : round_up(pending.members[index].bytes, page);
    window.members[index].data_at = static_cast<MpiLibrary::Aint>(bound ? 0 : begin);
    window.members[index].board_at = static_cast<MpiLibrary::Aint>(begin + after);
  }
}

// Collective, and in the same order everywhere: of windows that every member has dropped.
void MpiWorld::reclaim(MpiCircle& circle, const std::set<std::uint64_t>& numbers) {
  for (const std::uint64_t number : numbers) {
    MpiCircle::Dropped dropped;
    {
      const std::lock_guard lock(mutex_);
      const auto found = circle.dropped.find(number);
      if (found == circle.dropped.end()) continue;
      dropped = found->second;
      circle.dropped.erase(found);
    }
    if (dropped.data != dropped.board) {
      library_->check(library_->close_and_free(&dropped.data), "MPI_Win_free", -1);
    }
    library_->check(library_->close_and_free(&dropped.board), "MPI_Win_free", -1);
  }
}

void MpiWorld::drop(MpiWindow& window) {
  if (!window.ready) return;
  const std::lock_guard lock(mutex_);
  const auto found = own_.find(window.own);
  if (found != own_.end() && found->second == &window) own_.erase(found);
  named_.erase(window.name());
  window.circle->live.erase(&window);
  window.circle->dropped[window.number] = {window.data, window.board, window.region};
  if (window.helped) n_unmapped_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace pgasdl

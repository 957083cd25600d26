// Windows: all members make them in one order and name them; making a later one frees them.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "memory/region.hpp"
#include "transport/mpi/host_turn.hpp"
#include "transport/mpi/window_group.hpp"

namespace pgasdl {
namespace {

// Sets to zero. Shared memory drops its pages, and unused ones stay unallocated.
void clear(std::byte* begin, std::uint64_t bytes) {
  const std::uint64_t pages = bytes / page_bytes() * page_bytes();
  if (pages == 0 || madvise(begin, pages, MADV_REMOVE) != 0) std::memset(begin, 0, pages);
  std::memset(begin + pages, 0, bytes - pages);
}

// Making a window takes milliseconds.
constexpr double kTurnPatience = 1;

// Ranks poll for flags by loads.
void require_unified(MpiLibrary& library, const MpiWindow& window) {
  for (const MpiLibrary::Handle handle : {window.board, window.data}) {
    bool unified = false;
    library.check(library.unified(handle, &unified), "MPI_Win_get_attr", -1);
    if (!unified) {
      throw Error(ErrorKind::kUnavailable,
                  "transport \"mpi\" is not available: windows of this MPI have two memories "
                  "(MPI_WIN_SEPARATE) here");
    }
  }
}

// Waits until the first member on every host has the turn there. No other member may be in the
// creation yet: Open MPI finishes creations that a process has begun in an order of its own.
void take_turn(MpiLibrary& library, const MpiWindowGroup& group, const std::set<Rank>& near,
               Rank self, std::optional<HostTurn>* turn) {
  const auto all_are_here = [&] {
    std::vector<std::uint64_t> unused(group.members.size());
    library.check(library.allgather(0, unused.data(), group.communicator), "MPI_Allgather", -1);
  };
  all_are_here();
  const auto first = std::find_if(group.members.begin(), group.members.end(),
                                  [&](Rank member) { return near.count(member) != 0; });
  if (*first == self) turn->emplace(kTurnPatience);
  all_are_here();
}

}  // namespace

MpiWindow::MpiWindow(std::shared_ptr<MpiWorld> owner) : world(std::move(owner)) {}
MpiWindow::~MpiWindow() { world->drop(*this); }

const std::vector<Rank>& MpiWindow::ranks() const { return group->members; }
MpiWindowName MpiWindow::name() const { return {group->key, number}; }

// MPI requires the same order of collective calls everywhere, but a rank's threads that make
// windows of one group arrive in any order.
class MpiWorld::InOrder {
 public:
  InOrder(MpiWindowGroup& group, std::uint64_t number) : group_(group) {
    // All ranks have reached the earlier windows, and are in MPI or about to be, unless a thread of
    // this rank gave up because the first member did not answer.
    auto deadline = Deadline::in(kPatience);
    while (group_.n_made.load(std::memory_order_acquire) != number - 1) {
      if (group_.making.load(std::memory_order_relaxed)) {
        deadline = Deadline::in(kPatience);
      } else if (deadline.passed()) {
        throw Error(ErrorKind::kSystem,
                    text("rank ", group_.members.front(), " did not answer for ", kPatience,
                         " s while another thread gave up a segment of the same ranks, and counts "
                         "on it now: these ranks can make no more segments, end the job"));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    group_.making.store(true, std::memory_order_relaxed);
  }
  ~InOrder() {
    group_.making.store(false, std::memory_order_relaxed);
    group_.n_made.fetch_add(1, std::memory_order_release);
  }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;

 private:
  MpiWindowGroup& group_;
};

// All members are on the way here and none leaves, so only MPI itself can delay this rank.
void MpiWorld::make(MpiWindow& window, LocalSegment& own, std::uint64_t number) {
  MpiWindowGroup& group = *window.group;
  const Blocking blocking(*this, "the creation of a window");
  const InOrder in_order(group, number);
  const auto lock = serialize();
  if (group.communicator == kNoHandle) {
    const std::vector<int> members(group.members.begin(), group.members.end());
    library_->check(
        library_->subset(communicator_, members.data(), static_cast<int>(members.size()),
                         static_cast<int>(group.key & 0x3fff), &group.communicator),
        "MPI_Comm_create_group", -1);
  }
  reclaim(window.pending->dropped_by_all);
  window.number = number;
  allocate(window, own);
  for (std::size_t index = 0; index < group.members.size(); ++index) {
    MpiWindow::Member& member = window.members[index];
    if (window.board == window.data) {
      member.base = library_->mapped(window.board, static_cast<int>(index));
    }
    window.helped |= !member.mapped();
    window.maps |= member.mapped() && static_cast<int>(index) != window.own_index;
  }
  if (window.helped) n_unmapped_.fetch_add(1, std::memory_order_relaxed);
  if (window.maps) n_mapped_.fetch_add(1, std::memory_order_relaxed);
  window.pending.reset();
}

// Before any peer can learn of the window: messages for an unknown name mean one that is gone.
void MpiWorld::give_name(MpiWindow& window, const LocalSegment& segment) {
  const std::lock_guard lock(mutex_);
  window.own = segment.data;
  window.own_bytes = segment.bytes;
  window.own_board = segment.board;
  window.own_notifications = segment.notifications;
  window.ready = true;
  own_[window.own] = &window;
  named_[window.name()] = &window;
  window.group->live.insert(&window);
}

void MpiWorld::allocate(MpiWindow& window, LocalSegment& segment) {
  const MpiPending& pending = *window.pending;
  const MpiWindowGroup& group = *window.group;
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
  std::optional<HostTurn> turn;
  if (library_->constants().windows_by_turns) take_turn(*library_, group, near_, rank_, &turn);
  if (pending.created) {
    if (!bound) {
      segment.region = Region::create_private(bytes);
      base = segment.region->data();
      segment.data = base;
      segment.board = reinterpret_cast<FlagWord*>(base + board_offset);
    }
    window.region = segment.region;
    library_->check(library_->create(base, bytes, group.communicator, &window.board),
                    "MPI_Win_create", -1);
  } else {
    // One page more, to begin at a page boundary. Whole pages: where neighbours do not map each
    // other, MPICH 4.0.2 takes the next one's memory to begin earlier than it does.
    void* memory = nullptr;
    const bool near =
        std::includes(near_.begin(), near_.end(), group.members.begin(), group.members.end());
    window.shared = near && !bound;
    library_->check(library_->allocate(round_up(bytes, page) + page, near, group.communicator,
                                       &memory, &window.board),
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
    library_->check(library_->create(segment.data, segment.bytes, group.communicator, &window.data),
                    "MPI_Win_create", -1);
    library_->check(library_->open(window.data), "MPI_Win_lock_all", -1);
  }
  turn.reset();
  require_unified(*library_, window);
  give_name(window, segment);
  // Tells also that everybody's memory is zero by now, open, and can be named.
  std::vector<std::uint64_t> shifts(group.members.size());
  library_->check(library_->allgather(shift, shifts.data(), group.communicator), "MPI_Allgather",
                  -1);
  for (std::size_t index = 0; index < shifts.size(); ++index) {
    const std::uint64_t begin = shifts[index];
    const std::uint64_t after = bound ? 0 : round_up(pending.members[index].bytes, page);
    window.members[index].data_at = static_cast<MpiLibrary::Aint>(bound ? 0 : begin);
    window.members[index].board_at = static_cast<MpiLibrary::Aint>(begin + after);
  }
}

// Collective, in the same order everywhere: frees windows that every member has dropped.
void MpiWorld::reclaim(const std::set<MpiWindowName>& names) {
  for (const MpiWindowName& name : names) {
    MpiWindowGroup::Dropped dropped;
    {
      const std::lock_guard lock(mutex_);
      const auto group = std::ranges::find_if(
          window_groups_, [&](const auto& known) { return known.second->key == name.group; });
      const auto found = group->second->dropped.find(name.number);
      if (found == group->second->dropped.end()) continue;
      dropped = found->second;
      group->second->dropped.erase(found);
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
  window.group->live.erase(&window);
  window.group->dropped[window.number] = {window.data, window.board, window.region};
  if (window.helped) n_unmapped_.fetch_sub(1, std::memory_order_relaxed);
  if (window.maps) n_mapped_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace pgasdl

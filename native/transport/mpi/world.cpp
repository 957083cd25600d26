#include "transport/mpi/world.hpp"

#include <algorithm>
#include <cstring>

#include "memory/region.hpp"
#include "sys/packed.hpp"
#include "transport/mpi/window_group.hpp"

namespace pgasdl {
namespace {

constexpr std::size_t kShortest = offsetof(MpiDescription, dropped);

std::uint64_t key_of(const std::vector<Rank>& members) {
  std::uint64_t key = 14695981039346656037u;  // FNV-1a
  for (Rank member : members) {
    for (int byte = 0; byte < 4; ++byte) {
      key = (key ^ ((static_cast<std::uint32_t>(member) >> (8 * byte)) & 255)) * 1099511628211u;
    }
  }
  return key;
}

MpiDescription parsed(Rank peer, const std::string& bytes) {
  MpiDescription theirs{};
  if (bytes.size() >= kShortest) std::memcpy(&theirs, bytes.data(), kShortest);
  if (bytes.size() < kShortest || theirs.n_dropped > kMostDropped ||
      bytes.size() != kShortest + sizeof(MpiWindowName) * theirs.n_dropped) {
    throw_malformed("segment description", peer);
  }
  std::memcpy(theirs.dropped, bytes.data() + kShortest, sizeof(MpiWindowName) * theirs.n_dropped);
  return theirs;
}

MpiWindow* window_of(const LocalSegment& segment) {
  return static_cast<MpiWindow*>(segment.keep.get());
}

std::int64_t now() { return Clock::now().time_since_epoch().count(); }

}  // namespace

MpiWorld::MpiWorld(std::unique_ptr<MpiLibrary> library, Handle communicator, Rank rank, Rank size,
                   std::set<Rank> near, bool messages_near, Threads threads)
    : library_(std::move(library)),
      communicator_(communicator),
      channel_(*library_, communicator,
               [this](const MpiHeader& header) { return place_of(header); }),
      rank_(rank),
      size_(size),
      near_(std::move(near)),
      messages_near_(messages_near),
      threads_(threads),
      main_(std::this_thread::get_id()),
      gone_(std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(size))) {}

MpiWorld::~MpiWorld() = default;

std::string MpiWorld::publish(LocalSegment& segment, std::span<const Rank> members, bool created) {
  std::vector<Rank> ranks(members.begin(), members.end());
  std::sort(ranks.begin(), ranks.end());
  MpiDescription mine{};
  mine.group = key_of(ranks);
  mine.bytes = segment.bytes;
  mine.notifications = segment.notifications;
  mine.bound = segment.bound;
  mine.created = created;
  if (ranks.size() > 1) {
    const std::lock_guard lock(mutex_);
    mine.ticket = ++n_published_;
    auto& group = window_groups_[ranks];
    if (group == nullptr) {
      group = std::make_unique<MpiWindowGroup>();
      group->members = ranks;
      group->key = mine.group;
      if (static_cast<Rank>(ranks.size()) == size_) group->communicator = communicator_;
    }
    auto window = std::make_shared<MpiWindow>(shared_from_this());
    window->group = group.get();
    window->members.resize(ranks.size());
    auto pending = std::make_unique<MpiPending>();
    pending->created = created;
    for (const MpiWindowGroup* within : groups_within(*group)) {
      for (const auto& [number, dropped] : within->dropped) {
        if (mine.n_dropped == kMostDropped) break;
        mine.dropped[mine.n_dropped++] = {within->key, number};
      }
    }
    const auto self = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    window->own_index = static_cast<int>(self);
    pending->members.resize(ranks.size());
    pending->members[static_cast<std::size_t>(self)] = mine;
    window->pending = std::move(pending);
    segment.keep = std::move(window);
  }
  std::string description = packed(mine);
  description.resize(kShortest + sizeof(MpiWindowName) * mine.n_dropped);
  return description;
}

RemoteSegment MpiWorld::attach(Rank peer, const std::string& description) {
  const MpiDescription theirs = parsed(peer, description);
  auto remote = std::make_shared<MpiRemote>();
  remote->description = description;
  RemoteSegment result;
  result.bytes = theirs.bytes;
  result.notifications = theirs.notifications;
  result.keep = std::move(remote);
  return result;
}

Outcome MpiWorld::settle(LocalSegment& own, std::span<const Rank> members,
                         std::span<RemoteSegment> remotes, Deadline deadline,
                         const std::function<void()>& help) {
  if (members.size() < 2) return Outcome::kDone;
  MpiWindow& window = *window_of(own);
  if (window.pending != nullptr) {
    if (!may_call()) {
      throw Error(ErrorKind::kUnavailable,
                  "segments are created by the thread that initialised MPI, as this MPI gave no "
                  "more than MPI_THREAD_FUNNELED");
    }
    if (window.pending->failure != nullptr) throw Error(*window.pending->failure);
    if (!window.pending->gathered) gather(window, own, members, remotes);
    const std::uint64_t number = meet(window, deadline, help);
    if (number == 0) return Outcome::kTimeout;
    make(window, own, number);
  }
  for (std::size_t index = 0; index < remotes.size(); ++index) {
    if (members[index] == rank_) continue;
    auto& remote = *static_cast<MpiRemote*>(remotes[index].keep.get());
    remote = {std::static_pointer_cast<MpiWindow>(own.keep), static_cast<int>(index), {}};
  }
  return Outcome::kDone;
}

void MpiWorld::leave(LocalSegment& own, const std::function<void()>& help) {
  MpiWindow* const window = window_of(own);
  if (window == nullptr || window->pending == nullptr || !window->pending->gathered) return;
  try {
    const std::uint64_t number = part(*window, help);
    if (number != 0) make(*window, own, number);
  } catch (const Error& error) {
    window->pending->failure = std::make_unique<Error>(error);
  }
}

void MpiWorld::gather(MpiWindow& window, LocalSegment& own, std::span<const Rank> members,
                      std::span<const RemoteSegment> remotes) {
  MpiPending& pending = *window.pending;
  for (std::size_t index = 0; index < members.size(); ++index) {
    const Rank peer = members[index];
    if (peer == rank_) continue;
    const auto& remote = *static_cast<const MpiRemote*>(remotes[index].keep.get());
    const MpiDescription theirs = parsed(peer, remote.description);
    if (theirs.group != window.group->key) {
      throw Error(ErrorKind::kMismatch,
                  text("rank ", peer, " describes a segment of other ranks than rank ", rank_));
    }
    if ((theirs.bound != 0) != own.bound) {
      throw Error(ErrorKind::kMismatch,
                  text("rank ", peer, " binds memory where this rank does not, or the reverse"));
    }
    pending.created |= theirs.created != 0;
    pending.members[index] = theirs;
  }
  const auto dropped_by = [&](Rank member, const MpiWindowName& name) {
    const auto at = std::ranges::find(members, member) - members.begin();
    const MpiDescription& theirs = pending.members[static_cast<std::size_t>(at)];
    return std::ranges::count(std::span(theirs.dropped, theirs.n_dropped), name) != 0;
  };
  const std::lock_guard lock(mutex_);
  for (const MpiWindowGroup* within : groups_within(*window.group)) {
    for (const auto& [number, dropped] : within->dropped) {
      const MpiWindowName name{within->key, number};
      const auto by = [&](Rank member) { return dropped_by(member, name); };
      if (std::ranges::all_of(within->members, by)) pending.dropped_by_all.insert(name);
    }
  }
  pending.gathered = true;
}

// The group itself comes first. With mutex_ held.
std::vector<MpiWindowGroup*> MpiWorld::groups_within(const MpiWindowGroup& group) const {
  std::vector<MpiWindowGroup*> found;
  for (const auto& [members, other] : window_groups_) {
    if (std::ranges::includes(group.members, members)) found.push_back(other.get());
  }
  std::stable_partition(found.begin(), found.end(),
                        [&](const auto* other) { return other == &group; });
  return found;
}

void MpiWorld::retract(const LocalSegment& segment) {
  const MpiWindow* const window = window_of(segment);
  if (window == nullptr || window->pending == nullptr || !window->pending->gathered) return;
  const std::lock_guard lock(channel_mutex_);
  meetings_.erase(window->pending->meeting(*window->group));
}

MpiWindow* MpiWorld::own_window(const std::byte* data) const {
  const std::lock_guard lock(mutex_);
  const auto found = own_.find(data);
  return found == own_.end() ? nullptr : found->second;
}

void MpiWorld::finish(double seconds) {
  if (size_ == 1 || !may_call()) return;
  try {
    const auto collect = [this] {
      const auto lock = serialize();
      while (receive()) {
      }
    };
    const auto deadline = Deadline::in(seconds);
    meet_all(deadline, collect);
    do {
      collect();
    } while (receiving() && !deadline.passed());
    if (receiving()) return;  // their data still arrive in windows
    const auto lock = serialize();
    // Groups in the same order everywhere, so that any two ranks free shared windows in one order.
    for (auto& [members, group] : window_groups_) {
      std::map<std::uint64_t, MpiWindowGroup::Dropped> all = group->dropped;
      for (const MpiWindow* window : group->live) {
        all[window->number] = {window->data, window->board, window->region};
      }
      group->dropped = all;
      group->live.clear();
      std::set<MpiWindowName> names;
      for (const auto& [number, dropped] : all) names.insert({group->key, number});
      reclaim(names);
    }
  } catch (const Error&) {
    // Some rank ended in another way: the windows end with the process.
  }
}

MpiWorld::Blocking::Blocking(MpiWorld& world, const char* call) : world_(&world) {
  std::int64_t nobody = 0;
  if (!world.blocked_since_.compare_exchange_strong(nobody, now())) {
    world_ = nullptr;  // another thread is in such a call, which is watched
    return;
  }
  world.blocked_in_.store(call, std::memory_order_release);
}

MpiWorld::Blocking::~Blocking() {
  if (world_ == nullptr) return;
  world_->blocked_in_.store(nullptr, std::memory_order_relaxed);
  world_->blocked_since_.store(0, std::memory_order_release);
}

const char* MpiWorld::stuck(double seconds) const {
  const std::int64_t since = blocked_since_.load(std::memory_order_acquire);
  if (since == 0) return nullptr;
  const std::chrono::duration<double> limit(seconds);
  if (Clock::duration(now() - since) < limit) return nullptr;
  return blocked_in_.load(std::memory_order_acquire);
}

}  // namespace pgasdl

#include "transport/mpi_world.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "memory/region.hpp"

namespace pgasdl {
namespace {

// A description has to fit into a slot of the group's exchange.
constexpr std::size_t kMostTold = 64;
constexpr MpiLibrary::Handle kNone = 0;

struct Description {
  std::uint64_t circle;
  std::uint64_t bytes;
  std::uint64_t n_told;
  std::uint32_t notifications;
  std::uint32_t bound;
  std::uint32_t created;
  std::uint32_t padding;
  std::uint64_t told[kMostTold];  // windows of this circle that the sender has dropped
};
constexpr std::size_t kShortest = offsetof(Description, told);

std::uint64_t key_of(const std::vector<Rank>& members) {
  std::uint64_t key = 14695981039346656037u;  // FNV-1a
  for (Rank member : members) {
    for (int byte = 0; byte < 4; ++byte) {
      key = (key ^ ((static_cast<std::uint32_t>(member) >> (8 * byte)) & 255)) * 1099511628211u;
    }
  }
  return key;
}

// To zero. Shared memory forgets its pages, and those that nobody uses stay without.
void clear(std::byte* begin, std::uint64_t bytes) {
  const std::uint64_t pages = bytes / page_bytes() * page_bytes();
  if (pages == 0 || madvise(begin, pages, MADV_REMOVE) != 0) std::memset(begin, 0, pages);
  std::memset(begin + pages, 0, bytes - pages);
}

std::int64_t now() { return Clock::now().time_since_epoch().count(); }

}  // namespace

// Ranks that have segments together.
struct MpiCircle {
  struct Dropped {
    MpiLibrary::Handle data;
    MpiLibrary::Handle board;
    std::shared_ptr<Region> region;
  };
  std::vector<Rank> members;
  std::uint64_t key = 0;
  MpiLibrary::Handle communicator = kNone;  // made with the first window
  std::uint64_t next = 1;
  std::set<MpiWindow*> live;
  std::map<std::uint64_t, Dropped> dropped;
};

// A segment that is published and not yet attached by everybody.
struct MpiWorld::Pending {
  LocalSegment* segment;
  MpiCircle* circle;
  std::shared_ptr<MpiWindow> window;
  std::size_t left;
  bool created;
  std::set<std::uint64_t> told;  // what all so far have dropped
  std::vector<Description> others;
};

MpiWindow::~MpiWindow() { world->drop(*this); }

const std::vector<Rank>& MpiWindow::ranks() const { return circle->members; }
MpiWindowName MpiWindow::name() const { return {circle->key, number}; }

MpiWorld::MpiWorld(std::unique_ptr<MpiLibrary> library, Handle communicator, Rank rank, Rank size,
                   std::set<Rank> near, Threads threads)
    : library_(std::move(library)),
      communicator_(communicator),
      mail_(*library_, communicator),
      rank_(rank),
      size_(size),
      near_(std::move(near)),
      threads_(threads),
      main_(std::this_thread::get_id()) {}

MpiWorld::~MpiWorld() = default;

std::string MpiWorld::publish(LocalSegment& segment, std::span<const Rank> members, bool created) {
  std::vector<Rank> ranks(members.begin(), members.end());
  std::sort(ranks.begin(), ranks.end());
  Description mine{};
  mine.circle = key_of(ranks);
  mine.bytes = segment.bytes;
  mine.notifications = segment.notifications;
  mine.bound = segment.bound;
  mine.created = created;
  if (ranks.size() > 1) {
    const std::lock_guard lock(mutex_);
    auto& circle = circles_[ranks];
    if (circle == nullptr) {
      circle = std::make_unique<MpiCircle>();
      circle->members = ranks;
      circle->key = mine.circle;
      if (static_cast<Rank>(ranks.size()) == size_) circle->communicator = communicator_;
    }
    auto pending = std::make_unique<Pending>();
    pending->segment = &segment;
    pending->circle = circle.get();
    pending->window = std::make_shared<MpiWindow>(shared_from_this());
    pending->window->circle = circle.get();
    pending->window->members.resize(ranks.size());
    pending->left = ranks.size() - 1;
    pending->created = created;
    pending->others.resize(ranks.size());
    for (const auto& [number, dropped] : circle->dropped) {
      if (mine.n_told == kMostTold) break;
      mine.told[mine.n_told++] = number;
      pending->told.insert(number);
    }
    const auto self = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    pending->window->own_index = static_cast<int>(self);
    pending->others[static_cast<std::size_t>(self)] = mine;
    segment.keep = pending->window;
    pending_[mine.circle] = std::move(pending);
  }
  return std::string(reinterpret_cast<const char*>(&mine), kShortest + 8 * mine.n_told);
}

RemoteSegment MpiWorld::attach(Rank peer, const std::string& bytes, Deadline deadline,
                               const std::function<void()>& help) {
  Description theirs{};
  if (bytes.size() >= kShortest) std::memcpy(&theirs, bytes.data(), kShortest);
  if (bytes.size() < kShortest || theirs.n_told > kMostTold ||
      bytes.size() != kShortest + 8 * theirs.n_told) {
    throw Error(ErrorKind::kMismatch,
                text("malformed segment description from rank ", peer, ": other version?"));
  }
  std::memcpy(theirs.told, bytes.data() + kShortest, 8 * theirs.n_told);
  std::unique_ptr<Pending> complete;
  auto remote = std::make_shared<MpiRemote>();
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(theirs.circle);
    if (found == pending_.end()) {
      throw Error(ErrorKind::kMismatch,
                  text("rank ", peer, " describes a segment of a group that creates none here"));
    }
    Pending& pending = *found->second;
    const auto& members = pending.circle->members;
    const auto at = std::find(members.begin(), members.end(), peer);
    if (at == members.end()) {
      throw Error(ErrorKind::kMismatch, text("rank ", peer, " is not in the segment's group"));
    }
    const auto index = static_cast<std::size_t>(at - members.begin());
    pending.others[index] = theirs;
    pending.created |= theirs.created != 0;
    std::erase_if(pending.told, [&](std::uint64_t number) {
      return std::find(theirs.told, theirs.told + theirs.n_told, number) ==
             theirs.told + theirs.n_told;
    });
    *remote = {pending.window, static_cast<int>(index)};
    if (--pending.left == 0) {
      complete = std::move(found->second);
      pending_.erase(found);
    }
  }
  if (complete != nullptr) settle(*complete, deadline, help);
  RemoteSegment result;
  result.bytes = theirs.bytes;
  result.notifications = theirs.notifications;
  result.keep = std::move(remote);
  return result;
}

void MpiWorld::retract(const LocalSegment& segment) {
  const std::lock_guard lock(mutex_);
  std::erase_if(pending_, [&](const auto& entry) { return entry.second->segment == &segment; });
}

MpiWindow* MpiWorld::own_window(const std::byte* data) const {
  const std::lock_guard lock(mutex_);
  const auto found = own_.find(data);
  return found == own_.end() ? nullptr : found->second;
}

bool MpiWorld::send(Rank peer, const MpiLetter& letter, const std::byte* bytes) {
  const std::lock_guard lock(mail_mutex_);
  return mail_.send(peer, letter, bytes);
}

bool MpiWorld::answered(Rank peer, std::uint64_t& question) {
  const std::lock_guard lock(mail_mutex_);
  if (question == 0) {
    MpiLetter letter{};
    letter.kind = MpiLetter::Kind::kAsk;
    letter.question = questions_ + 1;
    if (!mail_.send(peer, letter, nullptr)) return false;
    question = ++questions_;
  }
  return answers_[peer] >= question;
}

bool MpiWorld::receive() {
  const std::unique_lock mine(mail_mutex_, std::try_to_lock);
  if (!mine.owns_lock()) return false;  // another thread is at it
  std::erase_if(unanswered_, [&](const auto& asked) {
    MpiLetter letter{};
    letter.kind = MpiLetter::Kind::kAnswer;
    letter.question = asked.second;
    try {
      return mail_.send(asked.first, letter, nullptr);
    } catch (const Error&) {
      return true;  // of a peer that is lost
    }
  });
  const MpiLetter* letter = mail_.receive();
  if (letter == nullptr) return false;
  if (letter->kind == MpiLetter::Kind::kAsk) {
    unanswered_.emplace_back(mail_.sender(), letter->question);
    return true;
  }
  if (letter->kind == MpiLetter::Kind::kAnswer) {
    answers_[mail_.sender()] = letter->question;
    return true;
  }
  const std::lock_guard lock(mutex_);
  // Of windows that are not there any more nobody looks at the memory.
  const auto data = named_.find(letter->data);
  if (letter->bytes > 0 && data != named_.end()) {
    std::memcpy(data->second->own + letter->offset, mail_.bytes(), letter->bytes);
  }
  const auto board = named_.find(letter->board);
  if (board != named_.end()) {
    FlagWord& flag = board->second->own_board[letter->notification];
    flag.store(letter->value, std::memory_order_release);
  }
  return true;
}

// Everybody is on the way to what all must call at once; whoever is not, by the deadline, ends it
// for us. Only then does nothing else than MPI itself keep us in there.
void MpiWorld::meet(Handle communicator, Deadline deadline, const std::function<void()>& help) {
  Handle request = kNone;
  {
    const auto lock = turn();
    library_->check(library_->ibarrier(communicator, &request), "MPI_Ibarrier", -1);
  }
  for (;;) {
    bool done = false;
    {
      const auto lock = turn();
      library_->check(library_->test(&request, &done), "MPI_Ibarrier", -1);
    }
    if (done) return;
    if (deadline.passed()) {
      throw Error(ErrorKind::kSystem,
                  text("rank ", rank_,
                       ": a member of the group described its segment, but does not come to make "
                       "the MPI window: see its error"));
    }
    help();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void MpiWorld::settle(Pending& pending, Deadline deadline, const std::function<void()>& help) {
  if (!may_call()) {
    throw Error(ErrorKind::kUnavailable,
                "segments are created by the thread that initialised MPI, as this MPI gave no more "
                "than MPI_THREAD_FUNNELED");
  }
  MpiCircle& circle = *pending.circle;
  if (circle.communicator == kNone) {
    const auto lock = turn();
    const Blocking blocking(*this, "MPI_Comm_create_group");
    const std::vector<int> members(circle.members.begin(), circle.members.end());
    library_->check(
        library_->subset(communicator_, members.data(), static_cast<int>(members.size()),
                         static_cast<int>(circle.key & 0x3fff), &circle.communicator),
        "MPI_Comm_create_group", -1);
  }
  meet(circle.communicator, deadline, help);
  const auto lock = turn();
  const Blocking blocking(*this, "the creation of a window");
  reclaim(circle, pending.told);
  allocate(pending);
  MpiWindow& window = *pending.window;
  int unmapped = 0;
  for (std::size_t index = 0; index < circle.members.size(); ++index) {
    MpiWindow::Member& member = window.members[index];
    const int target = static_cast<int>(index);
    if (window.board == window.data) member.base = library_->mapped(window.board, target);
    unmapped += member.mapped() ? 0 : 1;
  }
  const std::lock_guard mine(mutex_);
  if (unmapped > 0) n_unmapped_.fetch_add(1, std::memory_order_relaxed);
  window.number = circle.next++;
  window.own = pending.segment->data;
  window.own_board = pending.segment->board;
  window.ready = true;
  own_[window.own] = &window;
  named_[window.name()] = &window;
  circle.live.insert(&window);
}

void MpiWorld::allocate(Pending& pending) {
  MpiWindow& window = *pending.window;
  LocalSegment& segment = *pending.segment;
  const MpiCircle& circle = *pending.circle;
  const bool bound = std::any_of(pending.others.begin(), pending.others.end(),
                                 [](const Description& other) { return other.bound != 0; });
  const std::uint64_t page = page_bytes();
  const auto board_bytes = [&](const Description& of) {
    return std::uint64_t{of.notifications} * sizeof(FlagWord);
  };
  const std::uint64_t board_offset = bound ? 0 : round_up(segment.bytes, page);
  const std::uint64_t bytes =
      board_offset + board_bytes(pending.others[static_cast<std::size_t>(window.own_index)]);
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
  // Tells also that everybody's memory is zero by now, and open.
  std::vector<std::uint64_t> shifts(circle.members.size());
  library_->check(library_->allgather(shift, shifts.data(), circle.communicator), "MPI_Allgather",
                  -1);
  for (std::size_t index = 0; index < shifts.size(); ++index) {
    const std::uint64_t begin = shifts[index];
    const std::uint64_t after = bound ? 0 : round_up(pending.others[index].bytes, page);
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
  const bool unmapped = std::any_of(window.members.begin(), window.members.end(),
                                    [](const auto& member) { return !member.mapped(); });
  if (unmapped) n_unmapped_.fetch_sub(1, std::memory_order_relaxed);
}

void MpiWorld::finish(double seconds) {
  if (size_ == 1 || !may_call()) return;
  try {
    const auto collect = [this] {
      const auto lock = turn();
      while (receive()) {
      }
    };
    meet(communicator_, Deadline::in(seconds), collect);
    collect();
    const auto lock = turn();
    // Circles in the same order everywhere: those two ranks share come in one order on both.
    for (auto& [members, circle] : circles_) {
      std::map<std::uint64_t, MpiCircle::Dropped> all = circle->dropped;
      for (const MpiWindow* window : circle->live) {
        all[window->number] = {window->data, window->board, window->region};
      }
      circle->dropped = all;
      circle->live.clear();
      std::set<std::uint64_t> numbers;
      for (const auto& [number, dropped] : all) numbers.insert(number);
      reclaim(*circle, numbers);
    }
  } catch (const Error&) {
    // Somebody ended another way: what there is goes with the process.
  }
}

MpiWorld::Blocking::Blocking(MpiWorld& world, const char* call) : world_(&world) {
  std::int64_t nobody = 0;
  if (!world.blocked_since_.compare_exchange_strong(nobody, now())) {
    world_ = nullptr;  // another thread is in one: that is watched
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

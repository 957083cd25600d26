// The parts of MPI that a process has beside a context: a communicator, and windows over segments'
// memory.
//
// A window is made collectively by a segment's group, when every member is there (meeting.cpp),
// and freed when a later one is made and every member has dropped it: MPI knows no other way. It
// outlives its context, as views of its memory may, so a world is kept from context to context.
//
// A segment's data and board are one window that MPI allocated, with shared memory inside a machine
// where the library does that; memory that the program bound, and everything where allocated
// windows are not wanted, has windows that are made over memory that is there.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "transport/mpi/channel.hpp"
#include "transport/mpi/library.hpp"
#include "transport/transport.hpp"

namespace pgasdl {

class MpiWorld;
struct MpiWindowGroup;
struct MpiPending;

// A segment, at all its members.
class MpiWindow : public std::enable_shared_from_this<MpiWindow> {
 public:
  using Handle = MpiLibrary::Handle;
  explicit MpiWindow(std::shared_ptr<MpiWorld> owner);
  ~MpiWindow();

  struct Member {
    MpiLibrary::Aint data_at = 0;  // displacements in the two windows
    MpiLibrary::Aint board_at = 0;
    std::byte* base = nullptr;  // of the one window, if it is mapped here: then a put is stores
    bool mapped() const { return base != nullptr; }
    std::byte* data() const { return base + data_at; }
    FlagWord* board() const { return reinterpret_cast<FlagWord*>(base + board_at); }
  };
  const std::shared_ptr<MpiWorld> world;  // outlives its windows
  Handle data = 0;
  Handle board = 0;     // may be the same one
  bool ready = false;   // made, and named
  bool helped = false;  // its traffic moves only when we call MPI
  bool shared = false;  // mapped by all members, so that atomics are the processor's
  // Our memory that MPI made the window over: messages from peers may arrive until it is freed.
  std::shared_ptr<Region> region;
  std::uint64_t number = 0;  // in its group, the same on every member
  MpiWindowGroup* group = nullptr;
  std::byte* own = nullptr;  // this rank's data, and board
  std::uint64_t own_bytes = 0;
  FlagWord* own_board = nullptr;
  std::uint32_t own_notifications = 0;
  int own_index = -1;
  std::vector<Member> members;
  const Member& member(int index) const { return members[static_cast<std::size_t>(index)]; }
  const std::vector<Rank>& ranks() const;  // of the members
  MpiWindowName name() const;
  std::unique_ptr<MpiPending> pending;  // until it is made
};

// The content of RemoteSegment::keep.
struct MpiRemote {
  std::shared_ptr<MpiWindow> window;  // once all members' are known
  int index = -1;                     // of the peer among its members
  std::string description;            // until then
  const MpiWindow::Member& member() const { return window->member(index); }
};

class MpiWorld : public std::enable_shared_from_this<MpiWorld> {
 public:
  using Handle = MpiLibrary::Handle;
  // Which threads may call MPI: the one that initialised it, any one at a time, any.
  enum class Threads : std::uint8_t { kOne, kSerialized, kMultiple };

  // `communicator`: the library's own, whose ranks are those of the job. `near`: those of this
  // machine, this one too; `messages_near`: the library sends to them through memory. Called by the
  // thread that may call MPI.
  MpiWorld(std::unique_ptr<MpiLibrary> library, Handle communicator, Rank rank, Rank size,
           std::set<Rank> near, bool messages_near, Threads threads);
  ~MpiWorld();

  MpiLibrary& library() { return *library_; }
  Rank rank() const { return rank_; }
  Rank size() const { return size_; }
  const std::set<Rank>& near() const { return near_; }
  bool through_memory(Rank peer) const { return messages_near_ && near_.count(peer) != 0; }
  Handle communicator() const { return communicator_; }

  bool one_thread() const { return threads_ == Threads::kOne; }
  // This thread may call MPI, with serialize() held.
  bool may_call() const { return threads_ != Threads::kOne || std::this_thread::get_id() == main_; }
  // One thread at a time, where MPI wants it so.
  [[nodiscard]] std::unique_lock<std::mutex> serialize() {
    return threads_ == Threads::kMultiple ? std::unique_lock<std::mutex>()
                                          : std::unique_lock(serial_);
  }
  // False if another thread is inside: whoever only helps on does not wait for it.
  [[nodiscard]] bool try_serialize(std::unique_lock<std::mutex>& lock) {
    if (threads_ == Threads::kMultiple) return true;
    lock = std::unique_lock(serial_, std::try_to_lock);
    return lock.owns_lock();
  }
  // How data go to `peer`. Short ones with their flag in its message: through memory, copying costs
  // more than a second message from fewer bytes on. Long ones as messages of their own, or by puts
  // where the library's are faster.
  std::uint32_t most_within(Rank peer) const {
    return through_memory(peer) ? kMostThroughMemory : MpiChannel::kMostBytes;
  }
  bool sends_long(Rank peer) const {
    return !library_->constants().far_puts || through_memory(peer);
  }
  // With serialize() held: messages to peers, and what came of theirs, put where it belongs.
  bool send(Rank peer, const MpiHeader& header, const std::byte* bytes, Handle* request);
  bool receive();          // true: something came
  bool receiving() const;  // parts of it are still to come
  // Asks whether all messages so far of a queue to `peer` were put where they belong; `question` is
  // 0 until it could be sent. True: they were.
  bool answered(QueueId queue, Rank peer, std::uint64_t& question);

  // `created`: no memory of MPI's.
  std::string publish(LocalSegment& segment, std::span<const Rank> members, bool created);
  static RemoteSegment attach(Rank peer, const std::string& description);
  // `help` is called while others are waited for: what they wait for may still be on its way. It
  // throws if they never come.
  Outcome settle(LocalSegment& own, std::span<const Rank> members, std::span<RemoteSegment> remotes,
                 Deadline deadline, const std::function<void()>& help);
  void leave(LocalSegment& own, const std::function<void()>& help);
  void retract(const LocalSegment& segment);
  // A context begins: whoever failed in one before may have come again.
  void begin() {
    for (Rank peer = 0; peer < size_; ++peer) gone_[static_cast<std::size_t>(peer)].store(false);
  }
  // No window is begun with `peer` any more, in this context.
  void lost(Rank peer) { gone_[static_cast<std::size_t>(peer)].store(true); }
  // The window of this rank's own copy; null while it is no other's.
  MpiWindow* own_window(const std::byte* data) const;
  // There are windows whose traffic moves only when we call MPI.
  bool needs_help() const { return n_unmapped_.load(std::memory_order_relaxed) != 0; }

  // While it lives, this thread is in a call that may wait for a peer. If that peer is lost, MPI
  // may never return from it: then stuck() names the call.
  class Blocking {
   public:
    Blocking(MpiWorld& world, const char* call);
    ~Blocking();
    Blocking(const Blocking&) = delete;
    Blocking& operator=(const Blocking&) = delete;

   private:
    MpiWorld* world_;
  };
  const char* stuck(double seconds) const;

  // At the end of the process, when no memory is looked at any more: all windows are freed if every
  // rank comes here in time.
  void finish(double seconds);

 private:
  friend class MpiWindow;
  static constexpr std::uint32_t kMostThroughMemory = 4 << 10;
  class InOrder;
  // The members that are there to make a window, as the first of them knows, and what the others
  // heard.
  struct Meeting {
    bool here = false;           // this rank, until it leaves
    bool left = false;           // the first member knows that it left
    std::uint64_t number = 0;    // once all were there at once: of the group's windows, from 1
    std::vector<Rank> expected;  // at the first member
    std::set<Rank> came;
  };
  void gather(MpiWindow& window, LocalSegment& own, std::span<const Rank> members,
              std::span<const RemoteSegment> remotes);
  // The meeting's number, or 0: not all were there at once before the deadline.
  std::uint64_t meet(const MpiWindow& window, Deadline deadline, const std::function<void()>& help);
  std::uint64_t part(const MpiWindow& window, const std::function<void()>& help);
  template <typename Until>
  bool listen(const MpiWindowName& name, Until&& until, Deadline deadline,
              const std::function<void()>& help);
  void make(MpiWindow& window, LocalSegment& own, std::uint64_t number);
  void meet_all(Deadline deadline, const std::function<void()>& help);
  // With channel_mutex_ held.
  MpiPlace place_of(const MpiHeader& header) const;
  void deliver(const MpiHeader& header);
  void hear(const MpiHeader& header, Rank sender);
  void announce(Rank peer, MpiHeader::Kind kind, const MpiWindowName& meeting,
                std::uint64_t number);
  void open(const MpiWindowName& name, Meeting& meeting);
  void send_unsent();
  void allocate(MpiWindow& window, LocalSegment& segment);
  void give_name(MpiWindow& window, const LocalSegment& segment);
  std::vector<MpiWindowGroup*> groups_within(const MpiWindowGroup& group) const;
  void reclaim(const std::set<MpiWindowName>& names);
  void drop(MpiWindow& window);

  const std::unique_ptr<MpiLibrary> library_;
  const Handle communicator_;
  mutable std::mutex channel_mutex_;  // of what follows; not held in calls of MPI that wait
  MpiChannel channel_;
  std::uint64_t questions_ = 0;
  std::map<Rank, std::uint64_t> answers_;           // the last of each peer
  std::vector<std::pair<Rank, MpiHeader>> unsent_;  // without bytes, in their order
  std::map<MpiWindowName, Meeting> meetings_;
  std::map<std::uint64_t, std::uint64_t> n_opened_;  // that this rank comes first in, by group
  const Rank rank_;
  const Rank size_;
  const std::set<Rank> near_;
  const bool messages_near_;
  const Threads threads_;
  const std::thread::id main_;
  std::mutex serial_;
  mutable std::mutex mutex_;  // of what follows; never held while MPI waits
  std::map<std::vector<Rank>, std::unique_ptr<MpiWindowGroup>> window_groups_;
  std::uint64_t n_published_ = 0;
  std::map<const std::byte*, MpiWindow*> own_;
  std::map<MpiWindowName, MpiWindow*> named_;
  const std::unique_ptr<std::atomic<bool>[]> gone_;
  std::atomic<int> n_unmapped_{0};
  std::atomic<const char*> blocked_in_{nullptr};
  std::atomic<std::int64_t> blocked_since_{0};
};

}  // namespace pgasdl

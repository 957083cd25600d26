// The MPI state of a process beyond a context: a communicator, and windows over segments' memory.
//
// A segment's group makes a window collectively when every member is there (meeting.cpp). MPI can
// free it only collectively, so that happens when a later window is made and every member has
// dropped the old one. A window outlives its context, as views of its memory may, so one world
// serves context after context.
//
// A segment's data and board are one window that MPI allocated, with shared memory inside a machine
// if the library offers that. Memory that the program bound, and all memory where allocated windows
// are not wanted, gets windows made over existing memory.
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

// A segment on all its members.
class MpiWindow : public std::enable_shared_from_this<MpiWindow> {
 public:
  using Handle = MpiLibrary::Handle;
  explicit MpiWindow(std::shared_ptr<MpiWorld> owner);
  ~MpiWindow();

  struct Member {
    MpiLibrary::Aint data_at = 0;  // displacements in the two windows
    MpiLibrary::Aint board_at = 0;
    std::byte* base = nullptr;  // of the one window, if mapped here: then puts are stores
    bool mapped() const { return base != nullptr; }
    std::byte* data() const { return base + data_at; }
    FlagWord* board() const { return reinterpret_cast<FlagWord*>(base + board_at); }
  };
  const std::shared_ptr<MpiWorld> world;  // outlives its windows
  Handle data = 0;
  Handle board = 0;     // may be the same as `data`
  bool ready = false;   // made, and named
  bool helped = false;  // its traffic advances only when this process calls MPI
  bool maps = false;    // some peer's part is mapped here
  bool shared = false;  // mapped by all members, so that atomics are the processor's
  // This rank's memory under a created window: messages from peers may arrive until it is freed.
  std::shared_ptr<Region> region;
  std::uint64_t number = 0;  // in its group, the same on every member
  MpiWindowGroup* group = nullptr;
  std::byte* own = nullptr;  // this rank's data and board
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
  std::shared_ptr<MpiWindow> window;  // once all members' descriptions are known
  int index = -1;                     // of the peer among its members
  std::string description;            // until then
  const MpiWindow::Member& member() const { return window->member(index); }
};

class MpiWorld : public std::enable_shared_from_this<MpiWorld> {
 public:
  using Handle = MpiLibrary::Handle;
  // Which threads may call MPI: the one that initialised it, any one at a time, or any.
  enum class Threads : std::uint8_t { kOne, kSerialized, kMultiple };

  // `communicator`: the library's own, with the ranks of the job. `near`: the ranks of this
  // machine, including this one; `messages_near`: the library sends to them through memory. The
  // constructor is called by the thread that may call MPI.
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
  // This thread may call MPI while it holds serialize().
  bool may_call() const { return threads_ != Threads::kOne || std::this_thread::get_id() == main_; }
  // One thread at a time, if this MPI requires it.
  [[nodiscard]] std::unique_lock<std::mutex> serialize() {
    return threads_ == Threads::kMultiple ? std::unique_lock<std::mutex>()
                                          : std::unique_lock(serial_);
  }
  // False if another thread is inside: helpers do not wait for it.
  [[nodiscard]] bool try_serialize(std::unique_lock<std::mutex>& lock) {
    if (threads_ == Threads::kMultiple) return true;
    lock = std::unique_lock(serial_, std::try_to_lock);
    return lock.owns_lock();
  }
  // How data go to `peer`. Short data travel in their flag's message, up to a length at which
  // copying costs more than a second message, lower where messages go through memory. Long data are
  // messages of their own, or puts if the library's puts are faster.
  std::uint32_t most_within(Rank peer) const {
    return through_memory(peer) ? kMostThroughMemory : MpiChannel::kMostBytes;
  }
  bool sends_long(Rank peer) const {
    return !library_->constants().far_puts || through_memory(peer);
  }
  // With serialize() held: sends messages to peers, and puts received ones into their places.
  bool send(Rank peer, const MpiHeader& header, const std::byte* bytes, Handle* request);
  bool receive();          // true: a message was received
  bool receiving() const;  // parts of messages are still to come
  // Asks whether all earlier messages of a queue to `peer` have reached their places; `question` is
  // 0 until the question was sent. True: they have.
  bool answered(QueueId queue, Rank peer, std::uint64_t& question);

  // `created`: uses no memory of MPI's.
  std::string publish(LocalSegment& segment, std::span<const Rank> members, bool created);
  static RemoteSegment attach(Rank peer, const std::string& description);
  // `help` is called while this rank waits for others: messages that they wait for may still be
  // under way. It throws if they never come.
  Outcome settle(LocalSegment& own, std::span<const Rank> members, std::span<RemoteSegment> remotes,
                 Deadline deadline, const std::function<void()>& help);
  void leave(LocalSegment& own, const std::function<void()>& help);
  void retract(const LocalSegment& segment);
  // A context begins: ranks that failed in an earlier one may be back.
  void begin() {
    for (Rank peer = 0; peer < size_; ++peer) gone_[static_cast<std::size_t>(peer)].store(false);
  }
  // From now on this context begins no window with `peer`.
  void lost(Rank peer) { gone_[static_cast<std::size_t>(peer)].store(true); }
  // The window of this rank's own copy; null while none is shared.
  MpiWindow* own_window(const std::byte* data) const;
  // There are windows whose traffic advances only when this process calls MPI.
  bool needs_help() const { return n_unmapped_.load(std::memory_order_relaxed) != 0; }
  // There are windows whose flags peers store: no message tells of them.
  bool maps() const { return n_mapped_.load(std::memory_order_relaxed) != 0; }

  // Marks that this thread is in a call that may wait for a peer. If that peer is lost, MPI may
  // never return from it: then stuck() names the call.
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

  // At the end of the process: frees all windows, unused by now, if every rank arrives in time.
  void finish(double seconds);

 private:
  friend class MpiWindow;
  static constexpr std::uint32_t kMostThroughMemory = 4 << 10;
  class InOrder;
  // The members there to make a window: the first member's view, and what the others heard.
  struct Meeting {
    bool here = false;           // this rank is there, and has not left
    bool left = false;           // the first member knows that this rank left
    std::uint64_t number = 0;    // the opened window's, from 1; 0: not open
    std::vector<Rank> expected;  // by the first member
    std::set<Rank> came;
  };
  void gather(MpiWindow& window, LocalSegment& own, std::span<const Rank> members,
              std::span<const RemoteSegment> remotes);
  // The meeting's number, or 0 if not all members were there at once before the deadline.
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
  mutable std::mutex channel_mutex_;  // guards the members below; not held in MPI calls that wait
  MpiChannel channel_;
  std::uint64_t questions_ = 0;
  std::map<Rank, std::uint64_t> answers_;           // the last answer of each peer
  std::vector<std::pair<Rank, MpiHeader>> unsent_;  // headers without bytes, in order
  std::map<MpiWindowName, Meeting> meetings_;
  std::map<std::uint64_t, std::uint64_t> n_opened_;  // by this rank as first member, by group
  const Rank rank_;
  const Rank size_;
  const std::set<Rank> near_;
  const bool messages_near_;
  const Threads threads_;
  const std::thread::id main_;
  std::mutex serial_;
  mutable std::mutex mutex_;  // guards the members below; never held while MPI waits
  std::map<std::vector<Rank>, std::unique_ptr<MpiWindowGroup>> window_groups_;
  std::uint64_t n_published_ = 0;
  std::map<const std::byte*, MpiWindow*> own_;
  std::map<MpiWindowName, MpiWindow*> named_;
  const std::unique_ptr<std::atomic<bool>[]> gone_;
  std::atomic<int> n_unmapped_{0};
  std::atomic<int> n_mapped_{0};
  std::atomic<const char*> blocked_in_{nullptr};
  std::atomic<std::int64_t> blocked_since_{0};
};

}  // namespace pgasdl

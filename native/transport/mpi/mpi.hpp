// MPI RMA, for any machine with an MPI, over the library that mpi4py has loaded.
//
// A flag is sent as a message (channel.hpp), together with the data written with it, except long
// writes where the library's puts are faster (MpiWorld::sends_long). The requests of a queue to a
// peer are ordered in their connection: puts are under way together, and progress() tests whether
// those before a flag have left, flushes, and sends the flag. Only that flush, and atomics, may
// wait until the peer calls MPI: MPI has no flush that only tests.
//
// If the library maps the peer's part of a window here (memory of MPI's own, one machine), plans
// load and store there, and writes and flags are this library's own stores, as MPI allows for such
// windows: MPI_Put copies there, too, but at a third of the speed.
//
// MPI progresses when it is called: by waits, by the executor, and by the thread that watches the
// ranks, at every heartbeat.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transport/mpi/world.hpp"

namespace pgasdl {

struct MpiOptions {
  std::uint32_t queues = 1;  // the number of QueueIds
  bool created = false;      // makes all windows over memory of this process
  double patience_s = 3;     // in a call that a lost peer blocks, before the process ends
};

class MpiTransport final : public Transport {
 public:
  MpiTransport(std::shared_ptr<MpiWorld> world, const MpiOptions& options);
  ~MpiTransport() override;

  std::string_view name() const override { return "mpi"; }
  std::string endpoint() override { return {}; }
  void connect(Rank, const std::string&) override {}
  void set_wake_word(Rank peer, WakeWord* wake_word) override {
    wake_words_[static_cast<std::size_t>(peer)].store(wake_word, std::memory_order_release);
  }
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, int device,
                       Deadline deadline) override;
  Outcome settle(LocalSegment& own, std::span<const Rank> members, std::span<RemoteSegment> remotes,
                 Deadline deadline) override;
  void leave(LocalSegment& own) override;

  bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                  const RemoteFlag* flag) override;
  bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                 const LocalFlag* flag) override;
  bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) override;
  bool complete(QueueId queue) override;
  bool needs_progress() const override { return true; }
  bool receives_in_progress() const override { return world_->needs_help(); }
  void progress() override;
  void lost(Rank peer) override;
  // MPI's launchers end all ranks when one is killed: its process stays.
  bool forget(Rank) override { return true; }

 private:
  using Handle = MpiLibrary::Handle;
  using Aint = MpiLibrary::Aint;
  struct Operation {
    enum class Kind : std::uint8_t { kPut, kGet, kMessage, kLocalFlag, kAtomic };
    Kind kind;
    std::shared_ptr<MpiWindow> window;  // kMessage: the flag's, if any
    int target = 0;                     // in the window
    Aint at = 0;
    std::byte* here = nullptr;
    int bytes = 0;
    std::uint32_t notification = 0;
    std::uint32_t value = 0;
    bool add = false;
    std::shared_ptr<MpiWindow> data;  // kMessage: the target of the bytes, if any
    std::uint64_t offset = 0;
    bool sent = false;
    FlagWord* word = nullptr;  // kLocalFlag
    Atomic atomic{};
    Handle request = 0;
  };
  static constexpr std::size_t kMostOperations = 1u << 17;
  static constexpr std::size_t kMostSent = 8;  // under way at once in a connection
  // The operations from one queue to one peer.
  struct Connection {
    std::mutex mutex;  // held in MPI's calls, which a lost peer may never let end: only tried for
    QueueId queue = 0;
    Rank peer = 0;
    std::deque<Operation> operations;
    std::size_t n_begun = 0;         // the first operations, which have begun
    std::size_t n_sent = 0;          // the first messages, which have left
    std::size_t messages_ahead = 0;  // among those begun
    std::unique_ptr<Error> fault;    // thrown by the next call
    struct Written {
      std::shared_ptr<MpiWindow> window;
      int target;
    };
    std::vector<Written> written;        // since the last flush
    std::atomic<bool> unflushed{false};  // whether there is any
    std::atomic<bool> unread{false};     // data were sent that may not have been read
    std::uint64_t question = 0;          // the number of the question whether they were read
    std::atomic<bool> busy{false};       // there are operations
    bool listed = false;                 // in active_
  };

  Connection& connection(QueueId queue, Rank peer) {
    return *connections_[queue * static_cast<std::size_t>(world_->size()) +
                         static_cast<std::size_t>(peer)];
  }
  void raise_here(FlagWord& word, std::uint32_t value);
  void write_here(std::span<const Transfer> transfers, const RemoteFlag* flag);
  void atomic_here(const Atomic& atomic);
  void run(const Atomic& atomic, const MpiWindow& window, int target);
  bool by_message(Rank peer, const Transfer& transfer, const RemoteFlag* flag) const;
  bool send(Connection& connection, Operation& operation);
  bool sent(Connection& connection, Operation& operation);
  void send_ahead(Connection& connection);
  bool messages_read(Connection& connection);
  void flush(Connection& connection);
  static void forget_written(Connection& connection);
  static void settle(Connection& connection);
  static Operation& enqueue(Connection& connection, Operation::Kind kind, const MpiRemote& remote);
  static void enqueue_message(Connection& connection, const Transfer* data, const RemoteFlag* flag);
  static void enqueue(Connection& connection, Operation::Kind kind, const MpiRemote& remote,
                      std::byte* here, std::uint64_t offset, std::uint64_t bytes);
  void activate(Connection& connection);
  void begin(Connection& connection);
  bool finish(Connection& connection, Operation& operation);
  void advance(Connection& connection);
  static void drop(Connection& connection);
  bool move(Connection& connection);  // true: nothing is left
  static void raise_fault(Connection& connection);
  // Called after a store has raised a flag.
  void wake(Rank rank) {
    const auto& there = wake_words_[static_cast<std::size_t>(rank)];
    if (WakeWord* wake_word = there.load(std::memory_order_acquire)) wake_word->wake();
  }
  void help_library();
  void help_meeting(std::span<const Rank> members);
  void end_if_stuck();

  const std::shared_ptr<MpiWorld> world_;
  const MpiOptions options_;
  const Rank rank_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::mutex active_mutex_;
  std::vector<Connection*> active_;
  std::atomic<std::size_t> n_active_{0};
  std::atomic<std::uint64_t> helped_{0};                        // ticks
  const std::unique_ptr<std::atomic<WakeWord*>[]> wake_words_;  // null where not mapped
  std::unique_ptr<std::atomic<bool>[]> lost_;
  std::atomic<bool> any_lost_{false};
  std::atomic<Rank> first_lost_{-1};
};

}  // namespace pgasdl

// A reliable connection: the queue pair that carries one queue's operations to one peer.
//
// Posting is under the connection's own lock. A request is numbered by `posted_`; a ring holds
// notes of what to do at completion, which the thread that polls the completion queue does. The
// last request of every chain is signalled, so room for new ones always comes back. There are as
// many completion entries as requests and receives, since a broken queue pair reports each.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "transport/faults.hpp"
#include "transport/held_flags.hpp"
#include "transport/transport.hpp"
#include "transport/verbs/device.hpp"
#include "transport/verbs/flags.hpp"
#include "transport/verbs/memory.hpp"
#include "transport/verbs/path.hpp"

namespace pgasdl {

class VerbsQueue;

// A queue pair as the other side needs it.
struct VerbsEnd {
  std::uint32_t number = 0;  // 0: there is none
  std::uint32_t first_packet = 0;
  std::uint64_t shared = 0;  // address of its VerbsFlags::Shared
  std::uint32_t shared_key = 0;
  std::uint32_t padding = 0;
};

class VerbsConnection {
 public:
  VerbsConnection(const VerbsDevice& device, VerbsBoards& boards, VerbsQueue& queue,
                  ibv_cq* completions, Rank peer, std::uint32_t depth);

  Rank peer() const { return peer_; }
  VerbsQueue& queue() const { return queue_; }
  ibv_qp* pair() const { return pair_.get(); }
  std::uint32_t inline_bytes() const { return inline_bytes_; }

  // --- set-up, by one thread at a time (the manager's lock)
  void open();  // makes a queue pair that is not connected yet
  // It has a queue pair, whether or not the peer has joined it.
  bool holds_pair() const { return holds_pair_.load(std::memory_order_relaxed); }
  const VerbsEnd& here() const { return here_; }
  const VerbsEnd& there() const { return there_; }
  void join(const VerbsPath& path, const VerbsEnd& there);  // both ends are known
  void admit();                                             // the peer has joined, too
  // Destroys the queue pair and drops its requests. True if any were under way.
  bool close();
  // Every post throws this until close(). `lost`: with requests under way, complete() throws it,
  // too.
  void break_off(const Error& error, bool lost);

  // --- data path
  bool apart() const { return state_.load(std::memory_order_acquire) == State::kApart; }
  bool broken() const { return state_.load(std::memory_order_acquire) == State::kBroken; }
  using Posted = std::optional<VerbsPosted>;  // nothing: there is no room
  Posted write(std::span<const Transfer> transfers, const RemoteFlag* flag);
  Posted read(std::span<const Transfer> transfers, const LocalFlag* flag, WakeWord* wake_word);
  Posted atomic(const Atomic& atomic, const VerbsRemoteKeys& remote);
  // Sends held flags whose completions have arrived, unless another thread posts.
  void release();

  // --- as one of several rails
  VerbsFate fate(VerbsPosted& posted);
  std::optional<VerbsBreak> what_broke();
  // Reads a word of the peer, after all that was posted.
  Posted fence();
  // Stops all traffic. From then on flags that have arrived are taken, until parted(), which
  // returns their number; `at_once`: does not wait for more.
  void part();
  bool parted(bool at_once, std::uint32_t& taken);

  // --- called by the thread that polls (the queue's polling lock)
  static Rank peer_of(const ibv_wc& completion) {
    return static_cast<Rank>((completion.wr_id & ~kReceive) >> kPeerShift);
  }
  void completed(const ibv_wc& completion);

  // Which requests are under way, and whether they are over.
  std::uint64_t mark() const {
    return std::uint64_t{generation_.load(std::memory_order_relaxed)} << kMarkShift |
           posted_.load(std::memory_order_relaxed);
  }
  VerbsMemory::Pending under_way() const;
  bool over(const VerbsMemory::Pending& pending) const;

 private:
  enum class State : std::uint8_t { kApart, kReady, kBroken };
  enum class Operation : std::uint8_t { kWrite, kNotify, kRead, kAtomic, kBook };
  // A note of a request, and of what to do when it completes.
  struct Note {
    std::uint64_t offset;  // at the peer; for a flag, its number
    std::uint32_t bytes;
    Operation operation;
    bool signalled;
    std::uint32_t value;
    FlagWord* flag;  // to be set to `value`
    WakeWord* wake_word;
    std::uint64_t* old;  // to get an atomic's result
  };
  // A flag at the peer. The program may drop its segment here while it waits.
  struct Flag {
    VerbsRemoteKeys at;
    std::uint32_t notification;
    std::uint32_t value;
    bool add;
    bool again;
  };
  struct HeldFlag {
    Flag flag;
    std::optional<std::uint32_t> immediate;  // chosen already, and its slot defined
  };
  class Chain;
  // A completion returns the request's number, the queue pair's number and the peer.
  static constexpr int kPeerShift = 40;
  static constexpr int kGenerationShift = 32;
  static constexpr std::uint64_t kReceive = std::uint64_t{1} << 63;  // not a request
  std::uint64_t id_of_requests() const {
    return static_cast<std::uint64_t>(peer_) << kPeerShift |
           static_cast<std::uint64_t>(
               static_cast<std::uint8_t>(generation_.load(std::memory_order_relaxed)))
               << kGenerationShift;
  }

  void change(ibv_qp_attr& attributes, int mask, const char* what);
  std::uint32_t room() const {
    return depth_ -
           (posted_.load(std::memory_order_relaxed) - retired_.load(std::memory_order_acquire));
  }
  // Whether there is room for these besides held flags; throws if the connection is broken.
  bool admits(std::uint64_t requests);
  // The number of requests that carry the transfers.
  std::uint64_t requests_for(std::span<const Transfer> transfers) const;
  void add(Chain& chain, Operation operation, const Transfer& transfer);
  void add(Chain& chain, const Flag& flag, std::uint32_t bytes);
  void define(Chain& chain, const VerbsFlags::Choice& choice);
  // As chosen; an immediate travels with the last write of the chain, if there is one.
  void raise(Chain& chain, const Flag& flag, const VerbsFlags::Choice& choice);
  VerbsFlags::Choice choose(const Flag& flag, bool with_data);
  void hold(const HeldFlag& flag);
  bool send(HeldFlag& held);  // false: later
  std::size_t drop_held();
  void ask(Chain& chain);  // reads how many immediates the peer has taken
  void arrived(const ibv_wc& completion);
  // Posts more receives for the peer's immediates, half of all.
  void offer();
  Error fault_of(const ibv_wc& completion, const Note& note) const;
  [[noreturn]] void throw_fault();

  VerbsFlags::Shared& shared() const {
    return *reinterpret_cast<VerbsFlags::Shared*>(buffer_->data());
  }
  // The memory in which results of atomics arrive.
  std::byte* results() const { return buffer_->data() + sizeof(VerbsFlags::Shared); }

  const VerbsDevice& device_;
  VerbsBoards& boards_;
  VerbsQueue& queue_;
  ibv_cq* const completions_;
  const Rank peer_;
  const std::uint32_t depth_;
  std::uint32_t mask_;        // of the ring, which has at least the queue pair's depth
  const std::uint64_t most_;  // bytes of one request
  VerbsPtr<ibv_qp> pair_;
  std::atomic<bool> holds_pair_{false};
  std::uint32_t inline_bytes_ = 0;
  VerbsEnd here_;
  VerbsEnd there_;
  std::atomic<State> state_{State::kApart};
  std::atomic<std::uint32_t> generation_{0};  // counts earlier queue pairs

  std::mutex mutex_;  // guards posting
  std::atomic<std::uint32_t> posted_{0};
  std::uint64_t signalled_ = 0;  // in total
  std::vector<ibv_send_wr> requests_;
  std::vector<ibv_sge> pieces_;
  std::vector<Note> notes_;
  std::optional<VerbsBuffer> buffer_;  // shared with the peer; then results()
  VerbsFlags flags_;
  bool completion_first_ = false;
  HeldFlags<HeldFlag> held_;
  std::uint32_t n_flags_sent_ = 0;
  std::uint32_t asked_ = 0;  // the last request that asked

  std::atomic<std::uint32_t> retired_{0};
  std::uint64_t settled_ = 0;  // signalled requests that completed, in total

  std::mutex fault_mutex_;
  std::optional<PeerFault> fault_;
  static constexpr std::uint64_t kNone = UINT64_MAX;
  std::atomic<std::uint64_t> failed_{kNone};  // the first request that failed
  static constexpr int kMarkShift = 32;
  // The previous queue pair: its generation, and its first request that was not done.
  std::atomic<std::uint64_t> ended_{0};
  bool by_request_ = false;           // whether a request broke it
  std::atomic<bool> parting_{false};  // part() was called
  std::uint32_t offered_ = 0;         // receives
  std::uint32_t flushed_ = 0;         // receives that were flushed without a message
};

}  // namespace pgasdl

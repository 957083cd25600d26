// A reliable connection: the queue pair that carries one queue's operations to one peer.
//
// Posting is under the connection's own lock. A request is numbered by `posted_`; what has to be
// done when it completes is noted in a ring, and whoever polls the completion queue does it. The
// last request of every chain is signalled, so that room for new ones always comes back, and there
// are as many completion entries as requests and receives, since a broken queue pair reports each.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "transport/transport.hpp"
#include "transport/verbs/device.hpp"
#include "transport/verbs/flags.hpp"
#include "transport/verbs/memory.hpp"

namespace pgasdl {

class VerbsQueue;

// How often a request is sent before its peer is lost; adapters may wait up to four times as long
// as they were told in between, but report a link that is down at once. Not 8, which is the most
// there are and which soft-RoCE takes for "without end".
constexpr int kVerbsAttempts = 7;

// How a peer is reached.
struct VerbsPath {
  ibv_ah_attr address{};
  ibv_mtu mtu = IBV_MTU_256;
  std::uint8_t reads = 1;     // outstanding at once, that both sides can do
  std::uint8_t timeout = 16;  // of an acknowledgement: 4.096 us times 2 to this power
};

// What the other side has to know of a queue pair.
struct VerbsEnd {
  std::uint32_t number = 0;  // 0: there is none
  std::uint32_t first_packet = 0;
  std::uint64_t shared = 0;  // address of its VerbsFlags::Shared
  std::uint32_t shared_key = 0;
  std::uint32_t padding = 0;
};

// An Error that is kept, to be thrown by several threads: exceptions share their words when copied,
// with a count that no sanitizer sees.
struct VerbsFault {
  explicit VerbsFault(const Error& error)
      : kind(error.kind()), words(error.what()), rank(error.rank()) {}
  Error error() const { return Error(kind, words, rank); }
  ErrorKind kind;
  std::string words;
  int rank;
};

class VerbsConnection {
 public:
  VerbsConnection(const VerbsDevice& device, VerbsBoards& boards, VerbsQueue& queue,
                  ibv_cq* completions, Rank peer, std::uint32_t depth);

  Rank peer() const { return peer_; }
  VerbsQueue& queue() const { return queue_; }

  // --- set-up, by one thread at a time (the manager's lock)
  void open();  // a queue pair that is not connected yet
  const VerbsEnd& here() const { return here_; }
  const VerbsEnd& there() const { return there_; }
  void join(const VerbsPath& path, const VerbsEnd& there);  // both ends are known
  void admit();                                             // the peer has joined too
  // Gives the queue pair up, with what was under way. True if something was.
  bool close();
  // Until close() every post throws this. `lost`: with requests under way, so that complete() has
  // to throw it too.
  void break_off(const Error& error, bool lost);

  // --- data path
  bool apart() const { return state_.load(std::memory_order_acquire) == State::kApart; }
  bool broken() const { return state_.load(std::memory_order_acquire) == State::kBroken; }
  bool write(std::span<const Transfer> transfers, const RemoteFlag* flag);
  bool read(std::span<const Transfer> transfers, const LocalFlag* flag, WakeWord* wake_word);
  bool atomic(const Atomic& atomic, const VerbsRemoteKeys& remote);

  // --- by whoever polls (the queue's polling lock)
  static Rank peer_of(const ibv_wc& completion) {
    return static_cast<Rank>((completion.wr_id & ~kReceive) >> kPeerShift);
  }
  void completed(const ibv_wc& completion);

  // Which requests are under way, and whether they are over.
  VerbsMemory::Pending under_way() const;
  bool over(const VerbsMemory::Pending& pending) const;

 private:
  enum class State : std::uint8_t { kApart, kReady, kBroken };
  enum class Operation : std::uint8_t { kWrite, kNotify, kRead, kAtomic, kBook };
  // What a request was, and what follows when it completes.
  struct Note {
    std::uint64_t offset;  // at the peer; of a flag its number
    std::uint32_t bytes;
    Operation operation;
    bool signalled;
    std::uint32_t value;
    FlagWord* flag;  // to be set to `value`
    WakeWord* wake_word;
    std::uint64_t* old;  // to get an atomic's result
  };
  class Chain;
  // What a completion brings back: number of the request, of the queue pair, and the peer.
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
  // Whether so many requests may be posted now; throws if the connection is broken.
  bool admits(std::uint64_t requests);
  // How many it takes to carry them.
  std::uint64_t requests_for(std::span<const Transfer> transfers) const;
  void add(Chain& chain, Operation operation, const Transfer& transfer);
  void add(Chain& chain, const RemoteFlag& flag, std::uint32_t bytes);
  VerbsFlags::Choice choose(const RemoteFlag& flag, bool with_data);
  void ask(Chain& chain);  // how many immediates the peer has taken
  void arrived(const ibv_wc& completion);
  // Holds more receives ready for the peer's immediates, half of all.
  void offer();
  Error fault_of(const ibv_wc& completion, const Note& note) const;
  [[noreturn]] void throw_fault();

  VerbsFlags::Shared& shared() const {
    return *reinterpret_cast<VerbsFlags::Shared*>(buffer_->data());
  }
  // Where the results of atomics arrive.
  std::byte* results() const { return buffer_->data() + sizeof(VerbsFlags::Shared); }

  const VerbsDevice& device_;
  VerbsBoards& boards_;
  VerbsQueue& queue_;
  ibv_cq* const completions_;
  const Rank peer_;
  const std::uint32_t depth_;
  std::uint32_t mask_;        // of the ring, at least as long as the queue pair is deep
  const std::uint64_t most_;  // bytes of one request
  VerbsPtr<ibv_qp> pair_;
  std::uint32_t inline_bytes_ = 0;
  VerbsEnd here_;
  VerbsEnd there_;
  std::atomic<State> state_{State::kApart};
  std::atomic<std::uint32_t> generation_{0};  // how many queue pairs there were before

  std::mutex mutex_;  // posting
  std::atomic<std::uint32_t> posted_{0};
  std::uint64_t signalled_ = 0;  // ever
  std::vector<ibv_send_wr> requests_;
  std::vector<ibv_sge> pieces_;
  std::vector<Note> notes_;
  std::optional<VerbsBuffer> buffer_;  // what is shared with the peer, and results()
  VerbsFlags flags_;
  std::uint32_t asked_ = 0;  // the request that last did

  std::atomic<std::uint32_t> retired_{0};
  std::uint64_t settled_ = 0;  // signalled ones that completed, ever

  std::mutex fault_mutex_;
  std::optional<VerbsFault> fault_;
};

}  // namespace pgasdl

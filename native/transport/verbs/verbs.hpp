// RDMA over libibverbs: reliable connections, one per queue and peer, made when first needed.
//
// A write_notify is a chain of RDMA WRITEs of which the last carries an immediate, which becomes
// the flag (flags.hpp), or is the flag itself, inline, into the peer's board: a memory region of
// its own, and the same queue pair, so that the flag cannot overtake the data. Peers find each
// other by datagrams between small UD queue pairs (connection_manager.hpp). libibverbs is loaded
// when the first of these is made; without its headers at build time the table of transports
// (table.hpp) lacks this one.
//
// Memory per connection at the default depth, bytes: work requests and what is noted of each 24 K,
// the provider's send queue 16 K (mlx5) to 32 K (rxe), its receive queue 2 K to 16 K, completion
// entries 16 K, flags and results of atomics 14 K; 104 K in all. A peer that is used on three
// queues (a program's, the library's, the plans') costs about 300 K, one that is not used nothing.
#pragma once

#include <mutex>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

class VerbsDevice;
class VerbsMemory;
class VerbsQueue;
class VerbsConnectionManager;
class VerbsBoards;

struct VerbsOptions {
  std::string device;         // "": the best there is
  int port = 0;               // 0: likewise
  int gid_index = -1;         // -1: likewise
  std::uint32_t queues = 18;  // how many QueueIds there are
  // Send work requests of a queue pair. One less than a power of two, as providers round up.
  std::uint32_t depth = 127;
  double timeout_s = 3;  // a peer that does not answer for so long is lost
};

// One address by which this machine can be reached, and why it is not used if it is not.
struct VerbsDeviceInfo {
  std::string device;
  int port = 0;
  int gid_index = -1;
  std::string state;       // of the port
  std::string link_layer;  // Ethernet or InfiniBand
  int mtu = 0;             // active, bytes
  double gigabits = 0;     // a second, of the link; 0: unknown
  std::string gid;
  std::string type;  // RoCE v2, RoCE v1, InfiniBand
  std::string net_device;
  int numa_node = -1;
  bool chosen = false;
  std::string refused;  // the reason, unless chosen
};

// Every address, best first. Throws kUnavailable where libibverbs cannot be loaded.
std::vector<VerbsDeviceInfo> verbs_devices(const VerbsOptions& options = {});

class VerbsTransport final : public Transport {
 public:
  // `token`: 16 bytes that only ranks of this job know; datagrams that come without are dropped.
  VerbsTransport(Rank rank, Rank size, const std::string& token, const VerbsOptions& options = {});
  ~VerbsTransport() override;

  std::string_view name() const override { return "verbs"; }
  std::string endpoint() override;
  void connect(Rank peer, const std::string& endpoint) override;
  void set_wake_word(Rank peer, WakeWord* wake_word) override;
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, Deadline deadline) override;
  void retract(const LocalSegment& segment) override;
  int service_descriptor() const override;
  void service() override;

  // A post throws if the connection is broken, and goes on doing so until reconnect(); it answers
  // false while there is none yet. A list longer than a queue pair is deep is posted in pieces, and
  // the call then waits inside until the last one has found room. complete() throws once for each
  // connection that broke with operations of that queue.
  bool post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                  const RemoteFlag* flag) override;
  bool post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                 const LocalFlag* flag) override;
  bool post_atomic(QueueId queue, Rank peer, const Atomic& atomic) override;
  bool connecting(QueueId queue, Rank peer) const override;
  bool complete(QueueId queue) override;
  std::uint64_t mark(QueueId queue, Rank peer) const override;
  bool reached(QueueId queue, Rank peer, std::uint64_t mark) const override;
  bool needs_progress() const override { return true; }
  void progress() override;
  void reconnect(Rank peer) override;

 private:
  VerbsQueue& queue_at(QueueId queue) const;
  void collect_retired();

  const Rank rank_;
  std::shared_ptr<VerbsDevice> device_;
  std::shared_ptr<VerbsBoards> boards_;
  std::shared_ptr<VerbsMemory> memory_;
  std::vector<std::unique_ptr<VerbsQueue>> queues_;
  std::unique_ptr<VerbsConnectionManager> manager_;
};

}  // namespace pgasdl

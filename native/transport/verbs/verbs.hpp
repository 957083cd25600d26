// RDMA over libibverbs: reliable connections, one per queue and peer, made when first needed.
//
// A write_notify is a chain of RDMA WRITEs of which the last carries an immediate, which becomes
// the flag (flags.hpp), or is the flag itself, inline, into the peer's board: a memory region of
// its own, and the same queue pair, so that the flag cannot overtake the data. Where the fabric
// does not keep that order, the flag is held until the data have completed. Peers find each other
// by datagrams between small UD queue pairs (connection_manager.hpp). libibverbs is loaded when the
// first of these is made; without its headers at build time the table of transports (table.hpp)
// lacks this one.
//
// Memory per connection at the default depth, bytes: work requests and what is noted of each 24 K,
// the provider's send queue 16 K (mlx5) to 32 K (rxe), its receive queue 2 K to 16 K, completion
// entries 16 K, flags and results of atomics 14 K; 104 K in all. A peer that is used on three
// queues (a program's, the library's, the atomics', the plans') costs about 300 K, one that is not
// used nothing.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "transport/transport.hpp"

namespace pgasdl {

class VerbsDevice;
class VerbsMemory;
class VerbsQueue;
class VerbsConnection;
class VerbsConnectionManager;
class VerbsBoards;

// A device's port, or all of its ports.
struct VerbsPort {
  std::string device;
  int port = 0;  // 0: all
};

// Whether a flag may follow the data that come before it at once, because the fabric keeps the
// order of a connection's writes, or only when their completions are in.
enum class VerbsOrder : std::uint8_t { kAuto, kKept, kCompletion };  // kAuto: as the device says

struct VerbsOptions {
  std::vector<VerbsPort> ports;     // the best of these; empty: of all
  bool excluded = false;            // of all but these
  int gid_index = -1;               // -1: the best
  int pkey = 0;                     // of which the lower 15 bits count; 0: the port's first
  int mtu = 0;                      // bytes of a packet, at most; 0: as the port has it
  int service_level = 0;            // on Ethernet the priority in a VLAN's tag
  int traffic_class = 0;            // of global routes; of RoCE v2 the IP header's
  bool global_routes = false;       // also to peers in the same InfiniBand subnet
  int retry_count = 6;              // 7 is the most; to soft-RoCE it means "without end"
  int rnr_retry_count = 6;          // 7: without end
  int ack_timeout = 0;              // 4.096 us times 2 to this power; 0: by timeout_s
  std::uint32_t inline_bytes = 64;  // at most, and what the device takes
  VerbsOrder order = VerbsOrder::kAuto;
  std::vector<int> distances;      // to NUMA nodes, by the kernel's measure; empty: unknown
  std::uint32_t turn = 0;          // of this rank among those that would choose the same port
  std::uint32_t rails = 1;         // ports that share the work, at most (rails.hpp)
  std::uint64_t stripe = 1 << 20;  // bytes; what is longer goes over all rails
  bool warns = true;               // on standard error, of rails that are dropped
  // Every flag is an immediate, which the receiver's processor counts and stores. Unset: where the
  // device stores by a processor's copy, which may store a word twice.
  std::optional<bool> count_flags;
  std::uint32_t queues = 1;  // how many QueueIds there are
  // Send work requests of a queue pair. One less than a power of two, as providers round up.
  std::uint32_t depth = 127;
  double timeout_s = 3;  // a peer that does not answer for so long is lost

  // The time for an acknowledgement, as ack_timeout.
  int acknowledgement_timeout() const;
};

// One address by which this machine can be reached, and why it is not used if it is not.
struct VerbsDeviceInfo {
  std::string device;
  int port = 0;
  int gid_index = -1;
  std::string state;         // of the port
  std::string link_layer;    // Ethernet or InfiniBand
  int mtu = 0;               // active, bytes
  int path_mtu = 0;          // the largest that a connection from here may have, bytes
  int pkey = 0;              // of connections from here; 0: unknown
  int ack_timeout = 0;       // likewise, 4.096 us times 2 to this power
  bool keeps_order = false;  // of writes, as far as this side is asked
  double gigabits = 0;       // a second, of the link; 0: unknown
  std::string gid;
  std::string type;  // RoCE v2, RoCE v1, InfiniBand
  std::string net_device;
  int numa_node = -1;
  int lid = 0;    // of a port of InfiniBand
  int turn = -1;  // VerbsOptions::turn of the rank that would choose it; -1: none that runs here
  bool chosen = false;
  std::string refused;  // the reason, unless chosen
};

// Every address, best first. Throws kUnavailable where libibverbs cannot be loaded.
std::vector<VerbsDeviceInfo> verbs_devices(const VerbsOptions& options = {});

// How many bytes a request takes inline on the chosen device: as many as were asked for, or fewer.
std::uint32_t verbs_inline_bytes(const VerbsOptions& options);

// What was posted: its mark and, of a flag, its number among its connection's (from 1). A flag that
// is held leaves later, so its mark is of what came before.
struct VerbsPosted {
  std::uint64_t mark = 0;
  std::uint32_t flag = 0;
  bool held = false;
};

// The fate of what was posted.
enum class VerbsFate : std::uint8_t {
  kUnderWay,
  kDone,
  kFailed,  // its connection broke before, and has not been made anew
  kGone,    // its connection was given up
};

// Why a connection broke: by the way to its peer, or by a request that no other way would carry.
struct VerbsBreak {
  Error error;
  bool by_request;
};

// One rank's word to another that a rail was given up, for one queue's connection.
struct VerbsRailNews {
  std::uint32_t rail;
  std::uint32_t queue;
  std::uint32_t round;  // of the rail's connections with the receiver
  std::uint32_t taken;  // flags of the receiver that have come by it
  std::uint32_t known;  // 1: the receiver's own word has come
};

class VerbsTransport final : public Transport {
 public:
  // `token`: 16 bytes that only ranks of this job know; datagrams that were made without are
  // dropped.
  VerbsTransport(Rank rank, Rank size, const std::string& token, const VerbsOptions& options = {});
  ~VerbsTransport() override;

  std::string_view name() const override { return "verbs"; }
  std::string describe() const override;
  std::string endpoint() override;
  void connect(Rank peer, const std::string& endpoint) override;
  void set_wake_word(Rank peer, WakeWord* wake_word) override;
  std::string publish(LocalSegment& segment, std::span<const Rank> peers) override;
  RemoteSegment attach(Rank peer, const std::string& description, int device,
                       Deadline deadline) override;
  std::string refuses_device(int device) const override;
  void retract(const LocalSegment& segment) override;
  int service_descriptor() const override;
  bool service() override;

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
  std::size_t connections(QueueId queue) const override;
  std::optional<QueueId> connected(QueueId queue, Rank peer) const override;
  void send_farewell(Rank peer, std::uint64_t word) override;
  std::uint64_t farewell(Rank peer) const override;
  bool complete(QueueId queue) override;
  // Marks are of requests: a flag that is held is not among them.
  std::uint64_t mark(QueueId queue, Rank peer) const override;
  bool reached(QueueId queue, Rank peer, std::uint64_t mark) const override;
  bool needs_progress() const override { return true; }
  void progress() override;
  void reconnect(Rank peer) override;

  // --- as one of several rails (rails.hpp)
  using HearNews = std::function<void(Rank from, const VerbsRailNews& news)>;
  const VerbsDevice& device() const { return *device_; }
  // Its port carries packets, as far as the adapter knows.
  bool port_is_up() const;
  // Posts to another rank; nothing: as a post that answers false. Said under the connection's lock:
  // other threads send what is held, and connect anew.
  using Posted = std::optional<VerbsPosted>;
  Posted write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
               const RemoteFlag* flag);
  Posted read(QueueId queue, Rank peer, std::span<const Transfer> transfers, const LocalFlag* flag);
  Posted atomic(QueueId queue, Rank peer, const Atomic& atomic);
  // A read that, once it is done, tells that all writes before it are in the peer's memory, where
  // whatever comes by another adapter finds them: they pass the peer's bus before the answer.
  Posted fence(QueueId queue, Rank peer);
  // Notes in `posted` that a held flag has left.
  VerbsFate fate(QueueId queue, Rank peer, VerbsPosted& posted) const;
  std::optional<VerbsBreak> broken(QueueId queue, Rank peer) const;
  // Gives up the connections with `peer` so that nothing comes by them any more, until reconnect()
  // by either side. Flags that had come are taken; parted() says when, and how many they were.
  void part(Rank peer);
  bool parted(QueueId queue, Rank peer, bool at_once, std::uint32_t& taken);
  // How often connections with `peer` were made anew; kRankLeft: it has taken leave.
  static constexpr std::uint32_t kRankLeft = UINT32_MAX;
  std::uint32_t round(Rank peer) const;
  std::uint64_t renewals() const;  // of all peers
  void announce(Rank peer, const VerbsRailNews& news);
  void hear(HearNews hear);  // from now on, under a lock of this transport's
  void listen();             // takes what has come; services do, too

 private:
  VerbsQueue& queue_at(QueueId queue) const;
  // The connection to post to; null: there is none yet, and it is asked for.
  VerbsConnection* connection_to(QueueId queue, Rank peer);
  void collect_retired();

  const Rank rank_;
  std::shared_ptr<VerbsDevice> device_;
  std::shared_ptr<VerbsBoards> boards_;
  std::shared_ptr<VerbsMemory> memory_;
  std::vector<std::unique_ptr<VerbsQueue>> queues_;
  std::unique_ptr<VerbsConnectionManager> manager_;
};

}  // namespace pgasdl

// RDMA over libibverbs: reliable connections, one per queue and peer, made when first needed.
//
// A write_notify is a chain of RDMA WRITEs. The last one carries an immediate, which becomes the
// flag (flags.hpp), or is the flag itself, inline, into the peer's board: a separate memory region
// but the same queue pair, so that the flag cannot overtake the data. If the fabric does not keep
// that order, the flag is held until the data have completed. Peers find each other by datagrams
// between small UD queue pairs (connection_manager.hpp). The first object loads libibverbs; if its
// headers were missing at build time, the table of transports (table.hpp) lacks this one.
//
// Memory per connection at the default depth, bytes: work requests and the notes of each 24 K, the
// provider's send queue 16 K (mlx5) to 32 K (rxe), its receive queue 2 K to 16 K, completion
// entries 16 K, flags and results of atomics 14 K; 104 K in all. A peer costs that for each queue
// it is used on (a program's, the library's, the atomics', the plans'), about 300 K for three; an
// unused peer costs nothing.
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

// Whether a flag may follow earlier data at once, because the fabric keeps the order of a
// connection's writes, or only after their completions.
enum class VerbsOrder : std::uint8_t { kAuto, kKept, kCompletion };  // kAuto: as the device says

struct VerbsOptions {
  std::vector<VerbsPort> ports;     // use the best of these; empty: of all
  bool excluded = false;            // of all others instead
  int gid_index = -1;               // -1: the best
  int pkey = 0;                     // its lower 15 bits count; 0: the port's first
  int mtu = 0;                      // bytes of a packet, at most; 0: the port's
  int service_level = 0;            // on Ethernet the priority in a VLAN's tag
  int traffic_class = 0;            // of global routes; of RoCE v2 the IP header's
  bool global_routes = false;       // also to peers in the same InfiniBand subnet
  int retry_count = 6;              // 7 is the most; soft-RoCE then repeats without end
  int rnr_retry_count = 6;          // 7: without end
  int ack_timeout = 0;              // 4.096 us times 2 to this power; 0: by timeout_s
  std::uint32_t inline_bytes = 64;  // at most, and within the device's limit
  VerbsOrder order = VerbsOrder::kAuto;
  std::vector<int> distances;      // to NUMA nodes, by the kernel's measure; empty: unknown
  std::uint32_t turn = 0;          // of this rank among those that would choose the same port
  std::uint32_t rails = 1;         // ports that share the work, at most (rails.hpp)
  std::uint64_t stripe = 1 << 20;  // bytes; longer transfers use all rails
  bool warns = true;               // reports dropped rails on standard error
  // Every flag is an immediate, which the receiver's processor counts and stores. Unset: only on
  // devices that store by a processor's copy, which may store a word twice.
  std::optional<bool> count_flags;
  std::uint32_t queues = 1;  // the number of QueueIds
  // Send work requests of a queue pair. One less than a power of two, as providers round up.
  std::uint32_t depth = 127;
  double timeout_s = 3;  // a peer that is silent for longer is lost

  // The time for an acknowledgement, in the form of ack_timeout.
  int acknowledgement_timeout() const;
};

// One address by which this machine can be reached, and the reason if it is not used.
struct VerbsDeviceInfo {
  std::string device;
  int port = 0;
  int gid_index = -1;
  std::string state;         // of the port
  std::string link_layer;    // Ethernet or InfiniBand
  int mtu = 0;               // active, bytes
  int path_mtu = 0;          // the largest for connections from here, bytes
  int pkey = 0;              // of connections from here; 0: unknown
  int ack_timeout = 0;       // likewise, 4.096 us times 2 to this power
  bool keeps_order = false;  // of writes, as far as this side decides
  double gigabits = 0;       // per second, of the link; 0: unknown
  std::string gid;
  std::string type;  // RoCE v2, RoCE v1, InfiniBand
  std::string net_device;
  int numa_node = -1;
  int lid = 0;    // of a port of InfiniBand
  int turn = -1;  // VerbsOptions::turn that would choose it; -1: none of a rank here
  bool chosen = false;
  std::string refused;  // the reason, unless chosen
};

// Every address, best first. Throws kUnavailable if libibverbs cannot be loaded.
std::vector<VerbsDeviceInfo> verbs_devices(const VerbsOptions& options = {});

// How many bytes a request takes inline on the chosen device, at most as many as were asked for.
std::uint32_t verbs_inline_bytes(const VerbsOptions& options);

// Identifies a posted request: its mark and, for a flag, its number in its connection (from 1). A
// held flag leaves later, so its mark is that of earlier requests.
struct VerbsPosted {
  std::uint64_t mark = 0;
  std::uint32_t flag = 0;
  bool held = false;
};

// The fate of a posted request.
enum class VerbsFate : std::uint8_t {
  kUnderWay,
  kDone,
  kFailed,  // its connection broke before, and was not made anew
  kGone,    // its connection was dropped
};

// Why a connection broke: by the path to its peer, or by a request that no other path would carry.
struct VerbsBreak {
  Error error;
  bool by_request;
};

// One rank's report to another that it dropped a rail, for one queue's connection.
struct VerbsRailNews {
  std::uint32_t rail;
  std::uint32_t queue;
  std::uint32_t round;  // of the rail's connections with the receiver
  std::uint32_t taken;  // flags of the receiver that arrived by it
  std::uint32_t known;  // 1: the receiver's own report has arrived
};

class VerbsTransport final : public Transport {
 public:
  // `token`: 16 bytes that only ranks of this job know; datagrams made without it are dropped.
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

  // A post throws if the connection is broken, until reconnect(), and returns false while there is
  // none yet. A list longer than the queue pair's depth is posted in pieces, and the call waits
  // inside until the last piece has found room. complete() throws once for each connection that
  // broke with operations of that queue.
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
  // Marks refer to requests, which do not include held flags.
  std::uint64_t mark(QueueId queue, Rank peer) const override;
  bool reached(QueueId queue, Rank peer, std::uint64_t mark) const override;
  bool needs_progress() const override { return true; }
  void progress() override;
  void reconnect(Rank peer) override;
  bool forget(Rank peer) override;

  // --- as one of several rails (rails.hpp)
  using HearNews = std::function<void(Rank from, const VerbsRailNews& news)>;
  const VerbsDevice& device() const { return *device_; }
  // Its port carries packets, as far as the adapter knows.
  bool port_is_up() const;
  // Post to another rank; nothing where a plain post returns false. The result is made under the
  // connection's lock, since other threads send held flags and reconnect.
  using Posted = std::optional<VerbsPosted>;
  Posted write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
               const RemoteFlag* flag);
  Posted read(QueueId queue, Rank peer, std::span<const Transfer> transfers, const LocalFlag* flag);
  Posted atomic(QueueId queue, Rank peer, const Atomic& atomic);
  // A read whose completion proves that all earlier writes are in the peer's memory, where later
  // writes by another adapter find them: they pass the peer's bus before the answer.
  Posted fence(QueueId queue, Rank peer);
  // Notes in `posted` when a held flag has left.
  VerbsFate fate(QueueId queue, Rank peer, VerbsPosted& posted) const;
  std::optional<VerbsBreak> broken(QueueId queue, Rank peer) const;
  // Parts the connections with `peer`: nothing arrives by them any more, until reconnect() by
  // either side. Flags that had arrived are taken; parted() tells when that is done, and their
  // number.
  void part(Rank peer);
  bool parted(QueueId queue, Rank peer, bool at_once, std::uint32_t& taken);
  // How often connections with `peer` were made anew; kRankLeft: it has left.
  static constexpr std::uint32_t kRankLeft = UINT32_MAX;
  std::uint32_t round(Rank peer) const;
  std::uint64_t renewals() const;  // of all peers
  void announce(Rank peer, const VerbsRailNews& news);
  void hear(HearNews hear);  // from now on, under a lock of this transport
  void listen();             // takes arrived news; service() does so, too

 private:
  VerbsQueue& queue_at(QueueId queue) const;
  // The connection to post to; null: there is none yet, and it is requested.
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

#include "transport/verbs/connection_manager.hpp"

#include <algorithm>
#include <array>
#include <bit>

#include "sys/packed.hpp"

namespace pgasdl {
namespace {

constexpr std::uint64_t kMagic = 0x327672656c646770;  // of this version of the protocol
constexpr auto kFirstRepetition = std::chrono::milliseconds(20);
constexpr auto kLongestInterval = std::chrono::milliseconds(500);
constexpr int kLeastRepetitions = 4;
// Reads and atomics under way at once, at most: adapters have room for 16.
constexpr int kMostReads = 16;
constexpr std::size_t kMostGids = 8;

// A queue pair of another job does not get so far as to read the token.
std::uint32_t datagram_key(const std::string& token) {
  std::uint32_t hash = 2166136261u;
  for (const char byte : token) hash = (hash ^ static_cast<unsigned char>(byte)) * 16777619u;
  return hash & 0x7fffffff;  // with the highest bit it would mean something else
}

int common_bits(const ibv_gid& a, const ibv_gid& b) {
  int bits = 0;
  for (std::size_t i = 0; i < sizeof a.raw; ++i, bits += 8) {
    const auto differ = static_cast<std::uint8_t>(a.raw[i] ^ b.raw[i]);
    if (differ != 0) return bits + std::countl_zero(differ);
  }
  return bits;
}

std::uint32_t most_reads(const ibv_device_attr& limits) {
  return static_cast<std::uint32_t>(
      std::clamp(std::min(limits.max_qp_rd_atom, limits.max_qp_init_rd_atom), 1, kMostReads));
}

// A peer that stands still for less than `seconds`, or than a minute, is not lost: a request and
// its repetitions last at least as long. What was lost on the way waits for a repetition, too: for
// half a second by default.
std::uint8_t acknowledgement_timeout(double seconds) {
  constexpr double kUnit = 4.096e-6;
  constexpr std::uint8_t kMostExponent = 21;  // 8.6 s
  std::uint8_t exponent = 8;
  while (exponent < kMostExponent && kVerbsAttempts * kUnit * (1u << exponent) < seconds) {
    ++exponent;
  }
  return exponent;
}

}  // namespace

struct VerbsConnectionManager::Endpoint {
  std::uint64_t magic;
  std::uint32_t datagrams;
  std::uint32_t mtu;
  std::uint32_t reads;
  std::uint32_t lid;
  VerbsLink link;
  std::uint32_t n_gids;
  std::array<ibv_gid, kMostGids> gids;
};

VerbsConnectionManager::VerbsConnectionManager(
    const VerbsDevice& device, const std::string& token, Rank rank, Rank size,
    const std::vector<std::unique_ptr<VerbsQueue>>& queues, double timeout_s)
    : device_(device),
      token_(checked_token(token)),
      rank_(rank),
      queues_(queues),
      timeout_s_(timeout_s),
      datagrams_(device, datagram_key(token)),
      peers_(static_cast<std::size_t>(size)) {}

std::string VerbsConnectionManager::endpoint() const {
  Endpoint endpoint{};
  endpoint.magic = kMagic;
  endpoint.datagrams = datagrams_.number();
  endpoint.mtu = device_.link().active_mtu;
  endpoint.reads = most_reads(device_.limits());
  endpoint.lid = device_.link().lid;
  endpoint.link = device_.gids()[0].link;
  for (const VerbsGid& gid : device_.gids()) {
    if (endpoint.n_gids < kMostGids) endpoint.gids[endpoint.n_gids++] = gid.gid;
  }
  return packed(endpoint);
}

void VerbsConnectionManager::connect(Rank peer, const std::string& bytes) {
  const auto there = unpacked<Endpoint>(bytes, "endpoint", peer);
  if (there.magic != kMagic || there.n_gids == 0 || there.n_gids > kMostGids || there.reads == 0 ||
      there.mtu < IBV_MTU_256 || there.mtu > IBV_MTU_4096) {
    throw Error(ErrorKind::kMismatch,
                text("rank ", peer, " speaks another version of RDMA set-up"));
  }
  const std::lock_guard lock(mutex_);
  Peer& known = peer_at(peer);
  known.path = path_to(peer, there);
  known.datagrams = there.datagrams;
  known.known = true;
}

VerbsPath VerbsConnectionManager::path_to(Rank peer, const Endpoint& there) const {
  if (there.link != device_.gids()[0].link) {
    throw Error(ErrorKind::kUnavailable,
                text("rank ", peer,
                     "'s RDMA device speaks another protocol (RoCE v1, RoCE v2 or "
                     "InfiniBand) than ",
                     device_.name(), ": choose devices of one kind"));
  }
  // Both sides come to the same pair: the longest common prefix, and of equals the one that the
  // lower rank, then the higher, ranks first.
  const std::size_t mine = std::min(device_.gids().size(), kMostGids);
  const bool lower = rank_ <= peer;
  std::size_t here_best = 0;
  std::size_t there_best = 0;
  int most = -1;
  for (std::size_t a = 0; a < (lower ? mine : there.n_gids); ++a) {
    for (std::size_t b = 0; b < (lower ? there.n_gids : mine); ++b) {
      const std::size_t here = lower ? a : b;
      const std::size_t other = lower ? b : a;
      const int bits = common_bits(device_.gids()[here].gid, there.gids[other]);
      if (bits <= most) continue;
      most = bits;
      here_best = here;
      there_best = other;
    }
  }
  VerbsPath path;
  path.mtu = static_cast<ibv_mtu>(std::min<std::uint32_t>(there.mtu, device_.link().active_mtu));
  path.reads = static_cast<std::uint8_t>(std::min(most_reads(device_.limits()), there.reads));
  path.timeout = acknowledgement_timeout(timeout_s_);
  const bool infiniband = there.link == VerbsLink::kInfiniBand;
  path.address.port_num = device_.port();
  path.address.dlid = static_cast<std::uint16_t>(there.lid);
  path.address.is_global = !infiniband || most < 64;  // 64 bits are the subnet
  path.address.grh.dgid = there.gids[there_best];
  path.address.grh.sgid_index = static_cast<std::uint8_t>(device_.gids()[here_best].index);
  path.address.grh.hop_limit = 64;
  return path;
}

void VerbsConnectionManager::send(Peer& peer, Message message) {
  if (peer.address == nullptr) {
    peer.address.reset(verbs_library().create_ah(device_.domain(), &peer.path.address));
    if (peer.address == nullptr) throw_system(text("a route to rank ", message.to), errno);
  }
  message.magic = kMagic;
  std::memcpy(message.token, token_.data(), kTokenBytes);
  message.from = rank_;
  message.count = peer.count;
  datagrams_.send(peer.address.get(), peer.datagrams, message);
}

void VerbsConnectionManager::tell(VerbsConnection& connection, bool answer) {
  Message message{};
  message.to = connection.peer();
  message.queue = connection.queue().id();
  message.end = connection.here();
  message.joined = connection.there().number;
  message.answer = answer ? 1 : 0;
  send(peer_at(connection.peer()), message);
}

void VerbsConnectionManager::want(QueueId queue, Rank peer) {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // whoever posts asks again
  if (!peer_at(peer).known) {
    throw Error(ErrorKind::kSystem, text("rank ", peer, " was never announced to this transport"));
  }
  if (peer_at(peer).count == kLeft) {
    throw Error(ErrorKind::kPeerLost, text("rank ", peer, " has left"), peer);
  }
  VerbsConnection& connection = queues_[queue]->make(peer);
  const bool asked = std::any_of(wanted_.begin(), wanted_.end(), [&](const Wanted& wanted) {
    return wanted.connection == &connection;
  });
  if (asked || !connection.apart()) return;
  if (connection.here().number == 0) connection.open();
  if (peer == rank_) {
    connection.join(peer_at(peer).path, connection.here());
    connection.admit();
    return;
  }
  tell(connection, true);
  const auto now = Clock::now();
  wanted_.push_back({&connection, now, now + kFirstRepetition, kFirstRepetition, 0});
  n_wanted_.store(wanted_.size(), std::memory_order_relaxed);
}

void VerbsConnectionManager::progress() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  take_datagrams();
  repeat();
}

void VerbsConnectionManager::service() {
  const std::lock_guard lock(mutex_);
  datagrams_.rearm();
  take_datagrams();
  repeat();
}

void VerbsConnectionManager::repeat() {
  const auto now = Clock::now();
  for (Wanted& wanted : wanted_) {
    VerbsConnection& connection = *wanted.connection;
    if (now < wanted.next || !connection.apart()) continue;
    try {
      repeat(wanted, now);
    } catch (const Error& error) {
      // What fails here may work a little later, when there is memory again.
      if (error.kind() == ErrorKind::kPeerLost || patience_over(wanted, now)) {
        connection.break_off(error, false);
      } else {
        wanted.next = now + wanted.interval;
      }
    }
  }
  std::erase_if(wanted_, [&](const Wanted& wanted) { return !wanted.connection->apart(); });
  n_wanted_.store(wanted_.size(), std::memory_order_relaxed);
}

void VerbsConnectionManager::repeat(Wanted& wanted, Clock::time_point now) {
  VerbsConnection& connection = *wanted.connection;
  // Counted too: a process that was stopped for a while has to ask again before it gives up.
  if (patience_over(wanted, now) && wanted.repetitions >= kLeastRepetitions) {
    const Rank peer = connection.peer();
    throw Error(ErrorKind::kPeerLost,
                text("rank ", peer, " has not answered requests for a connection on queue ",
                     connection.queue().id(), " for ", timeout_s_, " s; ctx.reconnect(", peer,
                     ") tries again"),
                peer);
  }
  if (connection.here().number == 0) connection.open();
  tell(connection, true);
  ++wanted.repetitions;
  wanted.interval = std::min<Nanoseconds>(2 * wanted.interval, kLongestInterval);
  wanted.next = now + wanted.interval;
}

void VerbsConnectionManager::take_datagrams() {
  Message message;
  while (datagrams_.receive(message)) {
    try {
      handle(message);
    } catch (const Error&) {
      // Who asked repeats itself, and in the end learns that nobody answered.
    }
  }
}

void VerbsConnectionManager::handle(const Message& message) {
  const bool ours = message.magic == kMagic && message.to == rank_ && message.from != rank_ &&
                    std::memcmp(message.token, token_.data(), kTokenBytes) == 0 &&
                    message.queue < queues_.size() && message.from >= 0 &&
                    static_cast<std::size_t>(message.from) < peers_.size();
  if (!ours || !peer_at(message.from).known) return;
  Peer& peer = peer_at(message.from);
  if (message.count > peer.count) give_up_all(message.from, message.count);
  if (peer.count == kLeft) return;
  if (message.count < peer.count) {
    // It does not know yet that its end is of no use any more.
    Message news{};
    news.to = message.from;
    news.queue = message.queue;
    if (message.answer != 0) send(peer, news);
    return;
  }
  if (message.end.number == 0) return;
  VerbsConnection& connection = queues_[message.queue]->make(message.from);
  if (connection.broken()) return;
  // Fails where memory is short: whoever asked asks again.
  if (connection.here().number == 0) connection.open();
  try {
    answer(message, connection);
  } catch (const Error& error) {
    connection.break_off(error, false);
  }
}

void VerbsConnectionManager::answer(const Message& message, VerbsConnection& connection) {
  if (connection.there().number == 0) {
    connection.join(peer_at(message.from).path, message.end);
  } else if (connection.there().number != message.end.number) {
    return;  // late, of an end that was given up
  }
  const bool joined = message.joined == connection.here().number;
  if (joined) connection.admit();
  if (message.answer != 0) tell(connection, !joined);
}

void VerbsConnectionManager::give_up_all(Rank peer, std::uint32_t count) {
  peer_at(peer).count = count;
  for (const auto& queue : queues_) {
    VerbsConnection* connection = queue->find(peer);
    if (connection == nullptr) continue;
    const bool lost = connection->close();
    const Error fault(
        ErrorKind::kPeerLost,
        text("rank ", peer, count == kLeft ? " has left" : " has connected anew",
             lost ? text(": what was under way to it on queue ", queue->id(), " is lost") : ""),
        peer);
    if (lost) queue->add_fault(fault, peer);
    if (count == kLeft) connection->break_off(fault, false);
  }
}

void VerbsConnectionManager::reconnect(Rank peer) {
  const std::lock_guard lock(mutex_);
  const std::uint32_t count = peer_at(peer).count;
  if (count == kLeft) return;
  give_up_all(peer, count + 1);
  for (const auto& queue : queues_) queue->drop_faults(peer);
}

void VerbsConnectionManager::leave() {
  const std::lock_guard lock(mutex_);
  try {
    for (std::size_t number = 0; number < peers_.size(); ++number) {
      Peer& peer = peers_[number];
      if (peer.address == nullptr || peer.count == kLeft) continue;
      peer.count = kLeft;
      Message farewell{};
      farewell.to = static_cast<Rank>(number);
      send(peer, farewell);
      datagrams_.drain();
    }
  } catch (const Error&) {
    // They will notice.
  }
}

}  // namespace pgasdl

#include "transport/verbs/connection_manager.hpp"

#include <algorithm>
#include <array>
#include <type_traits>

#include "sys/packed.hpp"
#include "transport/siphash.hpp"

namespace pgasdl {
namespace {

constexpr auto kFirstRepetition = std::chrono::milliseconds(20);
constexpr auto kLongestInterval = std::chrono::milliseconds(500);
constexpr int kLeastRepetitions = 4;
// Making an end takes up to milliseconds, many ranks may ask, and this thread sends heartbeats.
constexpr auto kLongestService = std::chrono::milliseconds(10);

// Travels in every packet, so that a queue pair of another job drops it before any tag is read.
std::uint32_t datagram_key(const std::string& token) {
  return siphash(token, "queue key") & 0x7fffffff;  // the highest bit has another meaning
}

template <typename Datagram>
std::uint64_t tag_of(Datagram datagram, const std::string& token) {
  static_assert(std::has_unique_object_representations_v<Datagram>);  // no padding: all bytes count
  datagram.tag = 0;
  return siphash(token, {reinterpret_cast<const char*>(&datagram), sizeof datagram});
}

template <typename Datagram>
Datagram from_bytes(const std::byte* bytes) {
  Datagram datagram;
  std::memcpy(&datagram, bytes, sizeof datagram);
  return datagram;
}

}  // namespace

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
  return packed(endpoint_of(device_, datagrams_.number()));
}

void VerbsConnectionManager::connect(Rank peer, const std::string& bytes) {
  const auto there = unpacked<VerbsEndpoint>(bytes, "endpoint", peer);
  const std::lock_guard lock(mutex_);
  Peer& known = peer_at(peer);
  const VerbsEndpoint here = endpoint_of(device_, datagrams_.number());
  known.path = path_to(device_, agree(rank_, here, peer, there), there);
  known.datagrams = there.datagrams;
  known.known = true;
}

template <typename Datagram>
void VerbsConnectionManager::send(Peer& peer, Datagram message) {
  if (peer.address == nullptr) {
    peer.address.reset(verbs_library().create_ah(device_.domain(), &peer.path.address));
    if (peer.address == nullptr) throw_system(text("a route to rank ", message.to), errno);
  }
  message.magic = VerbsEndpoint::kMagic;
  message.from = rank_;
  if constexpr (std::is_same_v<Datagram, Message>) message.count = peer.count;
  message.tag = tag_of(message, token_);
  datagrams_.send(peer.address.get(), peer.datagrams, message);
}

void VerbsConnectionManager::announce(VerbsConnection& connection, bool answer) {
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
  if (!lock.owns_lock()) return;  // the caller asks again
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
  announce(connection, true);
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

bool VerbsConnectionManager::service() {
  // A thread that waits for connections does the same, again and again.
  const std::unique_lock lock(mutex_, kLongestService);
  if (!lock.owns_lock()) return true;
  datagrams_.rearm();
  const bool all = take_datagrams();
  repeat();
  return !all;
}

void VerbsConnectionManager::repeat() {
  const auto now = Clock::now();
  for (Wanted& wanted : wanted_) {
    VerbsConnection& connection = *wanted.connection;
    if (now < wanted.next || !connection.apart()) continue;
    try {
      repeat(wanted, now);
    } catch (const Error& error) {
      // A call that fails may work later, when there is memory again.
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

bool VerbsConnectionManager::patience_over(const Wanted& wanted, Clock::time_point now) const {
  const Peer& peer = peers_[static_cast<std::size_t>(wanted.connection->peer())];
  return now - std::max(wanted.since, peer.heard) > std::chrono::duration<double>(timeout_s_);
}

void VerbsConnectionManager::repeat(Wanted& wanted, Clock::time_point now) {
  VerbsConnection& connection = *wanted.connection;
  // Repetitions count, too: a process that was stopped for a while asks again before it gives up.
  if (patience_over(wanted, now) && wanted.repetitions >= kLeastRepetitions) {
    const Rank peer = connection.peer();
    throw Error(ErrorKind::kPeerLost,
                text("rank ", peer, " has not answered requests for a connection on queue ",
                     connection.queue().id(), " for ", timeout_s_, " s; ctx.reconnect(", peer,
                     ") tries again"),
                peer);
  }
  if (connection.here().number == 0) connection.open();
  announce(connection, true);
  ++wanted.repetitions;
  wanted.interval = std::min<Nanoseconds>(2 * wanted.interval, kLongestInterval);
  wanted.next = now + wanted.interval;
}

bool VerbsConnectionManager::take_datagrams() {
  const auto until = Clock::now() + kLongestService;
  std::array<std::byte, VerbsDatagramChannel::kMostBytes> datagram;
  while (const std::size_t bytes = datagrams_.receive(datagram)) {
    try {
      if (bytes == sizeof(Message)) handle(from_bytes<Message>(datagram.data()));
      if (bytes == sizeof(News)) handle(from_bytes<News>(datagram.data()));
      if (bytes == sizeof(Farewell)) handle(from_bytes<Farewell>(datagram.data()));
    } catch (const Error&) {
      // The asking rank repeats itself, and learns in the end that no answer comes.
    }
    if (Clock::now() > until) return false;
  }
  return true;
}

template <typename Datagram>
bool VerbsConnectionManager::is_ours(const Datagram& datagram) {
  if (datagram.magic != VerbsEndpoint::kMagic || datagram.to != rank_ || datagram.from == rank_ ||
      datagram.from < 0 || static_cast<std::size_t>(datagram.from) >= peers_.size() ||
      !peer_at(datagram.from).known || datagram.tag != tag_of(datagram, token_)) {
    return false;
  }
  peer_at(datagram.from).heard = Clock::now();
  return true;
}

void VerbsConnectionManager::handle(const Message& message) {
  if (!is_ours(message) || message.queue >= queues_.size()) return;
  Peer& peer = peer_at(message.from);
  if (peer.forgotten) return;
  if (message.count > peer.count) give_up_all(message.from, message.count);
  if (peer.count == kLeft) return;
  if (message.count < peer.count) {
    // The sender does not know yet that its end is useless.
    Message news{};
    news.to = message.from;
    news.queue = message.queue;
    if (message.answer != 0) send(peer, news);
    return;
  }
  if (message.end.number == 0 || peer.parted) return;
  VerbsConnection& connection = queues_[message.queue]->make(message.from);
  if (connection.broken()) return;
  // Fails if memory is short: the sender asks again.
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
    return;  // late, from an end that was dropped
  }
  const bool joined = message.joined == connection.here().number;
  if (joined) connection.admit();
  if (message.answer != 0) announce(connection, !joined);
}

void VerbsConnectionManager::give_up_all(Rank peer, std::uint32_t count) {
  peer_at(peer).count = count;
  peer_at(peer).parted = false;
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
  n_renewals_.fetch_add(1, std::memory_order_release);
}

void VerbsConnectionManager::part(Rank peer) {
  const std::lock_guard lock(mutex_);
  peer_at(peer).parted = true;
  for (const auto& queue : queues_) {
    if (VerbsConnection* connection = queue->find(peer)) connection->part();
  }
}

void VerbsConnectionManager::forget(Rank peer) {
  const std::lock_guard lock(mutex_);
  peer_at(peer).forgotten = true;
  for (const auto& queue : queues_) {
    VerbsConnection* connection = queue->find(peer);
    if (connection == nullptr) continue;
    connection->close();
    connection->break_off(Error(ErrorKind::kPeerLost, text("rank ", peer, " is lost"), peer),
                          false);
  }
}

std::uint32_t VerbsConnectionManager::round(Rank peer) {
  const std::lock_guard lock(mutex_);
  return peer_at(peer).count;
}

void VerbsConnectionManager::announce(Rank peer, const VerbsRailNews& news) {
  const std::lock_guard lock(mutex_);
  if (!peer_at(peer).known) return;
  News message{};
  message.to = peer;
  message.what = news;
  send(peer_at(peer), message);
}

void VerbsConnectionManager::hear(VerbsTransport::HearNews hear) {
  const std::lock_guard lock(mutex_);
  hear_ = std::move(hear);
}

void VerbsConnectionManager::handle(const News& news) {
  if (is_ours(news) && hear_) hear_(news.from, news.what);
}

void VerbsConnectionManager::send_farewell(Rank peer, std::uint64_t word) {
  const std::lock_guard lock(mutex_);
  if (!peer_at(peer).known) return;
  Farewell message{};
  message.to = peer;
  message.word = word;
  send(peer_at(peer), message);
  datagrams_.drain();
}

void VerbsConnectionManager::handle(const Farewell& farewell) {
  if (is_ours(farewell)) peer_at(farewell.from).farewell = farewell.word;
}

std::uint64_t VerbsConnectionManager::farewell(Rank peer) {
  const std::lock_guard lock(mutex_);
  return peer_at(peer).farewell;
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
    // The peers notice by time-outs.
  }
}

}  // namespace pgasdl

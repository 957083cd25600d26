#include "transport/verbs/rails.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "sys/packed.hpp"
#include "transport/siphash.hpp"
#include "transport/verbs/device.hpp"

namespace pgasdl {
namespace {

constexpr std::uint64_t kMagic = 0x31736c696172;  // no VerbsEndpoint begins with it
constexpr std::size_t kPiecesPerRail = 128;

std::vector<VerbsPort> ports_of(const VerbsOptions& options) {
  std::vector<VerbsPort> ports;
  for (const VerbsDeviceInfo& info : verbs_devices(options)) {
    if (info.chosen) ports.push_back({info.device, info.port});
  }
  return ports;
}

// Precedes every rail's words, each of which follows its length.
struct Head {
  std::uint64_t magic;
  std::uint32_t n_rails;
  std::uint32_t padding;
};

std::string joined(const std::vector<std::string>& parts) {
  std::string all = packed(Head{kMagic, static_cast<std::uint32_t>(parts.size()), 0});
  for (const std::string& part : parts) {
    all += packed(static_cast<std::uint32_t>(part.size())) + part;
  }
  return all;
}

std::vector<std::string> parts_of(Rank peer, std::string_view all) {
  const auto mismatch = [&] {
    return Error(ErrorKind::kMismatch,
                 text("rank ", peer, "'s words are not of several rails: give all ranks the same ",
                      "PGASDL_VERBS_RAILS"),
                 peer);
  };
  if (all.size() < sizeof(Head)) throw mismatch();
  const auto head = take_packed<Head>(all, "words of rails", peer);
  if (head.magic != kMagic) throw mismatch();
  std::vector<std::string> parts;
  while (parts.size() < head.n_rails && all.size() >= sizeof(std::uint32_t)) {
    const auto bytes = take_packed<std::uint32_t>(all, "words of rails", peer);
    if (all.size() < bytes) throw mismatch();
    parts.emplace_back(all.substr(0, bytes));
    all.remove_prefix(bytes);
  }
  if (parts.empty() || parts.size() != head.n_rails || !all.empty()) throw mismatch();
  return parts;
}

// Makes one rail's datagrams invalid for another.
std::string token_of_rail(const std::string& token, std::size_t rail) {
  return packed(siphash(token, text("rail ", rail))) +
         packed(siphash(token, text("rail ", rail, ", the other half")));
}

// A segment as one rail reaches it, without the transport's resources.
LocalSegment plain(const LocalSegment& segment) {
  LocalSegment copy;
  copy.id = segment.id;
  copy.data = segment.data;
  copy.bytes = segment.bytes;
  copy.board = segment.board;
  copy.notifications = segment.notifications;
  copy.device = segment.device;
  copy.bound = segment.bound;
  copy.region = segment.region;
  copy.device_region = segment.device_region;
  return copy;
}

}  // namespace

VerbsRails::VerbsRails(Rank rank, Rank size, const std::string& token, const VerbsOptions& options)
    : rank_(rank),
      size_(size),
      options_(options),
      queues_(options.queues),
      peers_(static_cast<std::size_t>(size)),
      places_(std::make_unique<std::atomic<RailConnection*>[]>(static_cast<std::size_t>(size) *
                                                               options.queues)),
      ready_(epoll_create1(EPOLL_CLOEXEC)) {
  if (!ready_) throw_system("epoll_create1", errno);
  VerbsOptions one = options;
  one.rails = 1;
  one.excluded = false;
  one.count_flags = true;
  one.ack_timeout = options.acknowledgement_timeout();
  std::vector<VerbsPort> ports = ports_of(options);
  if (ports.empty()) ports.push_back({});  // its constructor says what is missing
  for (const VerbsPort& port : ports) {
    if (!port.device.empty()) one.ports = {port};
    rails_.push_back(std::make_unique<VerbsTransport>(
        rank, size, token_of_rail(checked_token(token), rails_.size()), one));
    VerbsTransport& rail = *rails_.back();
    lanes_.push_back(&rail);
    rail.hear([this](Rank from, const VerbsRailNews& news) {
      const std::lock_guard lock(heard_mutex_);
      heard_.push_back({from, news});
      has_heard_.store(true, std::memory_order_release);
    });
    epoll_event readable{};
    readable.events = EPOLLIN;
    if (epoll_ctl(ready_.get(), EPOLL_CTL_ADD, rail.service_descriptor(), &readable) != 0) {
      throw_system("epoll_ctl", errno);
    }
  }
  renewals_.resize(rails_.size());
}

// Each rail takes leave; the memory that pieces hold is released before the rails.
VerbsRails::~VerbsRails() {
  for (const auto& rail : rails_) rail->hear({});
  for (const auto& connection : owned_) connection->clear(1);
}

std::string VerbsRails::endpoint() {
  std::vector<std::string> parts;
  for (const auto& rail : rails_) parts.push_back(rail->endpoint());
  return joined(parts);
}

void VerbsRails::connect(Rank peer, const std::string& endpoint) {
  const std::vector<std::string> parts = parts_of(peer, endpoint);
  const std::size_t n_common = std::min(parts.size(), rails_.size());
  for (std::size_t rail = 0; rail < n_common; ++rail) rails_[rail]->connect(peer, parts[rail]);
  const std::lock_guard lock(rails_mutex_);
  Peer& known = peers_[static_cast<std::size_t>(peer)];
  // A rank posts only atomics to itself.
  known.common = peer == rank_ ? 1 : (1u << n_common) - 1;
  known.carrying.store(known.common, std::memory_order_release);
  known.dropped.resize(rails_.size());
}

void VerbsRails::set_wake_word(Rank peer, WakeWord* wake_word) {
  for (const auto& rail : rails_) rail->set_wake_word(peer, wake_word);
  if (peer == rank_) wake_word_.store(wake_word, std::memory_order_release);
}

// Pieces share the memory: it is deregistered after retract() or drop, when the last piece is done.
std::string VerbsRails::publish(LocalSegment& segment, std::span<const Rank> peers) {
  if (segment.keep == nullptr) {
    auto made = std::make_shared<RailLocal>();
    for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
      made->rails.push_back(plain(segment));
    }
    segment.keep = std::make_shared<std::shared_ptr<RailLocal>>(std::move(made));
  }
  RailLocal& memory = **static_cast<std::shared_ptr<RailLocal>*>(segment.keep.get());
  std::vector<std::string> parts;
  for (std::size_t rail = 0; rail < rails_.size(); ++rail) {
    parts.push_back(rails_[rail]->publish(memory.rails[rail], peers));
    segment.needs_flush |= memory.rails[rail].needs_flush;
  }
  return joined(parts);
}

RemoteSegment VerbsRails::attach(Rank peer, const std::string& description, int device,
                                 Deadline deadline) {
  const std::vector<std::string> parts = parts_of(peer, description);
  auto memory = std::make_shared<RailRemote>();
  for (std::size_t rail = 0; rail < std::min(parts.size(), rails_.size()); ++rail) {
    memory->rails.push_back(rails_[rail]->attach(peer, parts[rail], device, deadline));
  }
  const RemoteSegment& first = memory->rails[0];
  RemoteSegment remote;
  remote.bytes = first.bytes;
  remote.notifications = first.notifications;
  remote.device = first.device;
  remote.address = first.address;
  remote.keep = std::move(memory);
  return remote;
}

std::string VerbsRails::refuses_device(int device) const {
  for (const auto& rail : rails_) {
    if (auto why = rail->refuses_device(device); !why.empty()) return why;
  }
  return "";
}

void VerbsRails::retract(const LocalSegment& segment) {
  if (segment.keep == nullptr) return;
  static_cast<std::shared_ptr<RailLocal>*>(segment.keep.get())->reset();
  for (const auto& rail : rails_) rail->progress();
}

bool VerbsRails::service() {
  bool more = false;
  for (const auto& rail : rails_) more |= rail->service();
  look_after_rails();
  return more;
}

// --- data path

std::atomic<RailConnection*>& VerbsRails::place_of(QueueId queue, Rank peer) const {
  if (queue >= queues_.size()) [[unlikely]] {
    throw Error(ErrorKind::kQueue,
                text("queue ", queue, ": this transport was made for ", queues_.size()));
  }
  return places_[static_cast<std::size_t>(queue) * static_cast<std::size_t>(size_) +
                 static_cast<std::size_t>(peer)];
}

RailConnection& VerbsRails::make(QueueId queue, Rank peer) {
  if (RailConnection* found = find(queue, peer)) return *found;
  const std::lock_guard lock(rails_mutex_);
  std::atomic<RailConnection*>& place = place_of(queue, peer);
  if (RailConnection* found = place.load(std::memory_order_acquire)) return *found;
  const Peer& known = peers_[static_cast<std::size_t>(peer)];
  if (known.common == 0) {
    throw Error(ErrorKind::kSystem, text("rank ", peer, " was never announced to this transport"));
  }
  const std::uint32_t carrying = known.carrying.load(std::memory_order_relaxed);
  auto made = std::make_unique<RailConnection>(
      std::span(lanes_), queues_[queue], queue, peer, known.common, carrying,
      RailConnection::Limits{options_.stripe, kPiecesPerRail * rails_.size(), options_.timeout_s});
  made->next = connections_.load(std::memory_order_relaxed);
  if (carrying != known.common) dropping_.store(true, std::memory_order_release);
  owned_.push_back(std::move(made));
  connections_.store(owned_.back().get(), std::memory_order_release);
  place.store(owned_.back().get(), std::memory_order_release);
  return *owned_.back();
}

bool VerbsRails::post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                            const RemoteFlag* flag) {
  if (peer != rank_) [[likely]]
    return make(queue, peer).write(transfers, flag);
  return rails_[0]->post_write(queue, peer, transfers, flag);  // this rank's own copy is mapped
}

bool VerbsRails::post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                           const LocalFlag* flag) {
  if (peer != rank_) [[likely]]
    return make(queue, peer).read(transfers, flag, wake_word_.load(std::memory_order_acquire));
  return rails_[0]->post_read(queue, peer, transfers, flag);
}

bool VerbsRails::post_atomic(QueueId queue, Rank peer, const Atomic& atomic) {
  return make(queue, peer).atomic(atomic);
}

bool VerbsRails::connecting(QueueId queue, Rank peer) const {
  const RailConnection* connection = find(queue, peer);
  return connection == nullptr || connection->connecting();
}

std::size_t VerbsRails::connections(QueueId queue) const {
  std::size_t all = 0;
  for (const auto& rail : rails_) all += rail->connections(queue);
  return all;
}

std::optional<QueueId> VerbsRails::connected(QueueId queue, Rank peer) const {
  std::optional<QueueId> other;
  for (const auto& rail : rails_) {
    const auto found = rail->connected(queue, peer);
    if (found == queue) return queue;
    if (found) other = found;
  }
  return other;
}

void VerbsRails::send_farewell(Rank peer, std::uint64_t word) {
  for (const auto& rail : rails_) rail->send_farewell(peer, word);
}

std::uint64_t VerbsRails::farewell(Rank peer) const {
  for (const auto& rail : rails_) {
    if (const std::uint64_t word = rail->farewell(peer)) return word;
  }
  return 0;
}

bool VerbsRails::complete(QueueId queue) { return queues_[queue].complete(); }

std::uint64_t VerbsRails::mark(QueueId queue, Rank peer) const {
  const RailConnection* connection = find(queue, peer);
  return connection == nullptr ? 0 : connection->mark();
}

bool VerbsRails::reached(QueueId queue, Rank peer, std::uint64_t mark) const {
  const RailConnection* connection = find(queue, peer);
  return connection == nullptr || connection->reached(mark);
}

void VerbsRails::progress() {
  for (const auto& rail : rails_) rail->progress();
  look_after_rails();
  for (RailConnection* connection = connections_.load(std::memory_order_acquire);
       connection != nullptr; connection = connection->next) {
    if (!connection->busy()) continue;
    const auto suspect = connection->progress();
    if (!suspect) continue;
    const Error& why = suspect->error;
    if (!drop(connection->peer(), suspect->rail, why.what())) connection->fail(why);
  }
}

}  // namespace pgasdl

#include "transport/verbs/verbs.hpp"

#include <algorithm>

#include "memory/device_stream.hpp"
#include "reduce/copy.hpp"
#include "transport/raise_flag.hpp"
#include "transport/verbs/connection_manager.hpp"
#include "transport/verbs/device.hpp"
#include "transport/verbs/memory.hpp"
#include "transport/verbs/queue.hpp"

namespace pgasdl {
namespace {

// This rank's own copy, reached without the adapter.
std::byte* own_data(const RemoteSegment& segment) {
  return segment.data != nullptr ? segment.data : reinterpret_cast<std::byte*>(segment.address);
}

FlagWord* own_board(const RemoteSegment& segment) {
  if (segment.board != nullptr) return segment.board;
  return reinterpret_cast<FlagWord*>(
      static_cast<const VerbsRemoteKeys*>(segment.keep.get())->board_address);
}

// The GPU that takes part in a transfer of this rank to itself, or kHost.
int device_of(const Transfer& transfer) {
  return transfer.local->device != kHost ? transfer.local->device : transfer.remote->device;
}

void copy(int device, std::byte* to, const std::byte* from, std::uint64_t bytes) {
  if (device == kHost) return pgasdl::copy(to, from, bytes);
  device_copy(device, to, from, bytes);
}

}  // namespace

VerbsTransport::VerbsTransport(Rank rank, Rank size, const std::string& token,
                               const VerbsOptions& options)
    : rank_(rank),
      device_(std::make_shared<VerbsDevice>(options)),
      boards_(std::make_shared<VerbsBoards>()),
      memory_(std::make_shared<VerbsMemory>(device_, boards_)) {
  constexpr std::uint32_t kLeastDepth = 4;
  const auto most =
      static_cast<std::uint32_t>(std::min(device_->limits().max_qp_wr, device_->limits().max_cqe));
  const std::uint32_t depth = std::min(std::max(options.depth, kLeastDepth), most);
  for (QueueId queue = 0; queue < options.queues; ++queue) {
    queues_.push_back(std::make_unique<VerbsQueue>(*device_, *boards_, queue, size, depth));
  }
  manager_ = std::make_unique<VerbsConnectionManager>(*device_, token, rank, size, queues_,
                                                      options.timeout_s);
}

// The order matters: first no more answers, then no more traffic, then memory may go.
VerbsTransport::~VerbsTransport() {
  manager_->leave();
  manager_.reset();
  queues_.clear();
  memory_->close();
}

std::string VerbsTransport::describe() const { return text("RDMA by ", device_->port_name()); }

std::string VerbsTransport::endpoint() { return manager_->endpoint(); }

void VerbsTransport::connect(Rank peer, const std::string& endpoint) {
  manager_->connect(peer, endpoint);
}

void VerbsTransport::set_wake_word(Rank peer, WakeWord* wake_word) {
  if (peer == rank_) boards_->set_wake_word(wake_word);
}

std::string VerbsTransport::publish(LocalSegment& segment, std::span<const Rank>) {
  return memory_->publish(segment);
}

RemoteSegment VerbsTransport::attach(Rank peer, const std::string& description, int, Deadline) {
  return VerbsMemory::attach(peer, description);
}

std::string VerbsTransport::refuses_device(int device) const {
  return memory_->refuses_device(device);
}

void VerbsTransport::retract(const LocalSegment& segment) {
  if (segment.keep == nullptr) return;
  memory_->retract(*static_cast<VerbsLocalKeys*>(segment.keep.get()));
  collect_retired();
}

int VerbsTransport::service_descriptor() const { return manager_->descriptor(); }

bool VerbsTransport::service() { return manager_->service(); }

VerbsQueue& VerbsTransport::queue_at(QueueId queue) const {
  if (queue >= queues_.size()) [[unlikely]] {
    throw Error(ErrorKind::kQueue,
                text("queue ", queue, ": this transport was made for ", queues_.size()));
  }
  return *queues_[queue];
}

VerbsConnection* VerbsTransport::connection_to(QueueId queue, Rank peer) {
  VerbsConnection* connection = queue_at(queue).find(peer);
  if (connection != nullptr && !connection->apart()) [[likely]]
    return connection;
  manager_->want(queue, peer);
  return nullptr;
}

bool VerbsTransport::post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                                const RemoteFlag* flag) {
  if (peer == rank_) [[unlikely]] {
    for (const Transfer& transfer : transfers) {
      copy(device_of(transfer), own_data(*transfer.remote) + transfer.remote_offset,
           transfer.local->data + transfer.local_offset, transfer.bytes);
    }
    if (flag == nullptr) return true;
    raise_flag(own_board(*flag->remote)[flag->notification], flag->value, flag->add);
    if (WakeWord* wake_word = boards_->wake_word()) wake_word->wake();
    return true;
  }
  return write(queue, peer, transfers, flag).has_value();
}

VerbsTransport::Posted VerbsTransport::write(QueueId queue, Rank peer,
                                             std::span<const Transfer> transfers,
                                             const RemoteFlag* flag) {
  VerbsConnection* connection = connection_to(queue, peer);
  return connection == nullptr ? std::nullopt : connection->write(transfers, flag);
}

bool VerbsTransport::post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                               const LocalFlag* flag) {
  if (peer == rank_) [[unlikely]] {
    for (const Transfer& transfer : transfers) {
      copy(device_of(transfer), transfer.local->data + transfer.local_offset,
           own_data(*transfer.remote) + transfer.remote_offset, transfer.bytes);
    }
    if (flag == nullptr) return true;
    flag->local->board[flag->notification].store(flag->value, std::memory_order_release);
    if (WakeWord* wake_word = boards_->wake_word()) wake_word->wake();
    return true;
  }
  return read(queue, peer, transfers, flag).has_value();
}

VerbsTransport::Posted VerbsTransport::read(QueueId queue, Rank peer,
                                            std::span<const Transfer> transfers,
                                            const LocalFlag* flag) {
  VerbsConnection* connection = connection_to(queue, peer);
  return connection == nullptr ? std::nullopt
                               : connection->read(transfers, flag, boards_->wake_word());
}

// Also uses a queue pair to this rank itself: adapters' atomics are not atomic to the processor.
bool VerbsTransport::post_atomic(QueueId queue, Rank peer, const Atomic& atomic) {
  return this->atomic(queue, peer, atomic).has_value();
}

VerbsTransport::Posted VerbsTransport::atomic(QueueId queue, Rank peer, const Atomic& atomic) {
  VerbsConnection* connection = connection_to(queue, peer);
  if (connection == nullptr) return std::nullopt;
  const RemoteSegment& remote = *atomic.remote;
  return connection->atomic(atomic, remote.data != nullptr
                                        ? memory_->own_keys(remote.data)
                                        : *static_cast<const VerbsRemoteKeys*>(remote.keep.get()));
}

bool VerbsTransport::connecting(QueueId queue, Rank peer) const {
  const VerbsConnection* connection = queue_at(queue).find(peer);
  return connection == nullptr || connection->apart();
}

std::size_t VerbsTransport::connections(QueueId queue) const { return queue_at(queue).connected(); }

std::optional<QueueId> VerbsTransport::connected(QueueId queue, Rank peer) const {
  const auto carries = [&](const VerbsQueue& each) {
    const VerbsConnection* connection = each.find(peer);
    return connection != nullptr && !connection->apart() && !connection->broken();
  };
  if (carries(queue_at(queue))) return queue;
  for (const auto& other : queues_) {
    if (carries(*other)) return other->id();
  }
  return std::nullopt;
}

void VerbsTransport::send_farewell(Rank peer, std::uint64_t word) {
  manager_->send_farewell(peer, word);
}

std::uint64_t VerbsTransport::farewell(Rank peer) const { return manager_->farewell(peer); }

bool VerbsTransport::complete(QueueId queue) { return queue_at(queue).complete(); }

std::uint64_t VerbsTransport::mark(QueueId queue, Rank peer) const {
  const VerbsConnection* connection = queue_at(queue).find(peer);
  return connection == nullptr ? 0 : connection->mark();
}

bool VerbsTransport::reached(QueueId queue, Rank peer, std::uint64_t mark) const {
  const VerbsConnection* connection = queue_at(queue).find(peer);
  return connection == nullptr || connection->over({connection, static_cast<std::uint32_t>(mark),
                                                    static_cast<std::uint32_t>(mark >> 32)});
}

// The library's own queues come last and are polled first: a rank that sees a barrier's flag has
// polled for everything that had arrived on the program's queues before it.
void VerbsTransport::progress() {
  for (std::size_t queue = queues_.size(); queue-- > 0;) {
    if (queues_[queue]->used()) queues_[queue]->progress();
  }
  if (manager_->busy()) [[unlikely]]
    manager_->progress();
  if (memory_->has_retired()) [[unlikely]]
    collect_retired();
}

void VerbsTransport::collect_retired() {
  const auto under_way = [&] {
    std::vector<VerbsMemory::Pending> all;
    for (const auto& queue : queues_) queue->list_under_way(all);
    return all;
  };
  memory_->collect(under_way, [](const VerbsMemory::Pending& pending) {
    return pending.connection->over(pending);
  });
}

void VerbsTransport::reconnect(Rank peer) { manager_->reconnect(peer); }

// Its requests may be with its adapter, which does not stop with it.
bool VerbsTransport::forget(Rank peer) {
  manager_->forget(peer);
  return true;
}

bool VerbsTransport::port_is_up() const { return device_->port_is_up(); }

VerbsFate VerbsTransport::fate(QueueId queue, Rank peer, VerbsPosted& posted) const {
  VerbsConnection* connection = queue_at(queue).find(peer);
  return connection == nullptr ? VerbsFate::kGone : connection->fate(posted);
}

std::optional<VerbsBreak> VerbsTransport::broken(QueueId queue, Rank peer) const {
  VerbsConnection* connection = queue_at(queue).find(peer);
  return connection == nullptr ? std::nullopt : connection->what_broke();
}

VerbsTransport::Posted VerbsTransport::fence(QueueId queue, Rank peer) {
  VerbsConnection* connection = connection_to(queue, peer);
  return connection == nullptr ? std::nullopt : connection->fence();
}

void VerbsTransport::part(Rank peer) { manager_->part(peer); }

bool VerbsTransport::parted(QueueId queue, Rank peer, bool at_once, std::uint32_t& taken) {
  taken = 0;
  VerbsConnection* connection = queue_at(queue).find(peer);
  return connection == nullptr || connection->parted(at_once, taken);
}

std::uint32_t VerbsTransport::round(Rank peer) const { return manager_->round(peer); }

std::uint64_t VerbsTransport::renewals() const { return manager_->renewals(); }

void VerbsTransport::announce(Rank peer, const VerbsRailNews& news) {
  manager_->announce(peer, news);
}

void VerbsTransport::hear(HearNews hear) { manager_->hear(std::move(hear)); }

void VerbsTransport::listen() { manager_->progress(); }

}  // namespace pgasdl

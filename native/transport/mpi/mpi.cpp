#include "transport/mpi/mpi.hpp"

#include <algorithm>
#include <cstring>

#include "reduce/copy.hpp"
#include "transport/processor_atomic.hpp"
#include "transport/raise_flag.hpp"

namespace pgasdl {
namespace {

const MpiRemote& mpi_remote(const RemoteSegment& remote) {
  return *static_cast<const MpiRemote*>(remote.keep.get());
}

bool mapped(std::span<const Transfer> transfers) {
  return std::all_of(transfers.begin(), transfers.end(), [](const Transfer& transfer) {
    return mpi_remote(*transfer.remote).member().mapped();
  });
}

std::byte* source_of(const Transfer& transfer) {
  return transfer.local->data + transfer.local_offset;
}

}  // namespace

MpiTransport::MpiTransport(std::shared_ptr<MpiWorld> world, const MpiOptions& options)
    : world_(std::move(world)),
      options_(options),
      rank_(world_->rank()),
      wake_words_(
          std::make_unique<std::atomic<WakeWord*>[]>(static_cast<std::size_t>(world_->size()))),
      lost_(std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(world_->size()))) {
  register_wake_words();
  world_->begin();
  for (QueueId queue = 0; queue < options.queues; ++queue) {
    for (Rank peer = 0; peer < world_->size(); ++peer) {
      connections_.push_back(std::make_unique<Connection>());
      connections_.back()->queue = queue;
      connections_.back()->peer = peer;
    }
  }
}

MpiTransport::~MpiTransport() = default;

std::string MpiTransport::publish(LocalSegment& segment, std::span<const Rank> peers) {
  return world_->publish(segment, peers, options_.created);
}

RemoteSegment MpiTransport::attach(Rank peer, const std::string& description, int, Deadline) {
  return MpiWorld::attach(peer, description);
}

// Makes the window, which also shows where the other members' memory is.
Outcome MpiTransport::settle(LocalSegment& own, std::span<const Rank> members,
                             std::span<RemoteSegment> remotes, Deadline deadline) {
  const auto help = [&] { help_meeting(members); };
  if (world_->settle(own, members, remotes, deadline, help) != Outcome::kDone) {
    return Outcome::kTimeout;
  }
  for (RemoteSegment& remote : remotes) {
    if (remote.keep == nullptr || !mpi_remote(remote).member().mapped()) continue;
    remote.data = mpi_remote(remote).member().data();
    remote.board = mpi_remote(remote).member().board();
  }
  return Outcome::kDone;
}

void MpiTransport::leave(LocalSegment& own) {
  const auto* window = static_cast<const MpiWindow*>(own.keep.get());
  if (window == nullptr) return;
  world_->leave(own, [&] { help_meeting(window->ranks()); });
}

void MpiTransport::raise_here(FlagWord& word, std::uint32_t value) {
  word.store(value, std::memory_order_release);
  wake(rank_);
}

// --- to this rank itself: by stores, but atomics as for peers

void MpiTransport::write_here(std::span<const Transfer> transfers, const RemoteFlag* flag) {
  for (const Transfer& transfer : transfers) {
    std::memmove(transfer.remote->data + transfer.remote_offset, source_of(transfer),
                 transfer.bytes);
  }
  if (flag != nullptr) {
    raise_flag(flag->remote->board[flag->notification], flag->value, flag->add);
    wake(rank_);
  }
}

void MpiTransport::atomic_here(const Atomic& atomic) {
  MpiWindow* window = world_->own_window(atomic.remote->data);
  if (window == nullptr || window->shared || world_->library().constants().own_by_processor) {
    processor_atomic(atomic, atomic.remote->data);
    return;
  }
  const auto serial = world_->serialize();
  run(atomic, *window, window->own_index);
}

// --- to peers

// Short data travel with their flag; long data in the way that is faster with this library.
bool MpiTransport::by_message(Rank peer, const Transfer& transfer, const RemoteFlag* flag) const {
  if (mpi_remote(*transfer.remote).member().mapped()) return false;
  return transfer.bytes > world_->most_within(peer) ? world_->sends_long(peer) : flag != nullptr;
}

bool MpiTransport::post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                              const RemoteFlag* flag) {
  if (peer == rank_) {
    write_here(transfers, flag);
    return true;
  }
  Connection& connection = this->connection(queue, peer);
  // Nothing may overtake operations through MPI; without any, the connection is not needed.
  const bool direct = !connection.busy.load(std::memory_order_acquire) && mapped(transfers) &&
                      (flag == nullptr || (!connection.unflushed.load(std::memory_order_acquire) &&
                                           !connection.unread.load(std::memory_order_acquire) &&
                                           mpi_remote(*flag->remote).member().mapped()));
  if (direct) {
    for (const Transfer& transfer : transfers) {
      pgasdl::copy(mpi_remote(*transfer.remote).member().data() + transfer.remote_offset,
                   source_of(transfer), transfer.bytes);
    }
    if (flag != nullptr) {
      FlagWord* board = mpi_remote(*flag->remote).member().board();
      raise_flag(board[flag->notification], flag->value, flag->add);
      wake(peer);
    }
    return true;
  }
  const std::unique_lock lock(connection.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  raise_fault(connection);
  if (connection.operations.size() >= kMostOperations) return false;
  const RemoteFlag* last = flag;  // travels in the last message, unless that precedes a put
  for (const Transfer& transfer : transfers) {
    const bool with = &transfer == &transfers.back() && flag != nullptr &&
                      !mpi_remote(*flag->remote).member().mapped();
    if (!by_message(peer, transfer, with ? flag : nullptr)) {
      enqueue(connection, Operation::Kind::kPut, mpi_remote(*transfer.remote), source_of(transfer),
              transfer.remote_offset, transfer.bytes);
      continue;
    }
    enqueue_message(connection, &transfer, with ? flag : nullptr);
    if (with) last = nullptr;
  }
  if (last != nullptr) enqueue_message(connection, nullptr, last);
  activate(connection);
  return true;
}

bool MpiTransport::post_read(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                             const LocalFlag* flag) {
  FlagWord* word = flag == nullptr ? nullptr : &flag->local->board[flag->notification];
  if (peer == rank_) {
    for (const Transfer& transfer : transfers) {
      std::memmove(source_of(transfer), transfer.remote->data + transfer.remote_offset,
                   transfer.bytes);
    }
    if (word != nullptr) raise_here(*word, flag->value);
    return true;
  }
  if (mapped(transfers)) {
    for (const Transfer& transfer : transfers) {
      pgasdl::copy(source_of(transfer),
                   mpi_remote(*transfer.remote).member().data() + transfer.remote_offset,
                   transfer.bytes);
    }
    if (word != nullptr) raise_here(*word, flag->value);
    return true;
  }
  Connection& connection = this->connection(queue, peer);
  const std::unique_lock lock(connection.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  raise_fault(connection);
  if (connection.operations.size() >= kMostOperations) return false;
  for (const Transfer& transfer : transfers) {
    enqueue(connection, Operation::Kind::kGet, mpi_remote(*transfer.remote), source_of(transfer),
            transfer.remote_offset, transfer.bytes);
  }
  if (word != nullptr) {
    Operation& operation = enqueue(connection, Operation::Kind::kLocalFlag, {});
    operation.word = word;
    operation.value = flag->value;
  }
  activate(connection);
  return true;
}

bool MpiTransport::post_atomic(QueueId queue, Rank peer, const Atomic& atomic) {
  if (peer == rank_) {
    atomic_here(atomic);
    return true;
  }
  const MpiRemote& remote = mpi_remote(*atomic.remote);
  if (remote.window->shared) {
    processor_atomic(atomic, remote.member().data());
    return true;
  }
  Connection& connection = this->connection(queue, peer);
  const std::unique_lock lock(connection.mutex, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  raise_fault(connection);
  enqueue(connection, Operation::Kind::kAtomic, remote).atomic = atomic;
  activate(connection);
  return true;
}

MpiTransport::Operation& MpiTransport::enqueue(Connection& connection, Operation::Kind kind,
                                               const MpiRemote& remote) {
  Operation& operation = connection.operations.emplace_back();
  operation.kind = kind;
  operation.window = remote.window;
  operation.target = remote.index;
  return operation;
}

void MpiTransport::enqueue(Connection& connection, Operation::Kind kind, const MpiRemote& remote,
                           std::byte* here, std::uint64_t offset, std::uint64_t bytes) {
  Aint at = remote.member().data_at + static_cast<Aint>(offset);
  while (bytes > 0) {
    Operation& operation = enqueue(connection, kind, remote);
    operation.here = here;
    operation.at = at;
    operation.bytes = static_cast<int>(std::min(bytes, MpiLibrary::kMostBytes));
    here += operation.bytes;
    at += operation.bytes;
    bytes -= static_cast<std::uint64_t>(operation.bytes);
  }
}

void MpiTransport::enqueue_message(Connection& connection, const Transfer* data,
                                   const RemoteFlag* flag) {
  std::uint64_t done = 0;
  for (bool last = false; !last;) {
    Operation& operation = connection.operations.emplace_back();
    operation.kind = Operation::Kind::kMessage;
    if (data != nullptr) {
      const std::uint64_t bytes = std::min(data->bytes - done, MpiLibrary::kMostBytes);
      operation.data = mpi_remote(*data->remote).window;
      operation.here = source_of(*data) + done;
      operation.offset = data->remote_offset + done;
      operation.bytes = static_cast<int>(bytes);
      done += bytes;
    }
    last = data == nullptr || done == data->bytes;
    if (!last || flag == nullptr) continue;
    operation.window = mpi_remote(*flag->remote).window;
    operation.target = mpi_remote(*flag->remote).index;
    operation.notification = flag->notification;
    operation.value = flag->value;
    operation.add = flag->add;
  }
}

// Lists a connection that has operations; if this thread may call MPI, they begin at once.
void MpiTransport::activate(Connection& connection) {
  if (connection.operations.empty()) return;
  connection.busy.store(true, std::memory_order_release);
  // The heartbeat thread must not wait for a thread that a lost peer keeps in MPI.
  std::unique_lock<std::mutex> serial;
  if (world_->may_call() && world_->try_serialize(serial)) {
    begin(connection);
    // An operation that needs no flush leaves at once.
    const bool leaves = connection.operations.front().kind == Operation::Kind::kMessage &&
                        connection.written.empty();
    if (leaves && move(connection) && connection.fault == nullptr) {
      settle(connection);
      return;
    }
  }
  if (connection.listed) return;
  connection.listed = true;
  const std::lock_guard lock(active_mutex_);
  active_.push_back(&connection);
  n_active_.store(active_.size(), std::memory_order_relaxed);
}

}  // namespace pgasdl

// Operations under way over MPI: advances, completes and drops them, the last if a peer is lost.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "transport/mpi/mpi.hpp"
#include "transport/raise_flag.hpp"

namespace pgasdl {
namespace {

// Asking the library costs as much as a small put. Where stores raise flags, too, this limits how
// often that happens.
constexpr std::uint64_t kTicksBetweenHelp = 1000;
// If all windows are mapped, only messages of meetings arrive.
constexpr std::uint64_t kTicksBetweenLooks = 1000 * 1000;
constexpr int kMessagesAtOnce = 16;

}  // namespace

void MpiTransport::run(const Atomic& atomic, const MpiWindow& window, int target) {
  MpiLibrary& library = world_->library();
  const Aint at = window.member(target).data_at + static_cast<Aint>(atomic.offset);
  const Rank peer = window.ranks()[static_cast<std::size_t>(target)];
  const bool adds = atomic.kind == Atomic::Kind::kFetchAdd;
  const char* call = adds ? "MPI_Fetch_and_op" : "MPI_Compare_and_swap";
  const MpiWorld::Blocking blocking(*world_, call);  // Open MPI blocks here, not only in flush
  library.check(adds ? library.fetch_add(&atomic.operand, atomic.old, target, at, window.data)
                     : library.compare_swap(&atomic.operand, &atomic.compare, atomic.old, target,
                                            at, window.data),
                call, peer);
  library.check(library.flush(target, window.data), "MPI_Win_flush", peer);
}

// Sends an operation's message or flag, after all earlier writes have arrived. False: not now.
bool MpiTransport::send(Connection& connection, Operation& operation) {
  flush(connection);
  const bool flagged = operation.window != nullptr;
  if (flagged && operation.window->member(operation.target).mapped()) {
    if (!messages_read(connection)) return false;
    FlagWord* board = operation.window->member(operation.target).board();
    raise_flag(board[operation.notification], operation.value, operation.add);
    wake(connection.peer);
    return true;
  }
  const MpiHeader header{
      .kind = MpiHeader::Kind::kWrite,
      .question = 0,
      .queue = connection.queue,
      .data = operation.data == nullptr ? MpiWindowName{} : operation.data->name(),
      .offset = operation.offset,
      .board = flagged ? operation.window->name() : MpiWindowName{},
      .notification = operation.notification,
      .value = operation.value,
      .bytes = static_cast<std::uint64_t>(operation.bytes),
      .apart = operation.bytes > static_cast<int>(world_->most_within(connection.peer)),
      .add = operation.add};
  if (!world_->send(connection.peer, header, operation.here, &operation.request)) return false;
  operation.sent = true;
  ++connection.n_sent;
  if (operation.bytes > 0) connection.unread.store(true, std::memory_order_release);
  return true;
}

// True: the source may change.
bool MpiTransport::sent(Connection& connection, Operation& operation) {
  if (!operation.sent) {
    if (!send(connection, operation)) return false;
    if (!operation.sent) return true;  // it was a store
  }
  bool left = true;
  if (operation.request != 0) {
    world_->library().check(world_->library().test(&operation.request, &left), "MPI_Test",
                            connection.peer);
  }
  return left;
}

// True once the peer has read all earlier messages: a read or a stored flag would overtake them.
bool MpiTransport::messages_read(Connection& connection) {
  if (!connection.unread.load(std::memory_order_relaxed)) return true;
  if (!world_->answered(connection.queue, connection.peer, connection.question)) return false;
  connection.question = 0;
  connection.unread.store(false, std::memory_order_release);
  return true;
}

void MpiTransport::flush(Connection& connection) {
  MpiLibrary& library = world_->library();
  for (const Connection::Written& written : connection.written) {
    const MpiWorld::Blocking blocking(*world_, "MPI_Win_flush");
    library.check(library.flush(written.target, written.window->data), "MPI_Win_flush",
                  connection.peer);
  }
  forget_written(connection);
}

void MpiTransport::forget_written(Connection& connection) {
  connection.written.clear();
  connection.unflushed.store(false, std::memory_order_release);
}

// The writes are complete only locally: a later flag still has to flush them.
void MpiTransport::settle(Connection& connection) {
  std::erase_if(connection.written,
                [](const Connection::Written& written) { return written.window.use_count() == 1; });
  connection.busy.store(false, std::memory_order_release);
}

// Puts and reads begin together, and so do messages that come before all others; other operations
// wait until they are the first, as do reads after messages.
void MpiTransport::begin(Connection& connection) {
  using Kind = Operation::Kind;
  MpiLibrary& library = world_->library();
  for (; connection.n_begun < connection.operations.size(); ++connection.n_begun) {
    Operation& operation = connection.operations[connection.n_begun];
    if (operation.kind == Kind::kPut) {
      const MpiWorld::Blocking blocking(*world_, "MPI_Rput");
      library.check(library.rput(operation.here, operation.bytes, operation.target, operation.at,
                                 operation.window->data, &operation.request),
                    "MPI_Rput", connection.peer);
      const bool known = std::any_of(
          connection.written.begin(), connection.written.end(), [&](const auto& written) {
            return written.window == operation.window && written.target == operation.target;
          });
      if (!known) connection.written.push_back({operation.window, operation.target});
      connection.unflushed.store(true, std::memory_order_release);
    } else if (operation.kind == Kind::kGet) {
      if (connection.messages_ahead > 0 || !messages_read(connection)) break;
      const MpiWorld::Blocking blocking(*world_, "MPI_Rget");
      library.check(library.rget(operation.here, operation.bytes, operation.target, operation.at,
                                 operation.window->data, &operation.request),
                    "MPI_Rget", connection.peer);
    } else if (operation.kind == Kind::kMessage) {
      ++connection.messages_ahead;
    }
  }
  send_ahead(connection);
}

// Sends messages together, up to the first that has to wait for something else.
void MpiTransport::send_ahead(Connection& connection) {
  while (connection.n_sent < std::min(connection.n_begun, kMostSent) &&
         connection.written.empty()) {
    Operation& operation = connection.operations[connection.n_sent];
    const bool stored =
        operation.window != nullptr && operation.window->member(operation.target).mapped();
    if (operation.kind != Operation::Kind::kMessage || stored) return;
    if (!send(connection, operation)) return;
  }
}

// True: the operation is over, as all before it are.
bool MpiTransport::finish(Connection& connection, Operation& operation) {
  using Kind = Operation::Kind;
  bool done = true;
  switch (operation.kind) {
    case Kind::kPut:
    case Kind::kGet:
      world_->library().check(world_->library().test(&operation.request, &done), "MPI_Test",
                              connection.peer);
      break;
    case Kind::kMessage:
      done = sent(connection, operation);
      break;
    case Kind::kLocalFlag:
      raise_here(*operation.word, operation.value);
      break;
    case Kind::kAtomic:
      run(operation.atomic, *operation.window, operation.target);
      break;
  }
  return done;
}

// Advances as far as possible, with the connection's mutex and serialize() held. One test advances
// everything in the library, so only the oldest operation is tested.
void MpiTransport::advance(Connection& connection) {
  std::deque<Operation>& operations = connection.operations;
  begin(connection);
  while (connection.n_begun > 0 && finish(connection, operations.front())) {
    if (operations.front().kind == Operation::Kind::kMessage) --connection.messages_ahead;
    if (operations.front().sent) --connection.n_sent;
    operations.pop_front();
    --connection.n_begun;
  }
}

void MpiTransport::drop(Connection& connection) {
  connection.operations.clear();
  connection.n_begun = 0;
  connection.n_sent = 0;
  connection.messages_ahead = 0;
}

bool MpiTransport::move(Connection& connection) {
  try {
    if (lost_[static_cast<std::size_t>(connection.peer)].load(std::memory_order_relaxed)) {
      drop(connection);
      forget_written(connection);
      connection.busy.store(false, std::memory_order_release);
    } else {
      advance(connection);
    }
  } catch (const Error& error) {
    connection.fault = std::make_unique<Error>(error);
    drop(connection);
  }
  return connection.operations.empty();
}

void MpiTransport::raise_fault(Connection& connection) {
  if (connection.fault == nullptr) [[likely]]
    return;
  const Error fault = *connection.fault;
  connection.fault.reset();
  throw fault;
}

bool MpiTransport::complete(QueueId queue) {
  // Also heartbeats: a program that writes and waits all the time leaves their thread no turn.
  if (n_active_.load(std::memory_order_relaxed) != 0) progress();
  bool all = true;
  for (Rank peer = 0; peer < world_->size(); ++peer) {
    Connection& connection = this->connection(queue, peer);
    if (!connection.busy.load(std::memory_order_acquire)) continue;
    const std::unique_lock lock(connection.mutex, std::try_to_lock);
    if (!lock.owns_lock()) {
      all = false;
      continue;
    }
    raise_fault(connection);
    std::unique_lock<std::mutex> serial;
    if (world_->may_call() && world_->try_serialize(serial)) {
      if (move(connection) && connection.busy.load(std::memory_order_relaxed) &&
          connection.fault == nullptr) {
        settle(connection);
      }
    }
    raise_fault(connection);
    all &= !connection.busy.load(std::memory_order_relaxed);
  }
  return all;
}

void MpiTransport::progress() {
  if (any_lost_.load(std::memory_order_relaxed)) [[unlikely]]
    end_if_stuck();
  if (!world_->may_call()) return;
  for (std::size_t number = 0; number < n_active_.load(std::memory_order_relaxed); ++number) {
    Connection* connection = nullptr;
    {
      const std::lock_guard lock(active_mutex_);
      if (number >= active_.size()) break;
      connection = active_[number];
    }
    const std::unique_lock lock(connection->mutex, std::try_to_lock);
    if (!lock.owns_lock()) continue;
    std::unique_lock<std::mutex> serial;
    if (!world_->try_serialize(serial)) return;
    if (!move(*connection)) continue;
    // Threads that may not call MPI wait until this one finishes their work.
    if (world_->one_thread() && connection->fault == nullptr) settle(*connection);
    const std::lock_guard active(active_mutex_);
    connection->listed = false;
    std::erase(active_, connection);
    n_active_.store(active_.size(), std::memory_order_relaxed);
  }
  help_library();
}

void MpiTransport::help_library() {
  const std::uint64_t now = ticks();
  const std::uint64_t since = now - helped_.load(std::memory_order_relaxed);
  const std::uint64_t stores = world_->needs_help() ? kTicksBetweenHelp : kTicksBetweenLooks;
  const std::uint64_t pause = world_->maps() ? stores : 0;
  if (since < pause) return;
  helped_.store(now, std::memory_order_relaxed);
  std::unique_lock<std::mutex> serial;
  if (!world_->try_serialize(serial)) return;
  // A wait looks for its flag after each message; others look rarely, and take what is there.
  const int most = since < kTicksBetweenHelp ? 1 : kMessagesAtOnce;
  int messages = 0;
  while (messages < most && world_->receive()) ++messages;
  if (messages != 0) wake(rank_);  // other threads wait for their flags
}

void MpiTransport::help_meeting(std::span<const Rank> members) {
  progress();
  for (const Rank member : members) {
    if (!lost_[static_cast<std::size_t>(member)].load(std::memory_order_relaxed)) continue;
    throw Error(ErrorKind::kPeerLost,
                text("rank ", member,
                     " was lost, and with it the segment that it was to make with "
                     "rank ",
                     rank_),
                member);
  }
}

// --- losses

void MpiTransport::lost(Rank peer) {
  lost_[static_cast<std::size_t>(peer)].store(true, std::memory_order_relaxed);
  Rank nobody = -1;
  first_lost_.compare_exchange_strong(nobody, peer);
  any_lost_.store(true, std::memory_order_release);
  world_->lost(peer);
}

// MPI does not return from a call that waits for a dead rank, and nothing can make it return, so
// the whole process ends, with the reason.
void MpiTransport::end_if_stuck() {
  const char* call = world_->stuck(options_.patience_s);
  if (call == nullptr) return;
  std::fprintf(stderr,
               "pgasdl: rank %d of %d was lost, and rank %d has been in %s since: MPI does not "
               "return from it, so this process ends (transport mpi)\n",
               first_lost_.load(), world_->size(), rank_, call);
  std::fflush(nullptr);
  std::_Exit(EXIT_FAILURE);
}

}  // namespace pgasdl

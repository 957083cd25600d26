#include "transport/mpi.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "reduce/copy.hpp"

namespace pgasdl {
namespace {

// Asking the library costs as much as a small put: not more often than this.
constexpr std::uint64_t kTicksBetweenHelp = 1000;

const MpiRemote& reach(const RemoteSegment& remote) {
  return *static_cast<const MpiRemote*>(remote.keep.get());
}

void by_processor(const Atomic& atomic, std::byte* data) {
  std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(data + atomic.offset));
  if (atomic.kind == Atomic::Kind::kFetchAdd) {
    *atomic.old = word.fetch_add(atomic.operand, std::memory_order_acq_rel);
  } else {
    *atomic.old = atomic.compare;
    word.compare_exchange_strong(*atomic.old, atomic.operand, std::memory_order_acq_rel);
  }
}

const MpiWindow::Member& member_of(const MpiRemote& remote) {
  return remote.window->members[static_cast<std::size_t>(remote.index)];
}

bool mapped(std::span<const Transfer> transfers) {
  return std::all_of(transfers.begin(), transfers.end(), [](const Transfer& transfer) {
    return member_of(reach(*transfer.remote)).mapped();
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
      lost_(std::make_unique<std::atomic<bool>[]>(static_cast<std::size_t>(world_->size()))) {
  for (QueueId queue = 0; queue < options.queues; ++queue) {
    for (Rank peer = 0; peer < world_->size(); ++peer) {
      lanes_.push_back(std::make_unique<Lane>());
      lanes_.back()->peer = peer;
    }
  }
}

MpiTransport::~MpiTransport() = default;

std::string MpiTransport::publish(LocalSegment& segment, std::span<const Rank> peers) {
  return world_->publish(segment, peers, options_.created);
}

RemoteSegment MpiTransport::attach(Rank peer, const std::string& description, Deadline deadline) {
  return world_->attach(peer, description, deadline, [this] { progress(); });
}

// --- to this rank itself: stores, and atomics by the way that the others' take

void MpiTransport::write_here(std::span<const Transfer> transfers, const RemoteFlag* flag) {
  for (const Transfer& transfer : transfers) {
    std::memmove(transfer.remote->data + transfer.remote_offset, source_of(transfer),
                 transfer.bytes);
  }
  if (flag != nullptr) {
    flag->remote->board[flag->notification].store(flag->value, std::memory_order_release);
  }
}

void MpiTransport::atomic_here(const Atomic& atomic) {
  MpiWindow* window = world_->own_window(atomic.remote->data);
  if (window == nullptr || window->shared || world_->library().constants().own_by_processor) {
    by_processor(atomic, atomic.remote->data);
    return;
  }
  const auto turn = world_->turn();
  run(atomic, *window, window->own_index);
}

void MpiTransport::run(const Atomic& atomic, const MpiWindow& window, int target) {
  MpiLibrary& library = world_->library();
  const Aint at =
      window.members[static_cast<std::size_t>(target)].data_at + static_cast<Aint>(atomic.offset);
  const Rank peer = window.ranks()[static_cast<std::size_t>(target)];
  if (atomic.kind == Atomic::Kind::kFetchAdd) {
    library.check(library.fetch_add(&atomic.operand, atomic.old, target, at, window.data),
                  "MPI_Fetch_and_op", peer);
  } else {
    library.check(
        library.compare_swap(&atomic.operand, &atomic.compare, atomic.old, target, at, window.data),
        "MPI_Compare_and_swap", peer);
  }
  const MpiWorld::Blocking blocking(*world_, "MPI_Win_flush");
  library.check(library.flush(target, window.data), "MPI_Win_flush", peer);
}

// --- to peers

std::uint32_t MpiTransport::take(FlagWord& word) {
  // Flags that come as messages are set by whichever thread of ours is in MPI, maybe by two stores.
  std::unique_lock<std::mutex> alone;
  if (world_->needs_help()) alone = world_->alone();
  return word.exchange(0, std::memory_order_acq_rel);
}

void MpiTransport::touch(Lane& lane, const Operation& operation, Handle handle, bool written) {
  for (Lane::Touched& touched : lane.touched) {
    if (touched.handle == handle && touched.target == operation.target) {
      touched.written |= written;
      return;
    }
  }
  lane.touched.push_back({operation.window, handle, operation.target, written});
}

void MpiTransport::send_flag(Lane& lane, const Operation& operation) {
  const bool full = lane.next_word == Lane::kWords;
  flush(lane, !full);
  if (full) lane.next_word = 0;
  const MpiWindow::Member& member = member_of({operation.window, operation.target});
  if (member.mapped()) {
    member.board()[operation.notification].store(operation.value, std::memory_order_release);
    return;
  }
  std::uint32_t& word = lane.words[lane.next_word++];
  word = operation.value;
  MpiLibrary& library = world_->library();
  const Aint at = member.board_at + static_cast<Aint>(operation.notification * sizeof(FlagWord));
  library.check(library.replace(&word, operation.target, at, operation.window->board),
                "MPI_Accumulate", lane.peer);
  touch(lane, operation, operation.window->board, false);
}

// Everything written has arrived.
void MpiTransport::flush(Lane& lane, bool written_only) {
  MpiLibrary& library = world_->library();
  for (Lane::Touched& touched : lane.touched) {
    if (written_only && !touched.written) continue;
    const MpiWorld::Blocking blocking(*world_, "MPI_Win_flush");
    library.check(library.flush(touched.target, touched.handle), "MPI_Win_flush", lane.peer);
    touched.written = false;
  }
}

void MpiTransport::settle(Lane& lane) {
  MpiLibrary& library = world_->library();
  for (const Lane::Touched& touched : lane.touched) {
    const MpiWorld::Blocking blocking(*world_, "MPI_Win_flush_local");
    library.check(library.flush_local(touched.target, touched.handle), "MPI_Win_flush_local",
                  lane.peer);
  }
  lane.touched.clear();
  lane.next_word = 0;
  lane.busy.store(false, std::memory_order_release);
}

// --- posting

bool MpiTransport::post_write(QueueId queue, Rank peer, std::span<const Transfer> transfers,
                              const RemoteFlag* flag) {
  if (peer == rank_) {
    write_here(transfers, flag);
    return true;
  }
  Lane& lane = this->lane(queue, peer);
  // What goes as messages must not be overtaken; where nothing does nobody needs the lane.
  const bool direct = !lane.busy.load(std::memory_order_acquire) && mapped(transfers) &&
                      (flag == nullptr || member_of(reach(*flag->remote)).mapped());
  if (direct) {
    for (const Transfer& transfer : transfers) {
      pgasdl::copy(member_of(reach(*transfer.remote)).data() + transfer.remote_offset,
                   source_of(transfer), transfer.bytes);
    }
    if (flag != nullptr) {
      FlagWord* board = member_of(reach(*flag->remote)).board();
      board[flag->notification].store(flag->value, std::memory_order_release);
    }
    return true;
  }
  const std::lock_guard lock(lane.mutex);
  raise_fault(lane);
  if (lane.operations.size() >= kMostOperations) return false;
  for (const Transfer& transfer : transfers) {
    enqueue(lane, Operation::Kind::kPut, reach(*transfer.remote), source_of(transfer),
            transfer.remote_offset, transfer.bytes);
  }
  if (flag != nullptr) {
    Operation& operation = enqueue(lane, Operation::Kind::kFlag, reach(*flag->remote));
    operation.notification = flag->notification;
    operation.value = flag->value;
  }
  activate(lane);
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
    if (word != nullptr) word->store(flag->value, std::memory_order_release);
    return true;
  }
  if (mapped(transfers)) {
    for (const Transfer& transfer : transfers) {
      pgasdl::copy(source_of(transfer),
                   member_of(reach(*transfer.remote)).data() + transfer.remote_offset,
                   transfer.bytes);
    }
    if (word != nullptr) word->store(flag->value, std::memory_order_release);
    return true;
  }
  Lane& lane = this->lane(queue, peer);
  const std::lock_guard lock(lane.mutex);
  raise_fault(lane);
  if (lane.operations.size() >= kMostOperations) return false;
  for (const Transfer& transfer : transfers) {
    enqueue(lane, Operation::Kind::kGet, reach(*transfer.remote), source_of(transfer),
            transfer.remote_offset, transfer.bytes);
  }
  if (word != nullptr) {
    Operation& operation = enqueue(lane, Operation::Kind::kLocalFlag, {nullptr, 0});
    operation.word = word;
    operation.value = flag->value;
  }
  activate(lane);
  return true;
}

bool MpiTransport::post_atomic(QueueId queue, Rank peer, const Atomic& atomic) {
  if (peer == rank_) {
    atomic_here(atomic);
    return true;
  }
  const MpiRemote& remote = reach(*atomic.remote);
  if (remote.window->shared) {
    by_processor(atomic, member_of(remote).data());
    return true;
  }
  Lane& lane = this->lane(queue, peer);
  const std::lock_guard lock(lane.mutex);
  raise_fault(lane);
  enqueue(lane, Operation::Kind::kAtomic, remote).atomic = atomic;
  activate(lane);
  return true;
}

MpiTransport::Operation& MpiTransport::enqueue(Lane& lane, Operation::Kind kind,
                                               const MpiRemote& remote) {
  Operation& operation = lane.operations.emplace_back();
  operation.kind = kind;
  operation.window = remote.window;
  operation.target = remote.index;
  return operation;
}

void MpiTransport::enqueue(Lane& lane, Operation::Kind kind, const MpiRemote& remote,
                           std::byte* here, std::uint64_t offset, std::uint64_t bytes) {
  Aint at = member_of(remote).data_at + static_cast<Aint>(offset);
  while (bytes > 0) {
    Operation& operation = enqueue(lane, kind, remote);
    operation.here = here;
    operation.at = at;
    operation.bytes = static_cast<int>(std::min(bytes, MpiLibrary::kMostBytes));
    here += operation.bytes;
    at += operation.bytes;
    bytes -= static_cast<std::uint64_t>(operation.bytes);
  }
}

// A lane with operations; they begin at once if this thread may call MPI.
void MpiTransport::activate(Lane& lane) {
  if (lane.operations.empty()) return;
  lane.busy.store(true, std::memory_order_release);
  if (!lane.listed) {
    lane.listed = true;
    const std::lock_guard lock(active_mutex_);
    active_.push_back(&lane);
    n_active_.store(active_.size(), std::memory_order_relaxed);
  }
  if (!world_->may_call()) return;
  const auto turn = world_->turn();
  for (Operation& operation : lane.operations) {
    const bool moves =
        operation.kind == Operation::Kind::kPut || operation.kind == Operation::Kind::kGet;
    if (moves && operation.state == Operation::State::kWaiting) issue(lane, operation);
  }
}

// --- under way

void MpiTransport::issue(Lane& lane, Operation& operation) {
  MpiLibrary& library = world_->library();
  if (operation.kind == Operation::Kind::kPut) {
    library.check(library.rput(operation.here, operation.bytes, operation.target, operation.at,
                               operation.window->data, &operation.request),
                  "MPI_Rput", lane.peer);
    touch(lane, operation, operation.window->data, true);
  } else {
    library.check(library.rget(operation.here, operation.bytes, operation.target, operation.at,
                               operation.window->data, &operation.request),
                  "MPI_Rget", lane.peer);
  }
  operation.state = Operation::State::kIssued;
}

// As far as it goes. Holding its mutex, and the turn.
void MpiTransport::advance(Lane& lane) {
  using Kind = Operation::Kind;
  using State = Operation::State;
  MpiLibrary& library = world_->library();
  bool all_before = true;
  for (Operation& operation : lane.operations) {
    if (operation.state == State::kWaiting) {
      switch (operation.kind) {
        case Kind::kPut:
        case Kind::kGet:
          issue(lane, operation);
          break;
        case Kind::kFlag:
          if (!all_before) break;
          send_flag(lane, operation);
          operation.state = State::kDone;
          break;
        case Kind::kLocalFlag:
          if (!all_before) break;
          operation.word->store(operation.value, std::memory_order_release);
          operation.state = State::kDone;
          break;
        case Kind::kAtomic:
          run(operation.atomic, *operation.window, operation.target);
          operation.state = State::kDone;
          break;
      }
    }
    if (operation.state == State::kIssued) {
      bool done = false;
      library.check(library.test(&operation.request, &done), "MPI_Test", lane.peer);
      if (done) operation.state = State::kDone;
    }
    all_before &= operation.state == State::kDone;
  }
  while (!lane.operations.empty() && lane.operations.front().state == State::kDone) {
    lane.operations.pop_front();
  }
}

bool MpiTransport::move(Lane& lane) {
  try {
    if (lost_[static_cast<std::size_t>(lane.peer)].load(std::memory_order_relaxed)) {
      lane.operations.clear();
      lane.touched.clear();
      lane.busy.store(false, std::memory_order_release);
    } else {
      advance(lane);
    }
  } catch (const Error& error) {
    lane.fault = std::make_unique<Error>(error);
    lane.operations.clear();
  }
  return lane.operations.empty();
}

void MpiTransport::raise_fault(Lane& lane) {
  if (lane.fault == nullptr) [[likely]]
    return;
  const Error fault = *lane.fault;
  lane.fault.reset();
  throw fault;
}

bool MpiTransport::complete(QueueId queue) {
  bool all = true;
  for (Rank peer = 0; peer < world_->size(); ++peer) {
    Lane& lane = this->lane(queue, peer);
    if (!lane.busy.load(std::memory_order_acquire)) continue;
    const std::lock_guard lock(lane.mutex);
    raise_fault(lane);
    if (world_->may_call()) {
      const auto turn = world_->turn();
      if (move(lane) && lane.busy.load(std::memory_order_relaxed) && lane.fault == nullptr) {
        settle(lane);
      }
    }
    raise_fault(lane);
    all &= !lane.busy.load(std::memory_order_relaxed);
  }
  return all;
}

void MpiTransport::progress() {
  if (any_lost_.load(std::memory_order_relaxed)) [[unlikely]]
    end_if_stuck();
  if (!world_->may_call()) return;
  for (std::size_t number = 0; number < n_active_.load(std::memory_order_relaxed); ++number) {
    Lane* lane = nullptr;
    {
      const std::lock_guard lock(active_mutex_);
      if (number >= active_.size()) break;
      lane = active_[number];
    }
    const std::unique_lock lock(lane->mutex, std::try_to_lock);
    if (!lock.owns_lock()) continue;
    std::unique_lock<std::mutex> turn;
    if (!world_->try_turn(turn)) return;
    if (!move(*lane)) continue;
    // Those who may not call MPI wait for this one to finish their work.
    if (world_->one_thread() && lane->fault == nullptr) settle(*lane);
    const std::lock_guard active(active_mutex_);
    lane->listed = false;
    std::erase(active_, lane);
    n_active_.store(active_.size(), std::memory_order_relaxed);
  }
  help_library();
}

void MpiTransport::help_library() {
  if (!world_->needs_help()) return;
  const std::uint64_t now = ticks();
  if (now - helped_.load(std::memory_order_relaxed) < kTicksBetweenHelp) return;
  helped_.store(now, std::memory_order_relaxed);
  std::unique_lock<std::mutex> turn;
  if (!world_->try_turn(turn)) return;
  world_->library().probe(world_->communicator());
}

// --- losses

void MpiTransport::lost(Rank peer) {
  lost_[static_cast<std::size_t>(peer)].store(true, std::memory_order_relaxed);
  Rank nobody = -1;
  first_lost_.compare_exchange_strong(nobody, peer);
  any_lost_.store(true, std::memory_order_release);
}

// MPI does not return from a call that waits for a rank that is no more, and nothing else can make
// it: the whole process ends, with the reason.
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

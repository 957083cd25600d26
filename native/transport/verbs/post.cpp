// Posting: turns operations into chains of work requests.
#include <endian.h>
#include <sched.h>

#include <algorithm>
#include <cstring>

#include "transport/verbs/connection.hpp"
#include "transport/verbs/queue.hpp"

namespace pgasdl {
namespace {

// A flag takes one request, even with its slot's definition, and maybe a read of the peer's count.
constexpr std::uint64_t kMostForFlag = 2;

std::uint32_t data_key(const LocalSegment& segment) {
  if (segment.keep == nullptr) [[unlikely]] {
    throw Error(ErrorKind::kBuffer,
                "this memory was never registered with the RDMA device: only a segment's can be "
                "sent or read into");
  }
  return static_cast<const VerbsLocalKeys*>(segment.keep.get())->data_key;
}

const VerbsRemoteKeys& keys_of(const RemoteSegment& segment) {
  return *static_cast<const VerbsRemoteKeys*>(segment.keep.get());
}

}  // namespace

bool VerbsConnection::admits(std::uint64_t requests) {
  const State state = state_.load(std::memory_order_acquire);
  if (state == State::kBroken) [[unlikely]]
    throw_fault();
  return state == State::kReady &&
         room() >= std::min<std::uint64_t>(requests + held_.size(), depth_);
}

std::uint64_t VerbsConnection::requests_for(std::span<const Transfer> transfers) const {
  std::uint64_t requests = 0;
  for (const Transfer& transfer : transfers) {
    requests += transfer.bytes <= most_ ? (transfer.bytes != 0 ? 1 : 0)
                                        : (transfer.bytes + most_ - 1) / most_;
  }
  return requests;
}

// Requests that go to the adapter together, with one doorbell.
class VerbsConnection::Chain {
 public:
  explicit Chain(VerbsConnection& connection)
      : connection_(connection), id_(connection.id_of_requests()), room_(connection.room()) {}

  // Adds a request; the caller sets its target. `note` says what happens at its completion.
  ibv_send_wr& add(ibv_wr_opcode opcode, const void* local, std::uint32_t bytes, std::uint32_t key,
                   const Note& note) {
    if (length_ == room_) [[unlikely]]
      make_room();
    VerbsConnection& connection = connection_;
    const std::uint32_t number = connection.posted_.load(std::memory_order_relaxed) + length_;
    ibv_send_wr& request = connection.requests_[length_];
    *request.sg_list = {reinterpret_cast<std::uint64_t>(local), bytes, key};
    request.wr_id = id_ | number;
    request.opcode = opcode;
    request.send_flags = 0;
    connection.notes_[number & connection.mask_] = note;
    ++length_;
    return request;
  }

  bool empty() const { return length_ == 0; }
  ibv_send_wr& last() { return connection_.requests_[length_ - 1]; }
  Note& last_note() {
    const std::uint32_t posted = connection_.posted_.load(std::memory_order_relaxed);
    return connection_.notes_[(posted + length_ - 1) & connection_.mask_];
  }

  void post() {
    VerbsConnection& connection = connection_;
    ibv_send_wr& last = connection.requests_[length_ - 1];
    ibv_send_wr* const next = last.next;
    last.next = nullptr;
    last.send_flags |= IBV_SEND_SIGNALED;
    last_note().signalled = true;
    // Counted first: another thread may take the completion at once.
    ++connection.signalled_;
    connection.queue_.posted();
    ibv_send_wr* refused = nullptr;
    const int error = ibv_post_send(connection.pair_.get(), &connection.requests_[0], &refused);
    last.next = next;
    if (error != 0) [[unlikely]]
      give_up(error, refused);
    connection.posted_.fetch_add(length_, std::memory_order_relaxed);
    room_ -= length_;
    length_ = 0;
  }

 private:
  // For a list longer than the queue pair's depth: posts what there is, and waits for room.
  void make_room() {
    if (length_ != 0) post();
    while ((room_ = connection_.room()) == 0) {
      connection_.queue_.poll();
      if (connection_.broken()) connection_.throw_fault();
      if (connection_.room() == 0) sched_yield();
    }
  }

  [[noreturn]] void give_up(int error, const ibv_send_wr* refused) {
    VerbsConnection& connection = connection_;
    const auto taken =
        refused == nullptr ? 0 : static_cast<std::uint32_t>(refused - connection.requests_.data());
    connection.posted_.fetch_add(taken, std::memory_order_relaxed);
    --connection.signalled_;
    connection.queue_.settled(1);
    // Requests that were accepted before get flushed, and their order is no longer known.
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_ERR;
    verbs_library().modify_qp(connection.pair_.get(), &attributes, IBV_QP_STATE);
    connection.break_off(
        Error(ErrorKind::kSystem,
              text("posting to rank ", connection.peer_, " on queue ", connection.queue_.id(), ": ",
                   std::strerror(error), " (errno ", error, ")")),
        true);
    connection.throw_fault();
  }

  VerbsConnection& connection_;
  const std::uint64_t id_;
  std::uint32_t room_;
  std::uint32_t length_ = 0;
};

void VerbsConnection::add(Chain& chain, Operation operation, const Transfer& transfer) {
  const std::uint32_t key = data_key(*transfer.local);
  const VerbsRemoteKeys& remote = keys_of(*transfer.remote);
  const bool write = operation == Operation::kWrite;
  // Inline data are copied by the processor.
  const bool inlined = write && transfer.local->device == kHost;
  const std::byte* local = transfer.local->data + transfer.local_offset;
  for (std::uint64_t done = 0; done < transfer.bytes;) {
    const auto bytes = static_cast<std::uint32_t>(std::min(transfer.bytes - done, most_));
    const std::uint64_t offset = transfer.remote_offset + done;
    ibv_send_wr& request =
        chain.add(write ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, local + done, bytes, key,
                  {offset, bytes, operation, false, 0, nullptr, nullptr, nullptr});
    request.wr.rdma = {remote.data_address + offset, remote.data_key};
    if (inlined && bytes <= inline_bytes_) request.send_flags = IBV_SEND_INLINE;
    done += bytes;
  }
}

// Carries the flag's value, or no bytes for an immediate.
void VerbsConnection::add(Chain& chain, const Flag& flag, std::uint32_t bytes) {
  const std::uint64_t offset = std::uint64_t{flag.notification} * sizeof(FlagWord);
  ibv_send_wr& request = chain.add(
      IBV_WR_RDMA_WRITE, &flag.value, bytes, 0,
      {flag.notification, bytes, Operation::kNotify, false, 0, nullptr, nullptr, nullptr});
  request.wr.rdma = {flag.at.board_address + offset, flag.at.board_key};
  request.send_flags = IBV_SEND_INLINE;
}

VerbsFlags::Choice VerbsConnection::choose(const Flag& flag, bool with_data) {
  const auto asked = static_cast<std::int32_t>(asked_ - retired_.load(std::memory_order_acquire));
  return flags_.choose(flag.at.board,
                       {nullptr, flag.notification, flag.value, flag.add, flag.again}, with_data,
                       shared().answer.load(std::memory_order_relaxed), asked > 0);
}

void VerbsConnection::ask(Chain& chain) {
  ibv_send_wr& request = chain.add(
      IBV_WR_RDMA_READ, &shared().answer, sizeof shared().answer, buffer_->registered->lkey,
      {0, sizeof shared().answer, Operation::kBook, false, 0, nullptr, nullptr, nullptr});
  request.wr.rdma = {there_.shared + offsetof(VerbsFlags::Shared, taken), there_.shared_key};
  asked_ = static_cast<std::uint32_t>(request.wr_id) + 1;
}

void VerbsConnection::define(Chain& chain, const VerbsFlags::Choice& choice) {
  if (choice.define == nullptr) return;
  ibv_send_wr& request = chain.add(IBV_WR_RDMA_WRITE, choice.define, sizeof *choice.define, 0,
                                   {choice.define->notification, sizeof *choice.define,
                                    Operation::kNotify, false, 0, nullptr, nullptr, nullptr});
  request.wr.rdma = {there_.shared + choice.slot * sizeof *choice.define, there_.shared_key};
  request.send_flags = IBV_SEND_INLINE;
}

void VerbsConnection::raise(Chain& chain, const Flag& flag, const VerbsFlags::Choice& choice) {
  if (choice.way == VerbsFlags::Way::kMessage) return add(chain, flag, sizeof flag.value);
  if (chain.empty()) add(chain, flag, 0);
  ibv_send_wr& last = chain.last();
  last.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
  last.imm_data = htobe32(choice.immediate);
}

// If the fabric keeps the order of writes, a flag is in one chain with its data. Otherwise it
// travels with them if they are one message and nothing is under way; else it is held.
VerbsConnection::Posted VerbsConnection::write(std::span<const Transfer> transfers,
                                               const RemoteFlag* flag) {
  using Way = VerbsFlags::Way;
  const std::uint64_t data = requests_for(transfers);
  const std::lock_guard lock(mutex_);
  if (!admits(data + (flag != nullptr ? kMostForFlag : 0))) return std::nullopt;
  HeldFlag later{};
  if (flag != nullptr)
    later.flag = {keys_of(*flag->remote), flag->notification, flag->value, flag->add, flag->again};
  const bool under_way = !held_.empty() || room() != depth_;
  bool held = flag != nullptr && completion_first_ && (under_way || data > 1);
  VerbsFlags::Choice choice;
  if (flag != nullptr && !held) {
    choice = choose(later.flag, data != 0);
    if (choice.way == Way::kWait && !choice.ask) return std::nullopt;
    if (completion_first_ && choice.way == Way::kMessage) held = data != 0;
    if (completion_first_ && choice.define != nullptr) {
      held = true;
      later.immediate = choice.immediate;
    }
  }
  Chain chain(*this);
  if (choice.way != Way::kWait) {
    define(chain, choice);
    for (const Transfer& transfer : transfers) add(chain, Operation::kWrite, transfer);
    if (flag != nullptr && !held) raise(chain, later.flag, choice);
  }
  if (choice.ask) ask(chain);
  if (!chain.empty()) chain.post();
  if (choice.way == Way::kWait) return std::nullopt;
  if (flag == nullptr) return VerbsPosted{mark()};
  if (!held) return VerbsPosted{mark(), ++n_flags_sent_};
  hold(later);
  return VerbsPosted{mark(), n_flags_sent_ + static_cast<std::uint32_t>(held_.size()), true};
}

void VerbsConnection::hold(const HeldFlag& flag) {
  held_.hold(flag, posted_.load(std::memory_order_relaxed));
  queue_.held();
}

std::size_t VerbsConnection::drop_held() {
  const std::size_t count = held_.drop();
  queue_.released(count);
  return count;
}

void VerbsConnection::release() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  try {
    while (!broken()) {
      HeldFlag* const next = held_.ready(retired_.load(std::memory_order_acquire));
      if (next == nullptr || !send(*next)) return;
      held_.sent(posted_.load(std::memory_order_relaxed));
      ++n_flags_sent_;
      queue_.released(1);
    }
  } catch (const Error&) {
    // The connection is broken by now, which its queue reports.
  }
  drop_held();
}

bool VerbsConnection::send(HeldFlag& held) {
  using Way = VerbsFlags::Way;
  if (!admits(kMostForFlag)) return false;
  VerbsFlags::Choice choice;
  if (held.immediate) {
    choice.way = Way::kImmediate;
    choice.immediate = *held.immediate;
  } else {
    choice = choose(held.flag, false);
  }
  Chain chain(*this);
  const bool defines = choice.define != nullptr;
  define(chain, choice);
  if (choice.way != Way::kWait && !defines) raise(chain, held.flag, choice);
  if (choice.ask) ask(chain);
  if (!chain.empty()) chain.post();
  if (defines) {
    held.immediate = choice.immediate;
    held_.wait(posted_.load(std::memory_order_relaxed));
  }
  return choice.way != Way::kWait && !defines;
}

VerbsConnection::Posted VerbsConnection::read(std::span<const Transfer> transfers,
                                              const LocalFlag* flag, WakeWord* wake_word) {
  const std::uint64_t requests = requests_for(transfers);
  const std::lock_guard lock(mutex_);
  if (!admits(requests)) return std::nullopt;
  FlagWord* const word = flag == nullptr ? nullptr : &flag->local->board[flag->notification];
  if (requests == 0) {  // the flag need not wait
    if (word != nullptr) word->store(flag->value, std::memory_order_release);
    if (word != nullptr && wake_word != nullptr) wake_word->wake();
    return VerbsPosted{mark()};
  }
  Chain chain(*this);
  for (const Transfer& transfer : transfers) add(chain, Operation::kRead, transfer);
  if (word != nullptr) {
    Note& note = chain.last_note();
    note.flag = word;
    note.value = flag->value;
    note.wake_word = wake_word;
  }
  chain.post();
  return VerbsPosted{mark()};
}

VerbsConnection::Posted VerbsConnection::fence() {
  const std::lock_guard lock(mutex_);
  if (!admits(1)) return std::nullopt;
  Chain chain(*this);
  ask(chain);
  chain.post();
  return VerbsPosted{mark()};
}

VerbsConnection::Posted VerbsConnection::atomic(const Atomic& atomic,
                                                const VerbsRemoteKeys& remote) {
  if (!device_.atomics()) {
    throw Error(ErrorKind::kUnavailable, text(device_.name(), " has no atomic operations"));
  }
  if ((remote.data_address + atomic.offset) % sizeof(std::uint64_t) != 0) {
    throw Error(ErrorKind::kAlignment,
                text("an atomic at offset ", atomic.offset, " of rank ", peer_,
                     "'s segment: its address there is not a multiple of 8"));
  }
  const std::lock_guard lock(mutex_);
  if (!admits(1)) return std::nullopt;
  const std::uint32_t slot = posted_.load(std::memory_order_relaxed) & mask_;
  const std::byte* result = results() + slot * sizeof(std::uint64_t);
  Chain chain(*this);
  const bool add = atomic.kind == Atomic::Kind::kFetchAdd;
  ibv_send_wr& request =
      chain.add(add ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP, result,
                sizeof(std::uint64_t), buffer_->registered->lkey,
                {atomic.offset, 8, Operation::kAtomic, false, 0, nullptr, nullptr, atomic.old});
  request.wr.atomic.remote_addr = remote.data_address + atomic.offset;
  request.wr.atomic.rkey = remote.data_key;
  request.wr.atomic.compare_add = add ? atomic.operand : atomic.compare;
  request.wr.atomic.swap = add ? 0 : atomic.operand;
  chain.post();
  return VerbsPosted{mark()};
}

}  // namespace pgasdl

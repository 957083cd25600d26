#include "transport/verbs/connection.hpp"

#include <endian.h>
#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "transport/verbs/queue.hpp"

namespace pgasdl {
namespace {

// The most bytes of one request if the kernel acts as the adapter: soft-RoCE repeats a request from
// the lost packet on, but counts its attempts by request, so long requests use them up.
constexpr std::uint32_t kSoftwareBytes = 32 << 10;

// Errors of a request that another connection would not carry out either.
bool blames_request(ibv_wc_status status) {
  return status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR ||
         status == IBV_WC_LOC_PROT_ERR || status == IBV_WC_LOC_LEN_ERR;
}

std::uint32_t random_packet_number() {
  std::uint32_t number = 0;
  if (getrandom(&number, sizeof number, 0) != sizeof number) throw_system("getrandom", errno);
  return number & 0xffffff;
}

// A queue pair whose requests take this many bytes inline from the processor, which saves the
// adapter a read. More bytes than the options ask for would make every request longer.
struct Pair {
  VerbsPtr<ibv_qp> pair;
  std::uint32_t inline_bytes;
};

Pair make_pair(const VerbsDevice& device, ibv_cq* completions, std::uint32_t depth) {
  constexpr std::uint32_t kLeast = sizeof(VerbsFlags::Slot);
  ibv_qp_init_attr wanted{};
  wanted.send_cq = completions;
  wanted.recv_cq = completions;
  wanted.qp_type = IBV_QPT_RC;
  Pair made{nullptr, std::max(device.options().inline_bytes, kLeast)};
  for (;;) {
    wanted.cap = {depth, VerbsFlags::kReceives, 1, 1, made.inline_bytes};
    made.pair.reset(verbs_library().create_qp(device.domain(), &wanted));
    if (made.pair != nullptr || made.inline_bytes == kLeast) break;
    // No attribute shows how much a device takes inline, and errors about it differ.
    made.inline_bytes = std::max(made.inline_bytes / 2, kLeast);
  }
  if (made.pair != nullptr && wanted.cap.max_inline_data < kLeast) {
    throw Error(ErrorKind::kUnavailable, text(device.name(), " takes ", wanted.cap.max_inline_data,
                                              " bytes inline, not ", kLeast));
  }
  return made;
}

}  // namespace

std::uint32_t verbs_inline_bytes(const VerbsOptions& options) {
  const VerbsDevice device(options);
  const VerbsPtr<ibv_cq> completions(
      verbs_library().create_cq(device.context(), 1, nullptr, nullptr, 0));
  if (completions == nullptr) throw_system("a completion queue", errno);
  const Pair made = make_pair(device, completions.get(), options.depth);
  if (made.pair == nullptr) throw_system(text("a queue pair on ", device.name()), errno);
  return made.inline_bytes;
}

VerbsConnection::VerbsConnection(const VerbsDevice& device, VerbsBoards& boards, VerbsQueue& queue,
                                 ibv_cq* completions, Rank peer, std::uint32_t depth)
    : device_(device),
      boards_(boards),
      queue_(queue),
      completions_(completions),
      peer_(peer),
      depth_(depth),
      mask_(std::bit_ceil(depth) - 1),
      most_(device.software() ? kSoftwareBytes : std::max(device.link().max_msg_sz, 1u << 20)),
      requests_(depth),
      pieces_(depth),
      notes_(mask_ + 1) {
  for (std::size_t i = 0; i < depth; ++i) {
    requests_[i].next = i + 1 < depth ? &requests_[i + 1] : nullptr;
    requests_[i].sg_list = &pieces_[i];
    requests_[i].num_sge = 1;
  }
}

void VerbsConnection::change(ibv_qp_attr& attributes, int mask, const char* what) {
  const int error = verbs_library().modify_qp(pair_.get(), &attributes, mask);
  if (error != 0) {
    throw_system(text("the connection to rank ", peer_, " on queue ", queue_.id(), ": ", what),
                 error);
  }
}

void VerbsConnection::open() {
  Pair made = make_pair(device_, completions_, depth_);
  if (made.pair == nullptr) {
    throw_system(text("a queue pair for rank ", peer_, " on ", device_.name()), errno);
  }
  pair_ = std::move(made.pair);
  inline_bytes_ = made.inline_bytes;
  if (!buffer_) {
    buffer_.emplace(device_, sizeof(VerbsFlags::Shared) + (mask_ + 1) * sizeof(std::uint64_t),
                    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
  }
  shared().taken.store(0, std::memory_order_relaxed);
  offered_ = flushed_ = 0;
  shared().answer.store(0, std::memory_order_relaxed);
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = device_.port();
  attributes.pkey_index = device_.pkey().index;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (device_.atomics()) attributes.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC;
  change(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
         "preparing its queue pair");
  offer();
  offer();
  here_ = {pair_->qp_num, random_packet_number(), reinterpret_cast<std::uint64_t>(buffer_->data()),
           buffer_->registered->rkey};
  holds_pair_.store(true, std::memory_order_relaxed);
}

void VerbsConnection::join(const VerbsPath& path, const VerbsEnd& there) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = path.mtu;
  attributes.dest_qp_num = there.number;
  attributes.rq_psn = there.first_packet;
  attributes.max_dest_rd_atomic = path.reads;
  attributes.min_rnr_timer = 12;
  attributes.ah_attr = path.address;
  change(attributes,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
             IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
         "making it ready to receive");
  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = path.timeout;
  attributes.retry_cnt = path.retry_count;
  attributes.rnr_retry = path.rnr_retry_count;
  attributes.sq_psn = here_.first_packet;
  attributes.max_rd_atomic = path.reads;
  change(attributes,
         IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
             IBV_QP_MAX_QP_RD_ATOMIC,
         "making it ready to send");
  there_ = there;
  completion_first_ = path.completion_first;
  flags_ = VerbsFlags(path.count_flags);
}

void VerbsConnection::admit() {
  State apart = State::kApart;
  state_.compare_exchange_strong(apart, State::kReady, std::memory_order_acq_rel);
}

bool VerbsConnection::close() {
  const std::scoped_lock lock(mutex_, queue_.polling());
  if (pair_ != nullptr) queue_.poll_locked();
  pair_.reset();
  holds_pair_.store(false, std::memory_order_relaxed);
  const std::uint64_t failed = failed_.load(std::memory_order_relaxed);
  ended_.store(std::uint64_t{generation_.load(std::memory_order_relaxed)} << kMarkShift |
                   static_cast<std::uint32_t>(
                       failed == kNone ? retired_.load(std::memory_order_relaxed) : failed),
               std::memory_order_relaxed);
  // Completion entries of the old queue pair have the old generation. They are taken now, since
  // room in the completion queue is limited.
  generation_.fetch_add(1, std::memory_order_release);
  queue_.poll_locked();
  const std::uint64_t lost = signalled_ - settled_;
  const std::size_t never_sent = drop_held();
  settled_ = signalled_;
  retired_.store(posted_.load(std::memory_order_relaxed), std::memory_order_release);
  queue_.settled(lost);
  here_ = there_ = {};
  n_flags_sent_ = 0;
  asked_ = posted_.load(std::memory_order_relaxed);
  const std::lock_guard fault_lock(fault_mutex_);
  fault_.reset();
  by_request_ = false;
  failed_.store(kNone, std::memory_order_release);
  parting_.store(false, std::memory_order_relaxed);
  state_.store(State::kApart, std::memory_order_release);
  return lost != 0 || never_sent != 0;
}

// Requests before the first failed one are done.
VerbsFate VerbsConnection::fate(VerbsPosted& request) {
  if (request.held) {
    const std::lock_guard lock(mutex_);
    if (request.mark >> kMarkShift != mark() >> kMarkShift) return VerbsFate::kGone;
    if (static_cast<std::int32_t>(n_flags_sent_ - request.flag) < 0) {
      return broken() ? VerbsFate::kFailed : VerbsFate::kUnderWay;
    }
    request.held = false;
    request.mark = mark();
  }
  const auto posted = static_cast<std::uint32_t>(request.mark);
  const auto generation = static_cast<std::uint32_t>(request.mark >> kMarkShift);
  // The order matters: a failure is noted before its request retires, and forgotten after the
  // generation changes.
  const std::uint32_t retired = retired_.load(std::memory_order_acquire);
  const std::uint64_t failed = failed_.load(std::memory_order_acquire);
  if (generation != generation_.load(std::memory_order_acquire)) {
    const std::uint64_t ended = ended_.load(std::memory_order_relaxed);
    const bool before = static_cast<std::int32_t>(static_cast<std::uint32_t>(ended) - posted) >= 0;
    return before && ended >> kMarkShift == generation ? VerbsFate::kDone : VerbsFate::kGone;
  }
  const bool over = static_cast<std::int32_t>(retired - posted) >= 0;
  if (!broken() && failed == kNone) return over ? VerbsFate::kDone : VerbsFate::kUnderWay;
  const bool before = failed == kNone ||
                      static_cast<std::int32_t>(static_cast<std::uint32_t>(failed) - posted) >= 0;
  return over && before ? VerbsFate::kDone : VerbsFate::kFailed;
}

std::optional<VerbsBreak> VerbsConnection::what_broke() {
  const std::lock_guard lock(fault_mutex_);
  if (!fault_) return std::nullopt;
  return VerbsBreak{fault_->error(), by_request_};
}

void VerbsConnection::part() {
  const std::lock_guard lock(mutex_);
  if (parting_.exchange(true, std::memory_order_relaxed)) return;
  if (pair_ != nullptr) {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_ERR;
    verbs_library().modify_qp(pair_.get(), &attributes, IBV_QP_STATE);
  }
  break_off(Error(ErrorKind::kPeerLost, text("this rail to rank ", peer_, " was dropped"), peer_),
            false);
}

// A queue pair in error returns each request and each receive; once all are here, everything that
// arrived before is here, too. The same holds once the queue pair is destroyed: what it left in the
// completion queue is taken before the count.
bool VerbsConnection::parted(bool at_once, std::uint32_t& taken) {
  const std::scoped_lock lock(mutex_, queue_.polling());
  const auto poll = [&] {
    queue_.poll_locked();
    if (here_.number != 0) taken = shared().taken.load(std::memory_order_relaxed);
  };
  poll();
  if (pair_ == nullptr) return true;
  const bool all = offered_ == taken + flushed_ && retired_.load(std::memory_order_relaxed) ==
                                                       posted_.load(std::memory_order_relaxed);
  if (!all && at_once) {
    pair_.reset();
    holds_pair_.store(false, std::memory_order_relaxed);
    poll();
    if (failed_.load(std::memory_order_relaxed) == kNone) failed_ = retired_.load();
    retired_.store(posted_.load(std::memory_order_relaxed), std::memory_order_release);
  }
  return all || at_once;
}

void VerbsConnection::break_off(const Error& error, bool lost) {
  const std::lock_guard lock(fault_mutex_);
  if (broken()) return;
  fault_.emplace(error);
  state_.store(State::kBroken, std::memory_order_release);
  if (lost) queue_.add_fault(error, peer_);
}

void VerbsConnection::throw_fault() {
  const std::lock_guard lock(fault_mutex_);
  throw fault_ ? fault_->error()
               : Error(ErrorKind::kPeerLost, text("rank ", peer_, " is lost"), peer_);
}

VerbsMemory::Pending VerbsConnection::under_way() const {
  return {this, posted_.load(std::memory_order_relaxed),
          generation_.load(std::memory_order_relaxed)};
}

bool VerbsConnection::over(const VerbsMemory::Pending& pending) const {
  const std::uint32_t retired = retired_.load(std::memory_order_acquire);
  return pending.generation != generation_.load(std::memory_order_relaxed) ||
         static_cast<std::int32_t>(retired - pending.posted) >= 0;
}

void VerbsConnection::offer() {
  ibv_recv_wr receives[VerbsFlags::kOffer];
  for (ibv_recv_wr& receive : receives) {
    receive = {id_of_requests() | kReceive, &receive + 1, nullptr, 0};
  }
  std::end(receives)[-1].next = nullptr;
  ibv_recv_wr* refused = nullptr;
  const int error = ibv_post_recv(pair_.get(), &receives[0], &refused);
  if (error != 0) [[unlikely]] {
    throw_system(text("receives from rank ", peer_, " on queue ", queue_.id()), error);
  }
  offered_ += VerbsFlags::kOffer;
}

void VerbsConnection::arrived(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS) {  // the queue pair has ended
    ++flushed_;
    return;
  }
  VerbsFlags::raise(be32toh(completion.imm_data), shared(), boards_);
  const std::uint32_t taken = shared().taken.load(std::memory_order_relaxed) + 1;
  if (taken % VerbsFlags::kOffer == 0 && !parting_.load(std::memory_order_relaxed)) offer();
  shared().taken.store(taken, std::memory_order_release);
}

void VerbsConnection::completed(const ibv_wc& completion) {
  const auto number = static_cast<std::uint32_t>(completion.wr_id);
  const auto generation = static_cast<std::uint8_t>(completion.wr_id >> kGenerationShift);
  if (generation != static_cast<std::uint8_t>(generation_.load(std::memory_order_relaxed))) return;
  if ((completion.wr_id & kReceive) != 0) return arrived(completion);
  const Note& note = notes_[number & mask_];
  if (completion.status == IBV_WC_SUCCESS) [[likely]] {
    if (note.old != nullptr) {
      std::memcpy(note.old, results() + (number & mask_) * sizeof *note.old, sizeof *note.old);
    }
    if (note.flag != nullptr) {
      note.flag->store(note.value, std::memory_order_release);
      if (note.wake_word != nullptr) note.wake_word->wake();
    }
  } else {  // later ones are only flushed
    if (failed_.load(std::memory_order_relaxed) == kNone) {
      failed_.store(number, std::memory_order_relaxed);
    }
    if (!broken()) {
      by_request_ = blames_request(completion.status);
      break_off(fault_of(completion, note), true);
    }
  }
  const bool signalled = note.signalled;
  retired_.store(number + 1, std::memory_order_release);
  if (!signalled) return;
  ++settled_;
  queue_.settled(1);
}

Error VerbsConnection::fault_of(const ibv_wc& completion, const Note& note) const {
  std::string words;
  switch (note.operation) {
    case Operation::kWrite:
      words = text("a write of ", note.bytes, " bytes to offset ", note.offset, " of a segment of");
      break;
    case Operation::kNotify:
      words = text("raising notification ", note.offset, " at");
      break;
    case Operation::kRead:
      words = text("a read of ", note.bytes, " bytes at offset ", note.offset, " of a segment of");
      break;
    case Operation::kAtomic:
      words = text("an atomic at offset ", note.offset, " of a segment of");
      break;
    case Operation::kBook:
      words = "keeping the books of flags with";
      break;
  }
  words += text(" rank ", peer_, " on queue ", queue_.id(), ": ");
  ErrorKind kind = ErrorKind::kPeerLost;
  switch (completion.status) {
    case IBV_WC_RETRY_EXC_ERR:
      words += "no answer; its process, its host or the link is gone";
      break;
    case IBV_WC_RNR_RETRY_EXC_ERR:
      words += "it was never ready to receive";
      break;
    case IBV_WC_WR_FLUSH_ERR:
      words += "the connection was broken, by an error of the peer's side or by its end";
      break;
    case IBV_WC_REM_ACCESS_ERR:
      kind = ErrorKind::kSystem;
      words +=
          "refused there; outside of registered memory, or its key is no longer valid "
          "(deleted by that rank?)";
      break;
    case IBV_WC_REM_INV_REQ_ERR:
      kind = ErrorKind::kSystem;
      words += "refused there as an invalid request";
      break;
    case IBV_WC_LOC_PROT_ERR:
      kind = ErrorKind::kSystem;
      words += "this rank's own memory is not registered, or no longer";
      break;
    default:
      kind = ErrorKind::kSystem;
      words += "the adapter failed";
  }
  words += text(" (", verbs_library().wc_status_str(completion.status), ", vendor code ",
                completion.vendor_err, "); ctx.reconnect(", peer_, ") connects anew");
  return Error(kind, words, kind == ErrorKind::kPeerLost ? peer_ : -1);
}

}  // namespace pgasdl

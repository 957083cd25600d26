#include "pgas/group.hpp"

#include <algorithm>

#include "memory/region.hpp"
#include "pgas/context.hpp"

namespace pgasdl {

Group::Inside::Inside(Group& group, Kind kind, const std::string& what)
    : group_(group), kind_(kind), taken_(group.inside_[static_cast<std::size_t>(kind)]) {
  if (taken_.exchange(true, std::memory_order_acquire)) {
    throw Error(ErrorKind::kMismatch,
                text("two threads of rank ", group.context_.rank(), " are in ", what,
                     " of the same group at once: this one is refused, the other goes on; give "
                     "each thread a group of its own"));
  }
}

Group::Inside::~Inside() {
  if (kind_ == Kind::kExchange && group_.creation_ && group_.creation_->segment != nullptr) {
    group_.context_.transport().leave(group_.creation_->segment->local());
  }
  taken_.store(false, std::memory_order_release);
}

Group::Group(Context& context, std::vector<Rank> ranks, bool world)
    : context_(context), ranks_(std::move(ranks)), world_(world) {
  std::sort(ranks_.begin(), ranks_.end());
  if (ranks_.empty()) throw Error(ErrorKind::kRank, "a group of no ranks");
  if (ranks_.size() > kMostMembers) {
    throw Error(ErrorKind::kRank,
                text("a group of ", ranks_.size(), " ranks: at most ", kMostMembers));
  }
  for (std::size_t i = 0; i < ranks_.size(); ++i) {
    if (ranks_[i] < 0 || ranks_[i] >= context.size()) {
      throw Error(ErrorKind::kRank,
                  text("rank ", ranks_[i], ": ranks are 0 to ", context.size() - 1));
    }
    if (i > 0 && ranks_[i] == ranks_[i - 1]) {
      throw Error(ErrorKind::kRank, text("rank ", ranks_[i], " is twice in the group"));
    }
    if (ranks_[i] == context.rank()) index_ = static_cast<Rank>(i);
  }
  if (index_ < 0) {
    throw Error(ErrorKind::kRank, text("rank ", context.rank(), " is not in the group it creates"));
  }
  const std::uint64_t members = ranks_.size();
  std::uint64_t bytes = 0;
  if (world) {
    bytes = gossip_offset_ = round_up(ControlBlock::bytes(context.size()), 64);
    bytes += Gossip::bytes(context.size());
  }
  std::uint32_t ids = 2 * kBarrierRounds;
  for (Kind kind : {Kind::kExchange, Kind::kReduce}) {
    Exchange& exchange = exchanges_[static_cast<int>(kind)];
    exchange.slots_offset = bytes;
    exchange.first_id = ids;
    bytes += 2 * members * (sizeof(Header) + slot_bytes(kind));
    ids += static_cast<std::uint32_t>(members);
  }
  if (world) {
    // Mailboxes by sender, then the messages on their way out by receiver.
    mail_offset_ = bytes;
    bytes += 2 * members * (sizeof(std::uint64_t) + context.options().passive_bytes);
    mail_id_ = ids;
    credit_id_ = ids + static_cast<std::uint32_t>(members);
    ids += 2 * static_cast<std::uint32_t>(members);
    mail_sent_.resize(members);
    mail_received_.resize(members);
  }
  control_ =
      std::make_shared<Segment>(context.next_segment_id(), bytes, ids, nullptr, context.size());
}

Group::~Group() {
  if (creation_ && creation_->segment != nullptr) {
    context_.transport().retract(creation_->segment->local());
  }
}

std::string Group::describe() { return context_.transport().publish(control_->local(), ranks_); }

Outcome Group::attach(const std::vector<std::string>& descriptions, Deadline deadline) {
  if (remotes_.empty()) remotes_ = attach(descriptions, 0, deadline);
  if (settle(*control_, remotes_, deadline) == Outcome::kDone) return Outcome::kDone;
  context_.transport().leave(control_->local());
  return Outcome::kTimeout;
}

void Group::remove() {
  if (world_) throw Error(ErrorKind::kRank, "the group of all ranks cannot be deleted");
  deleted_ = true;
  context_.transport().retract(control_->local());
}

bool Group::send(Rank member, std::uint64_t offset, std::uint64_t bytes,
                 std::uint64_t target_offset, std::uint32_t id, std::uint32_t value) {
  const Rank peer = ranks_[static_cast<std::size_t>(member)];
  const RemoteSegment* remote = control_->remote(peer);
  const Transfer transfer{&control_->local(), offset, remote, target_offset, bytes};
  const RemoteFlag flag{remote, id, value};
  return context_.transport().post_write(context_.internal_queue(), peer,
                                         std::span<const Transfer>(&transfer, bytes == 0 ? 0 : 1),
                                         &flag);
}

bool Group::raised(std::uint32_t id, std::uint32_t generation) const {
  if (context_.transport().needs_progress()) context_.transport().progress();
  const std::uint32_t seen = control_->local().board[id].load(std::memory_order_acquire);
  return seen != 0 && static_cast<std::int32_t>(seen - generation) >= 0;
}

// Members that are gone for good; those that only closed may have done their part before.
void Group::check_members(const char* what) const {
  context_.require_usable();
  if (deleted_) throw Error(ErrorKind::kRank, "the group was deleted");
  for (Rank peer : ranks_) {
    const Health health = context_.liveness().health(peer);  // once: it may close just now
    if (health != Health::kHealthy && health != Health::kClosed) {
      context_.liveness().require(peer, what);
    }
  }
}

}  // namespace pgasdl

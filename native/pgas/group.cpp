#include "pgas/group.hpp"

#include <algorithm>
#include <cstring>

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
  const std::size_t members = ranks_.size();
  const Memory memory = Group::memory(members, world, context.options().passive_bytes);
  const auto id = [members](std::size_t place) {
    return static_cast<std::uint32_t>(2 * kBarrierRounds + place * members);
  };
  gossip_offset_ = memory.states;
  barrier_.steps = steps(Kind::kBarrier, members);
  barrier_.first_word = kBarrierRounds;
  std::uint64_t slots = gossip_offset_ + memory.gossip;
  for (const Kind kind : {Kind::kExchange, Kind::kReduce}) {
    const auto place = static_cast<std::size_t>(kind);
    Exchange& exchange = exchanges_[place];
    exchange.slots_offset = slots;
    slots += kind == Kind::kExchange ? memory.exchange : memory.reduce;
    // From 17 members on, two ids per step are fewer than one per member.
    exchange.course.steps = steps(kind, members);
    exchange.course.first_flag = id(place);
    exchange.course.first_word =
        id(place) + static_cast<std::uint32_t>(exchange.course.steps.size());
  }
  if (world) {
    // Mailboxes by sender, then outgoing messages by receiver.
    mail_offset_ = slots;
    mail_id_ = id(2);
    credit_id_ = id(3);
    mail_sent_.resize(members);
    mail_received_.resize(members);
  }
  control_ = std::make_shared<Segment>(context.next_segment_id(), memory.data(), memory.flags,
                                       nullptr, context.size());
  context_.count_own_bytes(control_bytes());
}

Group::Memory Group::memory(std::size_t members, bool world, std::uint64_t passive_bytes) {
  Memory memory;
  const auto slots = [members](Kind kind) {
    return 2 * members * (sizeof(Header) + slot_bytes(kind, members));
  };
  memory.exchange = slots(Kind::kExchange);
  memory.reduce = slots(Kind::kReduce);
  memory.flags = static_cast<std::uint32_t>(2 * kBarrierRounds + 2 * members);
  if (world) {
    const auto size = static_cast<Rank>(members);
    memory.states = round_up(ControlBlock::bytes(size), 64);
    memory.gossip = Gossip::bytes(size);
    memory.mail = 2 * members * (sizeof(std::uint64_t) + passive_bytes);
    memory.flags += static_cast<std::uint32_t>(2 * members);
  }
  return memory;
}

Group::~Group() {
  if (creation_ && creation_->segment != nullptr) {
    context_.transport().retract(creation_->segment->local());
  }
  if (!deleted_ && control_->local().descriptor) context_.transport().retract(control_->local());
  context_.count_own_bytes(-control_bytes());
}

std::int64_t Group::control_bytes() const {
  const std::uint64_t board = control_->local().notifications * sizeof(FlagWord);
  return static_cast<std::int64_t>(control_->bytes() + board);
}

std::string Group::describe() { return context_.publish(control_->local(), ranks_); }

Outcome Group::attach(const std::vector<std::string>& descriptions, Deadline deadline) {
  handed_over(*control_);
  if (remotes_.empty()) remotes_ = attach(descriptions, 0, kHost, deadline);
  if (settle(*control_, remotes_, deadline) == Outcome::kDone) return Outcome::kDone;
  context_.transport().leave(control_->local());
  return Outcome::kTimeout;
}

void Group::remove() {
  if (world_) throw Error(ErrorKind::kRank, "the group of all ranks cannot be deleted");
  deleted_ = true;
  context_.transport().retract(control_->local());
}

bool Group::send(Rank peer, std::span<const Transfer> transfers, std::uint32_t id,
                 std::uint32_t value) {
  const RemoteFlag flag{control_->remote(peer), id, value};
  return context_.transport().post_write(context_.internal_queue(), peer, transfers, &flag);
}

bool Group::raised(std::uint32_t id, std::uint32_t generation) const {
  if (context_.transport().needs_progress()) context_.transport().progress();
  const std::uint32_t seen = control_->local().board[id].load(std::memory_order_acquire);
  return seen != 0 && static_cast<std::int32_t>(seen - generation) >= 0;
}

// Throws for lost members; one that only closed may have done its part before.
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

std::string Group::elsewhere(std::string_view what) const {
  std::string members;
  const auto look = [&](const Course& course, const auto& name) {
    const std::uint32_t next = following(course.generation);
    for (std::size_t step = 0; step < course.end_of_base(0); ++step) {
      if (!raised(course.first_flag + static_cast<std::uint32_t>(step), next)) continue;
      const std::size_t distance = course.steps[step].distance;
      members += text(members.empty() ? "" : ", ", "rank ", behind(distance), " is in ",
                      name(distance, next));
    }
  };
  if (!barrier_under_way_) {
    look(barrier_, [](std::size_t, std::uint32_t) { return std::string("a barrier"); });
  }
  for (const Kind kind : {Kind::kExchange, Kind::kReduce}) {
    const Exchange& exchange = exchanges_[static_cast<std::size_t>(kind)];
    if (exchange.under_way) continue;
    look(exchange.course, [&](std::size_t distance, std::uint32_t generation) {
      Header header;
      const std::uint64_t offset = slot_offset(exchange, kind, distance, generation);
      std::memcpy(&header, control_->local().data + offset, sizeof header);
      header.what[sizeof header.what - 1] = 0;
      return std::string(header.what);
    });
  }
  if (members.empty()) return context_.liveness().waits_of_others(what);
  return text("; ", members, " instead: all members make a group's collectives in one order");
}

}  // namespace pgasdl

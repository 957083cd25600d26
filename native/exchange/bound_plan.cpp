#include "exchange/bound_plan.hpp"

#include <algorithm>

namespace pgasdl {
namespace {

// A reduction longer than this lets other lanes go on in between.
constexpr std::uint64_t kBytesPerTurn = 8u << 20;

// What plans call memory in which data is put down for peers.
constexpr std::string_view kInbox = "inbox";

// Spreads every bit of the input over all bits of the output (SplitMix64's finalizer).
std::uint64_t spread(std::uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

}  // namespace

BoundPlan::BoundPlan(Context& context, const Plan& plan, std::vector<BufferBinding> buffers,
                     std::vector<Rank> ranks, std::shared_ptr<Segment> board,
                     std::uint64_t first_notification, std::uint64_t fingerprint)
    : context_(context),
      name_(plan.name),
      buffer_names_(plan.buffers),
      buffers_(std::move(buffers)),
      board_(std::move(board)),
      first_notification_(first_notification),
      notifications_(plan.notifications),
      fingerprint_(fingerprint),
      ranks_(std::move(ranks)) {
  std::size_t lane_number = 0;
  std::size_t step_number = 0;
  const auto refuse = [&](const std::string& why) -> Error {
    return Error(ErrorKind::kPlan, text("plan ", plan.name, " of rank ", plan.rank, ", lane ",
                                        lane_number, ", step ", step_number, ": ", why));
  };
  if (ranks_.size() != static_cast<std::size_t>(plan.size)) {
    throw refuse(text("made for ", plan.size, " ranks, bound to ", ranks_.size()));
  }
  if (plan.buffers.size() != plan.buffer_counts.size() || buffers_.size() != plan.buffers.size()) {
    throw refuse(text("has ", plan.buffers.size(), " buffers, ", buffers_.size(), " were bound"));
  }
  for (const BufferBinding& binding : buffers_) {
    own_.push_back(binding.segment->local().data + binding.offset);
  }
  const auto world_rank = [&](Rank rank) {
    if (rank < 0 || rank >= plan.size) throw refuse(text("no rank ", rank));
    return ranks_[static_cast<std::size_t>(rank)];
  };
  const auto remote_board = [&](Rank peer) -> const RemoteSegment& {
    const RemoteSegment* remote = board_->remote(peer);
    if (remote == nullptr) throw refuse(text("rank ", peer, " is not in the board's group"));
    return *remote;
  };
  const auto id_of = [&](std::int64_t notification, std::uint64_t limit) {
    if (notification < 0 || notification >= plan.notifications ||
        first_notification_ + plan.notifications > limit) {
      throw refuse(text("notification ", notification, " is out of range"));
    }
    return first_notification_ + static_cast<std::uint64_t>(notification);
  };
  struct Place {
    std::byte* address;
    DType dtype;
    const RemoteSegment* remote;
    std::uint64_t offset;
  };
  const auto place = [&](const PlanSpan& span, std::uint64_t count, bool address) -> Place {
    if (span.buffer >= buffers_.size()) throw refuse(text("no buffer ", span.buffer));
    const BufferBinding& binding = buffers_[span.buffer];
    const std::uint64_t elements = plan.buffer_counts[span.buffer];
    if (span.offset > elements || count > elements - span.offset) {
      throw refuse(text("elements [", span.offset, ", +", count, ") leave buffer ",
                        plan.buffers[span.buffer], " of ", elements));
    }
    const Rank peer = span.rank < 0 || span.rank == plan.rank ? -1 : world_rank(span.rank);
    const RemoteSegment* remote = peer < 0 ? nullptr : binding.segment->remote(peer);
    if (peer >= 0 && remote == nullptr) throw refuse(text("rank ", peer, " has no copy"));
    const std::uint64_t item = item_size(binding.dtype);
    const std::uint64_t limit = remote == nullptr ? binding.segment->bytes() : remote->bytes;
    const std::uint64_t needed = elements * item;
    if (binding.offset > limit || needed > limit - binding.offset || elements > limit) {
      throw refuse(text("buffer ", plan.buffers[span.buffer], " (", needed, " bytes at ",
                        binding.offset, ") leaves segment ", binding.segment->id()));
    }
    const std::uint64_t offset = binding.offset + span.offset * item;
    std::byte* base = remote == nullptr ? binding.segment->local().data : remote->data;
    if (address && base == nullptr) {
      throw refuse(text("needs rank ", peer,
                        "'s memory mapped here, which this transport or "
                        "bound memory does not offer: use plan gdraa or tree"));
    }
    return {base == nullptr ? nullptr : base + offset, binding.dtype, remote, offset};
  };
  for (const auto& steps : plan.lanes) {
    Lane& lane = lanes_.emplace_back();
    step_number = 0;
    for (const PlanStep& from : steps) {
      Step& step = lane.steps.emplace_back();
      step.kind = from.kind;
      step.count = from.count;
      step.scale = from.scale;
      step.hook = from.hook;
      step.notification = from.notification;
      step.salt = salt(static_cast<std::uint64_t>(from.notification));
      switch (from.kind) {
        case PlanStep::Kind::kPut: {
          step.peer = world_rank(from.peer);
          if (from.count > 0) {
            if (from.sources.size() != 1 || from.targets.size() != 1) throw refuse("malformed Put");
            PlanSpan target = from.targets[0];
            target.rank = from.peer;
            const Place source = place(from.sources[0], from.count, false);
            const Place goal = place(target, from.count, false);
            if (source.remote != nullptr || goal.remote == nullptr) {
              throw refuse("a Put goes from my memory to a peer's");
            }
            if (source.dtype != goal.dtype) throw refuse("a Put between different dtypes");
            step.transfer = {&buffers_[from.sources[0].buffer].segment->local(), source.offset,
                             goal.remote, goal.offset, from.count * item_size(source.dtype)};
            bytes_moved_ += step.transfer.bytes;
          }
          step.flagged = from.notification >= 0;
          if (step.flagged) {
            const RemoteSegment& remote = remote_board(step.peer);
            step.flag = {&remote,
                         static_cast<std::uint32_t>(id_of(from.notification, remote.notifications)),
                         0};
          }
          break;
        }
        case PlanStep::Kind::kWait:
          step.peer = from.peer < 0 ? -1 : world_rank(from.peer);
          step.word = &board_->local().board[id_of(from.notification, board_->notifications())];
          break;
        case PlanStep::Kind::kReduce: {
          if (from.sources.empty() || from.targets.empty()) throw refuse("malformed Reduce");
          std::uint64_t widest = 1;
          for (const PlanSpan& span : from.sources) {
            const Place source = place(span, from.count, true);
            step.sources.push_back({source.address, source.dtype});
            step.own.push_back(source.remote == nullptr ? static_cast<std::int32_t>(span.buffer)
                                                        : -1);
            widest = std::max<std::uint64_t>(widest, item_size(source.dtype));
          }
          for (const PlanSpan& span : from.targets) {
            const Place target = place(span, from.count, true);
            step.destinations.push_back({target.address, target.dtype});
            step.own.push_back(target.remote == nullptr ? static_cast<std::int32_t>(span.buffer)
                                                        : -1);
          }
          const auto integral = [](DType type) {
            return type == DType::kI32 || type == DType::kI64;
          };
          for (const Source& source : step.sources) {
            for (const Destination& target : step.destinations) {
              if ((integral(source.dtype) || integral(target.dtype)) &&
                  (source.dtype != target.dtype || from.scale != 1)) {
                throw refuse("integers are summed, neither averaged nor converted");
              }
            }
          }
          const std::uint64_t streams = step.sources.size() + step.destinations.size();
          bytes_moved_ += from.count * widest * streams;
          const std::int32_t into = step.own[step.sources.size()];
          if (streams == 2 && into >= 0 && plan.buffers[from.targets[0].buffer] == kInbox &&
              step.sources[0].dtype == step.destinations[0].dtype && from.scale == 1) {
            step.staging = from.count * widest;
          }
          lane.part_sources.reserve(std::max(lane.part_sources.capacity(), step.sources.size()));
          lane.part_destinations.reserve(
              std::max(lane.part_destinations.capacity(), step.destinations.size()));
          step.pass = std::max<std::uint64_t>(1024, kBytesPerTurn / (widest * streams) / 64 * 64);
          break;
        }
        case PlanStep::Kind::kCall:
          if (!from.targets.empty()) step.offset = from.targets[0].offset;
          break;
        case PlanStep::Kind::kFlush:
          break;
      }
      ++step_number;
    }
    ++lane_number;
  }
}

std::byte* BoundPlan::base(const std::string& buffer) const {
  const auto found = std::find(buffer_names_.begin(), buffer_names_.end(), buffer);
  if (found == buffer_names_.end()) return nullptr;
  return own_[static_cast<std::size_t>(found - buffer_names_.begin())];
}

void BoundPlan::rebase(const std::string& buffer, std::byte* address) {
  const auto found = std::find(buffer_names_.begin(), buffer_names_.end(), buffer);
  if (found == buffer_names_.end()) return;
  const auto number = static_cast<std::int32_t>(found - buffer_names_.begin());
  std::byte*& own = own_[static_cast<std::size_t>(number)];
  const std::ptrdiff_t shift = address - own;
  if (shift == 0) return;
  own = address;
  for (Lane& lane : lanes_) {
    for (Step& step : lane.steps) {
      for (std::size_t i = 0; i < step.own.size(); ++i) {
        if (step.own[i] != number) continue;
        const std::size_t n_sources = step.sources.size();
        if (i < n_sources) {
          step.sources[i].address = static_cast<const std::byte*>(step.sources[i].address) + shift;
        } else {
          void*& target = step.destinations[i - n_sources].address;
          target = static_cast<std::byte*>(target) + shift;
        }
      }
    }
  }
}

std::uint64_t BoundPlan::salt(std::uint64_t notification) { return spread(notification) | 1; }

void BoundPlan::require_peers(const Numbering& numbering) const {
  Transport& transport = context_.transport();
  for (const Lane& lane : lanes_) {
    if (lane.at >= lane.steps.size()) continue;
    const Step& step = lane.steps[lane.at];
    if (step.kind != PlanStep::Kind::kWait) continue;
    if (step.peer < 0) {
      if (!context_.liveness().everybody_left() || arrived(step)) continue;
      throw Error(ErrorKind::kPeerLost, missing() + "; every other rank has left");
    }
    const auto peer = std::find(ranks_.begin(), ranks_.end(), step.peer) - ranks_.begin();
    const FlagWord& word = board_->local().board[numbering.lost_id(static_cast<size_t>(peer))];
    if (context_.liveness().health(step.peer) == Health::kHealthy &&
        word.load(std::memory_order_acquire) == 0) {
      continue;
    }
    // What it sent before is here by now, or under way to us in the transport: it told before it
    // left, and raised its flags before both.
    if (transport.needs_progress()) transport.progress();
    if (arrived(step)) continue;
    const std::uint32_t told = word.load(std::memory_order_acquire);
    if (told == 0) context_.liveness().require(step.peer, name_.c_str());
    throw Error(ErrorKind::kPeerLost,
                text("plan ", name_, ", execution ", generation_, ": rank ", step.peer,
                     " waits for rank ", told - 1, ", which is gone"),
                static_cast<Rank>(told - 1));
  }
}

void BoundPlan::tell_lost(const Numbering& numbering, Rank gone) const {
  const auto self = std::find(ranks_.begin(), ranks_.end(), context_.rank()) - ranks_.begin();
  const auto id = static_cast<std::uint32_t>(numbering.lost_id(static_cast<std::size_t>(self)));
  for (const Rank peer : ranks_) {
    const RemoteSegment* remote = board_->remote(peer);
    if (peer == context_.rank() || remote == nullptr) continue;
    // Who needs no more of this execution may have deleted its board: addresses are not to be
    // written to then.
    const bool waits = std::any_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
      return std::any_of(lane.steps.begin() + static_cast<std::ptrdiff_t>(lane.at),
                         lane.steps.end(),
                         [&](const Step& step) { return step.flagged && step.peer == peer; });
    });
    if (!waits && !numbering.exclusive() && remote->board == nullptr) continue;
    context_.liveness().tell(
        {context_.plan_queue(), peer, {remote, id, static_cast<std::uint32_t>(gone + 1)}, board_});
  }
}

void BoundPlan::require_same_plan(const Numbering& numbering) const {
  for (std::uint64_t id = numbering.first(); id < numbering.first() + numbering.count(); ++id) {
    const std::uint32_t seen = board_->local().board[id].load(std::memory_order_acquire);
    if (seen == 0 || seen >> kTagBits != generation_) continue;
    const std::uint64_t own = id - first_notification_;
    if (own < notifications_ && seen == value(salt(own))) continue;
    throw Error(ErrorKind::kMismatch,
                text("plan ", name_, ", execution ", generation_, " on rank ", context_.rank(),
                     ": another rank runs a different collective as its execution ", generation_,
                     " (notification ", id, "): order, size, dtype and plan must be the same on ",
                     "all ranks"));
  }
}

void BoundPlan::begin(std::uint32_t generation) {
  generation_ = generation;
  hash_ = spread(fingerprint_ ^ (std::uint64_t{generation} << 48));
  began_ = ticks();
  lanes_left_ = 0;
  for (Lane& lane : lanes_) {
    lane.at = 0;
    lane.progress = 0;
    lane.call = Lane::Call::kNone;
    lanes_left_ += lane.steps.empty() ? 0 : 1;
  }
}

bool BoundPlan::arrived(const Step& step) const {
  const std::uint32_t seen = step.word->load(std::memory_order_acquire);
  if (seen == value(step.salt)) return true;
  if (seen != 0 && seen >> kTagBits == generation_) [[unlikely]] {
    throw Error(
        ErrorKind::kMismatch,
        text("plan ", name_, ", execution ", generation_, " on rank ", context_.rank(), ": rank ",
             step.peer, " runs a different collective (notification ", step.notification,
             "): order, size, dtype and plan must be the same on all ranks"));
  }
  return false;
}

bool BoundPlan::reduce_some(Lane& lane, const Step& step) {
  if (step.staging != 0) {
    stage_(step.destinations[0].address, step.sources[0].address, step.staging);
    return true;
  }
  if (step.count <= step.pass) [[likely]] {
    reduce(step.destinations, step.sources, step.count, step.scale);
    return true;
  }
  const std::uint64_t n = std::min(step.pass, step.count - lane.progress);
  lane.part_destinations = step.destinations;
  lane.part_sources = step.sources;
  for (Destination& target : lane.part_destinations) {
    target.address =
        static_cast<std::byte*>(target.address) + lane.progress * item_size(target.dtype);
  }
  for (Source& source : lane.part_sources) {
    source.address =
        static_cast<const std::byte*>(source.address) + lane.progress * item_size(source.dtype);
  }
  reduce(lane.part_destinations, lane.part_sources, n, step.scale);
  lane.progress += n;
  if (lane.progress < step.count) return false;
  lane.progress = 0;
  return true;
}

bool BoundPlan::advance_lane(Lane& lane) {
  bool moved = false;
  Transport& transport = context_.transport();
  while (lane.at < lane.steps.size()) {
    Step& step = lane.steps[lane.at];
    switch (step.kind) {
      case PlanStep::Kind::kPut: {
        step.flag.value = value(step.salt);
        const auto transfers =
            std::span<const Transfer>(&step.transfer, step.transfer.bytes == 0 ? 0 : 1);
        if (!transport.post_write(context_.plan_queue(), step.peer, transfers,
                                  step.flagged ? &step.flag : nullptr)) {
          return moved;
        }
        break;
      }
      case PlanStep::Kind::kWait:
        if (!arrived(step)) return moved;
        break;
      case PlanStep::Kind::kReduce:
        if (!reduce_some(lane, step)) return true;
        break;
      case PlanStep::Kind::kCall:
        if (lane.call == Lane::Call::kNone) {
          lane.call = Lane::Call::kAsked;
          call_pending_ = true;
          return true;
        }
        if (lane.call != Lane::Call::kAnswered) return moved;
        lane.call = Lane::Call::kNone;
        break;
      case PlanStep::Kind::kFlush:
        if (!context_.complete(context_.plan_queue())) return moved;
        break;
    }
    moved = true;
    ++lane.at;
  }
  --lanes_left_;
  return moved;
}

bool BoundPlan::advance() {
  bool moved = false;
  for (Lane& lane : lanes_) {
    if (lane.at < lane.steps.size()) moved |= advance_lane(lane);
  }
  if (over()) ended_ = ticks();
  return moved;
}

std::string BoundPlan::missing() const {
  std::string words;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    const Lane& at = lanes_[lane];
    if (at.at >= at.steps.size()) continue;
    const Step& step = at.steps[at.at];
    words += words.empty() ? "" : "; ";
    if (step.kind == PlanStep::Kind::kWait) {
      words += text("lane ", lane, " waits for notification ",
                    first_notification_ + static_cast<std::uint64_t>(step.notification),
                    " of segment ", board_->id(), " owed by rank ", step.peer);
    } else {
      words += text("lane ", lane, " is at step ", at.at, " of ", at.steps.size());
    }
  }
  return text("plan ", name_, ", execution ", generation_, ": ", words);
}

}  // namespace pgasdl

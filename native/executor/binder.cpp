#include "executor/binder.hpp"

#include <algorithm>

namespace pgasdl {
namespace {

// Longer reductions are made in passes, between which other lanes advance.
constexpr std::uint64_t kBytesPerPass = 8u << 20;

// Plans' name for memory into which peers write.
constexpr std::string_view kInbox = "inbox";

std::string device_name(int device) { return device == kHost ? "the host" : text("GPU ", device); }

std::string unmapped(Rank peer) {
  return text("needs rank ", peer,
              "'s memory mapped here, which this transport or bound memory does not offer: use "
              "plan gdraa or tree");
}

bool integral(DType type) { return type == DType::kI32 || type == DType::kI64; }

}  // namespace

Error BoundPlan::Binder::refuse(const std::string& why) const {
  return {ErrorKind::kPlan, text("plan ", plan_.name, " of rank ", plan_.rank, ", lane ", lane_,
                                 ", step ", step_, ": ", why)};
}

void BoundPlan::Binder::bind_buffers() {
  const std::size_t n_ranks = bound_.ranks_.size();
  if (n_ranks != static_cast<std::size_t>(plan_.size)) {
    throw refuse(text("made for ", plan_.size, " ranks, bound to ", n_ranks));
  }
  const auto& buffers = bound_.buffers_;
  if (plan_.buffers.size() != plan_.buffer_counts.size() ||
      buffers.size() != plan_.buffers.size()) {
    throw refuse(text("has ", plan_.buffers.size(), " buffers, ", buffers.size(), " were bound"));
  }
  for (const BufferBinding& binding : buffers) {
    if (!binding.homes.empty() && binding.homes.size() != n_ranks) {
      throw refuse(text("a buffer of ", binding.homes.size(), " ranks of ", n_ranks));
    }
    bound_.own_.push_back(binding.segment->local().data + binding.offset);
    const int device = binding.segment->device();
    if (device == kHost) continue;
    if (bound_.device_ != kHost && bound_.device_ != device) {
      throw refuse(text("buffers on different devices: ", device_name(bound_.device_), " and ",
                        device_name(device)));
    }
    bound_.device_ = device;
  }
  if (bound_.device_ != kHost && bound_.op_ != ReduceOp::kSum) {
    throw refuse("a GPU adds up, and does nothing else to several arrays");
  }
}

void BoundPlan::Binder::bind_lane(const std::vector<PlanStep>& steps) {
  Lane& lane = bound_.lanes_.emplace_back();
  if (bound_.device_ != kHost) lane.work_end = std::make_unique<DeviceMoment>(bound_.device_);
  step_ = 0;
  for (const PlanStep& from : steps) {
    Step& step = lane.steps.emplace_back();
    step.kind = from.kind;
    step.count = from.count;
    step.scale = from.scale;
    step.hook = from.hook;
    step.notification = from.notification;
    step.salt = salt(static_cast<std::uint64_t>(from.notification));
    switch (from.kind) {
      case PlanStep::Kind::kPut:
        bind_put(from, step);
        break;
      case PlanStep::Kind::kWait:
        bind_wait(from, step);
        break;
      case PlanStep::Kind::kReduce:
        bind_reduce(from, step, lane);
        break;
      case PlanStep::Kind::kCopy:
        bind_copy(from, step);
        break;
      case PlanStep::Kind::kCall:
        if (!from.targets.empty()) step.offset = from.targets[0].offset;
        break;
      case PlanStep::Kind::kFlush:
        break;
    }
    ++step_;
  }
  ++lane_;
}

Rank BoundPlan::Binder::world_rank(Rank rank) const {
  if (rank < 0 || rank >= plan_.size) throw refuse(text("no rank ", rank));
  return bound_.ranks_[static_cast<std::size_t>(rank)];
}

const RemoteSegment& BoundPlan::Binder::remote_board(Rank peer) const {
  const RemoteSegment* remote = bound_.board_->remote(peer);
  if (remote == nullptr) throw refuse(text("rank ", peer, " is not in the board's group"));
  return *remote;
}

std::uint64_t BoundPlan::Binder::id_of(std::int64_t notification, std::uint64_t limit) const {
  if (notification < 0 || notification >= plan_.notifications ||
      bound_.first_notification_ + plan_.notifications > limit) {
    throw refuse(text("notification ", notification, " is out of range"));
  }
  return bound_.first_notification_ + static_cast<std::uint64_t>(notification);
}

auto BoundPlan::Binder::place(const PlanSpan& span, std::uint64_t count, bool mapped) const
    -> Place {
  if (span.buffer >= bound_.buffers_.size()) throw refuse(text("no buffer ", span.buffer));
  const BufferBinding& binding = bound_.buffers_[span.buffer];
  const std::uint64_t elements = plan_.buffer_counts[span.buffer];
  if (span.offset > elements || count > elements - span.offset) {
    throw refuse(text("elements [", span.offset, ", +", count, ") leave buffer ",
                      plan_.buffers[span.buffer], " of ", elements));
  }
  const Rank peer = span.rank < 0 || span.rank == plan_.rank ? -1 : world_rank(span.rank);
  if (peer >= 0 && binding.directory != nullptr) {
    return {nullptr, binding.dtype, nullptr, span.offset * item_size(binding.dtype), peer};
  }
  const bool as_mine = peer < 0 || binding.homes.empty();
  const BufferHome home = as_mine ? BufferHome{binding.segment, binding.offset}
                                  : binding.homes[static_cast<std::size_t>(span.rank)];
  return place_in_segment(span, home, peer, mapped);
}

auto BoundPlan::Binder::place_in_segment(const PlanSpan& span, const BufferHome& home, Rank peer,
                                         bool mapped) const -> Place {
  const DType dtype = bound_.buffers_[span.buffer].dtype;
  const std::string& name = plan_.buffers[span.buffer];
  const Segment& segment = *home.segment;
  const RemoteSegment* remote = peer < 0 ? nullptr : segment.remote(peer);
  if (peer >= 0 && remote == nullptr) throw refuse(text("rank ", peer, " has no copy"));
  const std::uint64_t limit = remote == nullptr ? segment.bytes() : remote->bytes;
  const std::uint64_t elements = plan_.buffer_counts[span.buffer];
  const std::uint64_t needed = elements * item_size(dtype);
  if (home.offset > limit || needed > limit - home.offset || elements > limit) {
    throw refuse(text("buffer ", name, " (", needed, " bytes at ", home.offset, ") leaves segment ",
                      segment.id()));
  }
  const std::uint64_t offset = home.offset + span.offset * item_size(dtype);
  const bool on_host = segment.device() == kHost;
  if (remote != nullptr && (remote->device == kHost) != on_host) {
    throw refuse(text("buffer ", name, " of rank ", peer, " lies on ", device_name(remote->device),
                      ", mine on ", device_name(segment.device())));
  }
  std::byte* base = remote == nullptr ? segment.local().data : remote->data;
  if (mapped && base == nullptr) throw refuse(unmapped(peer));
  if (on_host && bound_.device_ != kHost) {
    Region* const region = remote == nullptr ? segment.local().region.get() : remote->region.get();
    if (region == nullptr) throw refuse(text("buffer ", name, " is out of the GPU's reach"));
    region->pin(bound_.device_);
    const cuda::Current current(bound_.device_);
    base = reinterpret_cast<std::byte*>(device_address(base));
  }
  return {base == nullptr ? nullptr : base + offset, dtype, remote, offset};
}

void BoundPlan::Binder::bind_put(const PlanStep& from, Step& step) {
  step.peer = world_rank(from.peer);
  if (from.count > 0) bind_transfer(from, step);
  step.flagged = from.notification >= 0;
  if (step.flagged) {
    const RemoteSegment& remote = remote_board(step.peer);
    const std::uint64_t id = id_of(from.notification, remote.notifications);
    step.flag = {&remote, static_cast<std::uint32_t>(id), 0};
    ++put_traffic_[step.peer].notifications;
  }
}

void BoundPlan::Binder::bind_transfer(const PlanStep& from, Step& step) {
  if (from.sources.size() != 1 || from.targets.size() != 1) throw refuse("malformed Put");
  PlanSpan target = from.targets[0];
  target.rank = from.peer;
  const Place source = place(from.sources[0], from.count, false);
  const Place goal = place(target, from.count, false);
  if (goal.announced_by >= 0) throw refuse("a Put to where a peer has yet to tell");
  if (source.remote != nullptr || goal.remote == nullptr) {
    throw refuse("a Put goes from my memory to a peer's");
  }
  if (source.dtype != goal.dtype) throw refuse("a Put between different dtypes");
  const std::uint32_t buffer = from.sources[0].buffer;
  step.transfer = {&bound_.buffers_[buffer].segment->local(), source.offset, goal.remote,
                   goal.offset, from.count * item_size(source.dtype)};
  bound_.bytes_moved_ += step.transfer.bytes;
  Traffic& traffic = put_traffic_[step.peer];
  traffic.bytes_written += step.transfer.bytes;
  ++traffic.messages_written;
  // An adapter also reaches unmapped memory on a GPU.
  if (bound_.device_ == kHost || goal.address == nullptr) return;
  // The GPU copies, and the step waits for it here, not in the transport; then comes the flag.
  step.on_device = true;
  step.count = step.transfer.bytes;
  step.device_copy = {goal.address, source.address};
  step.transfer.bytes = 0;
  step.own = {static_cast<std::int32_t>(buffer)};
}

void BoundPlan::Binder::bind_wait(const PlanStep& from, Step& step) const {
  step.peer = from.peer < 0 ? -1 : world_rank(from.peer);
  const Segment& board = *bound_.board_;
  step.word = &board.local().board[id_of(from.notification, board.notifications())];
}

void BoundPlan::Binder::bind_reduce(const PlanStep& from, Step& step, Lane& lane) {
  if (from.sources.empty() || from.targets.empty()) throw refuse("malformed Reduce");
  for (const PlanSpan& span : from.sources) bind_source(from, span, step);
  for (const PlanSpan& span : from.targets) bind_destination(from, span, step);
  check_dtypes(step);
  const bool host = bound_.device_ == kHost;
  step.on_device = !host;
  std::uint64_t widest = 1;
  for (const Source& source : step.sources) {
    widest = std::max<std::uint64_t>(widest, item_size(source.dtype));
  }
  const std::uint64_t streams = step.sources.size() + step.destinations.size();
  bound_.bytes_moved_ += from.count * widest * streams;
  const bool to_inbox =
      step.own[step.sources.size()] >= 0 && plan_.buffers[from.targets[0].buffer] == kInbox;
  if (host && streams == 2 && to_inbox && step.scale == 1 &&
      step.sources[0].dtype == step.destinations[0].dtype) {
    step.staging = from.count * widest;
  }
  lane.part_sources.reserve(std::max(lane.part_sources.capacity(), step.sources.size()));
  lane.part_destinations.reserve(
      std::max(lane.part_destinations.capacity(), step.destinations.size()));
  step.pass = std::max<std::uint64_t>(1024, kBytesPerPass / (widest * streams) / 64 * 64);
}

void BoundPlan::Binder::bind_copy(const PlanStep& from, Step& step) {
  if (from.sources.size() != 1 || from.targets.size() != 1 || from.rows == 0 || from.count == 0) {
    throw refuse("malformed Copy");
  }
  if (bound_.device_ != kHost) throw refuse("rows are copied on the host only");
  const auto extent = [&](std::uint64_t apart) {
    const std::uint64_t more = from.rows - 1;
    if (more != 0 && apart > (UINT64_MAX - from.count) / more) throw refuse("rows too far apart");
    return more * apart + from.count;
  };
  const PlanSpan& source = from.sources[0];
  const PlanSpan& target = from.targets[0];
  const Place here = place(source, extent(from.source_step), true);
  const Place there = place(target, extent(from.target_step), true);
  if (here.announced_by >= 0 || there.announced_by >= 0) {
    throw refuse("a Copy of rows where a peer has yet to tell");
  }
  step.sources.push_back({here.address, here.dtype});
  note(source, here, step);
  step.destinations.push_back({there.address, there.dtype});
  note(target, there, step);
  check_dtypes(step);
  const std::uint64_t item = item_size(here.dtype);
  const std::uint64_t target_item = item_size(there.dtype);
  step.rows = {from.rows, from.source_step * item, from.target_step * target_item};
  const std::uint64_t bytes = from.count * (item + target_item);
  bound_.bytes_moved_ += from.rows * bytes;
  note_traffic(source, here, from.rows * from.count, false);
  note_traffic(target, there, from.rows * from.count, true);
  step.pass = std::max<std::uint64_t>(1, kBytesPerPass / bytes);
}

void BoundPlan::Binder::bind_source(const PlanStep& from, const PlanSpan& span, Step& step) {
  const Place source = place(span, from.count, true);
  note_traffic(span, source, from.count, false);
  step.sources.push_back({source.address, source.dtype});
  note(span, source, step);
}

void BoundPlan::Binder::bind_destination(const PlanStep& from, const PlanSpan& span, Step& step) {
  const Place target = place(span, from.count, true);
  note_traffic(span, target, from.count, true);
  step.destinations.push_back({target.address, target.dtype});
  note(span, target, step);
}

void BoundPlan::Binder::note(const PlanSpan& span, const Place& at, Step& step) const {
  const bool own = at.remote == nullptr && at.announced_by < 0;
  if (at.announced_by >= 0) {
    const std::uint64_t needed = plan_.buffer_counts[span.buffer] * item_size(at.dtype);
    step.looked_up.push_back({step.own.size(), span.buffer, at.announced_by, at.offset, needed});
  }
  step.own.push_back(own ? static_cast<std::int32_t>(span.buffer) : -1);
}

void BoundPlan::Binder::note_traffic(const PlanSpan& span, const Place& at, std::uint64_t count,
                                     bool written) {
  if (at.remote == nullptr && at.announced_by < 0) return;
  Traffic& traffic = reduce_traffic_[world_rank(span.rank)];
  (written ? traffic.bytes_written : traffic.bytes_read) += count * item_size(at.dtype);
  ++(written ? traffic.messages_written : traffic.messages_read);
}

void BoundPlan::Binder::check_dtypes(const Step& step) const {
  for (const Source& source : step.sources) {
    for (const Destination& target : step.destinations) {
      const bool alike = source.dtype == target.dtype && step.scale == 1;
      const auto either = [&](auto&& is) { return is(source.dtype) || is(target.dtype); };
      if (either([](DType type) { return type == DType::kBytes; }) &&
          (!alike || step.sources.size() > 1)) {
        throw refuse("bytes are copied, neither summed nor converted");
      }
      if (either(integral) && !alike) {
        throw refuse("integers are summed, neither averaged nor converted");
      }
    }
  }
}

}  // namespace pgasdl

// Binds a plan to memory: resolves every address, checks every bound.
#include <algorithm>
#include <atomic>

#include "executor/bound_plan.hpp"
#include "reduce/device_reduce.hpp"

namespace pgasdl {
namespace {

// A reduction longer than this lets other lanes go on in between.
constexpr std::uint64_t kBytesPerPass = 8u << 20;

// The name in plans of memory in which peers put data down.
constexpr std::string_view kInbox = "inbox";

// -1: it is not among them.
std::int32_t number_of(const std::vector<std::string>& names, std::string_view name) {
  const auto found = std::ranges::find(names, name);
  return found == names.end() ? -1 : static_cast<std::int32_t>(found - names.begin());
}

std::string device_name(int device) { return device == kHost ? "the host" : text("GPU ", device); }

}  // namespace

BoundPlan::BoundPlan(Context& context, const Plan& plan, std::vector<BufferBinding> buffers,
                     std::vector<Rank> ranks, std::shared_ptr<Segment> board,
                     std::uint64_t first_notification, std::uint64_t fingerprint, ReduceOp op)
    : context_(context),
      name_(plan.name),
      data_(number_of(plan.buffers, "data")),
      buffers_(std::move(buffers)),
      board_(std::move(board)),
      first_notification_(first_notification),
      notifications_(plan.notifications),
      fingerprint_(fingerprint),
      ranks_(std::move(ranks)),
      op_(op) {
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
    if (!binding.homes.empty() && binding.homes.size() != ranks_.size()) {
      throw refuse(text("a buffer of ", binding.homes.size(), " ranks of ", ranks_.size()));
    }
    own_.push_back(binding.segment->local().data + binding.offset);
    const int device = binding.segment->device();
    if (&binding != &buffers_[0] && device != device_) {
      throw refuse(text("buffers on different devices: ", plan.buffers[0], " on ",
                        device_name(device_), ", another on ", device_name(device)));
    }
    device_ = device;
  }
  if (device_ != kHost) {
    if (op != ReduceOp::kSum)
      throw refuse("a GPU adds up, and does nothing else to several arrays");
    load_device_kernels(device_);  // now, and not in the first execution
    static std::atomic<std::size_t> lanes_bound{0};
    first_stream_ = lanes_bound.fetch_add(plan.lanes.size(), std::memory_order_relaxed);
    (void)shared_stream(device_, first_stream_);
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
  const auto unmapped = [](Rank peer) {
    return text("needs rank ", peer,
                "'s memory mapped here, which this transport or "
                "bound memory does not offer: use plan gdraa or tree");
  };
  struct Place {
    std::byte* address;
    DType dtype;
    const RemoteSegment* remote;
    std::uint64_t offset;
    Rank announced_by = -1;  // the peer that tells, in each execution, where its copy begins
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
    const bool as_mine = peer < 0 || binding.homes.empty();
    const BufferHome home = as_mine ? BufferHome{binding.segment, binding.offset}
                                    : binding.homes[static_cast<std::size_t>(span.rank)];
    if (peer >= 0 && binding.directory != nullptr) {
      if (address && binding.directory->anywhere()) throw refuse(unmapped(peer));
      return {nullptr, binding.dtype, nullptr, span.offset * item_size(binding.dtype), peer};
    }
    const RemoteSegment* remote = peer < 0 ? nullptr : home.segment->remote(peer);
    if (peer >= 0 && remote == nullptr) throw refuse(text("rank ", peer, " has no copy"));
    const std::uint64_t item = item_size(binding.dtype);
    const std::uint64_t limit = remote == nullptr ? home.segment->bytes() : remote->bytes;
    const std::uint64_t needed = elements * item;
    if (home.offset > limit || needed > limit - home.offset || elements > limit) {
      throw refuse(text("buffer ", plan.buffers[span.buffer], " (", needed, " bytes at ",
                        home.offset, ") leaves segment ", home.segment->id()));
    }
    const std::uint64_t offset = home.offset + span.offset * item;
    if (remote != nullptr && (remote->device == kHost) != (device_ == kHost)) {
      throw refuse(text("buffer ", plan.buffers[span.buffer], " of rank ", peer, " lies on ",
                        device_name(remote->device), ", mine on ", device_name(device_)));
    }
    std::byte* base = remote == nullptr ? home.segment->local().data : remote->data;
    if (address && base == nullptr) throw refuse(unmapped(peer));
    return {base == nullptr ? nullptr : base + offset, binding.dtype, remote, offset};
  };
  for (const auto& steps : plan.lanes) {
    Lane& lane = lanes_.emplace_back();
    if (device_ != kHost) lane.work_end = std::make_unique<DeviceMoment>(device_);
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
            if (goal.announced_by >= 0) throw refuse("a Put to where a peer has yet to tell");
            if (source.remote != nullptr || goal.remote == nullptr) {
              throw refuse("a Put goes from my memory to a peer's");
            }
            if (source.dtype != goal.dtype) throw refuse("a Put between different dtypes");
            step.transfer = {&buffers_[from.sources[0].buffer].segment->local(), source.offset,
                             goal.remote, goal.offset, from.count * item_size(source.dtype)};
            bytes_moved_ += step.transfer.bytes;
            if (device_ != kHost) {
              if (goal.address == nullptr)
                throw refuse("puts into memory of a GPU not mapped here");
              // A copy by the GPU, which is awaited here and not in the transport; then the flag.
              step.on_device = true;
              step.count = step.transfer.bytes;
              step.device_copy = {goal.address, source.address};
              step.transfer.bytes = 0;
              step.own = {static_cast<std::int32_t>(from.sources[0].buffer)};
            }
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
          const auto note = [&](const PlanSpan& span, const Place& at) {
            const bool own = at.remote == nullptr && at.announced_by < 0;
            if (at.announced_by >= 0) {
              const std::uint64_t needed = plan.buffer_counts[span.buffer] * item_size(at.dtype);
              step.looked_up.push_back(
                  {step.own.size(), span.buffer, at.announced_by, at.offset, needed});
            }
            step.own.push_back(own ? static_cast<std::int32_t>(span.buffer) : -1);
          };
          // A copy out of a peer's memory, which need not be mapped.
          const Rank owner = from.sources[0].rank;
          const bool copies = from.sources.size() == 1 && from.targets.size() == 1 &&
                              from.scale == 1 && owner >= 0 && owner != plan.rank &&
                              device_ == kHost;
          for (const PlanSpan& span : from.sources) {
            const Place source = place(span, from.count, !copies);
            const Directory* const announced = buffers_[span.buffer].directory.get();
            const bool anywhere = source.announced_by >= 0 && announced->anywhere();
            if (anywhere || (source.remote != nullptr && source.address == nullptr)) {
              step.peer = world_rank(owner);
              step.read = std::make_unique<Step::Read>();
              step.read->remote.bytes = UINT64_MAX;
              step.read->transfer = {&step.read->local, 0,
                                     source.remote != nullptr ? source.remote : &step.read->remote,
                                     source.remote != nullptr ? source.offset : 0,
                                     from.count * item_size(source.dtype)};
              if (!context_.transport().reads_anywhere(step.peer)) {
                throw refuse(unmapped(step.peer));
              }
            }
            step.sources.push_back({source.address, source.dtype});
            note(span, source);
            widest = std::max<std::uint64_t>(widest, item_size(source.dtype));
          }
          for (const PlanSpan& span : from.targets) {
            const Place target = place(span, from.count, true);
            if (step.read != nullptr && (target.address == nullptr || target.remote != nullptr ||
                                         target.dtype != step.sources[0].dtype)) {
              throw refuse("a peer's memory that is not mapped is only copied, as it is, to own");
            }
            step.destinations.push_back({target.address, target.dtype});
            note(span, target);
          }
          const auto integral = [](DType type) {
            return type == DType::kI32 || type == DType::kI64;
          };
          for (const Source& source : step.sources) {
            for (const Destination& target : step.destinations) {
              if ((source.dtype == DType::kBytes || target.dtype == DType::kBytes) &&
                  (source.dtype != target.dtype || step.sources.size() > 1 || from.scale != 1)) {
                throw refuse("bytes are copied, neither summed nor converted");
              }
              if ((integral(source.dtype) || integral(target.dtype)) &&
                  (source.dtype != target.dtype || from.scale != 1)) {
                throw refuse("integers are summed, neither averaged nor converted");
              }
            }
          }
          step.on_device = device_ != kHost;
          const std::uint64_t streams = step.sources.size() + step.destinations.size();
          bytes_moved_ += from.count * widest * streams;
          const std::int32_t into = step.own[step.sources.size()];
          if (device_ == kHost && streams == 2 && into >= 0 &&
              plan.buffers[from.targets[0].buffer] == kInbox &&
              step.sources[0].dtype == step.destinations[0].dtype && from.scale == 1) {
            step.staging = from.count * widest;
          }
          lane.part_sources.reserve(std::max(lane.part_sources.capacity(), step.sources.size()));
          lane.part_destinations.reserve(
              std::max(lane.part_destinations.capacity(), step.destinations.size()));
          step.pass = std::max<std::uint64_t>(1024, kBytesPerPass / (widest * streams) / 64 * 64);
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
  by_stream_ = device_ != kHost && is_by_stream() && streams_wait(device_);
  if (by_stream_) stream_end_ = std::make_unique<DeviceMoment>(device_);
}

// One lane: a stream makes steps in an order, which lanes do not have.
bool BoundPlan::is_by_stream() const {
  const auto working =
      std::ranges::count_if(lanes_, [](const Lane& lane) { return !lane.steps.empty(); });
  if (working > 1) return false;
  return std::ranges::all_of(lanes_, [](const Lane& lane) {
    return std::ranges::all_of(lane.steps, [](const Step& step) {
      switch (step.kind) {
        case PlanStep::Kind::kPut:
          return (step.on_device || step.transfer.bytes == 0) &&
                 (!step.flagged || step.flag.remote->region != nullptr);
        case PlanStep::Kind::kReduce:
          return step.on_device && step.looked_up.empty();
        case PlanStep::Kind::kWait:
          return true;
        default:
          return false;
      }
    });
  });
}

void BoundPlan::copy_array(int device, const std::vector<Piece>& pieces) {
  const std::uint64_t item = item_size(buffers_[static_cast<std::size_t>(data_)].dtype);
  std::vector<ArrayCopies::Extent> extents;
  std::size_t lane = 0;
  for (const Piece& piece : pieces) {
    if (piece.lanes > lanes_.size() - lane) break;
    ArrayCopies::Extent& extent = extents.emplace_back(piece.count * item, piece.lanes, 0);
    for (const std::size_t end = lane + piece.lanes; lane < end; ++lane) {
      extent.working += lanes_[lane].steps.empty() ? 0 : 1;
    }
  }
  if (extents.empty() || extents.size() != pieces.size() || lane != lanes_.size()) {
    throw Error(ErrorKind::kPlan,
                text("plan ", name_, ": ", pieces.size(), " pieces of an array do not share its ",
                     lanes_.size(), " lanes"));
  }
  array_copies_ = std::make_unique<ArrayCopies>(context_.waiter(), device, data(), extents);
}

Directory* BoundPlan::directory() const {
  return data_ < 0 ? nullptr : buffers_[static_cast<std::size_t>(data_)].directory.get();
}

void BoundPlan::rebase(std::byte* address) {
  if (data_ >= 0) rebase_buffer(data_, address);
}

void BoundPlan::rebase(std::span<const std::uintptr_t> addresses) {
  for (std::size_t number = 0; number < addresses.size(); ++number) {
    if (addresses[number] == 0) continue;
    rebase_buffer(static_cast<std::int32_t>(number),
                  reinterpret_cast<std::byte*>(addresses[number]));
  }
}

void BoundPlan::rebase_buffer(std::int32_t number, std::byte* address) {
  std::byte*& own = own_[static_cast<std::size_t>(number)];
  const std::ptrdiff_t shift = address - own;
  // From here Puts send; all phases share it.
  const BufferBinding& binding = buffers_[static_cast<std::size_t>(number)];
  binding.segment->local().data = address - binding.offset;
  if (shift == 0) return;
  own = address;
  for (Lane& lane : lanes_) {
    for (Step& step : lane.steps) {
      if (step.kind == PlanStep::Kind::kPut && step.on_device && step.own[0] == number) {
        step.device_copy.from += shift;
        continue;
      }
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

}  // namespace pgasdl

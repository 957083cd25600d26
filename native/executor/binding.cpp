// Binds a plan to memory, and later moves its array to another address.
#include <algorithm>
#include <atomic>

#include "executor/binder.hpp"
#include "reduce/device_reduce.hpp"

namespace pgasdl {
namespace {

// -1: not found.
std::int32_t number_of(const std::vector<std::string>& names, std::string_view name) {
  const auto found = std::ranges::find(names, name);
  return found == names.end() ? -1 : static_cast<std::int32_t>(found - names.begin());
}

}  // namespace

BoundPlan::BoundPlan(Context& context, const Plan& plan, std::vector<BufferBinding> buffers,
                     std::vector<Rank> ranks, std::shared_ptr<Segment> board,
                     std::uint64_t first_notification, std::uint64_t fingerprint, ReduceOp op,
                     std::string what)
    : context_(context),
      name_(plan.name),
      data_(number_of(plan.buffers, "data")),
      weights_(number_of(plan.buffers, "weights")),
      buffers_(std::move(buffers)),
      board_(std::move(board)),
      first_notification_(first_notification),
      notifications_(plan.notifications),
      fingerprint_(fingerprint),
      what_(std::move(what)),
      title_(what_.empty() ? name_ : what_.substr(0, what_.find(','))),
      ranks_(std::move(ranks)),
      op_(op) {
  Binder binder(*this, plan);
  binder.bind_buffers();
  if (device_ != kHost) {
    load_device_kernels(device_);  // now, not in the first execution
    static std::atomic<std::size_t> lanes_bound{0};
    first_stream_ = lanes_bound.fetch_add(plan.lanes.size(), std::memory_order_relaxed);
    (void)shared_stream(device_, first_stream_);
  }
  for (const auto& steps : plan.lanes) binder.bind_lane(steps);
  put_traffic_.assign(binder.put_traffic().begin(), binder.put_traffic().end());
  reduce_traffic_.assign(binder.reduce_traffic().begin(), binder.reduce_traffic().end());
  by_stream_ = device_ != kHost && is_by_stream() && streams_wait(device_);
  if (by_stream_) stream_end_ = std::make_unique<DeviceMoment>(device_);
  context_.liveness().note_plan(fingerprint_, first_notification_, what_);
}

// One lane only: a stream makes steps in one order, lanes have no order among each other.
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
  const std::byte* const result = weights_ < 0 ? data() : own_[static_cast<std::size_t>(weights_)];
  array_copies_ = std::make_unique<ArrayCopies>(context_.waiter(), device, data(), result, extents);
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
  // Puts send from here; all phases share it.
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

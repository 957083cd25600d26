#include "executor/bound_plan.hpp"

#include <algorithm>

#include "reduce/device_reduce.hpp"

namespace pgasdl {
namespace {

// Spreads every bit of the input over all bits of the output (SplitMix64's finalizer).
std::uint64_t spread(std::uint64_t bits) {
  bits += 0x9e3779b97f4a7c15;
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
  return bits ^ (bits >> 31);
}

}  // namespace

std::uint64_t BoundPlan::salt(std::uint64_t notification) { return spread(notification) | 1; }

void BoundPlan::require_peers(const Numbering& numbering) const {
  if (enqueued_ && stream_end_->reached()) return;
  Transport& transport = context_.transport();
  for (const Lane& lane : lanes_) {
    if (lane.at >= lane.steps.size()) continue;
    const Step& step = lane.steps[lane.at];
    if (step.kind != PlanStep::Kind::kWait) continue;
    if (step.peer < 0) {
      if (!context_.liveness().everybody_left() || arrived(step)) continue;
      throw Error(ErrorKind::kPeerLost, missing() + "; every other rank has left");
    }
    const auto peer = static_cast<std::size_t>(std::find(ranks_.begin(), ranks_.end(), step.peer) -
                                               ranks_.begin());
    if (context_.liveness().health(step.peer) == Health::kHealthy && left_by(numbering, peer) == 0)
      continue;
    // Its earlier messages are here, or the transport still holds them: the peer announced before
    // it left, and raised its flags before both.
    if (transport.needs_progress()) transport.progress();
    if (arrived(step)) continue;
    const std::uint32_t announced = left_by(numbering, peer);
    if (announced == 0) context_.liveness().require(step.peer, title_.c_str());
    throw given_up_by(peer, announced);
  }
}

Error BoundPlan::given_up_by(std::size_t of, std::uint32_t announced) const {
  const Rank reason = reason_of(announced);
  const std::string why = reason == ranks_[of]
                              ? std::string(" has given it up, and says why")
                              : text(" waits for rank ", reason, ", which ",
                                     (announced & kRenounced) != 0 ? "has given it up" : "is gone");
  return {ErrorKind::kPeerLost,
          text("plan ", name_, ", execution ", generation_, ": rank ", ranks_[of], why), reason};
}

void BoundPlan::announce_given_up(const Numbering& numbering, std::uint32_t why,
                                  bool boards_stay) const {
  const auto self = std::find(ranks_.begin(), ranks_.end(), context_.rank()) - ranks_.begin();
  const auto id = static_cast<std::uint32_t>(numbering.given_up_id(static_cast<std::size_t>(self)));
  for (const Rank peer : ranks_) {
    const RemoteSegment* remote = board_->remote(peer);
    if (peer == context_.rank() || remote == nullptr) continue;
    // A peer that needs no more of this execution may have deleted its board: without a mapping,
    // its addresses must not be written to.
    const bool waits = std::any_of(lanes_.begin(), lanes_.end(), [&](const Lane& lane) {
      return std::any_of(lane.steps.begin() + static_cast<std::ptrdiff_t>(lane.at),
                         lane.steps.end(),
                         [&](const Step& step) { return step.flagged && step.peer == peer; });
    });
    if (!waits && !boards_stay && !numbering.exclusive() && remote->board == nullptr) continue;
    context_.liveness().announce({context_.plan_queue(), peer, {remote, id, why}, board_});
  }
}

void BoundPlan::require_same_plan(const Numbering& numbering) const {
  for (std::uint64_t id = numbering.first(); id < numbering.reach(); ++id) {
    const std::uint32_t seen = board_->local().board[id].load(std::memory_order_acquire);
    if (seen == 0 || seen >> kTagBits != generation_) continue;
    const std::uint64_t own = id - first_notification_;
    if (own < notifications_ && seen == value(salt(own))) continue;
    throw Error(ErrorKind::kMismatch,
                text("plan ", name_, ", execution ", generation_, " on rank ", context_.rank(),
                     ": another rank runs a different collective as its execution ", generation_,
                     " (notification ", id, "): ", must_agree(id, seen)));
  }
  // A peer may have noticed first, before it sent anything by which this rank would notice.
  for (std::size_t of = 0; of < ranks_.size(); ++of) {
    if (announced_mismatch(numbering, of)) throw mismatch_announced_by(of);
    const std::uint32_t announced = left_by(numbering, of);
    if ((announced & kRenounced) != 0) throw given_up_by(of, announced);
  }
}

std::string BoundPlan::must_agree(Rank other, const std::string& theirs) const {
  context_.liveness().note_plan(fingerprint_, first_notification_, what_);  // for who is told of it
  const std::string title = theirs.substr(0, theirs.find(','));
  const bool alike = theirs.empty() || title == title_;  // then the rest tells them apart
  return text("order, size, dtype, plan and device must be the same on all ranks",
              what_.empty() ? "" : "; this rank runs ", alike ? what_ : title_,
              theirs.empty() ? "" : text(", rank ", other, " ", alike ? theirs : title));
}

std::string BoundPlan::must_agree(std::uint64_t notification, std::uint32_t seen) const {
  for (const Rank peer : ranks_) {
    if (peer == context_.rank()) continue;
    const std::string theirs =
        context_.liveness().plan_of(peer, [&](std::uint64_t fingerprint, std::uint64_t first) {
          return fingerprint != fingerprint_ && first <= notification &&
                 seen == value(salt(notification - first), hash_of(fingerprint));
        });
    if (!theirs.empty()) return must_agree(peer, theirs);
  }
  return must_agree();
}

Error BoundPlan::mismatch_announced_by(std::size_t of) const {
  const std::string newest =
      context_.liveness().plan_of(ranks_[of], [](std::uint64_t, std::uint64_t) { return true; });
  return {ErrorKind::kMismatch,
          text("plan ", name_, ", execution ", generation_, " on rank ", context_.rank(), ": rank ",
               ranks_[of], " says that ranks run different collectives as execution ", generation_,
               ": ", must_agree(ranks_[of], what_.starts_with(newest) ? "" : newest))};
}

std::uint64_t BoundPlan::hash_of(std::uint64_t fingerprint) const {
  return spread(fingerprint ^ mark_ ^ (std::uint64_t{generation_} << 48));
}

void BoundPlan::begin(std::uint32_t generation, std::uint64_t mark) {
  generation_ = generation;
  mark_ = mark;
  hash_ = hash_of(fingerprint_);
  began_ = ticks();
  enqueued_ = false;
  lanes_left_ = 0;
  for (Lane& lane : lanes_) {
    lane.at = 0;
    lane.progress = 0;
    lane.call = Lane::Call::kNone;
    lanes_left_ += lane.steps.empty() ? 0 : 1;
  }
}

void BoundPlan::count_traffic() const {
  context_.counters().add_executed(put_traffic_);
  if (!declined_) context_.counters().add_executed(reduce_traffic_);
}

bool BoundPlan::arrived(const Step& step) const {
  const std::uint32_t seen = step.word->load(std::memory_order_acquire);
  if (seen == value(step.salt)) {
    if (device_ != kHost) context_.flush_adapters_writes();
    return true;
  }
  if (seen != 0 && seen >> kTagBits == generation_) [[unlikely]] {
    throw Error(
        ErrorKind::kMismatch,
        text(
            "plan ", name_, ", execution ", generation_, " on rank ", context_.rank(), ": rank ",
            step.peer, " runs a different collective (notification ", step.notification, "): ",
            must_agree(first_notification_ + static_cast<std::uint64_t>(step.notification), seen)));
  }
  return false;
}

void BoundPlan::look_up(Step& step) {
  for (const Step::LookedUp& each : step.looked_up) {
    const Directory& directory = *buffers_[each.buffer].directory;
    const std::uint64_t place = directory.look_up(each.peer, each.needed, generation_);
    if (place == 0) {
      declined_ = true;
      return;
    }
    auto* const address = reinterpret_cast<std::byte*>(place + each.offset);
    const std::size_t n_sources = step.sources.size();
    if (each.number < n_sources) {
      step.sources[each.number].address = address;
    } else {
      step.destinations[each.number - n_sources].address = address;
    }
  }
}

bool BoundPlan::reduce_some(Lane& lane, const Step& step) {
  if (step.staging != 0) {
    stage_(step.destinations[0].address, step.sources[0].address, step.staging);
    return true;
  }
  if (step.count <= step.pass) [[likely]] {
    reduce(step.destinations, step.sources, step.count, step.scale, op_);
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
  reduce(lane.part_destinations, lane.part_sources, n, step.scale, op_);
  lane.progress += n;
  if (lane.progress < step.count) return false;
  lane.progress = 0;
  return true;
}

bool BoundPlan::copy_some(Lane& lane, const Step& step) const {
  const std::uint64_t end = std::min(lane.progress + step.pass, step.rows.count);
  Source source = step.sources[0];
  Destination target = step.destinations[0];
  source.address =
      static_cast<const std::byte*>(source.address) + lane.progress * step.rows.source_step;
  target.address = static_cast<std::byte*>(target.address) + lane.progress * step.rows.target_step;
  copy_rows(target, source, step.count, end - lane.progress, step.rows.target_step,
            step.rows.source_step);
  lane.progress = end == step.rows.count ? 0 : end;
  return lane.progress == 0;
}

void BoundPlan::enqueue_work(const Step& step, cuda::Stream stream) const {
  if (step.kind == PlanStep::Kind::kPut) {
    cuda::check(cuda::driver().memcpy_async(
                    reinterpret_cast<cuda::DevicePtr>(step.device_copy.to),
                    reinterpret_cast<cuda::DevicePtr>(step.device_copy.from), step.count, stream),
                "a Put on a GPU");
  } else {
    device_reduce(device_, stream, step.destinations, step.sources, step.count, step.scale);
  }
}

bool BoundPlan::device_done(std::size_t lane_number, const Step& step, Lock& lock) {
  Lane& lane = lanes_[lane_number];
  if (lane.work == Lane::Work::kNone) {
    lane.work = Lane::Work::kEnqueued;  // also if only a part gets enqueued
    const Outside outside(lock);
    const cuda::Stream stream = shared_stream(device_, first_stream_ + lane_number);
    const cuda::Current current(device_);
    enqueue_work(step, stream);
    lane.work_end->mark(stream);
  }
  if (lane.work == Lane::Work::kEnqueued) {
    if (!lane.work_end->reached()) return false;
    lane.work = Lane::Work::kEnded;
  }
  return true;
}

BoundPlan::~BoundPlan() { drain(); }

void BoundPlan::drain() {
  if (context_.inherited()) return;  // work under way is the parent's
  if (array_copies_ != nullptr) array_copies_->drain();
  if (enqueued_) drain_stream();
  for (Lane& lane : lanes_) {
    if (lane.work != Lane::Work::kEnqueued) continue;
    lane.work = Lane::Work::kNone;
    lane.work_end->wait();
  }
}

void BoundPlan::await_device() const {
  if (context_.inherited()) return;
  if (array_copies_ != nullptr) array_copies_->wait();
  for (const Lane& lane : lanes_) {
    if (device_ != kHost && lane.work == Lane::Work::kEnqueued) lane.work_end->wait();
  }
}

bool BoundPlan::advance_lane(std::size_t number, Lock& lock) {
  Lane& lane = lanes_[number];
  bool moved = false;
  Transport& transport = context_.transport();
  while (lane.at < lane.steps.size()) {
    Step& step = lane.steps[lane.at];
    switch (step.kind) {
      case PlanStep::Kind::kPut: {
        if (step.on_device && !device_done(number, step, lock)) return moved;
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
        if (lane.progress == 0) look_up(step);
        if (declined_) break;
        if (step.on_device) {
          if (!device_done(number, step, lock)) return moved;
        } else if (!reduce_some(lane, step)) {
          return true;
        }
        break;
      case PlanStep::Kind::kCopy:
        if (!copy_some(lane, step)) return true;
        break;
      case PlanStep::Kind::kCall:
        if (lane.call == Lane::Call::kNone) {
          lane.call = Lane::Call::kAsked;
          call_pending_ = true;
          return true;
        }
        if (lane.call != Lane::Call::kAnswered) return moved;
        if (lane.work == Lane::Work::kEnqueued && !lane.work_end->reached()) return moved;
        lane.call = Lane::Call::kNone;
        break;
      case PlanStep::Kind::kFlush:
        if (!context_.sent(context_.plan_queue())) return moved;
        break;
    }
    moved = true;
    lane.work = Lane::Work::kNone;
    ++lane.at;
  }
  --lanes_left_;
  if (array_copies_ != nullptr) array_copies_->lane_ended(number, lock);
  return moved;
}

bool BoundPlan::advance(Lock& lock) {
  if (enqueued_) return follow_stream();
  bool moved = array_copies_ != nullptr && array_copies_->advance(lock);
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    if (lanes_[lane].at >= lanes_[lane].steps.size()) continue;
    if (array_copies_ == nullptr || array_copies_->here(lane)) moved |= advance_lane(lane, lock);
  }
  if (over()) ended_ = ticks();
  return moved;
}

std::string BoundPlan::missing() const {
  std::string words;
  std::vector<Rank> owing;
  for (std::size_t lane = 0; lane < lanes_.size(); ++lane) {
    const Lane& at = lanes_[lane];
    if (at.at >= at.steps.size()) continue;
    const Step& step = at.steps[at.at];
    words += words.empty() ? "" : "; ";
    const bool waits = step.kind == PlanStep::Kind::kWait;
    if (step.peer >= 0 && waits) {
      if (std::find(owing.begin(), owing.end(), step.peer) == owing.end()) {
        owing.push_back(step.peer);
      }
    }
    if (waits) {
      words += text("lane ", lane, " waits for notification ",
                    first_notification_ + static_cast<std::uint64_t>(step.notification),
                    " of segment ", board_->id(), " owed by rank ", step.peer);
    } else {
      words += text("lane ", lane, " is at step ", at.at, " of ", at.steps.size());
    }
  }
  if (words.empty() && array_copies_ != nullptr) {
    words = text(array_copies_->left(), " pieces of the array are copied back");
  }
  std::string late;
  for (const Rank peer : owing) {
    late += text(late.empty() ? "nothing yet from rank " : ", rank ", peer);
  }
  if (!late.empty()) late += ": ";
  return text(late, what_.empty() ? "" : title_ + ", ", "plan ", name_, ", execution ", generation_,
              ": ", words, context_.liveness().waits_of_others(title_));
}

}  // namespace pgasdl

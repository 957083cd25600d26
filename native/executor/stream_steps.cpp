// Executions that a GPU's stream makes: all steps are enqueued at once, and devices do the rest.
// One rank's stream writes a flag and another's waits for it, with no call of a program or of the
// driver in between: a call that waits for a stream, such as freeing memory, waits for peers'
// streams and for no thread of this process.
//
// The host follows the progress by the flags, which are the same as those that hosts raise. It ends
// an execution that will not end by itself: it announces to peers that it gives up, then raises
// what the stream waits for, again and again until the stream is through.
#include <chrono>
#include <thread>

#include "executor/bound_plan.hpp"

namespace pgasdl {
namespace {

void copy(std::byte* to, const std::byte* from, std::uint64_t bytes, cuda::Stream stream) {
  if (bytes == 0) return;
  cuda::check(cuda::driver().memcpy_async(cuda::pointer(to), cuda::pointer(from), bytes, stream),
              text("copying ", bytes, " bytes of an array"));
}

}  // namespace

void BoundPlan::enqueue(const StreamOrder& order, const std::byte* from, std::byte* to,
                        std::uint64_t bytes) {
  const cuda::Current current(device_);
  enqueued_ = true;
  try {
    if (from != nullptr) copy(data(), from, bytes, order.stream);
    for (const Lane& lane : lanes_) {
      for (const Step& step : lane.steps) enqueue_step(step, order.stream);
    }
    if (to != nullptr) copy(to, data(), bytes, order.stream);
    stream_end_->mark(order.stream);
  } catch (...) {
    try {
      stream_end_->mark(order.stream);  // part of it may be under way
    } catch (const Error&) {
      // Refused twice: the device has failed, and no work of it is under way.
    }
    throw;
  }
}

void BoundPlan::enqueue_step(const Step& step, cuda::Stream stream) const {
  const auto& driver = cuda::driver();
  if (step.kind == PlanStep::Kind::kWait) {
    board_->local().region->pin(device_);
    cuda::check(driver.stream_wait_value(stream, device_address(step.word), value(step.salt),
                                         cuda::kWaitValueEq),
                "letting a stream wait for a peer");
    return;
  }
  if (step.on_device) enqueue_work(step, stream);
  if (step.kind != PlanStep::Kind::kPut || !step.flagged) return;
  const RemoteSegment& remote = *step.flag.remote;
  remote.region->pin(device_);
  cuda::check(
      driver.stream_write_value(stream, device_address(&remote.board[step.flag.notification]),
                                value(step.salt), cuda::kWriteValueDefault),
      "a stream's flag");
}

bool BoundPlan::follow_stream() {
  bool moved = false;
  for (Lane& lane : lanes_) {
    const auto passed = [&](const Step& step) {
      return step.kind != PlanStep::Kind::kWait || arrived(step);
    };
    while (lane.at < lane.steps.size() && passed(lane.steps[lane.at])) {
      ++lane.at;
      moved = true;
    }
  }
  if (!stream_end_->reached()) return moved;
  for (Lane& lane : lanes_) lane.at = lane.steps.size();
  lanes_left_ = 0;
  enqueued_ = false;
  ended_ = ticks();
  return true;
}

bool BoundPlan::release() {
  if (stream_end_->over()) return true;
  for (const Lane& lane : lanes_) {
    for (const Step& step : lane.steps) {
      if (step.kind != PlanStep::Kind::kWait) continue;
      const_cast<FlagWord*>(step.word)->store(value(step.salt), std::memory_order_release);
    }
  }
  return false;
}

void BoundPlan::drain_stream() {
  while (!release()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  enqueued_ = false;
}

void BoundPlan::require_nobody_gave_up(const Numbering& numbering) const {
  for (std::size_t of = 0; of < ranks_.size(); ++of) {
    if (announced_mismatch(numbering, of)) throw mismatch_announced_by(of);
    const std::uint32_t announced = left_by(numbering, of);
    if (announced != 0) throw given_up_by(of, announced);
  }
}

}  // namespace pgasdl

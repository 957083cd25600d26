#include "executor/schedule.hpp"

#include <algorithm>

namespace pgasdl {
LayerSchedule::LayerSchedule(Executor& executor,
                             const std::vector<std::vector<std::uint32_t>>& buckets)
    : executor_(executor) {
  for (const auto& members : buckets) {
    for (const std::uint32_t layer : members) {
      if (layer >= layers_.size()) layers_.resize(layer + 1);
      layers_[layer].bucket = buckets_.size();
    }
    Bucket& bucket = buckets_.emplace_back();
    bucket.layers = members;
    bucket.missing = members.size();
  }
}

void LayerSchedule::bind(std::size_t number, std::vector<std::shared_ptr<Execution>> executions,
                         std::vector<Array> arrays) {
  Bucket& bucket = buckets_.at(number);
  if (bucket.under_way) {
    throw Error(ErrorKind::kPlan, text("bucket ", number, " is under way: wait for it"));
  }
  arrays.resize(executions.size());
  bucket.executions = std::move(executions);
  bucket.arrays = std::move(arrays);
  bucket.current = 0;
}

std::size_t LayerSchedule::require(std::int64_t layer) const {
  if (layer < 0 || static_cast<std::uint64_t>(layer) >= layers_.size()) {
    throw Error(ErrorKind::kPlan,
                text("no layer ", layer, ": there are ", layers_.size(), ", from 0 on"));
  }
  if (ended_) {
    throw Error(ErrorKind::kClosed, "this gradient exchange cannot go on: " + *ended_);
  }
  return static_cast<std::size_t>(layer);
}

void LayerSchedule::ready(std::int64_t number, const StreamOrder* order) {
  Layer& layer = layers_[require(number)];
  Bucket& bucket = buckets_[layer.bucket];
  if (bucket.under_way || layer.ready) {
    throw Error(ErrorKind::kPlan, text("layer ", number, " is ready twice in one iteration: wait(",
                                       number, ") before its gradient is computed again"));
  }
  if (order != nullptr) refuse_capture(*order, "a gradient exchange");
  layer.became_ready = ticks();
  note_call(layer, layer.became_ready);
  const bool first = bucket.missing == bucket.layers.size();
  if (order != nullptr) {
    if (!first) bucket.gradients->hold(order->stream);
    if (bucket.gradients == nullptr) {
      bucket.gradients = std::make_unique<DeviceMoment>(order->device);
    }
    bucket.gradients->mark(order->stream);
  }
  if (bucket.missing == 1) {
    executor_.start(*bucket.executions[bucket.current], bucket.arrays[bucket.current], order);
    bucket.under_way = true;
  }
  layer.ready = begun_ = true;
  layer.arrived = interrupted_ = false;
  --bucket.missing;
}

std::shared_ptr<Execution> LayerSchedule::awaited(std::int64_t number) const {
  const Layer& layer = layers_[require(number)];
  const Bucket& bucket = buckets_[layer.bucket];
  if (bucket.under_way) return bucket.executions[bucket.current];
  if (layer.arrived) return nullptr;
  if (!layer.ready) {
    if (!begun_ || interrupted_) return nullptr;
    throw Error(ErrorKind::kPlan,
                text("wait(", number, ") without ready(", number, "): call ready(", number,
                     ") on every rank when the layer's gradient is there"));
  }
  std::string others;
  for (const std::uint32_t member : bucket.layers) {
    if (!layers_[member].ready) others += text(others.empty() ? "" : ", ", member);
  }
  throw Error(ErrorKind::kPlan, text("layer ", number, " shares bucket ", layer.bucket,
                                     " with layers [", others, "], which are not ready"));
}

std::shared_ptr<Execution> LayerSchedule::awaited_bucket(std::size_t number) const {
  const Bucket& bucket = buckets_.at(number);
  return bucket.under_way ? bucket.executions[bucket.current] : nullptr;
}

void LayerSchedule::taken(std::size_t number, const Execution& execution) {
  Bucket& bucket = buckets_.at(number);
  // If two threads wait for one layer, the first has done this already.
  if (!bucket.under_way || bucket.executions[bucket.current].get() != &execution ||
      execution.under_way()) {
    return;
  }
  for (const std::uint32_t member : bucket.layers) {
    Layer& layer = layers_[member];
    layer.began = execution.began();
    layer.ended = execution.ended();
    // A plan without steps ends when it begins.
    layer.queued += std::max(layer.began, layer.became_ready) - layer.became_ready;
    layer.exchanging += std::max(layer.ended, layer.began) - layer.began;
  }
  turn_over(bucket);
}

void LayerSchedule::turn_over(Bucket& bucket) {
  for (const std::uint32_t member : bucket.layers) {
    layers_[member].ready = false;
    layers_[member].arrived = true;
  }
  bucket.under_way = false;
  ++bucket.taken;
  bucket.missing = bucket.layers.size();
  bucket.current = (bucket.current + 1) % bucket.executions.size();
}

void LayerSchedule::note_wait(std::size_t number, std::uint64_t began, std::uint64_t ended) {
  Layer& layer = layers_[number];
  note_call(layer, began);
  layer.waited = ended;
  layer.waiting += ended - began;
  note_return(ended);
}

void LayerSchedule::note_call(Layer& layer, std::uint64_t now) const {
  if (returned_ != 0) layer.computing += std::max(now, returned_) - returned_;
}

std::uint64_t LayerSchedule::executions(std::size_t layer) const {
  return buckets_[layers_.at(layer).bucket].taken;
}

std::int64_t LayerSchedule::bucket_of(const Executor::Call& call) const {
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    const Bucket& bucket = buckets_[number];
    if (bucket.under_way && bucket.executions[bucket.current].get() == call.execution) {
      return static_cast<std::int64_t>(number);
    }
  }
  return -1;
}

void LayerSchedule::renounce() {
  for (const Bucket& bucket : buckets_) {
    for (const auto& execution : bucket.executions) executor_.renounce(*execution);
  }
}

void LayerSchedule::close() {
  abandoned_ = !idle();
  for (Bucket& bucket : buckets_) {
    for (const auto& execution : bucket.executions) execution->close();
    bucket.under_way = false;
    bucket.executions.clear();
  }
}

bool LayerSchedule::idle() const {
  return !abandoned_ && std::all_of(buckets_.begin(), buckets_.end(), [](const Bucket& bucket) {
    return std::all_of(
        bucket.executions.begin(), bucket.executions.end(),
        [](const auto& execution) { return execution->state() == Execution::State::kIdle; });
  });
}

}  // namespace pgasdl

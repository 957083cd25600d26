#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <tuple>

#include "python/handles.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// Which layers of a gradient exchange are ready, and how far the exchange of each bucket is: what
// stands between a training loop and the executor, once per layer. Used with the GIL held.
class LayerSchedule {
 public:
  // ready, began, ended, waited: moments of the last iteration; waiting: seconds of all.
  using Timing = std::tuple<double, double, double, double, double>;

  LayerSchedule(const ContextHandle& context,
                const std::vector<std::vector<std::uint32_t>>& buckets)
      : runtime_(context.runtime) {
    for (const auto& members : buckets) {
      for (const std::uint32_t layer : members) {
        if (layer >= layers_.size()) layers_.resize(layer + 1);
        layers_[layer].bucket = buckets_.size();
      }
      buckets_.push_back({members, {}, {}, 0, members.size(), false, 0});
    }
  }

  // A bucket's plans: executions take them in turn. They replace those it had.
  void bind(std::size_t bucket, std::vector<nb::object> phases) {
    Bucket& at = buckets_.at(bucket);
    if (at.under_way) raise("PlanError", text("bucket ", bucket, " is under way: wait for it"));
    at.phases.clear();
    at.phase = 0;
    for (const nb::object& phase : phases) at.phases.push_back(nb::cast<PlanHandle*>(phase));
    at.keep = std::move(phases);
  }

  void require(Integer layer) const { (void)number(layer); }

  // True if a Call waits for the program.
  bool ready(Integer layer) {
    Layer& at = layers_[number(layer)];
    Bucket& bucket = buckets_[at.bucket];
    if (bucket.under_way || at.ready) {
      raise("PlanError", text("layer ", layer.value, " is ready twice in one iteration: wait(",
                              layer.value, ") before its gradient is computed again"));
    }
    at.timing_ready = now();
    if (bucket.missing == 1) {
      runtime_->executor.start(*bucket.plan());
      bucket.under_way = true;
    }
    at.ready = true;
    --bucket.missing;
    return turn();
  }

  bool turn() {
    Executor& executor = runtime_->executor;
    if (executor.live()) {
      const nb::gil_scoped_release release;
      executor.turn();
    }
    return executor.calls_wait();
  }

  // False if a Call waits for the program: answer it, then wait again.
  bool wait(Integer layer, std::optional<double> timeout) {
    Layer& at = layers_[number(layer)];
    Bucket& bucket = buckets_[at.bucket];
    struct Stopwatch {
      Layer& layer;
      const double began = now();
      ~Stopwatch() {
        layer.timing_waited = now();
        layer.waiting += layer.timing_waited - began;
      }
    } stopwatch{at};
    if (bucket.under_way) return finish(bucket, timeout);
    if (at.ready) {
      std::string others;
      for (const std::uint32_t member : bucket.layers) {
        if (!layers_[member].ready) others += text(others.empty() ? "" : ", ", member);
      }
      raise("PlanError", text("layer ", layer.value, " shares bucket ", at.bucket, " with layers [",
                              others, "], which are not ready"));
    }
    return true;
  }

  // The same for a whole bucket; true if it was not under way.
  bool finish_bucket(std::size_t number, std::optional<double> timeout) {
    Bucket& bucket = buckets_.at(number);
    return !bucket.under_way || finish(bucket, timeout);
  }

  // How often the exchange of a layer's bucket is over.
  std::uint64_t executions(std::size_t layer) const {
    return buckets_[layers_.at(layer).bucket].executions;
  }

  // How often the exchange of every bucket is.
  std::uint64_t iterations() const {
    std::uint64_t least = UINT64_MAX;
    for (const Bucket& bucket : buckets_) least = std::min(least, bucket.executions);
    return buckets_.empty() ? 0 : least;
  }

  Timing timing(std::size_t layer) const {
    const Layer& at = layers_.at(layer);
    const Recorder& recorder = runtime_->context.recorder();
    const auto moment = [&](std::uint64_t ticks) {
      return ticks == 0 ? 0.0 : recorder.seconds(ticks);
    };
    // Each is converted at a moment of its own; and a plan without steps ends as it begins.
    const double began = moment(at.began);
    return {at.waiting, at.timing_ready, began, std::max(began, moment(at.ended)),
            at.timing_waited};
  }

  // Which bucket's update a Call asks for; -1: none of these.
  std::int64_t bucket_of(const Executor::Call& call) const {
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      const Bucket& bucket = buckets_[number];
      if (bucket.under_way && bucket.plan() == call.plan) return static_cast<std::int64_t>(number);
    }
    return -1;
  }

  // Nothing goes on from here.
  void end(const std::string& why) {
    if (!ended_) ended_ = why;
  }
  void release() {
    for (Bucket& bucket : buckets_) {
      bucket.under_way = false;
      bucket.phases.clear();
      bucket.keep.clear();
    }
  }
  const std::optional<std::string>& ended() const { return ended_; }

 private:
  struct Layer {
    std::size_t bucket = 0;
    bool ready = false;
    double waiting = 0;
    double timing_ready = 0;
    double timing_waited = 0;
    std::uint64_t began = 0;
    std::uint64_t ended = 0;
  };
  struct Bucket {
    std::vector<std::uint32_t> layers;
    std::vector<const PlanHandle*> phases;
    std::vector<nb::object> keep;
    std::size_t phase;
    std::size_t missing;  // layers that are not ready
    bool under_way;
    std::uint64_t executions;  // that are over
    BoundPlan* plan() const { return phases[phase]->plan.get(); }
  };

  std::size_t number(Integer layer) const {
    if (layer.natural() >= layers_.size()) {
      raise("PlanError",
            text("no layer ", layer.value, ": there are ", layers_.size(), ", from 0 on"));
    }
    if (ended_) raise("ClosedError", "this gradient exchange cannot go on: " + *ended_);
    return static_cast<std::size_t>(layer.value);
  }

  bool finish(Bucket& bucket, std::optional<double> timeout) {
    const nb::object keep = bucket.keep[bucket.phase];
    const BoundPlan& plan = *bucket.plan();
    if (!plan.done() || timeout) {
      if (!wait_plan(*bucket.phases[bucket.phase], timeout)) return false;
    } else {
      plan.rethrow();
    }
    for (const std::uint32_t member : bucket.layers) {
      Layer& layer = layers_[member];
      layer.began = plan.began();
      layer.ended = plan.ended();
      layer.ready = false;
    }
    bucket.under_way = false;
    ++bucket.executions;
    bucket.missing = bucket.layers.size();
    bucket.phase = (bucket.phase + 1) % bucket.phases.size();
    return true;
  }

  std::shared_ptr<Runtime> runtime_;
  std::vector<Layer> layers_;
  std::vector<Bucket> buckets_;
  std::optional<std::string> ended_;
};

}  // namespace

void bind_schedule(nb::module_& module) {
  nb::class_<LayerSchedule>(module, "LayerSchedule",
                            "Which layers are ready, and how far each bucket's exchange is.")
      .def(nb::init<const ContextHandle&, const std::vector<std::vector<std::uint32_t>>&>(),
           "context"_a, "buckets"_a)
      .def("bind", &LayerSchedule::bind, "bucket"_a, "phases"_a)
      .def("require", &LayerSchedule::require, "layer"_a, "PlanError, ClosedError, or nothing.")
      .def("ready", &LayerSchedule::ready, "layer"_a, "True if a Call waits for the program.")
      .def("turn", &LayerSchedule::turn, "True if a Call waits for the program.")
      .def("wait", &LayerSchedule::wait, "layer"_a, "timeout"_a.none() = nb::none(),
           "False if a Call waits for the program: answer it and wait again.")
      .def("finish", &LayerSchedule::finish_bucket, "bucket"_a, "timeout"_a.none() = nb::none(),
           "wait() for a whole bucket.")
      .def("executions", &LayerSchedule::executions, "layer"_a,
           "How often the exchange of the layer's bucket is over.")
      .def("iterations", &LayerSchedule::iterations, "How often that of every bucket is.")
      .def("timing", &LayerSchedule::timing, "layer"_a,
           "(waiting, ready, began, ended, waited), in seconds.")
      .def("bucket_of", &LayerSchedule::bucket_of, "call"_a, "-1: none of these.")
      .def("end", &LayerSchedule::end, "why"_a, "From now on ready and wait raise ClosedError.")
      .def("release", &LayerSchedule::release, "Let go of the plans.")
      .def_prop_ro("ended", &LayerSchedule::ended);
}

}  // namespace pgasdl

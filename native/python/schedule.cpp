#include "executor/schedule.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/handles.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

struct ScheduleHandle {
  std::shared_ptr<Runtime> runtime;
  std::unique_ptr<LayerSchedule> schedule;
};

void progress(const ScheduleHandle& self) {
  Executor& executor = self.runtime->executor;
  if (executor.live()) {
    const WithoutGil release;
    executor.progress();
  }
  if (executor.calls_wait()) self.runtime->serve();
}

void wait_bucket(const ScheduleHandle& self, std::size_t bucket,
                 const std::shared_ptr<Execution>& execution, double timeout) {
  if (execution == nullptr) return;
  wait_execution(*self.runtime, *execution, timeout);
  self.schedule->taken(bucket, *execution);
}

void wait_layer(const ScheduleHandle& self, Integer layer, std::optional<double> timeout) {
  const double limit = seconds(self.runtime->context, timeout);
  const std::size_t number = self.schedule->require(layer.value);
  struct Stopwatch {
    LayerSchedule& schedule;
    const std::size_t layer;
    const std::uint64_t began = ticks();
    ~Stopwatch() { schedule.note_wait(layer, began, ticks()); }
  } stopwatch{*self.schedule, number};
  const auto awaited = self.schedule->awaited(layer.value);
  try {
    wait_bucket(self, self.schedule->layer(number).bucket, awaited, limit);
  } catch (...) {
    self.schedule->note_interruption();
    throw;
  }
  self.schedule->claim(number);
}

// ready, began, ended, waited: moments of the last iteration; waiting: seconds of all iterations.
std::tuple<double, double, double, double, double> timing(const ScheduleHandle& self,
                                                          std::size_t number) {
  const LayerSchedule::Layer& layer = self.schedule->layer(number);
  const Recorder& recorder = self.runtime->context.recorder();
  const auto moment = [&](std::uint64_t ticks) {
    return ticks == 0 ? 0.0 : recorder.seconds(ticks);
  };
  // Each is converted separately, and a plan without steps ends when it begins.
  const double began = moment(layer.began);
  return {static_cast<double>(layer.waiting) * recorder.seconds_per_tick(),
          moment(layer.became_ready), began, std::max(began, moment(layer.ended)),
          moment(layer.waited)};
}

// The number of exchanges, and seconds of all: before its calls, until it began, in it, in waits.
std::tuple<std::uint64_t, double, double, double, double> total(const ScheduleHandle& self,
                                                                std::size_t number) {
  const LayerSchedule::Layer& layer = self.schedule->layer(number);
  const double tick = self.runtime->context.recorder().seconds_per_tick();
  const auto seconds = [&](std::uint64_t ticks) { return static_cast<double>(ticks) * tick; };
  return {self.schedule->executions(number), seconds(layer.computing), seconds(layer.queued),
          seconds(layer.exchanging), seconds(layer.waiting)};
}

}  // namespace

void bind_schedule(nb::module_& module) {
  nb::class_<ScheduleHandle>(module, "LayerSchedule",
                             "Which layers are ready, and how far each bucket's exchange is.")
      .def(
          "__init__",
          [](ScheduleHandle* self, const ContextHandle& context,
             const std::vector<std::vector<std::uint32_t>>& buckets) {
            new (self) ScheduleHandle{context.runtime, std::make_unique<LayerSchedule>(
                                                           context.runtime->executor, buckets)};
          },
          "context"_a, "buckets"_a)
      .def(
          "bind",
          [](const ScheduleHandle& self, std::size_t bucket,
             const std::vector<const ExecutionHandle*>& handles) {
            std::vector<std::shared_ptr<Execution>> executions;
            std::vector<Array> arrays;
            for (const ExecutionHandle* handle : handles) {
              executions.push_back(handle->execution);
              arrays.push_back(handle->array);
            }
            self.schedule->bind(bucket, std::move(executions), std::move(arrays));
          },
          "bucket"_a, "executions"_a)
      .def(
          "require",
          [](const ScheduleHandle& self, Integer layer) {
            (void)self.schedule->require(layer.value);
          },
          "layer"_a, "PlanError, ClosedError, or nothing.")
      .def(
          "ready",
          [](const ScheduleHandle& self, Integer layer) {
            self.schedule->ready(layer.value);
            progress(self);
            self.schedule->note_return(ticks());
          },
          "layer"_a, "Begin its exchange, and make progress.")
      .def(
          "ready_after",
          [](const ScheduleHandle& self, Integer layer, std::uintptr_t stream, int device) {
            const StreamOrder order{device, reinterpret_cast<cuda::Stream>(stream)};
            self.schedule->ready(layer.value, &order);
            self.schedule->note_return(ticks());
          },
          "layer"_a, "stream"_a, "device"_a,
          "Begin its exchange as soon as a stream of a GPU has done what is enqueued on it.")
      .def("progress", &progress)
      .def("wait", &wait_layer, "layer"_a, nb::kw_only(), "timeout"_a.none() = nb::none(),
           "Until its exchange is over.")
      .def(
          "finish",
          [](const ScheduleHandle& self, std::size_t bucket, double timeout) {
            wait_bucket(self, bucket, self.schedule->awaited_bucket(bucket), timeout);
          },
          "bucket"_a, nb::kw_only(), "timeout"_a, "wait() for a whole bucket.")
      .def(
          "executions",
          [](const ScheduleHandle& self, std::size_t layer) {
            return self.schedule->executions(layer);
          },
          "layer"_a, "How often the exchange of the layer's bucket is over.")
      .def("timing", &timing, "layer"_a, "(waiting, ready, began, ended, waited), in seconds.")
      .def("total", &total, "layer"_a,
           "(exchanges, computing, queued, exchanging, waiting): how often, and seconds of all "
           "times.")
      .def(
          "bucket_of",
          [](const ScheduleHandle& self, const Executor::Call& call) {
            return self.schedule->bucket_of(call);
          },
          "call"_a, "-1: none of these.")
      .def(
          "over",
          [](const ScheduleHandle& self, std::size_t layer) {
            Executor& executor = self.runtime->executor;
            const auto awaited = self.schedule->awaited(static_cast<std::int64_t>(layer));
            if (awaited != nullptr && awaited->state() == Execution::State::kRunning) {
              const WithoutGil release;
              executor.progress();
            }
            return awaited == nullptr || awaited->state() != Execution::State::kRunning;
          },
          "layer"_a, "Whether wait() returns at once; it answers no call.")
      .def(
          "postpone",
          [](const ScheduleHandle& self, const Executor::Call& call, std::size_t layer) {
            const auto number = static_cast<std::int64_t>(layer);
            self.runtime->executor.put_back(call, self.schedule->awaited(number).get());
          },
          "call"_a, "layer"_a, "take_call() returns it again once the layer's exchange is over.")
      .def(
          "end",
          [](const ScheduleHandle& self, const std::string& why) { self.schedule->end(why); },
          "why"_a, "From now on ready and wait raise ClosedError.")
      .def(
          "renounce",
          [](const ScheduleHandle& self) {
            const WithoutGil release;
            self.schedule->renounce();
          },
          "Tell the peers that this rank takes no more part; an update is asked for.")
      .def(
          "close",
          [](const ScheduleHandle& self) {
            const WithoutGil release;
            self.schedule->close();
          },
          "Nothing of it moves any more.")
      .def_prop_ro(
          "idle", [](const ScheduleHandle& self) { return self.schedule->idle(); },
          "Nothing is under way, and nothing failed.")
      .def_prop_ro("ended", [](const ScheduleHandle& self) { return self.schedule->ended(); });
}

}  // namespace pgasdl

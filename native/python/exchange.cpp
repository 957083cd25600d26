#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/handles.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

// (buffer, offset, rank; -1: my own)
using SpanTuple = std::tuple<std::uint32_t, std::uint64_t, Rank>;
// (kind, targets, sources, count, peer, notification, scale, hook)
using StepTuple = std::tuple<std::string, std::vector<SpanTuple>, std::vector<SpanTuple>,
                             std::uint64_t, Rank, std::int64_t, double, std::string>;
// (segment, byte offset, dtype)
using BindingTuple = std::tuple<const SegmentHandle*, std::uint64_t, std::string>;

DType dtype_of(const std::string& wanted) {
  for (int i = 0; i <= static_cast<int>(DType::kI64); ++i) {
    const auto dtype = static_cast<DType>(i);
    if (name(dtype) == wanted) return dtype;
  }
  throw Error(ErrorKind::kBuffer, text("no arithmetic for dtype ", wanted));
}

PlanStep::Kind kind_of(const std::string& wanted) {
  if (wanted == "put") return PlanStep::Kind::kPut;
  if (wanted == "wait") return PlanStep::Kind::kWait;
  if (wanted == "reduce") return PlanStep::Kind::kReduce;
  if (wanted == "call") return PlanStep::Kind::kCall;
  if (wanted == "flush") return PlanStep::Kind::kFlush;
  throw Error(ErrorKind::kPlan, text("no step of kind ", wanted));
}

std::vector<PlanSpan> spans_of(const std::vector<SpanTuple>& tuples) {
  std::vector<PlanSpan> spans;
  for (const auto& [buffer, offset, rank] : tuples) spans.push_back({buffer, offset, rank});
  return spans;
}

void make_plan(PlanHandle* self, const ContextHandle& context, const std::string& plan_name,
               Rank rank, Rank size, std::uint32_t notifications,
               const std::vector<std::pair<std::string, std::uint64_t>>& buffers,
               const std::vector<std::vector<StepTuple>>& lanes,
               const std::vector<BindingTuple>& bindings, std::vector<Rank> ranks,
               const SegmentHandle& board, std::uint64_t first_notification, std::uint32_t tag) {
  context.context().require_usable();
  Plan plan;
  plan.name = plan_name;
  plan.rank = rank;
  plan.size = size;
  plan.notifications = notifications;
  for (const auto& [buffer, count] : buffers) {
    plan.buffers.push_back(buffer);
    plan.buffer_counts.push_back(count);
  }
  for (const auto& steps : lanes) {
    auto& lane = plan.lanes.emplace_back();
    for (const auto& [kind, targets, sources, count, peer, notification, scale, hook] : steps) {
      lane.push_back({kind_of(kind), spans_of(targets), spans_of(sources), count, peer,
                      notification, scale, hook});
    }
  }
  std::vector<BufferBinding> bound;
  for (const auto& [segment, offset, dtype] : bindings) {
    bound.push_back({segment->segment, offset, dtype_of(dtype)});
  }
  new (self) PlanHandle(
      context.runtime,
      std::make_unique<BoundPlan>(context.context(), plan, std::move(bound), std::move(ranks),
                                  board.segment, first_notification, tag));
}

}  // namespace

bool wait_plan(const PlanHandle& self, std::optional<double> timeout) {
  Executor& executor = self.runtime->executor;
  Executor::Waited waited = Executor::Waited::kTimeout;
  (void)blocking(seconds(self.runtime->context, timeout), [&](Deadline deadline) {
    waited = executor.wait(*self.plan, deadline);
    return waited == Executor::Waited::kTimeout ? Outcome::kTimeout : Outcome::kDone;
  });
  if (waited == Executor::Waited::kTimeout) raise("Timeout", executor.missing(*self.plan));
  return waited == Executor::Waited::kDone;
}

void bind_exchange(nb::module_& module) {
  nb::class_<PlanHandle>(module, "BoundPlan", "A plan bound to memory, ready to run repeatedly.")
      .def("__init__", &make_plan, "context"_a, "name"_a, "rank"_a, "size"_a, "notifications"_a,
           "buffers"_a, "lanes"_a, "bindings"_a, "ranks"_a, "board"_a, "first_notification"_a,
           "tag"_a)
      .def(
          "start",
          [](const PlanHandle& self, std::uint32_t generation) {
            self.runtime->executor.start(*self.plan, generation);
          },
          "generation"_a = 0,
          "Begin the next execution; as many steps as go through at once are taken.")
      .def("wait", &wait_plan, "timeout"_a.none() = nb::none(),
           "Until done (True), or a Call waits for an answer (False).")
      .def(
          "run",
          [](const PlanHandle& self, std::optional<double> timeout, std::uint32_t generation) {
            self.runtime->executor.start(*self.plan, generation);
            return wait_plan(self, timeout);
          },
          "timeout"_a.none() = nb::none(), "generation"_a = 0, "start() and wait() in one call.")
      .def(
          "rebase",
          [](const PlanHandle& self, const std::string& buffer, std::uintptr_t address) {
            self.plan->rebase(buffer, reinterpret_cast<std::byte*>(address));
          },
          "buffer"_a, "address"_a, "Let this rank's copy of a buffer lie elsewhere.")
      .def(
          "watch",
          [](const PlanHandle& self, std::uint64_t first, std::uint64_t count) {
            self.plan->watch(first, count);
          },
          "first"_a, "count"_a)
      .def_prop_ro("name", [](const PlanHandle& self) { return self.plan->name(); })
      .def_prop_ro("done", [](const PlanHandle& self) { return self.plan->done(); })
      .def_prop_ro("generation", [](const PlanHandle& self) { return self.plan->generation(); })
      .def_prop_ro(
          "times",
          [](const PlanHandle& self) {
            const Recorder& recorder = self.runtime->context.recorder();
            return std::make_pair(recorder.seconds(self.plan->began()),
                                  recorder.seconds(self.plan->ended()));
          },
          "When the last execution began and ended, in time.monotonic()'s seconds.")
      .def("missing",
           [](const PlanHandle& self) { return self.runtime->executor.missing(*self.plan); });

  nb::class_<Executor::Call>(module, "Call", "A step that waits for the program's answer.")
      .def_prop_ro("hook", [](const Executor::Call& self) { return self.hook; })
      .def_prop_ro("offset", [](const Executor::Call& self) { return self.offset; })
      .def_prop_ro("count", [](const Executor::Call& self) { return self.count; });

  module.def(
      "turn",
      [](const ContextHandle& context) {
        const nb::gil_scoped_release release;
        return context.runtime->executor.turn();
      },
      "context"_a, "Advance every live plan as far as it goes without blocking.");
  module.def(
      "take_call",
      [](const ContextHandle& context) -> std::optional<Executor::Call> {
        Executor::Call call;
        if (!context.runtime->executor.take_call(call)) return std::nullopt;
        return call;
      },
      "context"_a);
  module.def(
      "answer",
      [](const ContextHandle& context, const Executor::Call& call) {
        const nb::gil_scoped_release release;
        context.runtime->executor.answer(call);
      },
      "context"_a, "call"_a);
  module.def(
      "progress_thread",
      [](const ContextHandle& context, bool run) {
        const nb::gil_scoped_release release;
        if (run) {
          context.runtime->executor.start_thread();
        } else {
          context.runtime->executor.stop_thread();
        }
      },
      "context"_a, "run"_a);
  module.def(
      "reduce",
      [](const std::vector<std::pair<std::uintptr_t, std::string>>& destinations,
         const std::vector<std::pair<std::uintptr_t, std::string>>& sources, std::uint64_t count,
         double scale, const std::string& op) {
        std::vector<Destination> to;
        std::vector<Source> from;
        for (const auto& [address, dtype] : destinations) {
          to.push_back({reinterpret_cast<void*>(address), dtype_of(dtype)});
        }
        for (const auto& [address, dtype] : sources) {
          from.push_back({reinterpret_cast<const void*>(address), dtype_of(dtype)});
        }
        const ReduceOp operation = op == "min"    ? ReduceOp::kMin
                                   : op == "max"  ? ReduceOp::kMax
                                   : op == "prod" ? ReduceOp::kProd
                                                  : ReduceOp::kSum;
        const nb::gil_scoped_release release;
        reduce(to, from, count, scale, operation);
      },
      "destinations"_a, "sources"_a, "count"_a, "scale"_a, "op"_a,
      "The kernel the executor uses, on (address, dtype) pairs; nothing is checked.");
}

}  // namespace pgasdl

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <span>

#include "python/direct_calls.hpp"
#include "reduce/moments.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

// (buffer, offset, rank; -1: this rank)
using SpanTuple = std::tuple<std::uint32_t, std::uint64_t, Rank>;
// (kind, targets, sources, count, peer, notification, scale, hook, (rows, and the steps between
// rows of targets and of sources, in elements))
using StepTuple = std::tuple<std::string, std::vector<SpanTuple>, std::vector<SpanTuple>,
                             std::uint64_t, Rank, std::int64_t, double, std::string,
                             std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>;
// (segment, byte offset)
using HomeTuple = std::tuple<const SegmentHandle*, std::uint64_t>;
// (segment, byte offset, dtype, each rank's home; empty: all alike, directory)
using BindingTuple = std::tuple<const SegmentHandle*, std::uint64_t, std::string,
                                std::vector<HomeTuple>, std::optional<DirectoryHandle>>;

DType dtype_of(const std::string& wanted) {
  for (int i = 0; i <= static_cast<int>(DType::kBytes); ++i) {
    const auto dtype = static_cast<DType>(i);
    if (name(dtype) == wanted) return dtype;
  }
  throw Error(ErrorKind::kBuffer, text("no arithmetic for dtype ", wanted));
}

// Rows of a matrix, in items, as in class Rows of pgasdl/plans/algorithms/remap.py.
struct LoadedRows {
  std::uint64_t n, rows, source, source_step, target, target_step;
};

PlanStep::Kind kind_of(const std::string& wanted) {
  if (wanted == "put") return PlanStep::Kind::kPut;
  if (wanted == "wait") return PlanStep::Kind::kWait;
  if (wanted == "reduce") return PlanStep::Kind::kReduce;
  if (wanted == "copy") return PlanStep::Kind::kCopy;
  if (wanted == "call") return PlanStep::Kind::kCall;
  if (wanted == "flush") return PlanStep::Kind::kFlush;
  throw Error(ErrorKind::kPlan, text("no step of kind ", wanted));
}

std::vector<PlanSpan> spans_of(const std::vector<SpanTuple>& tuples) {
  std::vector<PlanSpan> spans;
  for (const auto& [buffer, offset, rank] : tuples) spans.push_back({buffer, offset, rank});
  return spans;
}

// (name, rank, size, notifications, buffers and their elements, lanes)
using PlanTuple = std::tuple<std::string, Rank, Rank, std::uint32_t,
                             std::vector<std::pair<std::string, std::uint64_t>>,
                             std::vector<std::vector<StepTuple>>>;

Plan plan_of(const PlanTuple& tuple) {
  Plan plan;
  const auto& [plan_name, rank, size, notifications, buffers, lanes] = tuple;
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
    for (const auto& [kind, targets, sources, count, peer, notification, scale, hook, rows] :
         steps) {
      const auto& [n_rows, target_step, source_step] = rows;
      lane.push_back({kind_of(kind), spans_of(targets), spans_of(sources), count, peer,
                      notification, scale, hook, n_rows, target_step, source_step});
    }
  }
  return plan;
}

ReduceOp op_of(const std::string& wanted) {
  if (wanted == "sum") return ReduceOp::kSum;
  if (wanted == "min") return ReduceOp::kMin;
  if (wanted == "max") return ReduceOp::kMax;
  if (wanted == "prod") return ReduceOp::kProd;
  throw Error(ErrorKind::kPlan, text("no reduction ", wanted));
}

// (elements, lanes)
using PieceTuple = std::tuple<std::uint64_t, std::uint32_t>;

// Waits until streams have what they wait for, even if the execution has lost its owner.
void let_go(Execution* execution) {
  if (execution->streamed() && PyGILState_Check() != 0) {
    const WithoutGil release;
    execution->await_streams();
    delete execution;
  } else {
    delete execution;
  }
}

void make_execution(ExecutionHandle* self, const ContextHandle& context,
                    const std::vector<PlanTuple>& phases, const std::vector<BindingTuple>& bindings,
                    const std::vector<Rank>& ranks, const NumberingHandle& numbering,
                    std::uint64_t first_notification, std::uint64_t fingerprint,
                    BufferAccess access, std::uintptr_t source, std::uintptr_t target,
                    std::uint64_t bytes, int device,
                    const std::vector<std::vector<PieceTuple>>& pieces, const std::string& op,
                    const std::string& what) {
  context.context().require_usable();
  std::vector<BufferBinding> bound;
  for (const auto& [segment, offset, dtype, homes, directory] : bindings) {
    bound.push_back({segment->segment, offset, dtype_of(dtype)});
    for (const auto& [there, at] : homes) bound.back().homes.push_back({there->segment, at});
    if (directory) bound.back().directory = directory->directory;
  }
  std::vector<std::unique_ptr<BoundPlan>> plans;
  for (const PlanTuple& phase : phases) {
    plans.push_back(std::make_unique<BoundPlan>(context.context(), plan_of(phase), bound, ranks,
                                                numbering.numbering->board(), first_notification,
                                                fingerprint, op_of(op), what));
  }
  if (access == BufferAccess::kCopied && device != kHost) {
    if (pieces.size() != plans.size()) {
      throw Error(ErrorKind::kPlan, text("pieces of ", pieces.size(), " phases of ", plans.size()));
    }
    for (std::size_t phase = 0; phase < plans.size(); ++phase) {
      std::vector<BoundPlan::Piece> parts;
      for (const auto& [count, lanes] : pieces[phase]) parts.push_back({count, lanes});
      plans[phase]->copy_array(device, parts);
    }
  }
  new (self) ExecutionHandle{
      context.runtime,
      {new Execution(context.runtime->executor, std::move(plans), numbering.numbering), let_go},
      {access, reinterpret_cast<const std::byte*>(source), reinterpret_cast<std::byte*>(target),
       bytes, device}};
}

// Keeps the caller's array until an interrupted execution has ended.
std::shared_ptr<const void> kept(nb::handle array) {
  struct Kept {
    nb::object object;
    Export buffer;  // if it has one
  };
  auto* const kept = new Kept{nb::borrow(array), {}};
  (void)kept->buffer.take(array, PyBUF_SIMPLE);
  return {kept, [](Kept* released) {
            const nb::gil_scoped_acquire python;
            delete released;
          }};
}

// How often, and for how many ticks(), to look for an execution's end with the GIL held.
constexpr int kFirstLooks = 8;
constexpr std::uint64_t kFirstTicks = 4000;

StreamOrder order_on(const Execution& execution, const Array& array, std::uintptr_t stream) {
  const int device = array.device != kHost ? array.device : execution.device();
  if (device == kHost) {
    throw Error(
        ErrorKind::kUnavailable,
        text("plan ", execution.name(), " works on host memory: no stream of a ", "GPU orders it"));
  }
  return {device, reinterpret_cast<cuda::Stream>(stream)};
}

}  // namespace

// Releases the GIL for long copies and reductions.
void start_execution(Runtime& runtime, Execution& execution, const Array& array) {
  if (execution.brief()) {
    runtime.executor.start(execution, array);
    return;
  }
  const WithoutGil release;
  runtime.executor.start(execution, array);
}

void wait_execution(Runtime& runtime, Execution& execution, double timeout) {
  using Waited = Executor::Waited;
  // Mostly it is over, or nearly: then this reads no clock and keeps the GIL, whose release costs
  // as much as a flag takes from one core to another.
  Waited waited = Waited::kTimeout;
  const std::uint64_t begun = ticks();
  for (int look = execution.brief() ? 0 : kFirstLooks;
       look < kFirstLooks && waited == Waited::kTimeout; ++look) {
    if (look > 0 && ticks() - begun > kFirstTicks) break;
    waited = runtime.executor.wait(execution, Deadline::once());
  }
  if (waited == Waited::kDone) return;
  Deadline deadline = Deadline::in(timeout);
  bool passed = deadline.one_try();  // reading the clock would delay the wait
  for (;;) {
    if (waited == Waited::kCall) {
      runtime.serve();
    } else if (passed) {
      // A caller that always makes one try also learns what a peer announced.
      {
        const WithoutGil release;
        runtime.executor.check_peers(&execution);
      }
      if (execution.state() == Execution::State::kRunning) {
        raise("PgasTimeoutError", runtime.executor.missing(execution));
      }
    }
    {
      // In short pieces, so that signals get through.
      const WithoutGil release;
      waited = runtime.executor.wait(execution, deadline.next_piece(std::chrono::milliseconds(50)));
    }
    if (waited == Waited::kDone) return;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    passed = deadline.passed();
  }
}

void run_execution(Runtime& runtime, Execution& execution, const Array& array, double timeout,
                   nb::handle keep) {
  if (!execution.resume()) start_execution(runtime, execution, array);
  try {
    wait_execution(runtime, execution, timeout);
  } catch (...) {
    execution.interrupt(keep.is_valid() ? kept(keep) : nullptr);
    throw;
  }
}

namespace {

void run(const ExecutionHandle& self, std::optional<double> timeout) {
  const double limit = seconds(self.runtime->context, timeout);
  run_execution(*self.runtime, *self.execution, self.array, limit, nb::handle());
}

// Only one execution of a plan may be under way: a program that is ahead of its GPU waits here
// until the stream has made the previous one.
void require_made(Runtime& runtime, Execution& execution) {
  if (execution.streamed() && execution.under_way()) {
    wait_execution(runtime, execution, runtime.context.options().timeout);
  }
}

}  // namespace

bool run_execution_after(Runtime& runtime, Execution& execution, const Array& array,
                         std::uintptr_t stream, double timeout, nb::handle keep) {
  const StreamOrder order = order_on(execution, array, stream);
  if (!execution.resume()) {
    require_made(runtime, execution);
    const WithoutGil release;
    Executor& executor = runtime.executor;
    if (executor.enqueue(execution, array, order, Deadline::in(timeout))) return true;
    executor.start(execution, array, &order);
  }
  try {
    wait_execution(runtime, execution, timeout);
  } catch (...) {
    execution.interrupt(keep.is_valid() ? kept(keep) : nullptr);
    throw;
  }
  return false;
}

namespace {

PyObject* run_directly(PyObject* const* given, std::size_t n, bool& other) {
  const auto* const self = n == 1 ? direct<ExecutionHandle>(given[0]) : nullptr;
  other = self == nullptr;
  if (other) return nullptr;
  run(*self, std::nullopt);
  return Py_NewRef(Py_None);
}

}  // namespace

void bind_exchange(nb::module_& module) {
  nb::enum_<BufferAccess>(module, "BufferAccess", "How a plan gets at the caller's array.")
      .value("IN_PLACE", BufferAccess::kInPlace, "It lies where the plan works.")
      .value("REBASED", BufferAccess::kRebased, "The plan is told where it lies.")
      .value("COPIED", BufferAccess::kCopied, "To where the plan works, and back.");
  nb::class_<NumberingHandle>(module, "Numbering",
                              "Numbers executions that share notifications of a board.")
      .def(
          "__init__",
          [](NumberingHandle* self, const SegmentHandle& board, std::uint64_t first,
             std::uint64_t count, bool exclusive, std::uint64_t region) {
            new (self) NumberingHandle{
                std::make_shared<Numbering>(board.segment, first, count, exclusive, region)};
          },
          "board"_a, "first"_a, "count"_a, "exclusive"_a = false, "region"_a = 0)
      .def_prop_ro(
          "under_way", [](const NumberingHandle& self) { return self.numbering->under_way(); },
          "An exclusive one has begun, and its result was not taken.")
      .def_prop_ro(
          "failed", [](const NumberingHandle& self) { return self.numbering->failed(); },
          "Of an exclusive one: nothing can follow.")
      .def(
          "enter",
          [](const NumberingHandle& self, const char* what) { self.numbering->enter(what); },
          "what"_a, "MismatchError if another thread is inside.")
      .def("leave", [](const NumberingHandle& self) { self.numbering->leave(); });

  nb::class_<DirectoryHandle>(module, "Directory",
                              "Where each rank's array lies, told anew in every execution.")
      .def(
          "__init__",
          [](DirectoryHandle* self, const SegmentHandle& entries, std::uint64_t offset,
             const std::vector<const SegmentHandle*>& homes) {
            std::vector<std::shared_ptr<Segment>> segments;
            for (const SegmentHandle* home : homes) segments.push_back(home->segment);
            new (self) DirectoryHandle{
                std::make_shared<Directory>(entries.segment, offset, std::move(segments))};
          },
          "entries"_a, "offset"_a, "homes"_a,
          "Entries of 8 bytes in a segment; the segments that arrays may lie in.");

  nb::class_<ExecutionHandle> execution(
      module, "Execution", "A collective bound to memory, which runs any number of times.");
  execution
      .def("__init__", &make_execution, "context"_a, "phases"_a, "bindings"_a, "ranks"_a,
           "numbering"_a, "first_notification"_a, "fingerprint"_a,
           "access"_a = BufferAccess::kInPlace, "source"_a = 0, "target"_a = 0, "nbytes"_a = 0,
           "device"_a = kHost, "pieces"_a = std::vector<std::vector<PieceTuple>>(), "op"_a = "sum",
           "what"_a = "",
           "`pieces`, of each phase: (elements, lanes) of an array on a GPU that is copied.")
      .def(
          "start",
          [](const ExecutionHandle& self) {
            start_execution(*self.runtime, *self.execution, self.array);
          },
          "Begin the next execution; as many steps as go through at once are taken.")
      .def(
          "wait",
          [](const ExecutionHandle& self, std::optional<double> timeout) {
            wait_execution(*self.runtime, *self.execution, seconds(self.runtime->context, timeout));
          },
          nb::kw_only(), "timeout"_a.none() = nb::none(),
          "Until its result is there; returns at once if none is under way.")
      .def(
          "start_after",
          [](const ExecutionHandle& self, std::uintptr_t stream) {
            const StreamOrder order = order_on(*self.execution, self.array, stream);
            require_made(*self.runtime, *self.execution);
            const WithoutGil release;
            self.runtime->executor.start(*self.execution, self.array, &order);
          },
          "stream"_a, "start() as soon as a stream of the GPU has done what is enqueued on it.")
      .def(
          "run_after",
          [](const ExecutionHandle& self, std::uintptr_t stream, std::optional<double> timeout) {
            return run_execution_after(*self.runtime, *self.execution, self.array, stream,
                                       seconds(self.runtime->context, timeout), nb::handle());
          },
          "stream"_a, nb::kw_only(), "timeout"_a.none() = nb::none(),
          "run() after what is enqueued on a stream of the GPU, and before what will be. True: the "
          "stream makes it, and nobody waits.")
      .def("run", &run, nb::kw_only(), "timeout"_a.none() = nb::none(),
           "start() and wait(); what a run() that did not end has begun goes on.")
      .def(
          "run_at",
          [](const ExecutionHandle& self, nb::handle owner,
             const std::vector<std::uintptr_t>& addresses, std::optional<double> timeout,
             std::uint64_t mark) {
            Array array = self.array;
            array.places = addresses;
            array.mark = mark;
            run_execution(*self.runtime, *self.execution, array,
                          seconds(self.runtime->context, timeout), owner);
          },
          "owner"_a, "addresses"_a, "timeout"_a.none() = nb::none(), "mark"_a = 0,
          "run() with each buffer at an address, 0: where it was; `owner` keeps them. All ranks "
          "must agree on `mark`.")
      .def(
          "close",
          [](const ExecutionHandle& self) {
            await_streams([&](Deadline deadline) {
              return self.runtime->executor.await_streamed(self.execution.get(), deadline);
            });
            self.execution->close();
          },
          "Nothing of it moves any more, once streams have what they wait for; idempotent.")
      .def_prop_ro("name", [](const ExecutionHandle& self) { return self.execution->name(); })
      .def_prop_ro(
          "declined", [](const ExecutionHandle& self) { return self.execution->declined(); },
          "The last one did nothing: some rank's array lies in no segment of the directory.")
      .def_prop_ro(
          "under_way", [](const ExecutionHandle& self) { return self.execution->under_way(); },
          "It has begun, and its result was not taken.")
      .def_prop_ro(
          "idle",
          [](const ExecutionHandle& self) {
            return self.execution->state() == Execution::State::kIdle;
          },
          "It can begin: nothing is under way, it did not fail and was not closed.")
      .def_prop_ro(
          "times",
          [](const ExecutionHandle& self) {
            const Recorder& recorder = self.runtime->context.recorder();
            return std::make_pair(recorder.seconds(self.execution->began()),
                                  recorder.seconds(self.execution->ended()));
          },
          "When the last execution began and ended, in time.monotonic()'s seconds.")
      .def("missing", [](const ExecutionHandle& self) {
        return self.runtime->executor.missing(*self.execution);
      });
  DirectCalls<run_directly>::serve(execution.attr("run"));

  nb::class_<Executor::Call>(module, "Call", "A step that waits for the program's answer.")
      .def_prop_ro("hook", [](const Executor::Call& self) { return self.hook; })
      .def_prop_ro("offset", [](const Executor::Call& self) { return self.offset; })
      .def_prop_ro("count", [](const Executor::Call& self) { return self.count; });

  module.def(
      "serve_with",
      [](const ContextHandle& context, nb::object serve, nb::object stream_handle) {
        context.runtime->serve = std::move(serve);
        context.runtime->stream_handle = std::move(stream_handle);
      },
      "context"_a, "serve"_a, "stream_handle"_a,
      "Take the functions of Python that the core calls: when a Call waits for an answer, and for "
      "the handle of a stream.");
  module.def(
      "take_call",
      [](const ContextHandle& context) -> std::optional<Executor::Call> {
        Executor::Call call;
        if (!context.runtime->executor.take_call(call)) return std::nullopt;
        return call;
      },
      "context"_a);
  module.def(
      "put_back",
      [](const ContextHandle& context, const Executor::Call& call) {
        context.runtime->executor.put_back(call);
      },
      "context"_a, "call"_a, "It was not done: take_call() returns it again.");
  module.def(
      "answer",
      [](const ContextHandle& context, const Executor::Call& call, std::uintptr_t stream,
         int device) {
        const WithoutGil release;
        const StreamOrder order{device, reinterpret_cast<cuda::Stream>(stream)};
        context.runtime->executor.answer(call, device == kHost ? nullptr : &order);
      },
      "context"_a, "call"_a, "stream"_a = 0, "device"_a = kHost,
      "It is done, or will be after what a stream of the GPU has been given so far.");
  module.def(
      "progress_thread",
      [](const ContextHandle& context, bool run) {
        Executor& executor = context.runtime->executor;
        if (!run) {
          await_streams(
              [&](Deadline deadline) { return executor.await_streamed(nullptr, deadline); });
        }
        const WithoutGil release;
        if (run) {
          executor.start_thread();
        } else {
          executor.stop_thread();
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
        const ReduceOp operation = op_of(op);
        const WithoutGil release;
        reduce(to, from, count, scale, operation);
      },
      "destinations"_a, "sources"_a, "count"_a, "scale"_a, "op"_a,
      "The kernel the executor uses, on (address, dtype) pairs; nothing is checked.");
  module.def(
      "moments",
      [](const nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>& items,
         const std::string& squares) {
        const bool wide = items.dtype() == nb::dtype<double>();
        if (!wide && items.dtype() != nb::dtype<float>()) {
          throw Error(ErrorKind::kBuffer, "moments are of float32 or float64");
        }
        const Squares asked = squares == "mean"    ? Squares::kFromMean
                              : squares == "items" ? Squares::kOfItems
                                                   : Squares::kNone;
        const WithoutGil release;
        const Moments found =
            moments(items.data(), wide ? DType::kF64 : DType::kF32, items.size(), asked);
        return std::pair(found.sum, found.squares);
      },
      "items"_a, "squares"_a = "",
      nb::sig("def moments(items: object, squares: str = '') -> tuple[float, float]"),
      "The sum of an array, and of squares: of its ``items``, which leaves out the sum, or of "
      "their "
      "distances from the ``mean``. In float64, the same bits on all machines.");
  module.def(
      "load_rows",
      [](const ContextHandle& context, Rank peer, std::uintptr_t rows, std::uint64_t count,
         const std::pair<std::uintptr_t, std::string>& target,
         const std::pair<std::uintptr_t, std::string>& source) {
        const DType to = dtype_of(target.second), from = dtype_of(source.second);
        const std::uint64_t item = item_size(from), target_item = item_size(to);
        Traffic traffic{.messages_read = 1};
        const WithoutGil release;
        for (const LoadedRows& each : std::span(reinterpret_cast<const LoadedRows*>(rows), count)) {
          copy_rows({reinterpret_cast<void*>(target.first + each.target * target_item), to},
                    {reinterpret_cast<const void*>(source.first + each.source * item), from},
                    each.n, each.rows, each.target_step * target_item, each.source_step * item);
          traffic.bytes_read += each.n * each.rows * item;
        }
        if (peer != context.context().rank()) context.context().counters().add(peer, traffic);
      },
      "context"_a, "peer"_a, "rows"_a, "count"_a, "target"_a, "source"_a,
      "Copy ``count`` sets of rows, whose numbers lie at ``rows``, out of memory of ``peer`` at "
      "one (address, dtype) to another; nothing is checked.");
}

}  // namespace pgasdl

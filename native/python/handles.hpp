// The handles that Python objects hold, and how the bindings wait: without the GIL, open to Ctrl-C.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <memory>
#include <optional>

#include "executor/executor.hpp"
#include "pgas/context.hpp"
#include "pgas/group.hpp"
#include "python/without_gil.hpp"

namespace pgasdl {

namespace nb = nanobind;

// Everything that lives as long as the last Python object that needs it.
struct Runtime {
  Runtime(Rank rank, Rank size, std::unique_ptr<Transport> transport, const Options& options)
      : context(rank, size, std::move(transport), options), executor(context) {}
  Context context;
  Executor executor;
  nb::object serve;           // answers waiting Calls of any exchange
  nb::object stream_handle;   // turns a stream as users name it into the driver's handle
  PyObject* calls = nullptr;  // the AllreduceCalls of all ranks, while they live
};

struct ContextHandle {
  std::shared_ptr<Runtime> runtime;
  Context& context() const { return runtime->context; }
};
struct SegmentHandle {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Segment> segment;
};
struct SliceHandle {
  Slice slice;
};
struct GroupHandle {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Group> group;
};
struct NumberingHandle {
  std::shared_ptr<Numbering> numbering;
};
struct DirectoryHandle {
  std::shared_ptr<Directory> directory;
};
struct ExecutionHandle {
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<Execution> execution;
  Array array;  // of a handle: the caller's array, always the same
};

// Keeps a buffer in place: code that would resize it gets a BufferError. Needs the GIL.
struct Export {
  Export() { view.obj = nullptr; }
  ~Export() { PyBuffer_Release(&view); }
  Export(const Export&) = delete;
  Export& operator=(const Export&) = delete;
  bool take(nb::handle buffer, int flags) {
    if (PyObject_GetBuffer(buffer.ptr(), &view, flags) == 0) return true;
    PyErr_Clear();
    return false;
  }
  Py_buffer view;
};

// Any Python integer; those beyond 64 bits become the nearest, which the range checks refuse.
struct Integer {
  std::int64_t value = 0;
  std::uint64_t natural() const {
    return value < 0 ? UINT64_MAX : static_cast<std::uint64_t>(value);
  }
  Rank rank() const { return value < -1 || value > INT32_MAX ? -1 : static_cast<Rank>(value); }
  QueueId queue() const {
    return value < 0 || value > INT32_MAX ? UINT32_MAX : static_cast<QueueId>(value);
  }
};

// A slice; any other object is refused with an explanation when it is used.
class SliceArgument {
 public:
  SliceArgument() = default;
  explicit SliceArgument(const Slice& slice) : slice_(&slice) {}
  explicit SliceArgument(nb::handle given);
  const Slice& operator*() const { return slice_ != nullptr ? *slice_ : refuse(); }
  const Slice* operator->() const { return &**this; }

 private:
  [[noreturn]] const Slice& refuse() const;

  const Slice* slice_ = nullptr;
  nb::handle given_;
};

// Raises pgasdl.errors.<name>(message).
[[noreturn]] void raise(const char* error, const std::string& message);

inline double seconds(const Context& context, std::optional<double> timeout) {
  if (!timeout) return context.options().timeout;
  if (std::isnan(*timeout) || *timeout < 0) {
    PyErr_Format(PyExc_ValueError, "timeout is 0 (one try), seconds, or None (the default)");
    throw nb::python_error();
  }
  return *timeout;
}

// Makes a first try with the GIL held, then waits without it, in short pieces, for signals.
template <typename Attempt>
Outcome blocking(double timeout, Attempt&& attempt) {
  Outcome outcome = attempt(Deadline::once());
  if (outcome == Outcome::kDone || timeout <= 0) return outcome;
  Deadline deadline = Deadline::in(timeout);
  for (;;) {
    {
      const WithoutGil release;
      outcome = attempt(deadline.next_piece(std::chrono::milliseconds(50)));
    }
    if (outcome == Outcome::kDone || deadline.passed()) return outcome;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

// Waits until streams have made their work or it was given up, which their deadlines limit.
template <typename Attempt>
void await_streams(Attempt&& attempt) {
  constexpr double kForever = 1e9;
  (void)blocking(kForever, attempt);
}

// Begins, without the GIL if much is copied.
void start_execution(Runtime& runtime, Execution& execution, const Array& array);
// Waits until it is over, answering Calls. Raises timeout, and the fault of a failed execution.
void wait_execution(Runtime& runtime, Execution& execution, double timeout);
// Begins and waits, or only waits after an interrupted call. If interrupted itself, holds `keep`.
void run_execution(Runtime& runtime, Execution& execution, const Array& array, double timeout,
                   nb::handle keep);
// Likewise, ordered on a stream. True: the stream makes it.
bool run_execution_after(Runtime& runtime, Execution& execution, const Array& array,
                         std::uintptr_t stream, double timeout, nb::handle keep);

void bind_errors(nb::module_& module);
void bind_memory(nb::module_& module);
void bind_device(nb::module_& module);
void bind_context(nb::module_& module);
void bind_operations(nb::class_<ContextHandle>& context);
void bind_group(nb::module_& module);
void bind_exchange(nb::module_& module);
void bind_allreduce(nb::module_& module);
void bind_schedule(nb::module_& module);
void bind_mpi(nb::module_& module);
void bind_verbs(nb::module_& module);
void bind_measure(nb::module_& module);
void bind_simulate(nb::module_& module);
void bind_formats(nb::module_& module);

}  // namespace pgasdl

namespace nanobind::detail {
template <>
struct type_caster<pgasdl::Integer> {
  NB_TYPE_CASTER(pgasdl::Integer, const_name("int"))
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    PyObject* number = source.ptr();
    PyObject* owned = nullptr;
    if (!PyLong_CheckExact(number)) {
      if (PyFloat_Check(number)) return false;
      owned = PyNumber_Index(number);
      if (owned == nullptr) {
        PyErr_Clear();
        return false;
      }
      number = owned;
    }
    int overflow = 0;
    value.value = PyLong_AsLongLongAndOverflow(number, &overflow);
    if (overflow != 0) value.value = overflow > 0 ? INT64_MAX : INT64_MIN;
    Py_XDECREF(owned);
    return true;
  }
  static handle from_cpp(pgasdl::Integer integer, rv_policy, cleanup_list*) noexcept {
    return PyLong_FromLongLong(integer.value);  // defaults of arguments
  }
};
template <>
struct type_caster<pgasdl::SliceArgument> {
  NB_TYPE_CASTER(pgasdl::SliceArgument, const_name("pgasdl._native.Slice"))
  bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept {
    value = pgasdl::SliceArgument(source);
    return true;
  }
};
}  // namespace nanobind::detail

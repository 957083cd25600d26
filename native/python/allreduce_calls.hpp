// Calls of ctx.allreduce as the core has them: keys from arrays, and how a call waits.
#pragma once

#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#include <numpy/ndarraytypes.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "executor/repeated_calls.hpp"
#include "python/handles.hpp"

namespace pgasdl {

using Description = nb::typed<nb::tuple, nb::any, nb::ellipsis>;

// Arguments of the package's own tables, which hold all valid ones: the same text is one object.
inline PyObject* interned(nb::handle text) {
  PyObject* string = text.ptr();
  if (!PyUnicode_CheckExact(string)) return string;  // None, or invalid: the checks refuse it
  Py_INCREF(string);
  PyUnicode_InternInPlace(&string);
  Py_DECREF(string);  // the caller's argument, or the table, holds it too
  return string;
}

// Reads the array's fields: the buffer protocol takes longer than a small allreduce.
inline bool key_of_ndarray(nb::handle array, CallKey& key) {
  const auto* const fields = reinterpret_cast<PyArrayObject*>(array.ptr());
  if ((PyArray_FLAGS(fields) & NPY_ARRAY_CARRAY) != NPY_ARRAY_CARRAY) return false;
  key.address = reinterpret_cast<std::uintptr_t>(PyArray_DATA(fields));
  key.extent = 1;
  for (int i = 0; i < PyArray_NDIM(fields); ++i) {
    key.extent *= static_cast<std::uint64_t>(PyArray_DIM(fields, i));
  }
  key.dtype = PyArray_DESCR(fields);
  return true;
}

inline bool key_of_buffer(nb::handle array, CallKey& key, Export& held) {
  if (!held.take(array, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT)) return false;
  const Py_buffer& view = held.view;
  const std::size_t length = view.format == nullptr ? 0 : std::strlen(view.format);
  key.address = reinterpret_cast<std::uintptr_t>(view.buf);
  key.extent = static_cast<std::uint64_t>(view.len);
  if (length <= sizeof key.format) std::memcpy(&key.format, view.format, length);
  return length != 0 && length <= sizeof key.format;
}

// PyTorch offers no buffer protocol, and this library does not link PyTorch's C++ library.
inline bool key_of_tensor(nb::handle tensor, CallKey& key) {
  if (!nb::hasattr(tensor, "data_ptr") || !nb::hasattr(tensor, "is_cpu")) return false;
  try {
    if (!nb::cast<bool>(tensor.attr("is_cpu"))) return false;
    if (!nb::cast<bool>(tensor.attr("is_contiguous")())) return false;
    key.address = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());
    key.extent = nb::cast<std::uint64_t>(tensor.attr("nbytes"));
    const nb::object dtype = tensor.attr("dtype");
    key.dtype = dtype.ptr();  // one object per dtype, never freed
  } catch (const std::exception&) {
    return false;  // the checks explain it
  }
  return true;
}

// A call of the Python function, which its description identifies.
struct DescribedCall : RepeatedCall {
  DescribedCall(Description description, std::vector<Part> parts, std::shared_ptr<Runtime> owner)
      : RepeatedCall(std::move(parts), owner),
        description(std::move(description)),
        runtime(owner.get()) {}
  bool same(const RepeatedCall& other) const override {
    return description.equal(static_cast<const DescribedCall&>(other).description);
  }
  const Description description;
  Runtime* const runtime;  // of its executions, if there are any
};

// Runs executions in Python's way, open to Ctrl-C; an interrupted one holds `array`.
class PythonCaller : public Caller {
 public:
  PythonCaller(Runtime* runtime, nb::handle array, std::optional<std::uintptr_t> stream)
      : runtime_(runtime), array_(array), stream_(stream) {}
  bool run(Execution& execution, const Array& array, double timeout) override {
    if (stream_) {
      return run_execution_after(*runtime_, execution, array, *stream_, timeout, array_);
    }
    run_execution(*runtime_, execution, array, timeout, array_);
    return false;
  }
  void wait(Execution& execution, double timeout) override {
    wait_execution(*runtime_, execution, timeout);
  }

 private:
  Runtime* const runtime_;
  const nb::handle array_;
  const std::optional<std::uintptr_t> stream_;  // orders a GPU's array
};

// The calls of ctx.allreduce of a group, for Python: with the GIL held.
class AllreduceCalls : public RepeatedCalls {
 public:
  explicit AllreduceCalls(const NumberingHandle& handle) : RepeatedCalls(handle.numbering) {}
  ~AllreduceCalls() {
    if (const auto runtime = serves_.lock(); runtime != nullptr) runtime->calls = nullptr;
  }
  AllreduceCalls(const AllreduceCalls&) = delete;
  AllreduceCalls& operator=(const AllreduceCalls&) = delete;

  // Lets a context's calls, those of all ranks, be looked up in `self`. Called once.
  static void serve(nb::handle self, const ContextHandle& context) {
    nb::cast<AllreduceCalls&>(self).serves_ = context.runtime;
    context.runtime->calls = self.ptr();
  }

  // False: this call was not made before, or it was declined.
  bool run(nb::handle array, nb::handle op, nb::handle plan, std::optional<double> timeout) {
    CallKey key;
    Export held;
    if (!key_of(array, op, plan, key, held)) return false;
    std::shared_ptr<const RepeatedCall> call = find(key);
    if (call == nullptr) return false;
    Runtime* const runtime = static_cast<const DescribedCall&>(*call).runtime;
    const double limit = seconds(runtime->context, timeout);
    PythonCaller caller(runtime, array, std::nullopt);
    const Numbering::Entry entry(numbering(), "ctx.allreduce");
    return RepeatedCalls::run(std::move(call), key.address, limit, caller);
  }

  void admit(const Description& description) const {
    RepeatedCalls::admit(DescribedCall(description, {}, nullptr));
  }

  // Runs a new or the interrupted call. False: it was declined.
  bool make(nb::handle array, std::uintptr_t address, Description description,
            const std::vector<std::pair<const ExecutionHandle*, std::uint64_t>>& given,
            double timeout, std::optional<std::uintptr_t> stream) {
    std::vector<RepeatedCall::Part> parts;
    for (const auto& [handle, bytes] : given) {
      const Array& whole = handle->array;
      parts.push_back({handle->execution, {whole.access, nullptr, nullptr, bytes, whole.device}});
    }
    const auto runtime = given.empty() ? nullptr : given.front().first->runtime;
    auto call = std::make_shared<DescribedCall>(std::move(description), std::move(parts), runtime);
    PythonCaller caller(runtime.get(), array, stream);
    return RepeatedCalls::run(std::move(call), address, timeout, caller);
  }

  // Remembers the last call for run().
  void remember(nb::handle array, nb::handle op, nb::handle plan) {
    CallKey key;
    Export held;
    if (!key_of(array, op, plan, key, held)) return;
    // The dtype stays alive, so its address stays unique.
    auto* const dtype = static_cast<PyObject*>(const_cast<void*>(key.dtype));
    RepeatedCalls::remember(key, std::make_shared<nb::object>(nb::borrow(dtype)));
  }

  std::optional<Description> take_declined() {
    const auto declined = RepeatedCalls::take_declined();
    if (declined == nullptr) return std::nullopt;
    return static_cast<const DescribedCall&>(*declined).description;
  }

 private:
  bool key_of(nb::handle array, nb::handle op, nb::handle plan, CallKey& key, Export& held) const {
    key.op = interned(op);
    key.plan = interned(plan);
    // Not for subclasses, which may be more than their memory.
    if (array.type().is(ndarray_)) return key_of_ndarray(array, key);
    return PyObject_CheckBuffer(array.ptr()) ? key_of_buffer(array, key, held)
                                             : key_of_tensor(array, key);
  }

  const nb::object ndarray_ = nb::module_::import_("numpy").attr("ndarray");
  std::weak_ptr<Runtime> serves_;
};

}  // namespace pgasdl

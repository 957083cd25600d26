// The calls of ctx.allreduce: the executions that each one runs, and the interrupted call.
#pragma once

#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#include <numpy/ndarraytypes.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "python/handles.hpp"

namespace pgasdl {

using Description = nb::typed<nb::tuple, nb::any, nb::ellipsis>;

// Identifies a call of ctx.allreduce, by its array and its arguments.
struct CallKey {
  std::uintptr_t address = 0;
  std::uint64_t extent = 0;        // elements of a numpy.ndarray, bytes of other arrays
  std::uint64_t format = 0;        // the buffer protocol's, of at most eight characters,
  PyObject* dtype = nullptr;       // or an array's or a tensor's
  const PyObject* op = nullptr;    // interned: the package's own tables hold all valid ones
  const PyObject* plan = nullptr;  // likewise, or None
  bool operator==(const CallKey&) const = default;
};
struct CallHash {
  std::size_t operator()(const CallKey& key) const {
    return key.address ^ (key.address >> 12) ^ (key.extent << 7) ^ key.format;
  }
};

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
  key.dtype = reinterpret_cast<PyObject*>(PyArray_DESCR(fields));
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

// One call: executions of its parts, one after another. Its description identifies it.
struct Parts {
  Description description;
  std::vector<std::pair<ExecutionHandle, std::uint64_t>> executions;  // with the bytes of each
};

// The calls of ctx.allreduce of a group: repeats an earlier call without any Python in between, and
// remembers the call that a Timeout or Ctrl-C interrupted. Used with the GIL held, by one thread at
// a time: the caller of make() has entered the numbering.
class AllreduceCalls {
 public:
  explicit AllreduceCalls(const NumberingHandle& numbering) : numbering_(numbering.numbering) {}
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
    const auto found = calls_.find(key);
    if (found == calls_.end()) return false;
    const std::shared_ptr<const Parts> parts = found->second.parts;  // the table may be emptied
    const double limit = seconds(parts->executions.front().first.runtime->context, timeout);
    const Numbering::Entry entry(*numbering_, "ctx.allreduce");
    return run_parts(parts, key.address, array, limit, nullptr);
  }

  // Raises for any other call than the interrupted one.
  void admit(const Description& description) const {
    if (interrupted_ != nullptr && !interrupted_->description.equal(description)) {
      raise("MismatchError",
            "an allreduce of this group timed out: call it again with the same array first");
    }
  }

  // Runs a new or the interrupted call; `stream` orders a GPU's array. False: it was declined.
  bool make(nb::handle array, std::uintptr_t address, Parts parts, double timeout,
            std::optional<std::uintptr_t> stream) {
    const auto made = std::make_shared<const Parts>(std::move(parts));
    return run_parts(made, address, array, timeout, stream ? &*stream : nullptr);
  }

  // Remembers the last call for run().
  void remember(nb::handle array, nb::handle op, nb::handle plan) {
    CallKey key;
    Export held;
    if (last_ == nullptr || !key_of(array, op, plan, key, held)) return;
    if (calls_.size() >= kMostCalls) calls_.clear();
    calls_.insert_or_assign(key, Call{last_, nb::borrow(key.dtype)});
  }
  void forget() {
    calls_.clear();
    last_ = nullptr;
  }

  // The call that some rank declined, so that nothing was reduced; reported once.
  std::optional<Description> take_declined() { return std::exchange(declined_, std::nullopt); }
  Numbering& numbering() const { return *numbering_; }

 private:
  static constexpr std::size_t kMostCalls = 4096;

  struct Call {
    std::shared_ptr<const Parts> parts;
    nb::object dtype;  // keeps the key's dtype alive, so its address stays unique
  };

  bool run_parts(std::shared_ptr<const Parts> parts, std::uintptr_t address, nb::handle array,
                 double timeout, const std::uintptr_t* stream) {
    std::size_t part = 0;
    if (interrupted_ != nullptr) {
      admit(parts->description);
      parts = interrupted_;
      part = part_;
    }
    const bool one = parts->executions.size() < 2;  // saves reading the clock
    const Deadline deadline = one ? Deadline::once() : Deadline::in(timeout);
    for (std::size_t before = 0; before < part; ++before) {
      address += parts->executions[before].second;
    }
    for (; part < parts->executions.size(); ++part) {
      const auto& [handle, bytes] = parts->executions[part];
      const std::chrono::duration<double> left = deadline.left();
      try {
        run_part(handle, address, bytes, one ? timeout : left.count(), array, stream);
      } catch (...) {
        const bool begun = part > 0 || handle.execution->under_way();
        interrupted_ = begun && !numbering_->failed() ? parts : nullptr;
        part_ = part;
        throw;
      }
      if (handle.execution->declined()) {
        interrupted_ = nullptr;
        declined_ = parts->description;
        forget();
        return false;
      }
      address += bytes;
    }
    interrupted_ = nullptr;
    last_ = std::move(parts);
    return true;
  }

  void run_part(const ExecutionHandle& handle, std::uintptr_t address, std::uint64_t bytes,
                double timeout, nb::handle array, const std::uintptr_t* stream) {
    Runtime& runtime = *handle.runtime;
    if (streamed_ != nullptr && streamed_ != handle.execution) {  // one at a time
      wait_execution(runtime, *streamed_, timeout);
    }
    streamed_ = nullptr;
    auto* const at = reinterpret_cast<std::byte*>(address);
    const Array where{handle.array.access, at, at, bytes, handle.array.device};
    if (stream == nullptr) {
      run_execution(runtime, *handle.execution, where, timeout, array);
    } else if (run_execution_after(handle, where, *stream, timeout, array)) {
      streamed_ = handle.execution;
    }
  }

  bool key_of(nb::handle array, nb::handle op, nb::handle plan, CallKey& key, Export& held) const {
    key.op = interned(op);
    key.plan = interned(plan);
    // Not for subclasses, which may be more than their memory.
    if (array.type().is(ndarray_)) return key_of_ndarray(array, key);
    return PyObject_CheckBuffer(array.ptr()) ? key_of_buffer(array, key, held)
                                             : key_of_tensor(array, key);
  }

  const nb::object ndarray_ = nb::module_::import_("numpy").attr("ndarray");
  const std::shared_ptr<Numbering> numbering_;
  std::weak_ptr<Runtime> serves_;
  std::unordered_map<CallKey, Call, CallHash> calls_;
  std::shared_ptr<const Parts> last_;
  std::shared_ptr<const Parts> interrupted_;  // and the part at which it continues
  std::size_t part_ = 0;
  std::shared_ptr<Execution> streamed_;  // the last one, if a stream takes its result
  std::optional<Description> declined_;
};

}  // namespace pgasdl

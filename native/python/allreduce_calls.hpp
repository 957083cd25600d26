// Which execution each call of ctx.allreduce runs, of those that were made before.
#pragma once

#define NPY_NO_DEPRECATED_API NPY_1_25_API_VERSION
#include <numpy/ndarraytypes.h>

#include <cstring>
#include <unordered_map>
#include <utility>

#include "python/handles.hpp"

namespace pgasdl {

using Description = nb::typed<nb::tuple, nb::any, nb::ellipsis>;

// What tells one call of ctx.allreduce from another, taken from the array and from the arguments.
struct CallKey {
  std::uintptr_t address = 0;
  std::uint64_t extent = 0;        // elements of a numpy.ndarray, bytes of all else
  std::uint64_t format = 0;        // the buffer protocol's, of at most eight characters,
  PyObject* dtype = nullptr;       // or an array's or a tensor's
  const PyObject* op = nullptr;    // interned: the package's own tables hold all that are known
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
  if (!PyUnicode_CheckExact(string)) return string;  // None, or what the checks will refuse
  Py_INCREF(string);
  PyUnicode_InternInPlace(&string);
  Py_DECREF(string);  // somebody else holds it too: the caller's argument, or the table of all
  return string;
}

// Straight from its fields: the buffer protocol takes longer than a small allreduce.
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

// PyTorch offers no buffer protocol; its C++ library is not ours to link.
inline bool key_of_tensor(nb::handle tensor, CallKey& key) {
  if (!nb::hasattr(tensor, "data_ptr") || !nb::hasattr(tensor, "is_cpu")) return false;
  try {
    if (!nb::cast<bool>(tensor.attr("is_cpu"))) return false;
    if (!nb::cast<bool>(tensor.attr("is_contiguous")())) return false;
    key.address = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());
    key.extent = nb::cast<std::uint64_t>(tensor.attr("nbytes"));
    const nb::object dtype = tensor.attr("dtype");
    key.dtype = dtype.ptr();  // one object per dtype, for good
  } catch (const std::exception&) {
    return false;  // said in words by the checks
  }
  return true;
}

// Finds an execution without any Python in between. Used with the GIL held.
class AllreduceCalls {
 public:
  explicit AllreduceCalls(const NumberingHandle& numbering) : numbering_(numbering.numbering) {}
  ~AllreduceCalls() {
    if (const auto runtime = serves_.lock(); runtime != nullptr) runtime->calls = nullptr;
  }
  AllreduceCalls(const AllreduceCalls&) = delete;
  AllreduceCalls& operator=(const AllreduceCalls&) = delete;

  // From now on a context's calls, those of all ranks, are looked for in `self`. Once.
  static void serve(nb::handle self, const ContextHandle& context) {
    nb::cast<AllreduceCalls&>(self).serves_ = context.runtime;
    context.runtime->calls = self.ptr();
  }

  void remember(nb::handle array, std::uint64_t bytes, nb::handle op, nb::handle plan,
                nb::object execution, Description description) {
    CallKey key;
    Export held;
    if (!key_of(array, op, plan, key, held)) return;
    if (calls_.size() >= kMostCalls) calls_.clear();
    const auto& handle = nb::cast<const ExecutionHandle&>(execution);
    calls_.insert_or_assign(key, Call{&handle, bytes, std::move(execution), nb::borrow(key.dtype),
                                      std::move(description)});
  }
  void forget() { calls_.clear(); }

  // False: this call was not made before, the last one did not end, or this one was declined. When
  // it throws, `last` tells which call it was.
  bool run(nb::handle array, nb::handle op, nb::handle plan, std::optional<double> timeout) {
    CallKey key;
    Export held;
    if (!key_of(array, op, plan, key, held)) return false;
    const auto found = calls_.find(key);
    if (found == calls_.end()) return false;
    const nb::object keep = found->second.keep;  // while it runs the table may be emptied
    const std::uint64_t bytes = found->second.bytes;
    const ExecutionHandle& handle = *found->second.handle;
    const double limit = seconds(handle.runtime->context, timeout);
    const Numbering::Entry entry(*numbering_, "ctx.allreduce");
    if (numbering_->under_way()) return false;
    last_ = found->second.description;
    auto* const at = reinterpret_cast<std::byte*>(key.address);
    try {
      run_execution(*handle.runtime, *handle.execution, {handle.array.access, at, at, bytes}, limit,
                    array);
    } catch (...) {
      interrupted_ = numbering_->under_way();
      throw;
    }
    if (handle.execution->declined()) {
      declined_ = true;
      forget();
    }
    return !declined_;
  }
  // Whether run() left an execution under way, which was not asked for yet: of the call `last`.
  bool take_interrupted() { return std::exchange(interrupted_, false); }
  // Whether run() has ended an execution that reduced nothing: of the call `last`, told once.
  bool take_declined() { return std::exchange(declined_, false); }
  const Description& last() const { return last_; }
  Numbering& numbering() const { return *numbering_; }

 private:
  static constexpr std::size_t kMostCalls = 4096;

  struct Call {
    const ExecutionHandle* handle;
    std::uint64_t bytes;
    nb::object keep;
    nb::object dtype;  // of the key: its address belongs to no other
    Description description;
  };
  bool key_of(nb::handle array, nb::handle op, nb::handle plan, CallKey& key, Export& held) const {
    key.op = interned(op);
    key.plan = interned(plan);
    // Not of what derives from it: that may be more than its memory.
    if (array.type().is(ndarray_)) return key_of_ndarray(array, key);
    return PyObject_CheckBuffer(array.ptr()) ? key_of_buffer(array, key, held)
                                             : key_of_tensor(array, key);
  }

  const nb::object ndarray_ = nb::module_::import_("numpy").attr("ndarray");
  const std::shared_ptr<Numbering> numbering_;
  std::weak_ptr<Runtime> serves_;
  std::unordered_map<CallKey, Call, CallHash> calls_;
  Description last_ = nb::make_tuple();
  bool interrupted_ = false;
  bool declined_ = false;
};

}  // namespace pgasdl

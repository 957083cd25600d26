#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <unordered_map>

#include "python/handles.hpp"
#include "reduce/copy.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

using Description = nb::typed<nb::tuple, nb::any, nb::ellipsis>;

// What tells one call of ctx.allreduce from another, taken from the array and from the arguments.
struct CallKey {
  std::uintptr_t address = 0;
  std::uint64_t bytes = 0;
  std::uint64_t format = 0;         // the buffer protocol's, of at most eight characters,
  const PyObject* dtype = nullptr;  // or a tensor's
  const PyObject* op = nullptr;     // interned: the package's own tables hold all that are known
  const PyObject* plan = nullptr;   // likewise, or None
  bool operator==(const CallKey&) const = default;
};
struct CallHash {
  std::size_t operator()(const CallKey& key) const {
    return key.address ^ (key.address >> 12) ^ (key.bytes << 7) ^ key.format;
  }
};

// How a plan gets at the caller's array.
enum class Reach {
  kInPlace,  // it lies where the plan works
  kRebased,  // the plan is told where it lies
  kCopied,   // to where the plan works, and back
};

PyObject* interned(nb::handle text) {
  PyObject* string = text.ptr();
  if (!PyUnicode_CheckExact(string)) return string;  // None, or what the checks will refuse
  Py_INCREF(string);
  PyUnicode_InternInPlace(&string);
  Py_DECREF(string);  // somebody else holds it too: the caller's argument, or the table of all
  return string;
}

bool key_of_buffer(nb::handle array, CallKey& key) {
  Py_buffer view;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT;
  if (PyObject_GetBuffer(array.ptr(), &view, flags) != 0) {
    PyErr_Clear();
    return false;
  }
  const std::size_t length = view.format == nullptr ? 0 : std::strlen(view.format);
  key.address = reinterpret_cast<std::uintptr_t>(view.buf);
  key.bytes = static_cast<std::uint64_t>(view.len);
  if (length <= sizeof key.format) std::memcpy(&key.format, view.format, length);
  PyBuffer_Release(&view);
  return length != 0 && length <= sizeof key.format;
}

// PyTorch offers no buffer protocol; its C++ library is not ours to link.
bool key_of_tensor(nb::handle tensor, CallKey& key) {
  if (!nb::hasattr(tensor, "data_ptr") || !nb::hasattr(tensor, "is_cpu")) return false;
  try {
    if (!nb::cast<bool>(tensor.attr("is_cpu"))) return false;
    if (!nb::cast<bool>(tensor.attr("is_contiguous")())) return false;
    key.address = nb::cast<std::uintptr_t>(tensor.attr("data_ptr")());
    key.bytes = nb::cast<std::uint64_t>(tensor.attr("nbytes"));
    const nb::object dtype = tensor.attr("dtype");
    key.dtype = dtype.ptr();  // one object per dtype, for good
  } catch (const std::exception&) {
    return false;  // said in words by the checks
  }
  return true;
}

bool key_of(nb::handle array, nb::handle op, nb::handle plan, CallKey& key) {
  key.op = interned(op);
  key.plan = interned(plan);
  return PyObject_CheckBuffer(array.ptr()) ? key_of_buffer(array, key) : key_of_tensor(array, key);
}

// The allreduces of one group that were made before: a call that comes again is executed without
// any Python in between. All executions are numbered, and the number is the generation of their
// notifications; a plan's phases take turns. Used with the GIL held, by one thread at a time.
class AllreduceCalls {
 public:
  static constexpr std::uint64_t kGenerations = BoundPlan::kMostGenerations;

  std::uint64_t number() const { return number_; }
  void set_number(std::uint64_t number) { number_ = number; }
  std::uint32_t generation() const {
    return static_cast<std::uint32_t>(number_ % kGenerations) + 1;
  }
  std::uint64_t turn(std::size_t region) const {
    return region < turns_.size() ? turns_[region] : 0;
  }
  void executed(std::size_t region) {
    if (region >= turns_.size()) turns_.resize(region + 1);
    ++turns_[region];
    ++number_;
  }

  void remember(nb::handle array, nb::handle op, nb::handle plan, std::vector<nb::object> phases,
                std::size_t region, Reach reach, Description description) {
    CallKey key;
    if (!key_of(array, op, plan, key)) return;
    if (calls_.size() >= kMostCalls) calls_.clear();
    Call call{{}, std::move(phases), region, reach, std::move(description)};
    for (const nb::object& phase : call.keep) call.phases.push_back(nb::cast<PlanHandle*>(phase));
    calls_.insert_or_assign(key, std::move(call));
  }
  void forget() { calls_.clear(); }

  // False: this call was not made before, or the last one did not end. When it throws, `last`
  // tells which call it was.
  bool run(nb::handle array, nb::handle op, nb::handle plan, std::optional<double> timeout) {
    CallKey key;
    if (suspended_ || !key_of(array, op, plan, key)) return false;
    const auto found = calls_.find(key);
    if (found == calls_.end()) return false;
    const Call& call = found->second;
    const std::size_t region = call.region;
    const std::size_t number = turn(region) % call.phases.size();
    const nb::object keep = call.keep[number];  // while it runs the table may be emptied
    const PlanHandle& phase = *call.phases[number];
    auto* const given = reinterpret_cast<std::byte*>(key.address);
    std::byte* const home = call.reach == Reach::kCopied ? phase.plan->base("data") : nullptr;
    if (call.reach == Reach::kRebased) phase.plan->rebase("data", given);
    last_ = call.description;
    suspended_ = true;
    if (home != nullptr) move(home, given, key.bytes);
    phase.runtime->executor.start(*phase.plan, generation());
    wait_plan(phase, timeout);
    if (home != nullptr) move(given, home, key.bytes);
    suspended_ = false;
    executed(region);
    return true;
  }
  const Description& last() const { return last_; }
  void resume() { suspended_ = false; }

 private:
  static constexpr std::size_t kMostCalls = 4096;
  static constexpr std::uint64_t kLong = 64 << 10;

  // Other threads may run while much is copied.
  static void move(std::byte* destination, const std::byte* source, std::uint64_t bytes) {
    if (bytes < kLong) {
      std::memcpy(destination, source, bytes);
      return;
    }
    const nb::gil_scoped_release release;
    copy(destination, source, bytes);
  }

  struct Call {
    std::vector<const PlanHandle*> phases;
    std::vector<nb::object> keep;
    std::size_t region;
    Reach reach;
    Description description;
  };
  std::unordered_map<CallKey, Call, CallHash> calls_;
  std::vector<std::uint64_t> turns_;
  std::uint64_t number_ = 0;
  bool suspended_ = false;
  Description last_ = nb::make_tuple();
};

}  // namespace

void bind_allreduce(nb::module_& module) {
  nb::enum_<Reach>(module, "Reach", "How a plan gets at the caller's array.")
      .value("IN_PLACE", Reach::kInPlace, "It lies where the plan works.")
      .value("REBASED", Reach::kRebased, "The plan is told where it lies.")
      .value("COPIED", Reach::kCopied, "To where the plan works, and back.");
  nb::class_<AllreduceCalls>(module, "AllreduceCalls",
                             "Executions of one group's ctx.allreduce, and the calls made before.")
      .def(nb::init<>())
      .def_prop_rw("number", &AllreduceCalls::number, &AllreduceCalls::set_number,
                   "Executions that have ended.")
      .def_prop_ro("generation", &AllreduceCalls::generation, "Of the next execution.")
      .def_prop_ro("last", &AllreduceCalls::last, "What remember() was told of the last call.")
      .def("turn", &AllreduceCalls::turn, "region"_a, "Executions of a region's plans.")
      .def("executed", &AllreduceCalls::executed, "region"_a)
      .def("remember", &AllreduceCalls::remember, "array"_a, "op"_a, "plan"_a.none(), "phases"_a,
           "region"_a, "reach"_a, "description"_a)
      .def("forget", &AllreduceCalls::forget)
      .def("resume", &AllreduceCalls::resume)
      .def("run", &AllreduceCalls::run, "array"_a.none(), "op"_a.none(), "plan"_a.none(),
           "timeout"_a.none());
}

}  // namespace pgasdl

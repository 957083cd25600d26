#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <structmember.h>  // of Python

#include <cstddef>
#include <exception>

#include "python/allreduce_calls.hpp"
#include "python/direct_calls.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

// ctx.allreduce: repeats an earlier call at once, and passes any other to the Python function. A
// Python frame with named arguments takes half of the instructions of such a call.
struct Repeated {
  PyObject ob_base;
  vectorcallfunc call;
  PyObject* function;
  PyObject* attributes;  // those that functools.wraps copies from it
};

Repeated* of(PyObject* self) { return reinterpret_cast<Repeated*>(self); }

// Interned like names in Python's code, so that addresses identify them.
struct Names {
  PyObject* const op = PyUnicode_InternFromString("op");
  PyObject* const plan = PyUnicode_InternFromString("plan");
  PyObject* const timeout = PyUnicode_InternFromString("timeout");
  PyObject* const sum = PyUnicode_InternFromString("sum");
};
const Names& names() {
  static const Names all;
  return all;
}

struct Arguments {
  nb::handle context, array, op, plan, timeout;

  // False: not a call of all ranks on the host, or not a valid call.
  bool parse(PyObject* const* given, std::size_t count, PyObject* keywords) {
    if (count != 2 && count != 3) return false;
    context = given[0];
    array = given[1];
    op = count == 3 ? given[2] : names().sum;
    plan = timeout = Py_None;
    const Py_ssize_t named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
    for (Py_ssize_t i = 0; i < named; ++i) {
      PyObject* const name = PyTuple_GET_ITEM(keywords, i);
      PyObject* const value = given[count + static_cast<std::size_t>(i)];
      if (name == names().op && count == 2) {
        op = value;
      } else if (name == names().plan) {
        plan = value;
      } else if (name == names().timeout) {
        timeout = value;
      } else {
        return false;
      }
    }
    return timeout.is_none() || PyFloat_CheckExact(timeout.ptr());
  }
  std::optional<double> seconds() const {
    if (timeout.is_none()) return std::nullopt;
    return PyFloat_AS_DOUBLE(timeout.ptr());
  }
};

PyObject* call(PyObject* self, PyObject* const* given, std::size_t count, PyObject* keywords) {
  try {
    Arguments arguments;
    if (arguments.parse(given, static_cast<std::size_t>(PyVectorcall_NARGS(count)), keywords)) {
      const auto* const context = direct<ContextHandle>(arguments.context.ptr());
      // Keeps it, as another thread may close the context meanwhile.
      const nb::object calls = nb::borrow(context == nullptr ? nullptr : context->runtime->calls);
      if (calls.is_valid() &&
          nb::inst_ptr<AllreduceCalls>(calls)->run(arguments.array, arguments.op, arguments.plan,
                                                   arguments.seconds())) {
        return arguments.array.inc_ref().ptr();
      }
    }
  } catch (...) {
    return raised(std::current_exception());
  }
  return PyObject_Vectorcall(of(self)->function, given, count, keywords);
}

PyObject* bound(PyObject* self, PyObject* context, PyObject*) {
  return context == nullptr || context == Py_None ? Py_NewRef(self) : PyMethod_New(self, context);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(of(self)->function);
  Py_VISIT(of(self)->attributes);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(of(self)->function);
  Py_CLEAR(of(self)->attributes);
  return 0;
}

void destroy(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* repeated_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Repeated, call), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Repeated, attributes), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr}};
  static PyGetSetDef attributes[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bound)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_members, members},
                                {Py_tp_getset, attributes},
                                {0, nullptr}};
  static PyType_Spec spec = {"pgasdl._native.Repeated", sizeof(Repeated), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                 Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                             slots};
  static PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nb::python_error();
  return reinterpret_cast<PyTypeObject*>(type);
}

nb::object repeated(nb::object function) {
  PyTypeObject* const type = repeated_type();
  nb::object made = nb::steal(type->tp_alloc(type, 0));
  if (!made.is_valid()) throw nb::python_error();
  of(made.ptr())->call = call;
  of(made.ptr())->function = function.release().ptr();
  return made;
}

}  // namespace

void bind_allreduce(nb::module_& module) {
  nb::class_<AllreduceCalls>(module, "AllreduceCalls",
                             "Which execution each call of ctx.allreduce made before runs.")
      .def(nb::init<const NumberingHandle&>(), "numbering"_a)
      .def_prop_rw(
          "number", [](const AllreduceCalls& self) { return self.numbering().number(); },
          [](const AllreduceCalls& self, std::uint64_t number) {
            self.numbering().set_number(number);
          },
          "Executions that have begun.")
      .def("serve", &AllreduceCalls::serve, "context"_a,
           "From now on calls of ``context.allreduce`` of all ranks are looked for here first.")
      .def("run", &AllreduceCalls::run, "array"_a.none(), "op"_a.none(), "plan"_a.none(),
           "timeout"_a.none(), "False: this call was not made before, or it was declined.")
      .def("admit", &AllreduceCalls::admit, "description"_a,
           "MismatchError for another call than the one that was interrupted.")
      .def("make", &AllreduceCalls::make, "array"_a, "address"_a, "description"_a, "parts"_a,
           "timeout"_a, "stream"_a.none(),
           "Run a new call, part by part, or the rest of the interrupted one; the caller has "
           "entered the numbering. False: it was declined.")
      .def("remember", &AllreduceCalls::remember, "array"_a, "op"_a, "plan"_a.none(),
           "From now on run() knows the call that was made last.")
      .def("forget", &AllreduceCalls::forget)
      .def("take_declined", &AllreduceCalls::take_declined,
           "The description of the call that some rank declined; tells it once.");
  module.def("repeated", &repeated, "function"_a,
             "Context.allreduce, by way of AllreduceCalls or else of this function.");
}

}  // namespace pgasdl

// Methods that are called once per message: these check their arguments themselves, since the
// general dispatch takes longer than the message.
#pragma once

#include <cstddef>
#include <exception>

#include "python/handles.hpp"

namespace pgasdl {

// Raises the exception in Python, by a nanobind function that can translate it.
PyObject* raised(std::exception_ptr thrown);

// An argument as T; null if it is no T, or of a more distant subclass in Python: then the general
// dispatch converts it, or refuses it with an explanation.
template <typename T>
const T* direct(PyObject* argument) {
  static PyTypeObject* const type = reinterpret_cast<PyTypeObject*>(nb::type<T>().ptr());
  PyTypeObject* const its = Py_TYPE(argument);
  if ((its != type && its->tp_base != type) || !nb::inst_ready(argument)) return nullptr;
  return nb::inst_ptr<T>(argument);
}

inline bool direct(PyObject* argument, Integer& integer) {
  if (!PyLong_CheckExact(argument)) return false;
  int overflow = 0;
  integer.value = PyLong_AsLongLongAndOverflow(argument, &overflow);
  return overflow == 0;
}

// Passes calls of nanobind's `method` with only positional arguments to
//   PyObject* Call(PyObject* const* arguments, std::size_t n, bool& other),
// which sets `other` to leave the call to the general dispatch. The method object stays the same,
// and so do its signature, documentation and stub.
template <auto Call>
class DirectCalls {
 public:
  static void serve(nb::handle method) {
    general_ = PyVectorcall_Function(method.ptr());
    if (general_ == nullptr) return;
    // The offset in the method object at which its type keeps the vectorcall function.
    const auto offset = Py_TYPE(method.ptr())->tp_vectorcall_offset;
    *reinterpret_cast<vectorcallfunc*>(reinterpret_cast<char*>(method.ptr()) + offset) = &call;
  }

 private:
  static PyObject* call(PyObject* self, PyObject* const* arguments, std::size_t flagged,
                        PyObject* keywords) {
    const auto n = static_cast<std::size_t>(PyVectorcall_NARGS(flagged));
    if (keywords == nullptr || PyTuple_GET_SIZE(keywords) == 0) {
      bool other = false;
      try {
        PyObject* const result = Call(arguments, n, other);
        if (!other) return result;
      } catch (...) {
        return raised(std::current_exception());
      }
    }
    return general_(self, arguments, flagged, keywords);
  }

  static inline vectorcallfunc general_ = nullptr;
};

}  // namespace pgasdl

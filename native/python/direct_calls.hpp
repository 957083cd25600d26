// Methods that are called once per message: what their arguments are is seen here, without the
// general dispatch, which takes longer than the message.
#pragma once

#include <cstddef>
#include <exception>

#include "python/handles.hpp"

namespace pgasdl {

// Raises in Python what was thrown, by a function of nanobind's, which knows how.
PyObject* raised(std::exception_ptr thrown);

// An argument as T, or null if it is none, or of a class far from T's in Python: the general
// dispatch then converts it, or refuses it in words.
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

// Lets calls of `method` (of nanobind's) with positional arguments alone go to
//   PyObject* Call(PyObject* const* arguments, std::size_t n, bool& other),
// which sets `other` if it is not for it to answer. The object stays what it is, so that its
// signature, documentation and stub do.
template <auto Call>
class DirectCalls {
 public:
  static void serve(nb::handle method) {
    general_ = PyVectorcall_Function(method.ptr());
    if (general_ == nullptr) return;
    // Where an object's type says that the object keeps what is called.
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

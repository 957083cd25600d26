#include "python/direct_calls.hpp"

namespace pgasdl {
namespace {

const char* python_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kRank:
      return "RankError";
    case ErrorKind::kSegment:
      return "SegmentError";
    case ErrorKind::kAlignment:
      return "AlignmentError";
    case ErrorKind::kNotification:
      return "NotificationError";
    case ErrorKind::kQueue:
      return "QueueError";
    case ErrorKind::kBuffer:
      return "BufferRefusedError";
    case ErrorKind::kClosed:
      return "ClosedError";
    case ErrorKind::kPlan:
      return "PlanError";
    case ErrorKind::kMismatch:
      return "MismatchError";
    case ErrorKind::kPeerLost:
      return "PeerLostError";
    case ErrorKind::kUnavailable:
      return "UnavailableError";
    case ErrorKind::kTimeout:
      return "PgasTimeoutError";
    case ErrorKind::kSystem:
      break;
  }
  return "PgasError";
}

nb::object error_type(const char* name) { return nb::module_::import_("pgasdl.errors").attr(name); }

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object type = error_type(python_name(error.kind()));
    const nb::object instance = error.kind() == ErrorKind::kPeerLost
                                    ? type(error.what(), error.rank())
                                    : type(error.what());
    PyErr_SetObject(type.ptr(), instance.ptr());
  }
}

// Making the exception runs Python code, where a pending Ctrl-C may be raised instead.
void translate_or_be_interrupted(const std::exception_ptr& pointer, void* unused) {
  try {
    translate(pointer, unused);
  } catch (nb::python_error& other) {
    other.restore();
  }
}

}  // namespace

void raise(const char* error, const std::string& message) {
  const nb::object type = error_type(error);
  PyErr_SetString(type.ptr(), message.c_str());
  throw nb::python_error();
}

PyObject* raised(std::exception_ptr thrown) {
  static const nb::object* const raise =
      new nb::object(nb::cpp_function([](const nb::capsule& what) {
        std::rethrow_exception(*static_cast<std::exception_ptr*>(what.data()));
      }));
  try {
    (*raise)(nb::capsule(&thrown));
  } catch (nb::python_error& error) {
    error.restore();
  }
  return nullptr;
}

void bind_errors(nb::module_&) { nb::register_exception_translator(translate_or_be_interrupted); }

}  // namespace pgasdl

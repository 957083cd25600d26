#pragma once

#include <Python.h>
#include <unistd.h>

namespace pgasdl {

// This thread does not hold the GIL while this lives.
//
// When Python ends, it ends threads that want the GIL again by unwinding their stacks, until 3.14:
// in a destructor, and in nanobind, that ends the process by abort(). Such a thread stays here
// instead, as it does from 3.14 on, until the process ends.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  ~WithoutGil() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) pause();
    }
  }

 private:
  PyThreadState* const state_;
};

}  // namespace pgasdl

#pragma once

#include <Python.h>
#include <unistd.h>

namespace pgasdl {

// Releases the GIL for its lifetime.
//
// Until 3.14, an ending Python unwinds the stacks of threads that want the GIL again, which in a
// destructor, and in nanobind, ends the process by abort(). Such a thread waits here instead until
// the process ends, as it does from 3.14 on.
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

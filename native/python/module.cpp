#include "python/handles.hpp"

NB_MODULE(_native, module) {
  // A context that is open when the interpreter ends is closed by atexit; it is no leak.
  nanobind::set_leak_warnings(false);
  module.doc() = "Native core of pgasdl.";
  pgasdl::bind_errors(module);
  pgasdl::bind_memory(module);
  pgasdl::bind_context(module);
  pgasdl::bind_group(module);
  pgasdl::bind_exchange(module);
}

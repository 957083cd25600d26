#include "python/handles.hpp"
#include "reduce/kernels.hpp"

namespace {

// The instruction set that the reductions use.
const char* isa() {
  using pgasdl::Isa;
  if (&pgasdl::best_kernels() == pgasdl::kernels_for(Isa::kAvx512)) return "avx512";
  if (&pgasdl::best_kernels() == pgasdl::kernels_for(Isa::kAvx2)) return "avx2";
  return "baseline";
}

}  // namespace

NB_MODULE(_native, module) {
  // atexit closes a context that is still open when the interpreter ends, so it is no leak.
  nanobind::set_leak_warnings(false);
  module.doc() = "Native core of pgasdl.";
  module.attr("isa") = isa();
  pgasdl::bind_errors(module);
  pgasdl::bind_memory(module);
  pgasdl::bind_device(module);
  pgasdl::bind_mpi(module);
  pgasdl::bind_verbs(module);
  pgasdl::bind_context(module);
  pgasdl::bind_group(module);
  pgasdl::bind_exchange(module);
  pgasdl::bind_allreduce(module);
  pgasdl::bind_schedule(module);
  pgasdl::bind_measure(module);
  pgasdl::bind_simulate(module);
  pgasdl::bind_formats(module);
}

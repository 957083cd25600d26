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

// Lets `inspect.signature`, help() and editors know the parameters of the core's methods, which
// nanobind describes in its own way. Their types are immutable for Python.
void give_signatures() {
  namespace nb = nanobind;
  const nb::object getter = nb::cpp_function([](nb::handle method) {
    return nb::module_::import_("pgasdl.signatures").attr("signature_of")(method);
  });
  const nb::object property = nb::module_::import_("builtins").attr("property")(getter);
  const nb::object method = nb::type<pgasdl::ContextHandle>().attr("wait");
  const nb::object bound = nb::steal(
      Py_TYPE(method.ptr())
          ->tp_descr_get(method.ptr(), Py_None, reinterpret_cast<PyObject*>(Py_TYPE(Py_None))));
  for (PyTypeObject* const type : {Py_TYPE(method.ptr()), Py_TYPE(bound.ptr())}) {
    PyDict_SetItemString(type->tp_dict, "__signature__", property.ptr());
    PyType_Modified(type);
  }
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
  give_signatures();
}

#include "transport/mpi/mpi.hpp"

#include <nanobind/stl/map.h>
#include <nanobind/stl/set.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "python/handles.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

MpiWorld::Threads threads_of(const std::string& name) {
  if (name == "multiple") return MpiWorld::Threads::kMultiple;
  return name == "serialized" ? MpiWorld::Threads::kSerialized : MpiWorld::Threads::kOne;
}

}  // namespace

void bind_mpi(nb::module_& module) {
  nb::class_<MpiWorld>(module, "MpiWorld",
                       "A communicator of mpi4py's MPI, and windows over segments' memory.")
      .def_static(
          "make",
          [](const std::string& file, bool handles_are_pointers,
             const std::map<std::string, std::uintptr_t>& handles,
             const std::map<std::string, int>& numbers, const std::string& threads, Rank rank,
             Rank size, std::set<Rank> near, bool messages_near) {
            MpiLibrary::Constants constants;
            constants.byte = handles.at("byte");
            constants.uint64 = handles.at("uint64");
            constants.sum = handles.at("sum");
            constants.info_null = handles.at("info_null");
            constants.errors_return = handles.at("errors_return");
            constants.no_check = numbers.at("no_check");
            constants.any_source = numbers.at("any_source");
            constants.win_model = numbers.at("win_model");
            constants.win_unified = numbers.at("win_unified");
            constants.source_in_status = numbers.at("source_in_status");
            constants.own_by_processor = numbers.at("own_by_processor") != 0;
            constants.windows_by_turns = numbers.at("windows_by_turns") != 0;
            constants.far_puts = numbers.at("far_puts") != 0;
            return std::make_shared<MpiWorld>(
                MpiLibrary::load(file, handles_are_pointers, constants), handles.at("communicator"),
                rank, size, std::move(near), messages_near, threads_of(threads));
          },
          "file"_a, "handles_are_pointers"_a, "handles"_a, "numbers"_a, "threads"_a, "rank"_a,
          "size"_a, "near"_a, "messages_near"_a)
      .def_prop_ro("rank", &MpiWorld::rank)
      .def_prop_ro("size", &MpiWorld::size)
      .def_prop_ro("near", &MpiWorld::near,
                   "Ranks whose windows of MPI's own memory are mapped here, this one among them.")
      .def(
          "finish",
          [](MpiWorld& self, double seconds) {
            const WithoutGil release;
            self.finish(seconds);
          },
          "seconds"_a, "Frees all windows, if every rank comes here in time.");
}

}  // namespace pgasdl

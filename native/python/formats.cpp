#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "formats/tar_samples.hpp"
#include "python/handles.hpp"
#include "python/without_gil.hpp"

namespace pgasdl {
namespace {

using namespace nb::literals;

// The memory of a bytes, bytearray or memoryview, which cannot change its size meanwhile.
class Buffer {
 public:
  explicit Buffer(nb::handle object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE)) throw nb::python_error();
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { PyBuffer_Release(&view_); }
  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

template <typename Number>
nb::bytes bytes_of(const std::vector<Number>& numbers) {
  return nb::bytes(numbers.data(), numbers.size() * sizeof(Number));
}

std::string_view view_of(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

}  // namespace

void bind_formats(nb::module_& module) {
  nb::class_<TarSamples>(module, "TarSamples", "The samples of a tar, out of its headers.")
      .def(nb::init<std::uint64_t>(), "nbytes"_a)
      .def(
          "walk",
          [](TarSamples& self, nb::object data, std::uint64_t begin) -> const char* {
            const Buffer buffer(data);
            TarSamples::Stop stop;
            {
              const WithoutGil release;
              stop = self.walk(buffer.data(), buffer.size(), begin);
            }
            switch (stop) {
              case TarSamples::Stop::kMore:
                return "more";
              case TarSamples::Stop::kOther:
                return "other";
              case TarSamples::Stop::kName:
                return "name";
              default:
                return "end";
            }
          },
          "data"_a, "begin"_a,
          "Take the plain members whose headers lie in ``data``, the bytes of the tar from "
          "``begin`` on. Why it stopped at ``offset``: \"more\" data are wanted, an \"other\" "
          "member, one of another \"name\", \"end\".")
      .def(
          "add",
          [](TarSamples& self, const nb::bytes& key, const nb::bytes& extension,
             std::uint64_t offset, std::uint64_t nbytes) {
            return self.add(view_of(key), view_of(extension), offset, nbytes);
          },
          "key"_a, "extension"_a, "offset"_a, "nbytes"_a,
          "Add a field. False: its sample has one of that name.")
      .def("__len__", [](const TarSamples& self) { return self.key_nbytes().size(); })
      .def_prop_rw("offset", &TarSamples::offset, &TarSamples::go_on, "Where the walk goes on.")
      .def_prop_ro(
          "found",
          [](const TarSamples& self) {
            const TarSamples::Member& member = self.found();
            return std::tuple(nb::bytes(member.name.data(), member.name.size()), member.begin,
                              member.nbytes);
          },
          "Of the plain member where a \"name\" stopped the walk: name, where its data are, bytes.")
      .def_prop_ro("last", &TarSamples::last, "Where the last member began that was taken.")
      .def(
          "columns",
          [](const TarSamples& self) -> nb::typed<nb::dict, nb::str, nb::bytes> {
            nb::dict columns;
            columns["keys"] = nb::bytes(self.keys().data(), self.keys().size());
            columns["key_nbytes"] = bytes_of(self.key_nbytes());
            columns["n_members"] = bytes_of(self.n_members());
            columns["extension"] = bytes_of(self.extension());
            columns["offset"] = bytes_of(self.offsets());
            columns["nbytes"] = bytes_of(self.sizes());
            return nb::borrow<nb::typed<nb::dict, nb::str, nb::bytes>>(columns);
          },
          "Arrays, as bytes: of samples int32, of fields int32, int64 and int64.")
      .def_prop_ro(
          "extensions",
          [](const TarSamples& self) -> nb::typed<nb::list, nb::bytes> {
            nb::list names;
            for (const std::string& name : self.extensions())
              names.append(nb::bytes(name.data(), name.size()));
            return nb::borrow<nb::typed<nb::list, nb::bytes>>(names);
          },
          "Each one that there is, as bytes.");
}

}  // namespace pgasdl

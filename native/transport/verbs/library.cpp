#include "transport/verbs/library.hpp"

#include <dlfcn.h>
#include <sys/utsname.h>

#include <cstdio>

#include "sys/error.hpp"

namespace pgasdl {
namespace {

constexpr const char* kFile = "libibverbs.so.1";

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) {
    throw Error(ErrorKind::kUnavailable, text(kFile, " has no ", name, ": too old?"));
  }
}

bool kernel_before(int major, int minor) {
  utsname names{};
  int here[2] = {0, 0};
  if (uname(&names) != 0 || std::sscanf(names.release, "%d.%d", &here[0], &here[1]) != 2)
    return true;
  return here[0] < major || (here[0] == major && here[1] < minor);
}

VerbsLibrary load() {
  void* handle = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Error(ErrorKind::kUnavailable,
                text("no RDMA here: ", dlerror(),
                     " (Debian: apt-get install libibverbs1 ibverbs-providers)"));
  }
  VerbsLibrary library;
#define PGASDL_FIND(name) find(handle, "ibv_" #name, library.name);
  PGASDL_VERBS_FUNCTIONS(PGASDL_FIND)
#undef PGASDL_FIND
  library.reg_dmabuf_mr =
      reinterpret_cast<decltype(library.reg_dmabuf_mr)>(dlsym(handle, "ibv_reg_dmabuf_mr"));
  // A parent's registered pages stay its own. Recent kernels ensure that themselves; on others
  // ibv_fork_init does, by leaving these pages out of the child, which then has no views of them.
  if (kernel_before(5, 12)) {
    if (const int error = library.fork_init(); error != 0) throw_system("ibv_fork_init", error);
  }
  return library;
}

}  // namespace

const VerbsLibrary& verbs_library() {
  static const VerbsLibrary library = load();  // the next call repeats a failed attempt
  return library;
}

}  // namespace pgasdl

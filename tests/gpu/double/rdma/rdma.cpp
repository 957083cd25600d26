// Lets an adapter reach memory of the double: `ibv_reg_dmabuf_mr`, which soft-RoCE's driver lacks,
// put in front of libibverbs by LD_PRELOAD. The adapter gets the memory where the double itself has
// it; requests name it by the device's addresses, as with a GPU.
#include <dlfcn.h>
#include <fcntl.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::uint64_t kPage = 4096;

// Of a library that the process has loaded.
template <typename Function>
Function* loaded(const char* library, const char* name) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  return handle == nullptr ? nullptr
                           : reinterpret_cast<Function*>(dlvsym(handle, name, "IBVERBS_1.7"));
}

void* reg_dmabuf_mr(void* domain, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                    int descriptor, int access) {
  errno = EBADF;
  if (fcntl(descriptor, F_GETFD) < 0) return nullptr;
  errno = EINVAL;
  void* const cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (cuda == nullptr || offset != iova % kPage) return nullptr;
  auto* const host_address =
      reinterpret_cast<void* (*)(std::uint64_t)>(dlsym(cuda, "doubleHostAddress"));
  using RegMrIova = void*(void*, void*, std::size_t, std::uint64_t, int);
  auto* const reg_mr_iova = loaded<RegMrIova>("libibverbs.so.1", "ibv_reg_mr_iova");
  if (host_address == nullptr || reg_mr_iova == nullptr) return nullptr;
  return reg_mr_iova(domain, host_address(iova), length, iova, access);
}

}  // namespace

// What the library looks up at run time goes by this.
extern "C" __attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) {
  if (std::strcmp(name, "ibv_reg_dmabuf_mr") == 0) return reinterpret_cast<void*>(reg_dmabuf_mr);
  using Dlsym = void*(void*, const char*);
  static auto* const real = reinterpret_cast<Dlsym*>(dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
  return real(handle, name);
}

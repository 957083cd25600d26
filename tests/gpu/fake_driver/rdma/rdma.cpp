// Lets an adapter reach memory of the fake driver: `ibv_reg_dmabuf_mr`, which soft-RoCE's driver
// lacks, and `ibv_reg_mr` as with nvidia-peermem, put before libibverbs by LD_PRELOAD. The adapter
// gets the memory at the fake driver's own address; requests name it by the device's addresses, as
// with a GPU.
#include <dlfcn.h>
#include <fcntl.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

constexpr std::uint64_t kPage = 4096;

// A function of a library, if the process has loaded that.
template <typename Function>
Function* loaded(const char* library, const char* name, const char* version = nullptr) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return nullptr;
  return reinterpret_cast<Function*>(version == nullptr ? dlsym(handle, name)
                                                        : dlvsym(handle, name, version));
}

constexpr const char* kVerbs = "libibverbs.so.1";
constexpr const char* kCuda = "libcuda.so.1";

bool on_device(std::uint64_t address) {
  auto* const ask = loaded<int(void*, int, std::uint64_t)>(kCuda, "cuPointerGetAttribute");
  unsigned type = 0;
  constexpr int kMemoryType = 2;
  constexpr unsigned kDevice = 2;
  return ask != nullptr && ask(&type, kMemoryType, address) == 0 && type == kDevice;
}

void* registered(void* domain, std::uint64_t address, std::size_t length, int access) {
  using RegMrIova = void*(void*, void*, std::size_t, std::uint64_t, int);
  auto* const reg_mr_iova = loaded<RegMrIova>(kVerbs, "ibv_reg_mr_iova", "IBVERBS_1.7");
  auto* const host_address = loaded<void*(std::uint64_t)>(kCuda, "fakeHostAddress");
  if (reg_mr_iova == nullptr || host_address == nullptr) return nullptr;
  return reg_mr_iova(domain, host_address(address), length, address, access);
}

void* reg_dmabuf_mr(void* domain, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                    int descriptor, int access) {
  errno = EBADF;
  if (fcntl(descriptor, F_GETFD) < 0) return nullptr;
  errno = EINVAL;
  return offset == iova % kPage ? registered(domain, iova, length, access) : nullptr;
}

void* reg_mr(void* domain, void* address, std::size_t length, int access) {
  const auto number = reinterpret_cast<std::uint64_t>(address);
  if (on_device(number)) return registered(domain, number, length, access);
  using RegMr = void*(void*, void*, std::size_t, int);
  return loaded<RegMr>(kVerbs, "ibv_reg_mr", "IBVERBS_1.1")(domain, address, length, access);
}

}  // namespace

// The library's look-ups at run time go through this.
extern "C" __attribute__((visibility("default"))) void* dlsym(void* handle, const char* name) {
  if (std::strcmp(name, "ibv_reg_dmabuf_mr") == 0) return reinterpret_cast<void*>(reg_dmabuf_mr);
  if (std::strcmp(name, "ibv_reg_mr") == 0) return reinterpret_cast<void*>(reg_mr);
  using Dlsym = void*(void*, const char*);
  static auto* const real = reinterpret_cast<Dlsym*>(dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5"));
  return real(handle, name);
}

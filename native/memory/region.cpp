#include "memory/region.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "sys/cuda.hpp"
#include "sys/error.hpp"

namespace pgasdl {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
// Mappings of this size or more ask for huge pages: fewer faults and TLB misses for large models.
constexpr std::size_t kHugeFrom = 4u << 20;

constexpr std::size_t kHugePage = 2u << 20;

std::byte* map(int fd, std::size_t bytes) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (address == MAP_FAILED) {
    throw_system(text("mapping ", bytes, " bytes of memory (vm.max_map_count, or memory)"), errno);
  }
  if (bytes >= kHugeFrom) madvise(address, bytes, MADV_HUGEPAGE);
  return static_cast<std::byte*>(address);
}

}  // namespace

std::size_t page_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void prefault(std::byte* data, std::size_t bytes) {
#if defined(MADV_POPULATE_WRITE)
  constexpr int kPopulate = MADV_POPULATE_WRITE;
#else
  constexpr int kPopulate = 23;  // since Linux 5.14; the C library may not define it
#endif
  const auto address = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t begin = address / page_bytes() * page_bytes();
  if (bytes != 0) madvise(reinterpret_cast<void*>(begin), bytes + (address - begin), kPopulate);
}

std::shared_ptr<Region> Region::create(std::size_t bytes, UniqueFd& fd) {
  bytes = round_up(std::max<std::size_t>(bytes, 1), page_bytes());
  fd.reset(memfd_create("pgasdl", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_refused("memory for a segment", "memfd_create", errno);
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw_system(text("a segment of ", bytes, " bytes"), errno);
  }
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw_system("sealing a memfd", errno);
  return std::shared_ptr<Region>(new Region(map(fd.get(), bytes), bytes));
}

std::shared_ptr<Region> Region::create_private(std::size_t bytes) {
  bytes = round_up(std::max<std::size_t>(bytes, 1), page_bytes());
  if (bytes < kHugeFrom) return std::shared_ptr<Region>(new Region(map(-1, bytes), bytes));
  // Only memory aligned to a huge page becomes one: map one more, then unmap both ends.
  std::byte* mapped = map(-1, bytes + kHugePage);
  const std::size_t before = -reinterpret_cast<std::uintptr_t>(mapped) % kHugePage;
  std::byte* data = mapped + before;
  if (before > 0) munmap(mapped, before);
  munmap(data + bytes, kHugePage - before);
  return std::shared_ptr<Region>(new Region(data, bytes));
}

std::shared_ptr<Region> Region::attach(int fd, std::size_t bytes) {
  bytes = round_up(std::max<std::size_t>(bytes, 1), page_bytes());
  struct stat status{};
  if (fstat(fd, &status) != 0) throw_system("looking at a peer's memory", errno);
  if (static_cast<std::size_t>(status.st_size) < bytes ||
      (fcntl(fd, F_GET_SEALS) & kSeals) != kSeals) {
    throw Error(ErrorKind::kSegment, "a peer's memory is not sealed, or smaller than announced");
  }
  return std::shared_ptr<Region>(new Region(map(fd, bytes), bytes));
}

void Region::pin(int device) {
  if (pinned_.load(std::memory_order_acquire)) [[likely]]
    return;
  const std::lock_guard lock(pinning_);
  if (pinned_.load(std::memory_order_relaxed)) return;
  const cuda::Current current(device);
  cuda::check(cuda::driver().mem_host_register(
                  data_, bytes_, cuda::kHostRegisterPortable | cuda::kHostRegisterDeviceMap),
              text("registering ", bytes_, " bytes of host memory with the GPU's driver"));
  pinned_by_ = device;
  pinned_.store(true, std::memory_order_release);
}

Region::~Region() {
  if (pinned_) {
    try {
      const cuda::Current current(pinned_by_);
      // Memory that stays registered stays mapped: nothing else could be registered at its address.
      if (cuda::driver().mem_host_unregister(data_) != cuda::kSuccess) return;
    } catch (const Error&) {
      // A forked child: the registration belongs to the parent.
    }
  }
  munmap(data_, bytes_);
}

}  // namespace pgasdl

#include "reduce/device_launch.hpp"

#include <algorithm>
#include <cassert>

#include "reduce/kernels.hpp"
#include "reduce/reduce.hpp"
#include "sys/error.hpp"

namespace pgasdl {
namespace {

struct SameKernel {
  DType dtype;
  std::size_t n_sources;  // 0: any
};

// In the order of kDeviceKernelNames, where these come first.
#define PGASDL_ENTRY(dtype, DTYPE, sources) {DType::DTYPE, sources},
constexpr SameKernel kSame[] = {PGASDL_DEVICE_SAME(PGASDL_ENTRY)};
#undef PGASDL_ENTRY

constexpr std::size_t kMixed = std::size(kSame);
constexpr std::size_t kUnaligned = kMixed + kAccumulators;
constexpr std::size_t kCopy = kUnaligned + kAccumulators;
static_assert(kCopy + 1 == kDeviceKernelNames.size());

std::size_t same_kernel(DType dtype, std::size_t n_sources) {
  // The kernel for any number follows those for a fixed one.
  const auto* found = std::ranges::find_if(kSame, [&](const SameKernel& kernel) {
    return kernel.dtype == dtype && (kernel.n_sources == n_sources || kernel.n_sources == 0);
  });
  return static_cast<std::size_t>(found - std::begin(kSame));
}

std::uintptr_t number(const void* address) { return reinterpret_cast<std::uintptr_t>(address); }

// True if `test` holds for the address and dtype of every source and destination.
template <typename Test>
bool all_of(std::span<const Destination> destinations, std::span<const Source> sources, Test test) {
  const auto one = [&](const auto& place) { return test(number(place.address), place.dtype); };
  return std::ranges::all_of(sources, one) && std::ranges::all_of(destinations, one);
}

bool of_one_dtype(std::span<const Destination> destinations, std::span<const Source> sources) {
  return all_of(destinations, sources,
                [&](std::uintptr_t, DType dtype) { return dtype == sources[0].dtype; });
}

void check_number(std::size_t number, unsigned most, const char* what) {
  if (number <= most) return;
  throw Error(ErrorKind::kUnavailable, text("a reduction on a device takes at most ", most, " ",
                                            what, ", this one has ", number));
}

}  // namespace

bool is_copy(std::span<const Destination> destinations, std::span<const Source> sources,
             double scale) {
  return sources.size() == 1 && scale == 1.0 && of_one_dtype(destinations, sources);
}

bool fits_vectors(std::span<const Destination> destinations, std::span<const Source> sources,
                  std::size_t item_size) {
  const std::uintptr_t first = number(sources[0].address);
  return first % item_size == 0 &&
         all_of(destinations, sources, [&](std::uintptr_t address, DType) {
           return (address ^ first) % kDeviceVector == 0;
         });
}

DeviceLaunch device_launch(std::span<const Destination> destinations,
                           std::span<const Source> sources, std::size_t n, double scale) {
  assert(!sources.empty() && !destinations.empty());
  check_number(sources.size(), kDeviceSources, "sources");
  check_number(destinations.size(), kDeviceDestinations, "destinations");
  DeviceLaunch launch{};
  DeviceReduction& p = launch.parameters;
  for (std::size_t s = 0; s < sources.size(); ++s) {
    p.sources[s] = static_cast<const char*>(sources[s].address);
    p.source_dtypes[s] = sources[s].dtype;
  }
  const bool copies = is_copy(destinations, sources, scale);
  for (const Destination& destination : destinations) {
    if (copies && destination.address == sources[0].address) continue;
    p.destinations[p.n_destinations] = static_cast<char*>(destination.address);
    p.destination_dtypes[p.n_destinations++] = destination.dtype;
  }
  p.n = n;
  p.scale = scale;
  p.scale_f32 = static_cast<float>(scale);
  p.n_sources = static_cast<unsigned>(sources.size());

  const DType dtype = sources[0].dtype;
  const std::size_t item = copies ? 1 : item_size(dtype);
  if (of_one_dtype(destinations, sources) && fits_vectors(destinations, sources, item)) {
    if (copies) p.n = n * item_size(dtype);
    p.head = std::min<std::uint64_t>(-number(p.sources[0]) % kDeviceVector / item, p.n);
    p.vectors = (p.n - p.head) * item / kDeviceVector;
    launch.work = p.vectors;
    launch.kernel = copies ? kCopy : same_kernel(dtype, sources.size());
    return launch;
  }
  assert(!copies);
  const bool aligned = all_of(destinations, sources, [](std::uintptr_t address, DType of) {
    return address % item_size(of) == 0;
  });
  launch.work = n;
  launch.kernel =
      (aligned ? kMixed : kUnaligned) + static_cast<std::size_t>(accumulator_for(sources));
  return launch;
}

}  // namespace pgasdl

// The kernels for devices, compiled for this processor, against the reference, bit by bit: which
// kernel a call runs, and what it writes on grids of several sizes.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "check.hpp"
#include "gpu/fake_driver/grid.hpp"
#include "reduce/device_kernels.cu"
#include "reduce/device_launch.hpp"
#include "reduce_cases.hpp"
#include "sys/error.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::reference;

using DeviceKernel = void(DeviceReduction);
#define PGASDL_SAME_FUNCTION(dtype, DTYPE, sources) pgasdl_sum_##dtype##_##sources,
#define PGASDL_MIXED_FUNCTION(name, Acc) pgasdl_mixed_##name,
#define PGASDL_UNALIGNED_FUNCTION(name, Acc) pgasdl_unaligned_##name,
DeviceKernel* const kKernels[] = {
    // clang-format off
    PGASDL_DEVICE_SAME(PGASDL_SAME_FUNCTION)
    PGASDL_DEVICE_MIXED(PGASDL_MIXED_FUNCTION)
    PGASDL_DEVICE_MIXED(PGASDL_UNALIGNED_FUNCTION)
    pgasdl_copy,
    // clang-format on
};
static_assert(std::size(kKernels) == kDeviceKernelNames.size());

std::set<std::string> launched;

void on_grid(unsigned grid, unsigned block, std::span<const Destination> destinations,
             std::span<const Source> sources, std::size_t n, double scale, ReduceOp op) {
  if (is_copy(destinations, sources, scale) && !fits_vectors(destinations, sources, 1)) {
    return pgasdl::reduce(destinations, sources, n, scale, op);
  }
  CHECK(op == ReduceOp::kSum);
  const DeviceLaunch launch = device_launch(destinations, sources, n, scale);
  launched.insert(kDeviceKernelNames[launch.kernel]);
  run_grid(kKernels[launch.kernel], launch.parameters, grid, block);
}

Variants variants() {
  Variants found;
  for (const auto& [grid, block] : {std::pair{1u, 32u}, std::pair{3u, 64u}, std::pair{2u, 512u}}) {
    found.push_back({std::to_string(grid) + " x " + std::to_string(block),
                     [=](const auto&... call) { on_grid(grid, block, call...); }});
  }
  return found;
}

std::string kernel_for(const std::vector<Source>& sources,
                       const std::vector<Destination>& destinations, double scale = 1.0) {
  return kDeviceKernelNames[device_launch(destinations, sources, 100, scale).kernel];
}

void test_choice() {
  alignas(16) static char memory[64];
  const auto at = [](std::size_t shift, DType dtype) { return Source{memory + shift, dtype}; };
  const auto to = [](std::size_t shift, DType dtype) { return Destination{memory + shift, dtype}; };
  const Source f32 = at(0, DType::kF32), bf16 = at(16, DType::kBF16), i64 = at(8, DType::kI64);
  CHECK(kernel_for({f32, f32}, {to(16, DType::kF32)}) == "pgasdl_sum_f32_2");
  CHECK(kernel_for({f32, f32, f32}, {to(16, DType::kF32)}) == "pgasdl_sum_f32_0");
  CHECK(kernel_for({f32}, {to(16, DType::kF32)}, 0.5) == "pgasdl_sum_f32_1");
  CHECK(kernel_for({f32}, {to(16, DType::kF32), to(32, DType::kF32)}) == "pgasdl_copy");
  CHECK(kernel_for({i64, i64}, {to(8, DType::kI64)}) == "pgasdl_sum_i64_2");
  CHECK(kernel_for({bf16, bf16}, {to(0, DType::kF32)}) == "pgasdl_mixed_f32");
  CHECK(kernel_for({f32, f32}, {to(4, DType::kF32)}) == "pgasdl_mixed_f32");
  CHECK(kernel_for({f32, f32}, {to(2, DType::kF32)}) == "pgasdl_unaligned_f32");
  CHECK(kernel_for({i64, at(0, DType::kI32)}, {to(0, DType::kI32)}) == "pgasdl_mixed_i64");

  const DeviceLaunch shifted =
      device_launch(std::vector{to(4, DType::kF32)}, std::vector{at(4, DType::kF32)}, 100, 0.5);
  CHECK(shifted.parameters.head == 3 && shifted.parameters.vectors == 24 && shifted.work == 24);
}

void test_too_many() {
  float value = 1;
  const std::vector<Source> sources(kDeviceSources + 1, {&value, DType::kF32});
  const std::vector<Destination> destinations(kDeviceDestinations + 1, {&value, DType::kF32});
  const std::span<const Source> some = std::span(sources).first(kDeviceSources);
  const std::span<const Destination> one = std::span(destinations).first(1);
  device_launch(std::span(destinations).first(kDeviceDestinations), some, 1, 1.0);
  const auto refused = [&](auto to, auto from, const char* words) {
    try {
      device_launch(to, from, 1, 1.0);
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kUnavailable &&
             std::string(error.what()).find(words) != std::string::npos;
    }
    return false;
  };
  CHECK(refused(one, std::span(sources), "at most 64 sources, this one has 65"));
  CHECK(refused(std::span(destinations), some, "at most 64 destinations, this one has 65"));
}

void test_most_sources() {
  for (const std::size_t k : {kDeviceSources - 1, kDeviceSources}) {
    Case c{std::vector(k, DType::kBF16), {DType::kBF16}, 1003, 1.0, ReduceOp::kSum};
    run(variants(), c);
    c.sources[k - 1] = DType::kF32;
    run(variants(), c);
  }
}

}  // namespace

int main() {
  test_choice();
  test_too_many();
  test_most_sources();
  test_conversions(variants());
  test_one_dtype(variants(), kSums);
  test_mixed(variants(), kSums);
  test_large(variants());
  for (const char* name : kDeviceKernelNames) CHECK_NOTE(launched.contains(name), "%s", name);
  std::puts("ok");
}

// Every kernel of every instruction set of this processor against one scalar reference, bit by bit.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "reduce/copy.hpp"
#include "reduce/kernels.hpp"
#include "reduce/moments.hpp"
#include "reduce/reduce.hpp"
#include "reduce/staging.hpp"
#include "reduce_cases.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::reference;

struct IsaVariant {
  const char* name;
  const Kernels* kernels;
};

std::vector<IsaVariant> variants() {
  std::vector<IsaVariant> found;
  for (auto [name, isa] : {std::pair{"baseline", Isa::kBaseline}, std::pair{"avx2", Isa::kAvx2},
                           std::pair{"avx512", Isa::kAvx512}}) {
    if (const Kernels* kernels = kernels_for(isa)) found.push_back({name, kernels});
  }
  return found;
}

void test_numbers_by_hand() {
  const float a[] = {1, 2, -0.0f, 1e38f}, b[] = {3, 5, -0.0f, 3e38f};
  float out[4], twin[4];
  const Source sources[] = {{a, DType::kF32}, {b, DType::kF32}};
  const Destination destinations[] = {{out, DType::kF32}, {twin, DType::kF32}};
  pgasdl::reduce(destinations, sources, 4, 0.5);
  CHECK(out[0] == 2.0f && out[1] == 3.5f && out[2] == 0.0f && std::signbit(out[2]));
  CHECK(std::isinf(out[3]) && std::memcmp(out, twin, sizeof(out)) == 0);

  const std::int32_t big[] = {2147483647, -5}, one[] = {1, 3};
  std::int32_t sum[2];
  const Source ints[] = {{big, DType::kI32}, {one, DType::kI32}};
  const Destination total[] = {{sum, DType::kI32}};
  pgasdl::reduce(total, ints, 2, 1.0);
  CHECK(sum[0] == std::numeric_limits<std::int32_t>::min() && sum[1] == -2);
  pgasdl::reduce(total, ints, 2, 1.0, ReduceOp::kMin);
  CHECK(sum[0] == 1 && sum[1] == -5);

  CHECK(item_size(DType::kF16) == 2 && item_size(DType::kI64) == 8);
  CHECK(name(DType::kBF16) == "bfloat16" && name(DType::kF32) == "float32");
}

void test_copy() {
  Bytes from(24 << 20), to(from.size());
  for (std::size_t i = 0; i < from.size(); i += 8) put(from.data() + i, 0, random_bits());
  const auto check = [&](std::size_t target, std::size_t source, std::size_t bytes) {
    std::memset(to.data(), 0, to.size());
    copy(to.data() + target, from.data() + source, bytes);
    CHECK_NOTE(std::memcmp(to.data() + target, from.data() + source, bytes) == 0, "%zu", bytes);
    CHECK(target == 0 || to[target - 1] == 0);
    CHECK(to[target + bytes] == 0);
  };
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{100},
                                  (4u << 20) + 1ul, (8u << 20) - 1ul, (20u << 20) + 77ul}) {
    for (const std::size_t target : {0, 1, 63}) check(target, 64 - target, bytes);
  }
  for (const IsaVariant& variant : variants()) {
    for (std::size_t bytes = 0; bytes < 600; ++bytes) {
      for (const std::size_t target : {1, 32, 61}) {
        Bytes small(800);
        variant.kernels->stream(reinterpret_cast<char*>(small.data() + target),
                                reinterpret_cast<const char*>(from.data() + 3), bytes);
        CHECK(std::memcmp(small.data() + target, from.data() + 3, bytes) == 0);
        CHECK(small[target - 1] == 0 && small[target + bytes] == 0);
      }
    }
  }
  to = from;
  copy(to.data(), to.data(), to.size());
  CHECK(to == from);
}

// Enough repetitions to use both ways of copying.
void test_staging_copy() {
  StagingCopy stage;
  Bytes from(2 << 20), to(from.size());
  for (std::size_t i = 0; i < from.size(); i += 8) put(from.data() + i, 0, random_bits());
  for (int round = 0; round < 200; ++round) {
    for (const std::size_t bytes : {100ul, 16384ul, 16385ul, 131072ul, 131111ul}) {
      const std::size_t target = 1 + static_cast<std::size_t>(round) % 64;
      std::memset(to.data(), 0, bytes + 200);
      stage(to.data() + target, from.data() + round, bytes);
      CHECK_NOTE(std::memcmp(to.data() + target, from.data() + round, bytes) == 0, "%zu", bytes);
      CHECK(to[target - 1] == 0 && to[target + bytes] == 0);
    }
  }
  stage(to.data(), from.data(), to.size());
  CHECK(to == from);
}

}  // namespace

// Beside sums in long double; the same bits from each instruction set.
template <class T>
void test_moments(DType dtype) {
  const double closeness = sizeof(T) == sizeof(float) ? 1e-7 : 1e-14;
  std::normal_distribution<double> normal(3, 1);
  for (const double scale : {1.0, 1e-22, 1e25}) {
    for (const std::size_t n : {0, 1, 31, 1023, 4096, 4097, 20000, 70001}) {
      std::vector<T> items(n + 1);
      long double sum = 0, squares = 0, apart = 0;
      for (std::size_t i = 1; i <= n; ++i) {
        const long double item = items[i] = static_cast<T>(scale * normal(random_bits));
        sum += item;
        squares += item * item;
      }
      for (std::size_t i = 1; i <= n; ++i) apart += (items[i] - sum / n) * (items[i] - sum / n);
      const auto near = [&](double found, long double due) {
        return std::abs(found - due) <= closeness * std::abs(due);
      };
      for (const Squares which : {Squares::kNone, Squares::kOfItems, Squares::kFromMean}) {
        const Moments found = moments(items.data() + 1, dtype, n, which);
        for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
          if (kernels_for(isa) == nullptr) continue;
          const Moments other = moments(items.data() + 1, dtype, n, which, isa);
          CHECK(std::memcmp(&found, &other, sizeof found) == 0);
        }
        if (which != Squares::kOfItems) CHECK(near(found.sum, sum));
        if (which == Squares::kOfItems) CHECK(near(found.squares, squares));
        if (which == Squares::kFromMean) {
          CHECK(n < 2 ? found.squares == 0 : near(found.squares, apart));
        }
      }
    }
  }
  std::vector<T> items(9000, 1);
  items[5000] = std::numeric_limits<T>::infinity();
  CHECK(std::isinf(moments(items.data(), dtype, items.size(), Squares::kOfItems).squares));
  items[1] = std::numeric_limits<T>::quiet_NaN();
  CHECK(std::isnan(moments(items.data(), dtype, items.size(), Squares::kOfItems).squares));
}

int main() {
  Variants all;
  for (const IsaVariant& variant : variants()) {
    std::printf("%s ", variant.name);
    all.push_back(
        {variant.name, [=](const auto&... call) { reduce_with(*variant.kernels, call...); }});
  }
  test_numbers_by_hand();
  test_conversions(all);
  test_one_dtype(all);
  test_mixed(all);
  test_large(all);
  test_copy();
  test_staging_copy();
  test_moments<float>(DType::kF32);
  test_moments<double>(DType::kF64);
  std::puts("ok");
}

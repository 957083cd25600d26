// What is known of RDMA devices without one.

#include "check.hpp"
#include "transport/verbs/device.hpp"

namespace {

using namespace pgasdl;

// The codes of libibverbs, in the order of their speeds.
void speeds() {
  constexpr std::uint8_t kOne = 1, kTwo = 16, kFour = 2, kTwelve = 8;
  constexpr std::uint8_t kSdr = 1, kQdr = 4, kFdr10 = 8, kFdr = 16, kEdr = 32, kHdr = 64,
                         kNdr = 128;
  CHECK(gigabits_of(kFour, kQdr) == 40);
  CHECK(gigabits_of(kFour, kNdr) == 400 && gigabits_of(kTwelve, kSdr) == 30);
  CHECK(gigabits_of(kTwo, kEdr) < gigabits_of(kFour, kHdr));
  CHECK(gigabits_of(kTwo, kHdr) < gigabits_of(kFour, kEdr));
  CHECK(gigabits_of(kFour, kQdr) < gigabits_of(kFour, kFdr10));
  CHECK(gigabits_of(kFour, kFdr10) < gigabits_of(kFour, kFdr));
  CHECK(gigabits_of(kOne, kEdr) < gigabits_of(kTwo, kEdr));
  CHECK(gigabits_of(32, kEdr) == 0);
  for (const std::uint8_t nonsense : {std::uint8_t{0}, std::uint8_t{3}, std::uint8_t{255}}) {
    CHECK(gigabits_of(nonsense, kEdr) == 0 && gigabits_of(kFour, nonsense) == 0);
  }
}

}  // namespace

int main() {
  speeds();
  std::puts("ok");
}

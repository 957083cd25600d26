// MPI: segment descriptions, and messages. The library below MpiWorld is a stub that delivers what
// the input says, because no real MPI can be made to.
#include <algorithm>
#include <memory>
#include <vector>

#include "fuzz.hpp"
#include "memory/region.hpp"
#include "pgas/segment.hpp"
#include "transport/mpi/window_group.hpp"

namespace pgasdl::fuzz {
namespace {

constexpr std::uint64_t kBytes = MpiChannel::kMostBytes + 256;
constexpr std::uint32_t kNotifications = 16;

class Library final : public MpiLibrary {
 public:
  Library() : MpiLibrary(Constants{}) {}
  std::string message;  // delivered next, unless empty
  std::byte* memory = nullptr;
  std::uint64_t bytes = 0;
  std::vector<std::string> sent;

  int rput(const void*, int, int, Aint, Handle, Handle*) override { return 1; }
  int rget(void*, int, int, Aint, Handle, Handle*) override { return 1; }
  int fetch_add(const std::uint64_t*, std::uint64_t*, int, Aint, Handle) override { return 1; }
  int compare_swap(const std::uint64_t*, const std::uint64_t*, std::uint64_t*, int, Aint,
                   Handle) override {
    return 1;
  }
  int flush(int, Handle) override { return 0; }
  int test(Handle*, bool* done) override {
    *done = true;
    return 0;
  }
  int isend(const void* from, int n, int, int, Handle, Handle*) override {
    sent.emplace_back(static_cast<const char*>(from), static_cast<std::size_t>(n));
    return 0;
  }
  int irecv(void* to, int n, int, int, Handle, Handle*) override {
    auto* bytes = static_cast<std::byte*>(to);
    bytes[0] = bytes[n - 1] = std::byte{0xff};
    return 0;
  }
  int probe(int, Handle, bool* there, Handle*, int* source) override {
    *there = !message.empty();
    *source = 1;
    return 0;
  }
  int receive(void* to, int most, Handle*, Handle*) override {
    std::memcpy(to, message.data(), std::min(message.size(), static_cast<std::size_t>(most)));
    message.clear();
    return 0;
  }
  int allocate(std::uint64_t n, bool, Handle, void** base, Handle* window) override {
    bytes = round_up(n, page_bytes());
    held_.reset(static_cast<std::byte*>(std::aligned_alloc(page_bytes(), bytes)));
    *base = memory = held_.get();
    std::memset(memory, 0, bytes);
    *window = 1;
    return 0;
  }
  int create(void*, std::uint64_t, Handle, Handle* window) override {
    *window = 2;
    return 0;
  }
  int open(Handle) override { return 0; }
  int unified(Handle, bool* yes) override {
    *yes = true;
    return 0;
  }
  int close_and_free(Handle*) override { return 0; }
  std::byte* mapped(Handle, int) override { return nullptr; }
  int ibarrier(Handle, Handle*) override { return 0; }
  int allgather(std::uint64_t mine, std::uint64_t* all, Handle) override {
    all[0] = all[1] = mine;
    return 0;
  }
  int subset(Handle, const int*, int, int, Handle* made) override {
    *made = 3;
    return 0;
  }

 private:
  std::string words(int) const override { return "refused"; }
  struct Free {
    void operator()(std::byte* held) const { std::free(held); }
  };
  std::unique_ptr<std::byte, Free> held_;
};

std::shared_ptr<MpiWorld> world_of(std::unique_ptr<Library> library, Rank rank) {
  return std::make_shared<MpiWorld>(std::move(library), 1, rank, 2, std::set<Rank>{0, 1}, true,
                                    MpiWorld::Threads::kMultiple);
}

constexpr Rank kMembers[] = {0, 1};

void run(Input& input) {
  auto owned = std::make_unique<Library>();
  Library& library = *owned;
  const auto world = world_of(std::move(owned), 0);
  const auto other = world_of(std::make_unique<Library>(), 1);
  Segment segment(1, kBytes, kNotifications, nullptr, 2);
  Segment theirs(1, kBytes, kNotifications, nullptr, 2);
  const std::string mine = world->publish(segment.local(), kMembers, false);
  const std::string genuine = other->publish(theirs.local(), kMembers, false);
  MpiHeader come{};
  come.kind = MpiHeader::Kind::kCome;
  const auto* described = reinterpret_cast<const MpiDescription*>(mine.data());
  come.board = {described->group, described->ticket};
  library.message.assign(reinterpret_cast<const char*>(&come), sizeof come);
  std::vector<RemoteSegment> remotes(2);
  const bool attached = accepted([&] {
    remotes[1] = MpiWorld::attach(1, input.words(genuine));
    REQUIRE(world->settle(segment.local(), kMembers, remotes, Deadline::in(1), [] {}) ==
            Outcome::kDone);
  });
  const RemoteSegment& remote = remotes[1];
  library.sent.clear();
  other->retract(theirs.local());
  world->retract(segment.local());
  if (!attached) return;
  const MpiWindowName name = static_cast<const MpiRemote*>(remote.keep.get())->window->name();
  const LocalSegment& local = segment.local();
  if (library.memory == nullptr) return;  // windows over existing memory were chosen
  while (!input.empty()) {
    MpiHeader header{};
    header.kind = MpiHeader::Kind::kWrite;
    header.data = header.board = name;
    header.value = 0xffffffff;
    header.bytes = 8;
    std::string words(reinterpret_cast<const char*>(&header), sizeof header);
    words.append(8, '\xff');
    library.message = input.words(words);
    world->receive();
    world->receive();                   // long data come after their header
    REQUIRE(library.sent.size() <= 1);  // the answer to a question, at the next receive
    library.sent.clear();
  }
  // Nothing but the segment's data and its board may have changed.
  const auto* data = local.data;
  const auto* board = reinterpret_cast<const std::byte*>(local.board);
  const auto zero = [](const std::byte* from, const std::byte* to) {
    return std::all_of(from, to, [](std::byte byte) { return byte == std::byte{0}; });
  };
  REQUIRE(data == library.memory);
  REQUIRE(zero(data + kBytes, board));
  REQUIRE(zero(board + local.notifications * sizeof(FlagWord), library.memory + library.bytes));
}

}  // namespace
}  // namespace pgasdl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  pgasdl::fuzz::Input input(data, size);
  pgasdl::fuzz::run(input);
  return 0;
}

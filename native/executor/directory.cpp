#include "executor/directory.hpp"

#include <utility>

#include "executor/numbering.hpp"

namespace pgasdl {
namespace {

// An entry has 12 bits of a generation, the number of a home in 12 bits, and the offset in it.
constexpr int kOffsetBits = 40;
constexpr int kHomeBits = 12;
constexpr int kPlaceBits = kHomeBits + kOffsetBits;
static_assert(kGenerations < 1u << (64 - kPlaceBits));
static_assert(Directory::kElsewhere == (std::uint64_t{1} << kPlaceBits) - 1);

constexpr std::uint64_t low_bits(int n) { return (std::uint64_t{1} << n) - 1; }

}  // namespace

Directory::Directory(std::shared_ptr<Segment> entries, std::uint64_t offset,
                     std::vector<std::shared_ptr<Segment>> homes)
    : entries_(std::move(entries)), offset_(offset), homes_(std::move(homes)) {
  const std::uint64_t bytes = entries_->bytes();
  if (offset_ % sizeof(Entry) != 0 || bytes < sizeof(Entry) || offset_ > bytes - sizeof(Entry)) {
    throw Error(ErrorKind::kPlan, text("a directory at byte ", offset_, " of segment ",
                                       entries_->id(), ", which has ", bytes));
  }
  if (homes_.size() > low_bits(kHomeBits)) {
    throw Error(ErrorKind::kPlan,
                text("a directory of ", homes_.size(), " segments: at most ", low_bits(kHomeBits)));
  }
}

std::uint64_t Directory::entry_of(const std::byte* array, std::uint64_t bytes) const {
  for (std::size_t number = 0; number < homes_.size(); ++number) {
    const Segment& home = *homes_[number];
    const auto offset = static_cast<std::uint64_t>(array - home.local().data);
    if (array < home.local().data || offset > home.bytes() || bytes > home.bytes() - offset ||
        offset > low_bits(kOffsetBits)) {
      continue;
    }
    return number << kOffsetBits | offset;
  }
  return kElsewhere;  // no home has so high a number
}

void Directory::announce(std::uint64_t entry, std::uint32_t generation) {
  // Relaxed: the flag that follows is a release.
  own().store(std::uint64_t{generation} << kPlaceBits | entry, std::memory_order_relaxed);
}

const Directory::Entry& Directory::of(Rank peer) const {
  const RemoteSegment* entries = entries_->remote(peer);
  if (entries == nullptr || entries->data == nullptr) {
    throw Error(ErrorKind::kPlan, text("rank ", peer, "'s directory is not mapped here"));
  }
  return *reinterpret_cast<const Entry*>(entries->data + offset_);
}

std::uint64_t Directory::look_up(Rank peer, std::uint64_t bytes, std::uint32_t generation) const {
  const std::uint64_t announced = of(peer).load(std::memory_order_relaxed);
  const auto refuse = [&] {
    return Error(ErrorKind::kMismatch, text("rank ", peer, " did not tell where its array of ",
                                            bytes, " bytes lies in execution ", generation));
  };
  if (announced >> kPlaceBits != generation) throw refuse();
  const std::uint64_t place = announced & low_bits(kPlaceBits);
  if (place == kElsewhere) return 0;
  const std::uint64_t number = place >> kOffsetBits;
  const std::uint64_t offset = place & low_bits(kOffsetBits);
  const RemoteSegment* home = number < homes_.size() ? homes_[number]->remote(peer) : nullptr;
  if (home == nullptr || home->data == nullptr || offset > home->bytes ||
      bytes > home->bytes - offset) {
    throw refuse();
  }
  return reinterpret_cast<std::uint64_t>(home->data + offset);
}

}  // namespace pgasdl

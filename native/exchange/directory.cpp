#include "exchange/directory.hpp"

#include <utility>

#include "exchange/numbering.hpp"

namespace pgasdl {
namespace {

// An entry: 12 bits of a generation, 12 of a home's number, and the bytes before the array.
constexpr int kOffsetBits = 40;
constexpr int kHomeBits = 12;
static_assert(kGenerations < 1u << (64 - kOffsetBits - kHomeBits));

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
  throw Error(ErrorKind::kPlan, text("an array of ", bytes, " bytes lies in none of the ",
                                     homes_.size(), " segments that peers look for it in"));
}

void Directory::tell(std::uint64_t entry, std::uint32_t generation) {
  auto* const own = reinterpret_cast<Entry*>(entries_->local().data + offset_);
  // The flag that follows is a release.
  own->store(std::uint64_t{generation} << (kOffsetBits + kHomeBits) | entry,
             std::memory_order_relaxed);
}

std::byte* Directory::look_up(Rank peer, std::uint64_t bytes, std::uint32_t generation) const {
  const RemoteSegment* entries = entries_->remote(peer);
  if (entries == nullptr || entries->data == nullptr) {
    throw Error(ErrorKind::kPlan, text("rank ", peer, "'s directory is not mapped here"));
  }
  const auto* const theirs = reinterpret_cast<const Entry*>(entries->data + offset_);
  const std::uint64_t told = theirs->load(std::memory_order_relaxed);
  const std::uint64_t number = told >> kOffsetBits & low_bits(kHomeBits);
  const std::uint64_t offset = told & low_bits(kOffsetBits);
  const RemoteSegment* home = number < homes_.size() ? homes_[number]->remote(peer) : nullptr;
  if (told >> (kOffsetBits + kHomeBits) != generation || home == nullptr || home->data == nullptr ||
      offset > home->bytes || bytes > home->bytes - offset) {
    throw Error(ErrorKind::kMismatch, text("rank ", peer, " did not tell where its array of ",
                                           bytes, " bytes lies in execution ", generation));
  }
  return home->data + offset;
}

}  // namespace pgasdl

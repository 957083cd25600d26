// A group's all-gathers: by slots that every member has at every other, in pieces.
#include <algorithm>
#include <cstring>

#include "pgas/context.hpp"
#include "pgas/group.hpp"

namespace pgasdl {
namespace {

constexpr std::size_t kExchangeBytes = 1024;
constexpr std::size_t kReduceBytes = 8192;

}  // namespace

std::size_t Group::slot_bytes(Kind kind) {
  return kind == Kind::kExchange ? kExchangeBytes : kReduceBytes;
}

std::uint64_t Group::slot_offset(const Exchange& exchange, Kind kind, Rank member) const {
  const std::uint64_t slot =
      (exchange.generation & 1) * ranks_.size() + static_cast<std::uint64_t>(member);
  return exchange.slots_offset + slot * (sizeof(Header) + slot_bytes(kind));
}

void Group::refuse_another(const Exchange& exchange, const std::string& what) const {
  throw Error(
      ErrorKind::kMismatch,
      text(what, ": ", exchange.what, " ended half way on this group of rank ", context_.rank(),
           ": continue that one first, with the same arguments, or form another group"));
}

void Group::begin_piece(Exchange& exchange, Kind kind) {
  exchange.generation = following(exchange.generation);
  exchange.next_to_send = 0;
  const std::size_t first = std::min(exchange.piece * slot_bytes(kind), exchange.mine.size());
  const std::size_t bytes = std::min(slot_bytes(kind), exchange.mine.size() - first);
  Header header{exchange.fingerprint,
                exchange.mine.size(),
                static_cast<std::uint32_t>(bytes),
                exchange.generation,
                {}};
  exchange.what.copy(header.what, sizeof header.what - 1);
  std::byte* slot = control_->local().data + slot_offset(exchange, kind, index_);
  std::memcpy(slot, &header, sizeof header);
  if (bytes != 0) std::memcpy(slot + sizeof header, exchange.mine.data() + first, bytes);
  exchange.bytes_to_send = sizeof header + bytes;
  context_.recorder().record(Operation::kAllgather, -1, control_->id(), exchange.generation, bytes);
}

bool Group::take_piece(Exchange& exchange, Kind kind) {
  std::uint64_t longest = 0;
  std::string others;
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    const std::byte* slot =
        control_->local().data + slot_offset(exchange, kind, static_cast<Rank>(member));
    Header header;
    std::memcpy(&header, slot, sizeof header);
    if (header.fingerprint != exchange.fingerprint || header.bytes > slot_bytes(kind)) {
      header.what[sizeof header.what - 1] = 0;
      others += text(others.empty() ? "" : ", ", "rank ", ranks_[member], " is in ", header.what);
      continue;
    }
    longest = std::max(longest, header.total);
    exchange.all[member].append(reinterpret_cast<const char*>(slot + sizeof header), header.bytes);
  }
  if (!others.empty()) {
    throw Error(ErrorKind::kMismatch,
                text("collective ", exchange.generation, " of segment ", control_->id(),
                     "'s group: rank ", context_.rank(), " is in ", exchange.what, ", but ", others,
                     ": order, sizes and dtypes must be the same on all ranks"));
  }
  return ++exchange.piece * slot_bytes(kind) >= longest;
}

Outcome Group::allgather(const Inside&, Kind kind, const std::string& what,
                         std::uint64_t fingerprint, std::span<const std::byte> mine,
                         Deadline deadline, std::vector<std::string>& all) {
  Exchange& exchange = exchanges_[static_cast<std::size_t>(kind)];
  check_members(what.c_str());
  if (kind == Kind::kExchange && !remotes_.empty()) refuse_another(exchange, what);
  if (!exchange.under_way) {
    exchange.what = what;
    exchange.fingerprint = fingerprint;
    exchange.mine.assign(reinterpret_cast<const char*>(mine.data()), mine.size());
    exchange.all.assign(ranks_.size(), {});
    exchange.piece = 0;
    begin_piece(exchange, kind);
    exchange.under_way = true;
  } else if (exchange.what != what || exchange.fingerprint != fingerprint ||
             !std::ranges::equal(std::as_bytes(std::span(exchange.mine)), mine)) {
    refuse_another(exchange, what);
  }
  const std::size_t members = ranks_.size();
  for (;;) {
    const std::uint64_t my_slot = slot_offset(exchange, kind, index_);
    std::size_t arrived = 0;
    const auto ready = [&] {
      for (; exchange.next_to_send < members; ++exchange.next_to_send) {
        const auto member = static_cast<Rank>(exchange.next_to_send);
        if (member == index_) continue;
        if (!send(member, my_slot, exchange.bytes_to_send, my_slot,
                  exchange.first_id + static_cast<std::uint32_t>(index_), exchange.generation)) {
          return false;
        }
      }
      for (; arrived < members; ++arrived) {
        if (static_cast<Rank>(arrived) == index_) continue;
        const auto id = exchange.first_id + static_cast<std::uint32_t>(arrived);
        if (!raised(id, exchange.generation)) return false;
      }
      return true;
    };
    // Everybody needs every member: nobody has to be told of one that is gone.
    const auto slow = [&] {
      for (std::size_t member = arrived; member < members; ++member) {
        const Rank peer = ranks_[member];
        if (context_.liveness().health(peer) == Health::kHealthy) continue;
        const auto id = exchange.first_id + static_cast<std::uint32_t>(member);
        if (!raised(id, exchange.generation)) context_.liveness().require(peer, what.c_str());
      }
    };
    if (context_.waiter().until(ready, slow, deadline, what.c_str()) != Outcome::kDone) {
      return Outcome::kTimeout;
    }
    exchange.under_way = false;
    const bool over = take_piece(exchange, kind);
    if (over) break;
    begin_piece(exchange, kind);
    exchange.under_way = true;
  }
  all = std::move(exchange.all);
  return Outcome::kDone;
}

std::string Group::missing_in_allgather(Kind kind) const {
  if (kind == Kind::kExchange && !remotes_.empty()) {
    return text("segment ", creation_->segment->id(), " of a group of ", ranks_.size(),
                ": every member has described its copy, but not all were there at once to make it; "
                "call it again");
  }
  const Exchange& exchange = exchanges_[static_cast<int>(kind)];
  std::string missing;
  for (std::size_t member = 0; member < ranks_.size(); ++member) {
    const auto id = exchange.first_id + static_cast<std::uint32_t>(member);
    if (static_cast<Rank>(member) != index_ && !raised(id, exchange.generation)) {
      missing +=
          text(missing.empty() ? "" : ", ", "rank ", ranks_[member], " (notification ", id, ")");
    }
  }
  return text("collective ", exchange.generation, " of segment ", control_->id(),
              "'s group: nothing yet from ", missing);
}

}  // namespace pgasdl

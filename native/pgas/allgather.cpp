// A group's all-gathers, in pieces, through slots at every member.
#include <algorithm>
#include <cstring>

#include "pgas/context.hpp"
#include "pgas/group.hpp"

namespace pgasdl {
namespace {

constexpr std::size_t kExchangeBytes = 1024;
constexpr std::size_t kReduceBytes = 8192;
// A limit for all slots of a kind together: larger groups have smaller slots and more pieces. The
// description of a segment in host memory fits one piece in any group.
constexpr std::size_t kAllSlots = 1u << 20;
constexpr std::size_t kLeastBytes = 256;

}  // namespace

std::size_t Group::slot_bytes(Kind kind, std::size_t members) {
  const std::size_t most = kind == Kind::kExchange ? kExchangeBytes : kReduceBytes;
  return std::clamp(kAllSlots / members / 64 * 64, kLeastBytes, most);
}

std::uint64_t Group::slot_offset(const Exchange& exchange, Kind kind, std::size_t distance,
                                 std::uint32_t generation) const {
  const std::uint64_t slot = (generation & 1) * ranks_.size() + distance;
  return exchange.slots_offset + slot * (sizeof(Header) + slot_bytes(kind));
}

template <typename Found>
std::uint64_t Group::walk(const Exchange& exchange, Kind kind, std::size_t distance,
                          std::size_t blocks, Found&& found) const {
  const std::byte* const slot = control_->local().data + slot_offset(exchange, kind, distance);
  std::uint64_t at = 0;
  bool sound = true;
  for (std::size_t block = 0; sound && block < blocks; ++block) {
    Header header;
    std::memcpy(&header, slot + at, sizeof header);
    sound = header.generation == exchange.course.generation && header.bytes <= slot_bytes(kind);
    found(distance + block, slot + at, sound);
    at += sizeof header + (sound ? header.bytes : 0);
  }
  return at;
}

void Group::refuse_another(const Exchange& exchange, const std::string& what) const {
  throw Error(
      ErrorKind::kMismatch,
      text(what, ": ", exchange.what, " ended half way on this group of rank ", context_.rank(),
           ": continue that one first, with the same arguments, or form another group"));
}

void Group::begin_piece(Exchange& exchange, Kind kind) {
  exchange.course.begin();
  exchange.outgoing_step = kNoStep;
  const std::uint32_t generation = exchange.course.generation;
  const std::size_t first = std::min(exchange.piece * slot_bytes(kind), exchange.mine.size());
  const std::size_t bytes = std::min(slot_bytes(kind), exchange.mine.size() - first);
  Header header{exchange.fingerprint,
                exchange.mine.size(),
                static_cast<std::uint32_t>(bytes),
                generation,
                {}};
  exchange.what.copy(header.what, sizeof header.what - 1);
  std::byte* slot = control_->local().data + slot_offset(exchange, kind, 0);
  std::memcpy(slot, &header, sizeof header);
  if (bytes != 0) std::memcpy(slot + sizeof header, exchange.mine.data() + first, bytes);
  context_.recorder().record(Operation::kAllgather, -1, control_->id(), generation, bytes);
}

// Collects the blocks of a step, this rank's own and those behind it, from where they arrived.
void Group::gather_blocks(Exchange& exchange, Kind kind, std::size_t step) {
  const std::vector<DisseminationStep>& steps = exchange.course.steps;
  const auto& [distance, blocks, needed] = steps[step];
  exchange.outgoing.clear();
  exchange.outgoing_step = step;
  const RemoteSegment* remote = control_->remote(ahead(distance));
  std::uint64_t target = slot_offset(exchange, kind, distance);
  const auto add = [&](std::size_t from, std::size_t count) {
    const std::uint64_t bytes =
        walk(exchange, kind, from, count, [](std::size_t, const std::byte*, bool) {});
    exchange.outgoing.push_back(
        {&control_->local(), slot_offset(exchange, kind, from), remote, target, bytes});
    target += bytes;
  };
  add(0, 1);
  for (std::size_t earlier = 0; earlier < needed && steps[earlier].distance < blocks; ++earlier) {
    add(steps[earlier].distance, std::min(steps[earlier].blocks, blocks - steps[earlier].distance));
  }
}

bool Group::take_piece(Exchange& exchange, Kind kind) {
  const std::size_t members = ranks_.size();
  struct Block {
    const std::byte* at = nullptr;
    bool sound = false;
  };
  std::vector<Block> blocks(members);
  const auto found = [&](std::size_t distance, const std::byte* at, bool sound) {
    blocks[(static_cast<std::size_t>(index_) + members - distance) % members] = {at, sound};
  };
  (void)walk(exchange, kind, 0, 1, found);
  for (const DisseminationStep& step : exchange.course.steps) {
    (void)walk(exchange, kind, step.distance, step.blocks, found);
  }
  std::uint64_t longest = 0;
  std::string others;
  for (std::size_t member = 0; member < members; ++member) {
    const auto& [at, sound] = blocks[member];
    Header header{};
    if (at != nullptr) std::memcpy(&header, at, sizeof header);
    if (!sound || header.fingerprint != exchange.fingerprint) {
      header.what[sizeof header.what - 1] = 0;
      others += text(others.empty() ? "" : ", ", "rank ", ranks_[member]);
      others += sound ? text(" is in ", header.what) : " said nothing that can be read";
      continue;
    }
    longest = std::max(longest, header.total);
    exchange.all[member].append(reinterpret_cast<const char*>(at + sizeof header), header.bytes);
  }
  if (!others.empty()) {
    throw Error(ErrorKind::kMismatch,
                text("collective ", exchange.course.generation, " of segment ", control_->id(),
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
  Course& course = exchange.course;
  const auto post = [&](std::size_t step) {
    if (exchange.outgoing_step != step) gather_blocks(exchange, kind, step);
    const auto id = course.first_flag + static_cast<std::uint32_t>(step);
    return send(ahead(course.steps[step].distance), exchange.outgoing, id, course.generation);
  };
  for (;;) {
    if (disseminate(course, post, deadline, WaitCause::kCollective, what.c_str()) !=
        Outcome::kDone) {
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

std::string Group::missing_in_allgather(Kind kind, std::string_view what) const {
  if (kind == Kind::kExchange && !remotes_.empty()) {
    return text(what, ", segment ", creation_->segment->id(), " of a group of ", ranks_.size(),
                ": every member has described its copy, but not all were there at once to make it; "
                "call it again");
  }
  const Course& course = exchanges_[static_cast<std::size_t>(kind)].course;
  std::string missing;
  for (std::size_t step = course.arrived; step < course.end_of_base(course.arrived); ++step) {
    if (arrived(course, step)) continue;
    const auto& [distance, blocks, needed] = course.steps[step];
    missing += text(missing.empty() ? "" : ", ", "rank ", behind(distance), " (notification ",
                    course.first_flag + step);
    missing += blocks == 1 ? ")" : text(", blocks of ", blocks, " ranks)");
  }
  if (!missing.empty()) missing = text("nothing yet from ", missing);
  if (missing.empty() && course.sent < course.steps.size()) {
    missing = text("nothing sent yet to rank ", ahead(course.steps[course.sent].distance));
  }
  return text(missing, ": ", what, ", collective ", course.generation, " of segment ",
              control_->id(), "'s group", elsewhere(what));
}

}  // namespace pgasdl

#include <algorithm>

#include "simulate/model.hpp"

namespace pgasdl::simulate {

Resolved resolve(const Program& program, const Op& op, std::int64_t rank, std::int64_t ranks) {
  Resolved found{op.peer, op.note, op.bytes, false};
  if (op.flags & kRelative) {
    found.peer += rank;
    if (found.peer >= ranks) found.peer -= ranks;
  }
  if (op.flags & kBytesOfPeer) found.bytes = program.table[found.peer];
  if (op.flags & kBytesOfSelf) found.bytes = program.table[rank];
  if (op.flags & kNoteOfPeer) found.note += found.peer;
  if (op.flags & kNoteOfSelf) found.note += rank;
  found.skip = (op.flags & kSkipIfNone) && found.bytes == 0;
  return found;
}

bool Program::index(std::int64_t ranks) {
  alike = ranks > 1;
  for (std::size_t i = 2 * lanes; alike && i < ranges.size(); ++i) {
    alike = ranges[i] == ranges[i - 2 * lanes];
  }
  gathering_of_op.assign(ops.size(), -1);
  gathering_of_note.assign(notifications * (alike ? 1 : ranks), -1);
  // If all ranks are alike, two ranks show every flag: each lacks only its own.
  for (std::int64_t rank = 0; rank < (alike ? 2 : ranks); ++rank) {
    std::int32_t number = 0;
    for (std::int64_t lane = 0; lane < lanes; ++lane) {
      const std::int64_t* range = &ranges[2 * (rank * lanes + lane)];
      bool waiting = false;
      for (std::int64_t at = range[0]; at < range[1]; ++at) {
        const bool waits = (ops[at].flags & 7) == kWait;
        if (waiting && !waits) ++number;
        waiting = waits;
        if (!waits) continue;
        gathering_of_op[at] = number;
        const std::int64_t note = resolve(*this, ops[at], rank, ranks).note;
        std::int32_t& of = gathering_of_note[(alike ? 0 : rank) * notifications + note];
        if (of >= 0 && (!alike || of != number)) return false;
        of = number;
      }
      number += waiting;
    }
    gatherings = std::max(gatherings, number);
  }
  return true;
}

}  // namespace pgasdl::simulate

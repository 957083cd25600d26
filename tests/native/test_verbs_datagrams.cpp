// The datagrams by which ranks agree on connections: a stranger who sees them cannot make new ones,
// and the stranger's datagrams change nothing. With a stub of an adapter.

#include "../fuzz/adapter.hpp"
#include "../fuzz/rank_over_verbs.hpp"
#include "check.hpp"
#include "transport/token.hpp"

namespace {

using namespace pgasdl;
using fuzz::adapter;
using fuzz::RankOverVerbs;

constexpr const char* kToken = "sixteen bytes...";

// The datagram that a rank sends when one arrives; empty if none.
std::string answer(RankOverVerbs& rank, const std::string& datagram) {
  adapter().sent.clear();
  adapter().arriving = datagram;
  rank.manager.progress();
  CHECK(adapter().arriving.empty());
  return adapter().sent;
}

void acquaint(RankOverVerbs& one, Rank first, RankOverVerbs& other, Rank second) {
  one.manager.connect(second, other.manager.endpoint());
  other.manager.connect(first, one.manager.endpoint());
}

std::string asked_by(RankOverVerbs& rank, Rank peer) {
  adapter().sent.clear();
  rank.manager.want(0, peer);
  CHECK(!adapter().sent.empty());
  return adapter().sent;
}

// Rank 1 asks rank 0 for a connection while a stranger watches. The stub adapter delivers datagrams
// to the rank that was made last.
void strangers() {
  const VerbsDevice device{VerbsOptions{}};
  RankOverVerbs asking(device, 1, kToken);
  RankOverVerbs elsewhere(device, 1, "another sixteen.");
  RankOverVerbs asked(device, 0, kToken);
  acquaint(asking, 1, asked, 0);
  acquaint(elsewhere, 1, asked, 0);
  const std::string genuine = asked_by(asking, 0);
  const std::string of_another_job = asked_by(elsewhere, 0);
  asked.manager.connect(1, asking.manager.endpoint());
  CHECK(genuine.size() == of_another_job.size());
  constexpr std::size_t kPart = 4;
  for (std::size_t at = 0; at + kPart <= kTokenBytes; ++at) {
    CHECK_NOTE(genuine.find(std::string(kToken + at, kPart)) == std::string::npos, "byte %zu", at);
  }
  const int n_pairs = adapter().n_pairs;
  CHECK(answer(asked, of_another_job).empty());
  for (std::size_t bit = 0; bit < 8 * genuine.size(); ++bit) {
    std::string changed = genuine;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
    CHECK_NOTE(answer(asked, changed).empty() && adapter().n_pairs == n_pairs, "bit %zu", bit);
  }
  for (std::size_t bytes = 1; bytes < 2 * genuine.size(); ++bytes) {
    if (bytes == genuine.size()) continue;
    std::string changed = genuine;
    changed.resize(bytes);
    CHECK_NOTE(answer(asked, changed).empty() && adapter().n_pairs == n_pairs, "%zu bytes", bytes);
  }
  // None of these has disturbed it. A repeated datagram gets the same answer and makes nothing; an
  // answer that is sent back makes nothing, either.
  const std::string answered = answer(asked, genuine);
  CHECK(!answered.empty() && adapter().n_pairs == n_pairs + 1);
  CHECK(answer(asked, genuine) == answered && adapter().n_pairs == n_pairs + 1);
  CHECK(answer(asked, answered).empty() && adapter().n_pairs == n_pairs + 1);
  // A datagram from before the rank dropped its connections has no effect any more: the rank only
  // reports its count.
  asked.manager.reconnect(1);
  CHECK(adapter().n_pairs == n_pairs);
  const std::string told = answer(asked, genuine);
  CHECK(!told.empty() && told != answered && adapter().n_pairs == n_pairs);
  CHECK(answer(asked, genuine) == told);
}

// The other two kinds: a rank's news that a rail was dropped, and its farewell.
void words() {
  const VerbsDevice device{VerbsOptions{}};
  RankOverVerbs saying(device, 1, kToken);
  RankOverVerbs hearing(device, 0, kToken);
  acquaint(saying, 1, hearing, 0);
  int n_heard = 0;
  hearing.manager.hear([&](Rank from, const VerbsRailNews& news) {
    CHECK(from == 1 && news.taken == 4);
    ++n_heard;
  });
  saying.manager.send_farewell(0, 7);
  const std::string farewell = adapter().sent;
  saying.manager.announce(0, VerbsRailNews{1, 2, 3, 4, 1});
  const std::string news = adapter().sent;
  CHECK(farewell.size() != news.size());
  for (const std::string& genuine : {farewell, news}) {
    for (std::size_t bit = 0; bit < 8 * genuine.size(); ++bit) {
      std::string changed = genuine;
      changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ 1 << bit % 8);
      (void)answer(hearing, changed);
      CHECK_NOTE(n_heard == 0 && hearing.manager.farewell(1) == 0, "bit %zu", bit);
    }
  }
  (void)answer(hearing, farewell);
  (void)answer(hearing, news);
  CHECK(n_heard == 1 && hearing.manager.farewell(1) == 7);
}

}  // namespace

int main() {
  strangers();
  words();
}

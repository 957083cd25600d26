// TCP: frames of a peer whose greeting was right, beside a model of what they may do; greetings and
// their answers; endpoints and segment descriptions.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <span>
#include <vector>

#include "fuzz.hpp"
#include "sys/packed.hpp"
#include "transport/siphash.hpp"
#include "transport/tcp/answers.hpp"
#include "transport/tcp/meeting.hpp"
#include "transport/tcp/requests.hpp"

namespace pgasdl::fuzz {
namespace {

using Kind = TcpFrame::Kind;
constexpr std::uint64_t kBytes = 512;
constexpr std::uint32_t kNotifications = 8;
constexpr int kMostFrames = 32;
constexpr std::size_t kMostPayload = 2048;  // that is sent, whatever the frame says

int events() {
  static const int made = epoll_create1(EPOLL_CLOEXEC);
  return made;
}

// The peer's end of a connection.
struct Peer {
  Peer() {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
    here = TcpSocket(ends[0]);
    socket = UniqueFd(ends[1]);
  }
  void send(const std::string& bytes) const {
    (void)::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  std::string received() const {
    static std::string some(1 << 16, '\0');
    std::string all;
    for (;;) {
      const ssize_t got = recv(socket.get(), some.data(), some.size(), 0);
      if (got <= 0) return all;
      all.append(some, 0, static_cast<std::size_t>(got));
    }
  }
  TcpSocket here;
  UniqueFd socket;
};

// Frames, most of them as a peer sends them, with some of their bytes.
std::string frames(Input& input, Kind first, Kind last) {
  std::string all;
  for (int n = 0; n < kMostFrames && !input.empty(); ++n) {
    const std::uint8_t what = input.byte();
    TcpFrame frame{};
    const auto kinds = static_cast<std::uint32_t>(last) - static_cast<std::uint32_t>(first) + 1;
    frame.kind = static_cast<Kind>(static_cast<std::uint32_t>(first) + what % kinds);
    frame.flag = static_cast<TcpFrame::Flag>(what / 16 % 3);
    frame.offset = input.byte() % 64 * 8;
    frame.bytes = input.byte() % 128;
    frame.operand = what % 4;
    frame.memory = frame.board = 1 + what / 16 % 4;
    frame.notification = what % kNotifications;
    frame.value = what;
    std::string words = input.words(packed(frame));
    std::memcpy(&frame, words.data(), std::min(words.size(), sizeof frame));
    all += words;
    all.append(std::min<std::uint64_t>(frame.payload(), kMostPayload), static_cast<char>(what));
  }
  return all;
}

// Sends them in pieces; the stream takes each by itself.
void pieces(Input& input, const std::string& bytes, const Peer& peer, TcpStream& stream,
            std::string& replies) {
  const std::uint64_t step = 1 + input.byte() * std::uint64_t{input.byte()};
  for (std::size_t at = 0; at < bytes.size(); at += step) {
    peer.send(bytes.substr(at, step));
    stream.receive();
    replies += peer.received();
  }
}

// Takes a frame off bytes; false: not all of it is there.
bool next(std::string_view& bytes, TcpFrame& frame) {
  if (bytes.size() < sizeof frame) return false;
  std::memcpy(&frame, bytes.data(), sizeof frame);
  bytes.remove_prefix(sizeof frame);
  return true;
}

// Segments 1: on the host, 2: deleted, 3: on a device, 4: on the host, without bytes.
struct Segments {
  Segments() {
    for (std::uint32_t number = 1; number <= 4; ++number) {
      LocalSegment& segment = all.emplace_back();
      segment.bytes = number == 4 ? 0 : kBytes;
      segment.device = number == 3 ? 0 : kHost;
      data.push_back(std::make_unique<std::uint64_t[]>(segment.bytes / sizeof(std::uint64_t)));
      boards.push_back(std::make_unique<FlagWord[]>(kNotifications));
      segment.data = reinterpret_cast<std::byte*>(data.back().get());
      segment.board = boards.back().get();
      segment.notifications = kNotifications;
      (void)memories->publish(segment);
    }
    memories->retract(all[1]);
  }
  std::shared_ptr<TcpMemories> memories = std::make_shared<TcpMemories>();
  std::vector<std::unique_ptr<std::uint64_t[]>> data;
  std::vector<std::unique_ptr<FlagWord[]>> boards;
  std::vector<LocalSegment> all;
};

// What requests do, and which answers they get, until one that no rank sends.
struct Model {
  static bool reached(std::uint32_t number) { return number == 1 || number == 4; }
  static bool inside(const TcpFrame& frame, std::uint64_t bytes) {
    const std::uint64_t all = frame.memory == 4 ? 0 : kBytes;
    return frame.offset <= all && bytes <= all - frame.offset;
  }
  bool take(const TcpFrame& frame, std::string_view& bytes) {
    const auto kind = static_cast<std::uint32_t>(frame.kind);
    if (kind < 1 || kind > 5 || static_cast<std::uint32_t>(frame.flag) > 2) return false;
    if (frame.kind == Kind::kAsk) return true;
    const bool atomic = frame.kind == Kind::kAdd || frame.kind == Kind::kSwap;
    const std::uint64_t named = atomic ? sizeof(std::uint64_t) : frame.bytes;
    if (named != 0 && reached(frame.memory) && !inside(frame, named)) return false;
    const bool there = named != 0 && reached(frame.memory);
    if (frame.kind == Kind::kWrite) {
      const std::string_view payload = bytes.substr(0, frame.bytes);
      bytes.remove_prefix(payload.size());
      if (there) data.replace(frame.offset, payload.size(), payload);
      if (payload.size() < frame.bytes) return false;
      const bool done = there || frame.bytes == 0;
      if (done && frame.flag != TcpFrame::Flag::kNone && frame.board != 2 && frame.board >= 1 &&
          frame.board <= 4) {
        if (frame.notification >= kNotifications) return false;
        std::uint32_t& word = boards[frame.board - 1][frame.notification];
        word = frame.value + (frame.flag == TcpFrame::Flag::kAdd ? word : 0);
      }
    } else if (atomic) {
      if (frame.offset % sizeof(std::uint64_t) != 0) return false;
      TcpFrame answer{.kind = there ? Kind::kOld : Kind::kRefused};
      if (there) {
        std::memcpy(&answer.operand, &data[frame.offset], sizeof answer.operand);
        std::uint64_t value = answer.operand;
        if (frame.kind == Kind::kAdd) value += frame.operand;
        if (frame.kind == Kind::kSwap && value == frame.compare) value = frame.operand;
        std::memcpy(&data[frame.offset], &value, sizeof value);
      }
      answers += packed(answer);
    } else if (frame.bytes != 0 && !there) {
      answers += packed(TcpFrame{.kind = Kind::kRefused});
    } else {
      answers += packed(TcpFrame{.kind = Kind::kData, .bytes = frame.bytes});
      if (there) answers += data.substr(frame.offset, frame.bytes);
    }
    ++n_taken;
    return true;
  }
  std::string data = std::string(kBytes, '\0');
  std::uint32_t boards[4][kNotifications] = {};
  std::string answers;
  std::uint64_t n_taken = 0;
};

// Answers without acknowledgements, which must not be of more than was taken.
std::string without_acknowledgements(std::string_view replies, std::uint64_t n_taken) {
  std::string all;
  TcpFrame frame;
  while (next(replies, frame)) {
    if (frame.kind == Kind::kAcknowledge) {
      REQUIRE(frame.operand <= n_taken);
      continue;
    }
    all += packed(frame);
    all += replies.substr(0, frame.payload());
    replies.remove_prefix(std::min<std::uint64_t>(frame.payload(), replies.size()));
  }
  return all;
}

void requests_of_a_peer(Input& input) {
  Segments segments;
  Peer peer;
  const std::atomic<WakeWord*> nobody{nullptr};
  TcpAnswers answers(std::move(peer.here), events(), 1, 0, *segments.memories, nobody);
  answers.begin_events();
  const std::uint8_t first = input.byte(), second = input.byte();
  const std::string sent = frames(input, Kind::kWrite, Kind::kAsk);
  const std::uint8_t how[] = {first, second};
  Input sizes(how, sizeof how);
  std::string replies;
  pieces(sizes, sent, peer, answers, replies);
  Model model;
  std::string_view left = sent;
  TcpFrame frame;
  bool good = true;
  while (good && next(left, frame)) good = model.take(frame, left);
  if (left.empty() == false && good) REQUIRE(!answers.ended());  // a frame's beginning
  REQUIRE(std::memcmp(model.data.data(), segments.data[0].get(), kBytes) == 0);
  for (std::size_t board = 0; board < 4; ++board) {
    for (std::size_t i = 0; i < kNotifications; ++i) {
      REQUIRE(segments.boards[board][i] == model.boards[board][i]);
    }
  }
  const std::string got = without_acknowledgements(replies, model.n_taken);
  REQUIRE(got == model.answers.substr(0, got.size()));
  if (!answers.ended()) REQUIRE(got == model.answers);
  // Once a frame is over, nothing keeps the memory that it named but the table, and this question.
  if (good && left.empty()) REQUIRE(segments.memories->find(1).use_count() == 2);
  peer.socket.reset();
  answers.receive();
  REQUIRE(answers.ended() && answers.retire());
}

void answers_of_a_peer(Input& input) {
  Segments own;
  LocalSegment& local = own.all[0];
  const RemoteSegment remote = TcpMemories::attach(1, own.memories->publish(local));
  Peer peer;
  TcpQueue queue;
  std::size_t n_told = 0;
  const TcpRequests::Listener listener{
      [&] { ++n_told; }, [](TcpRequests& requests) { requests.end("the peer closed it"); }, [] {}};
  TcpRequests requests(std::move(peer.here), events(), 1, queue, 1, listener);
  requests.begin_events();
  struct Expected {
    Kind kind;
    std::uint64_t offset, bytes;
    std::uint32_t flag;           // that number, if bytes are 0
    std::uint64_t number, first;  // of the requests, and of those posted with it
  };
  std::vector<Expected> expected;
  std::uint64_t olds[8];
  std::fill(std::begin(olds), std::end(olds), 99);
  std::uint64_t n_posted = 0;
  for (std::uint32_t n = 0; n < 8; ++n) {
    const std::uint8_t what = input.byte();
    const std::uint64_t bytes = 1 + what / 4;
    const Transfer transfer{&local, n * 64, &remote, n * 64, bytes};
    const LocalFlag flag{&local, n, 1 + n};
    if (what % 4 == 0) break;
    if (what % 4 == 1) {
      REQUIRE(requests.write({&transfer, 1}, nullptr));
      n_posted += 1;
    } else if (what % 4 == 2) {
      REQUIRE(requests.read({&transfer, 1}, &flag));
      expected.push_back({Kind::kData, n * 64, bytes, 0, n_posted + 1, n_posted + 1});
      expected.push_back({Kind::kData, 0, 0, n, n_posted + 2, n_posted + 1});
      n_posted += 2;
    } else {
      REQUIRE(requests.atomic({Atomic::Kind::kFetchAdd, &remote, 0, 1, 0, &olds[n]}));
      expected.push_back({Kind::kOld, 0, 0, n, n_posted + 1, n_posted + 1});
      n_posted += 1;
    }
  }
  std::string ignored = peer.received();
  const std::uint8_t first = input.byte(), second = input.byte();
  // Answers as they should be, of which some are changed, or any.
  std::string sent;
  if (first % 2 == 0) {
    for (const Expected& each : expected) {
      sent += input.words(packed(TcpFrame{.kind = each.kind, .bytes = each.bytes, .operand = 7}));
      sent.append(each.bytes, 'x');
    }
    sent += packed(TcpFrame{.kind = Kind::kAcknowledge, .operand = n_posted});
  }
  sent += frames(input, Kind::kData, Kind::kFarewell);
  const std::uint8_t how[] = {first, second};
  Input sizes(how, sizeof how);
  pieces(sizes, sent, peer, requests, ignored);

  std::string data(kBytes, '\0');
  std::uint32_t flags[kNotifications] = {};
  std::uint64_t n_over = 0;
  std::string_view left = sent;
  TcpFrame frame;
  std::size_t at = 0;
  std::uint64_t refused = 0;  // the newest
  bool refused_write = false;
  while (next(left, frame)) {
    if (frame.kind == Kind::kFarewell) continue;
    if (frame.kind == Kind::kAcknowledge) {
      // What is acknowledged has been answered.
      const std::uint64_t most = at == expected.size() ? n_posted : expected[at].number - 1;
      if (frame.operand < n_over || frame.operand > most) break;
      n_over = frame.operand;
      if (frame.value != 0) refused_write = true;
      continue;
    }
    if (at == expected.size()) break;
    const Expected& now = expected[at];
    if (frame.kind == Kind::kRefused) {
      if (now.kind == Kind::kData && now.bytes == 0) break;
      refused = now.number;
    } else if (frame.kind != now.kind || (now.kind == Kind::kData && frame.bytes != now.bytes)) {
      break;
    } else if (now.kind == Kind::kOld) {
      REQUIRE(olds[now.flag] == frame.operand);
    } else if (now.bytes == 0) {
      if (refused < now.first) flags[now.flag] = 1 + now.flag;
    } else {
      const std::string_view payload = left.substr(0, now.bytes);
      data.replace(now.offset, payload.size(), payload);
      left.remove_prefix(payload.size());
      if (payload.size() < now.bytes) break;
    }
    ++at;
  }
  REQUIRE(std::memcmp(data.data(), own.data[0].get(), kBytes) == 0);
  for (std::size_t i = 0; i < kNotifications; ++i) REQUIRE(own.boards[0][i] == flags[i]);
  for (; at < expected.size(); ++at) {
    if (expected[at].kind == Kind::kOld) REQUIRE(olds[expected[at].flag] == 99);
  }
  if (!requests.ended()) REQUIRE(queue.n_over == n_over);
  peer.socket.reset();
  requests.receive();
  requests.end("the peer closed it");
  REQUIRE(queue.n_over == n_posted && requests.retire());
  const bool none_refused = refused == 0 && !refused_write;
  REQUIRE(accepted([&] { (void)queue.complete(); }) == (n_over == n_posted && none_refused));
}

std::uint64_t proof(char end, const TcpGreeting& greeting, const TcpNonce& nonce) {
  return siphash(kToken, std::string(1, end) + packed(greeting) + packed(nonce));
}

struct Meeting {
  void advance() {
    pollfd ready{meeting.descriptor(), POLLIN, 0};
    do {
      meeting.advance([&](TcpMeeting::Established made) { established.push_back(std::move(made)); },
                      [](Rank, QueueId, const std::string&) {});
    } while (poll(&ready, 1, 0) > 0);
  }
  std::vector<sockaddr_in6> address() const {
    return {tcp_addresses(0, tcp_endpoint(meeting.listener(), options)).front()};
  }
  TcpOptions options{.queues = 2};
  TcpMeeting meeting{0, 3, kToken, options};
  std::vector<TcpMeeting::Established> established;
};

void reset(const TcpSocket& socket) {  // frees the port at once
  const linger now{1, 0};
  (void)setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &now, sizeof now);
}

// Who is established has said the right words, and who has said them is.
void greetings(Input& input) {
  Meeting rank;
  const TcpSocket stranger = tcp_connect(rank.address().front());
  reset(stranger);
  const TcpGreeting genuine{.size = 3, .from = 1 + input.byte() % 2, .queue = input.byte() % 2u};
  const std::string said = input.words(packed(genuine));
  pollfd ready{stranger.get(), POLLOUT, 0};
  REQUIRE(poll(&ready, 1, 10000) == 1);
  (void)send(stranger.get(), said.data(), said.size(), MSG_NOSIGNAL);
  rank.advance();
  TcpReply reply{};
  const bool answered = recv(stranger.get(), &reply, sizeof reply, 0) == sizeof reply;
  TcpGreeting greeting{};
  std::memcpy(&greeting, said.data(), std::min(said.size(), sizeof greeting));
  const bool ours = said.size() >= sizeof greeting && greeting.magic == genuine.magic &&
                    greeting.size == 3 && greeting.to == 0 && greeting.queue < 2 &&
                    (greeting.from == 1 || greeting.from == 2);
  REQUIRE(!answered || (ours && reply.code == proof('a', greeting, reply.nonce)));
  const TcpProof right{proof('c', greeting, reply.nonce)};
  const std::string proved = input.words(packed(right));
  (void)send(stranger.get(), proved.data(), proved.size(), MSG_NOSIGNAL);
  rank.advance();
  // What came behind the greeting is taken for the proof.
  const std::string all = (said + proved).substr(std::min(said.size(), sizeof greeting));
  const bool proves = answered && all.substr(0, sizeof right) == packed(right);
  REQUIRE(rank.established.size() == (proves ? 1 : 0));
  if (!proves) return;
  REQUIRE(rank.established[0].peer == greeting.from && !rank.established[0].here);
  REQUIRE(rank.established[0].queue == greeting.queue);
}

// Whom this rank connects to must prove the same.
void replies(Input& input) {
  Meeting rank;
  const TcpSocket listener = tcp_listen({});
  const auto address = tcp_addresses(0, tcp_endpoint(listener, {}));
  rank.meeting.connect(1, 0, std::span(address).first(1));
  rank.advance();
  const TcpSocket peer(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  REQUIRE(peer);
  reset(peer);
  rank.advance();
  TcpGreeting greeting{};
  REQUIRE(recv(peer.get(), &greeting, sizeof greeting, 0) == sizeof greeting);
  TcpReply genuine{};
  genuine.nonce[0] = static_cast<char>(input.byte());
  genuine.code = proof('a', greeting, genuine.nonce);
  const std::string said = input.words(packed(genuine));
  (void)send(peer.get(), said.data(), said.size(), MSG_NOSIGNAL);
  rank.advance();
  const bool proves = said.substr(0, sizeof genuine) == packed(genuine);
  REQUIRE(rank.established.size() == (proves ? 1 : 0));
}

void descriptions(Input& input) {
  static const std::string genuine = tcp_endpoint(tcp_listen({}), {});
  accepted([&] {
    for (const sockaddr_in6& address : tcp_addresses(1, input.words(genuine))) {
      REQUIRE(!tcp_text(address).empty());
    }
  });
  Segments segments;
  const std::string description = segments.memories->publish(segments.all[0]);
  accepted([&] { (void)TcpMemories::attach(1, input.words(description)); });
}

}  // namespace
}  // namespace pgasdl::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace pgasdl::fuzz;
  Input input(data, size);
  constexpr void (*kWays[])(Input&) = {requests_of_a_peer, answers_of_a_peer, greetings, replies,
                                       descriptions};
  kWays[input.byte() % std::size(kWays)](input);
  return 0;
}

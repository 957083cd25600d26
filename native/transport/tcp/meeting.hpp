// Makes connections: listens for peers, connects to them, and lets both ends prove that they are of
// this job before anything else is read. One thread owns it.
#pragma once

#include <array>
#include <functional>
#include <list>
#include <span>

#include "transport/tcp/socket.hpp"
#include "transport/tcp/wire.hpp"

namespace pgasdl {

class TcpMeeting {
 public:
  struct Established {
    TcpSocket socket;
    Rank peer;
    QueueId queue;
    bool here;  // this rank connected
  };
  TcpMeeting(Rank rank, Rank size, std::string token, const TcpOptions& options);

  const TcpSocket& listener() const { return listener_; }
  // Begins to connect; `addresses` stay where they are.
  void connect(Rank peer, QueueId queue, std::span<const sockaddr_in6> addresses);
  // A descriptor that is readable when advance() has something to do, besides at next().
  int descriptor() const { return events_.get(); }
  // When advance() has to be called again; max(): not because of the time.
  Clock::time_point next() const;
  // Goes on with all; calls `established` for each that succeeded, `failed` for each of this rank's
  // that did not within the time.
  void advance(const std::function<void(Established)>& established,
               const std::function<void(Rank, QueueId, std::string)>& failed);
  // Nobody meets this rank any more.
  void close();

 private:
  enum class Step : std::uint8_t { kPause, kConnect, kReply, kGreeting, kProof, kOver };
  struct Guest {
    Step step;
    bool mine;  // this rank connects
    Rank peer = -1;
    QueueId queue = 0;
    TcpSocket socket{};
    std::span<const sockaddr_in6> addresses{};
    std::size_t address = 0;
    Clock::time_point until{};    // of this step
    Clock::time_point give_up{};  // of all
    std::string why{};            // the last attempt failed
    TcpGreeting greeting{};
    TcpReply reply{};
    std::array<char, sizeof(TcpGreeting)> arrived{};
    std::size_t n_arrived = 0;
  };
  void accept();
  void listen_again(Clock::time_point at);
  void try_next(Guest& guest, std::string why);
  void step(Guest& guest, const std::function<void(Established)>& established);
  void take_greeting(Guest& guest);
  bool take(Guest& guest, void* to, std::size_t bytes);  // false: not all is here
  bool send(Guest& guest, const void* from, std::size_t bytes);
  void await(Guest& guest, Step step, bool room);
  void establish(Guest& guest, const std::function<void(Established)>& established);
  std::uint64_t code(char end, const Guest& guest) const;

  const Rank rank_;
  const Rank size_;
  const std::string token_;
  const TcpOptions options_;
  UniqueFd events_;
  TcpSocket listener_;
  std::list<Guest> guests_;
  Clock::time_point listens_again_ = Clock::time_point::max();  // no descriptor was free
  std::size_t n_strangers_ = 0;  // guests that connected and have proved nothing yet
};

}  // namespace pgasdl

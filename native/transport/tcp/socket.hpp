// Sockets that never block, and the addresses by which ranks find each other.
#pragma once

#include <netinet/in.h>

#include <string>
#include <vector>

#include "sys/process.hpp"
#include "transport/tcp/options.hpp"
#include "transport/transport.hpp"

namespace pgasdl {

// A socket that a forked child closes at once: else a rank's end would not end its connections
// while a child of it lives.
class TcpSocket {
 public:
  TcpSocket() = default;
  explicit TcpSocket(int descriptor);
  TcpSocket(TcpSocket&& other) noexcept;
  TcpSocket& operator=(TcpSocket&& other) noexcept;
  ~TcpSocket();
  int get() const { return socket_.get(); }
  explicit operator bool() const { return bool{socket_}; }
  void reset();

 private:
  UniqueFd socket_;
};

// A listener on all addresses. Throws kUnavailable if no port of the range is free.
TcpSocket tcp_listen(const TcpOptions& options);

// Sets what an established connection has: no delay, and an end if the peer stays silent.
void tcp_tune(int descriptor, double timeout_s);

// The words by which peers find a listener: its port, and this machine's addresses. Throws
// kUnavailable if no interface has one of the names asked for.
std::string tcp_endpoint(const TcpSocket& listener, const TcpOptions& options);

// This rank's port and those addresses with their interfaces, for people; without `listener` the
// addresses alone.
std::string tcp_place(const TcpSocket* listener, const TcpOptions& options);

// The addresses of a peer's endpoint, those first that this machine reaches without a router.
std::vector<sockaddr_in6> tcp_addresses(Rank peer, const std::string& endpoint);

// Begins to connect. An empty socket: refused at once, or there is no descriptor; see errno.
TcpSocket tcp_connect(const sockaddr_in6& address);

std::string tcp_text(const sockaddr_in6& address);

}  // namespace pgasdl

#include "transport/tcp/socket.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <set>
#include <string_view>

#include "sys/error.hpp"
#include "sys/packed.hpp"

namespace pgasdl {
namespace {

// All descriptors of this process that a forked child has to close.
struct Open {
  std::mutex mutex;
  std::set<int> descriptors;
};

Open& open_sockets() {
  static Open* const open = [] {
    auto* made = new Open;  // lives until the process ends: threads may outlast static objects
    pthread_atfork([] { open_sockets().mutex.lock(); }, [] { open_sockets().mutex.unlock(); },
                   [] {
                     for (const int descriptor : open_sockets().descriptors) ::close(descriptor);
                     open_sockets().descriptors.clear();  // a child of the child has others
                     open_sockets().mutex.unlock();
                   });
    return made;
  }();
  return *open;
}

struct Address {
  in6_addr address;
  in6_addr mask;
  std::string interface;
};

in6_addr mapped(const in_addr& v4) {
  in6_addr all{};
  all.s6_addr[10] = all.s6_addr[11] = 0xff;
  std::memcpy(all.s6_addr + 12, &v4, sizeof v4);
  return all;
}

bool named(const std::string& names, std::string_view name) {
  std::string_view left = names;
  while (!left.empty()) {
    const std::size_t comma = std::min(left.find(','), left.size());
    if (left.substr(0, comma) == name) return true;
    left.remove_prefix(std::min(comma + 1, left.size()));
  }
  return false;
}

// This machine's addresses: of the named interfaces, or of all but those that only it reaches.
std::vector<Address> own_addresses(const std::string& interfaces) {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw_system("the addresses of this machine", errno);
  std::vector<Address> all;
  for (const ifaddrs* each = first; each != nullptr; each = each->ifa_next) {
    const bool wanted = interfaces.empty() ? (each->ifa_flags & IFF_LOOPBACK) == 0
                                           : named(interfaces, each->ifa_name);
    if (!wanted || (each->ifa_flags & IFF_UP) == 0 || each->ifa_addr == nullptr) continue;
    if (each->ifa_addr->sa_family == AF_INET) {
      in6_addr mask = mapped(reinterpret_cast<const sockaddr_in*>(each->ifa_netmask)->sin_addr);
      std::memset(mask.s6_addr, 0xff, 12);
      all.push_back({mapped(reinterpret_cast<const sockaddr_in*>(each->ifa_addr)->sin_addr), mask,
                     each->ifa_name});
    } else if (each->ifa_addr->sa_family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;
      all.push_back({v6->sin6_addr,
                     reinterpret_cast<const sockaddr_in6*>(each->ifa_netmask)->sin6_addr,
                     each->ifa_name});
    }
  }
  freeifaddrs(first);
  return all;
}

bool same_subnet(const in6_addr& one, const Address& own) {
  for (std::size_t i = 0; i < sizeof one.s6_addr; ++i) {
    if (((one.s6_addr[i] ^ own.address.s6_addr[i]) & own.mask.s6_addr[i]) != 0) return false;
  }
  return true;
}

struct Endpoint {
  std::uint64_t host;
  std::uint32_t port;
  std::uint32_t addresses;  // that many in6_addr follow
};

std::uint64_t host() { return std::hash<std::string>{}(host_identity()); }

sockaddr_in6 at(const in6_addr& address, std::uint16_t port) {
  sockaddr_in6 all{};
  all.sin6_family = AF_INET6;
  all.sin6_addr = address;
  all.sin6_port = htons(port);
  return all;
}

// An IPv4 address as such: a machine without IPv6 has no sockets of that family.
socklen_t plain(const sockaddr_in6& address, sockaddr_storage& out) {
  if (!IN6_IS_ADDR_V4MAPPED(&address.sin6_addr)) {
    std::memcpy(&out, &address, sizeof address);
    return sizeof address;
  }
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = address.sin6_port;
  std::memcpy(&v4.sin_addr, address.sin6_addr.s6_addr + 12, sizeof v4.sin_addr);
  std::memcpy(&out, &v4, sizeof v4);
  return sizeof v4;
}

std::uint16_t port_of(const TcpSocket& listener) {
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (getsockname(listener.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) {
    throw_system("getsockname", errno);
  }
  // Both families have the port at the same place.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
}

std::string address_text(const in6_addr& address) {
  char words[INET6_ADDRSTRLEN] = {};
  if (IN6_IS_ADDR_V4MAPPED(&address)) {
    inet_ntop(AF_INET, address.s6_addr + 12, words, sizeof words);
  } else {
    inet_ntop(AF_INET6, &address, words, sizeof words);
  }
  return words;
}

constexpr int kType = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
constexpr int kBacklog = 4096;

void set(int descriptor, int level, int option, int value) {
  (void)setsockopt(descriptor, level, option, &value, sizeof value);
}

TcpSocket listen_at(std::uint16_t port) {
  TcpSocket v6(socket(AF_INET6, kType, 0));
  if (v6) {
    set(v6.get(), SOL_SOCKET, SO_REUSEADDR, 1);  // connections of a job before may be in TIME_WAIT
    set(v6.get(), IPPROTO_IPV6, IPV6_V6ONLY, 0);
    const sockaddr_in6 any = at(in6addr_any, port);
    if (bind(v6.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0) return v6;
    if (errno == EADDRINUSE) return {};
  }
  TcpSocket v4(socket(AF_INET, kType, 0));
  if (!v4) throw_system("a TCP socket", errno);
  set(v4.get(), SOL_SOCKET, SO_REUSEADDR, 1);
  sockaddr_in any{};
  any.sin_family = AF_INET;
  any.sin_port = htons(port);
  if (bind(v4.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0) return v4;
  if (errno != EADDRINUSE && errno != EACCES) throw_system(text("binding port ", port), errno);
  return {};
}

}  // namespace

TcpSocket::TcpSocket(int descriptor) : socket_(descriptor) {
  if (descriptor < 0) return;
  const std::lock_guard lock(open_sockets().mutex);
  open_sockets().descriptors.insert(descriptor);
}

TcpSocket::TcpSocket(TcpSocket&& other) noexcept = default;

TcpSocket& TcpSocket::operator=(TcpSocket&& other) noexcept {
  reset();
  socket_ = std::move(other.socket_);
  return *this;
}

TcpSocket::~TcpSocket() { reset(); }

void TcpSocket::reset() {
  if (!socket_) return;
  const std::lock_guard lock(open_sockets().mutex);
  open_sockets().descriptors.erase(socket_.get());
  socket_.reset();
}

TcpSocket tcp_listen(const TcpOptions& options) {
  for (std::uint32_t port = options.first_port; port <= options.last_port; ++port) {
    TcpSocket listener = listen_at(static_cast<std::uint16_t>(port));
    if (listener && listen(listener.get(), kBacklog) == 0) return listener;
  }
  throw Error(ErrorKind::kUnavailable,
              text("no free port in PGASDL_TCP_PORTS=", options.first_port, "-", options.last_port,
                   ": each rank of this machine needs one"));
}

void tcp_tune(int descriptor, double timeout_s) {
  set(descriptor, IPPROTO_TCP, TCP_NODELAY, 1);
  set(descriptor, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, 1);
  set(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set(descriptor, IPPROTO_TCP, TCP_KEEPCNT, std::max(2, static_cast<int>(timeout_s)));
  set(descriptor, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(timeout_s * 1e3));
}

std::string tcp_endpoint(const TcpSocket& listener, const TcpOptions& options) {
  const std::uint16_t port = port_of(listener);
  const std::vector<Address> own = own_addresses(options.interfaces);
  if (own.empty() && !options.interfaces.empty()) {
    throw Error(ErrorKind::kUnavailable,
                text("no interface of PGASDL_TCP_INTERFACE=", options.interfaces,
                     " is up and has an address (`ip address` lists them)"));
  }
  std::string words = packed(Endpoint{host(), port, static_cast<std::uint32_t>(own.size())});
  for (const Address& each : own) words += packed(each.address);
  return words;
}

std::string tcp_place(const TcpSocket* listener, const TcpOptions& options) {
  std::string words = listener == nullptr ? "" : text("port ", port_of(*listener), " of ");
  bool first = true;
  for (const Address& each : own_addresses(options.interfaces)) {
    words += text(std::exchange(first, false) ? "" : ", ", address_text(each.address), " (",
                  each.interface, ")");
  }
  return words + (first && listener != nullptr ? "this machine alone" : "");
}

std::vector<sockaddr_in6> tcp_addresses(Rank peer, const std::string& endpoint) {
  std::string_view left = endpoint;
  const auto words = take_packed<Endpoint>(left, "endpoint", peer);
  const auto port = static_cast<std::uint16_t>(words.port);
  std::vector<sockaddr_in6> all;
  for (std::uint32_t i = 0; i < words.addresses; ++i) {
    all.push_back(at(take_packed<in6_addr>(left, "endpoint", peer), port));
  }
  const std::vector<Address> own = own_addresses("");
  std::stable_partition(all.begin(), all.end(), [&](const sockaddr_in6& address) {
    return std::ranges::any_of(
        own, [&](const Address& each) { return same_subnet(address.sin6_addr, each); });
  });
  if (words.host == host()) {
    all.insert(all.begin(), at(mapped(in_addr{htonl(INADDR_LOOPBACK)}), port));
  }
  return all;
}

TcpSocket tcp_connect(const sockaddr_in6& address) {
  sockaddr_storage out{};
  const socklen_t length = plain(address, out);
  TcpSocket made(socket(out.ss_family, kType, 0));
  if (!made) return {};
  if (connect(made.get(), reinterpret_cast<const sockaddr*>(&out), length) != 0 &&
      errno != EINPROGRESS) {
    return {};
  }
  return made;
}

std::string tcp_text(const sockaddr_in6& address) {
  const std::string words = address_text(address.sin6_addr);
  const bool is_v4 = IN6_IS_ADDR_V4MAPPED(&address.sin6_addr);
  return text(is_v4 ? "" : "[", words, is_v4 ? ":" : "]:", ntohs(address.sin6_port));
}

}  // namespace pgasdl

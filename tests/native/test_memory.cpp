// Regions and their seals, and mail from strangers and from dead ranks in the shm transport.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "memory/region.hpp"
#include "ranks.hpp"

namespace {

using namespace pgasdl;
using namespace pgasdl::testing;

void regions() {
  UniqueFd fd;
  const auto mine = Region::create(5000, fd);
  CHECK(mine->bytes() == round_up(5000, page_bytes()) && mine->bytes() % page_bytes() == 0);
  CHECK(reinterpret_cast<std::uintptr_t>(mine->data()) % page_bytes() == 0);
  for (std::size_t i = 0; i < mine->bytes(); ++i) CHECK(mine->data()[i] == std::byte{0});
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  CHECK((seals & F_SEAL_SHRINK) && (seals & F_SEAL_GROW) && (seals & F_SEAL_SEAL));
  CHECK(ftruncate(fd.get(), 0) == -1 && errno == EPERM);
  CHECK(ftruncate(fd.get(), 1 << 20) == -1 && errno == EPERM);
  CHECK(fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE) == -1);
  CHECK(fcntl(fd.get(), F_GETFD) & FD_CLOEXEC);
  {
    const auto theirs = Region::attach(fd.get(), 5000);
    CHECK(theirs->data() != mine->data());
    theirs->data()[4999] = std::byte{7};
  }
  CHECK(mine->data()[4999] == std::byte{7});

  // Refuses memory that the peer could still shrink, and memory that is too small.
  require_error(ErrorKind::kSegment, [&] { (void)Region::attach(fd.get(), 1 << 20); });
  const UniqueFd open_ended(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  CHECK(ftruncate(open_ended.get(), 8192) == 0);
  require_error(ErrorKind::kSegment, [&] { (void)Region::attach(open_ended.get(), 8192); });
  require_error(ErrorKind::kSystem, [&] { (void)Region::attach(-1, 8192); });
  UniqueFd unused;
  require_error(ErrorKind::kSystem, [&] { (void)Region::create(std::size_t{1} << 62, unused); });
}

void private_regions() {
  constexpr std::size_t kMega = 1 << 20;
  for (const std::size_t bytes : {std::size_t{1}, 5000 * page_bytes(), 8 * kMega + 3}) {
    const auto region = Region::create_private(bytes);
    CHECK(region->bytes() == round_up(bytes, page_bytes()));
    const auto address = reinterpret_cast<std::uintptr_t>(region->data());
    CHECK(address % (bytes < 4 * kMega ? page_bytes() : 2 * kMega) == 0);
    for (std::size_t i = 0; i < region->bytes(); ++i) {
      CHECK(region->data()[i] == std::byte{0});
      region->data()[i] = std::byte{7};
    }
  }
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) != -1 ? 1 : 0;
  return count;
}

// A stranger's datagrams are dropped, with or without a descriptor; the descriptors are closed.
void strangers() {
  const std::string token = "sixteen bytes...";
  ShmTransport transport(0, 2, token);
  const std::string endpoint = transport.endpoint();
  const char* name = endpoint.data() + sizeof(std::int32_t);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name, std::strlen(name));
  const auto length =
      static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + std::strlen(name));
  const UniqueFd socket_fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const int before = open_descriptors();
  for (std::size_t bytes : {0, 1, 16, 24, 25, 4000}) {
    for (const bool with_descriptor : {false, true}) {
      std::string content(bytes, 'x');
      if (bytes == 24) content.replace(0, 15, token.substr(0, 15));
      iovec part{content.data(), content.size()};
      alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
      msghdr message{};
      message.msg_name = &address;
      message.msg_namelen = length;
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      if (with_descriptor) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        const int fd = socket_fd.get();
        std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
      }
      CHECK(sendmsg(socket_fd.get(), &message, 0) == static_cast<ssize_t>(bytes));
    }
    transport.service();
  }
  CHECK(open_descriptors() == before);
  for (std::size_t bytes : {0, 3, 48, 500}) {
    require_error(ErrorKind::kMismatch, [&] { transport.connect(1, std::string(bytes, 'y')); });
    require_error(ErrorKind::kMismatch, [&] {
      (void)transport.attach(1, std::string(bytes, 'y'), kHost, Deadline::once());
    });
  }
}

// Memory that a lost rank had handed over is released when its loss is accepted, and later mail
// from it is not kept.
void unclaimed() {
  const std::string token = "sixteen bytes...";
  ShmTransport survivor(0, 3, token);
  LocalSegment segment;
  segment.bytes = 4096;
  segment.region = Region::create(segment.bytes, segment.descriptor);
  segment.data = segment.region->data();
  segment.board = reinterpret_cast<FlagWord*>(segment.data + segment.bytes);
  const std::vector<Rank> all{0, 1, 2};
  const int before = open_descriptors();
  std::string of_dead, of_living;
  {
    ShmTransport dies(1, 3, token);
    ShmTransport lives(2, 3, token);
    for (ShmTransport* peer : {&dies, &lives}) {
      peer->connect(0, survivor.endpoint());
      peer->connect(1, dies.endpoint());
      peer->connect(2, lives.endpoint());
    }
    for (segment.id = 1; segment.id <= 3; ++segment.id) {
      of_dead = dies.publish(segment, all);
      if (segment.id == 2) of_living = lives.publish(segment, all);
      survivor.service();
      if (segment.id == 2) survivor.forget(1);
    }
  }
  CHECK(survivor.attach(2, of_living, kHost, Deadline::once()).region != nullptr);
  require_error(ErrorKind::kSystem,
                [&] { (void)survivor.attach(1, of_dead, kHost, Deadline::once()); });
  CHECK_NOTE(open_descriptors() == before, "%d, then %d descriptors", before, open_descriptors());
}

}  // namespace

int main() {
  regions();
  private_regions();
  strangers();
  unclaimed();
  std::puts("ok");
}

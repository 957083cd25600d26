#include "transport/shm/shm.hpp"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

#include "memory/device_stream.hpp"
#include "reduce/copy.hpp"
#include "sys/packed.hpp"
#include "transport/processor_atomic.hpp"
#include "transport/raise_flag.hpp"
#include "transport/token.hpp"

namespace pgasdl {
namespace {

constexpr int kMailPerService = 64;
constexpr std::uint64_t kPiece = 1 << 20;

// The message that accompanies a descriptor.
struct Offer {
  char token[kTokenBytes];
  std::int32_t rank;
  std::uint32_t segment;
  std::uint32_t part;
};

// The description of a segment for a peer; the descriptor comes separately.
struct Description {
  std::uint64_t bytes;
  std::uint64_t address;
  std::uint64_t board_offset;
  std::uint64_t region_bytes;
  std::uint32_t id;
  std::uint32_t notifications;
  std::uint32_t bound;
  std::uint32_t on_device;
  DeviceHandle device;
};

struct Endpoint {
  std::int32_t pid;
  char address[64];
};

socklen_t abstract_address(const std::string& name, sockaddr_un& address) {
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // leading zero: no file
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

std::string random_name() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof bytes, 0) != sizeof bytes) throw_system("getrandom", errno);
  std::string name = "pgasdl-";
  for (unsigned char byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

// Lets the kernel drop datagrams without the token in the sender's call, before they are queued.
// Otherwise this rank would have to close a stranger's descriptor, which can block for long (a
// lingering socket, a FUSE file). On a kernel without such filters, service() checks the token.
void filter_by_token(int socket, const std::string& token) {
  constexpr std::uint32_t kAll = UINT32_MAX;
  constexpr std::size_t kWords = kTokenBytes / sizeof(std::uint32_t);
  std::vector<sock_filter> program;
  const auto require = [&](std::uint16_t load, std::uint32_t from, std::uint32_t value) {
    program.push_back(BPF_STMT(static_cast<std::uint16_t>(BPF_LD | BPF_W | load), from));
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 1, 0));
    program.push_back(BPF_STMT(BPF_RET | BPF_K, 0));
  };
  require(BPF_LEN, 0, sizeof(Offer));
  for (std::size_t word = 0; word < kWords; ++word) {
    std::uint32_t bytes;
    std::memcpy(&bytes, token.data() + word * sizeof bytes, sizeof bytes);
    require(BPF_ABS, static_cast<std::uint32_t>(offsetof(Offer, token) + word * sizeof bytes),
            ntohl(bytes));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, kAll));
  const sock_fprog attached{static_cast<unsigned short>(program.size()), program.data()};
  (void)setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &attached, sizeof attached);
}

// Makes a socket connected to a peer's socket, or none if the peer is gone. It stays connected to
// that one socket: a stranger that takes over a dead peer's name must receive nothing.
UniqueFd mailbox_of(Rank peer, const std::string& name) {
  UniqueFd mailbox(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!mailbox) throw_system(text("an AF_UNIX socket for rank ", peer), errno);
  const timeval patience{1, 0};
  if (setsockopt(mailbox.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) != 0) {
    throw_system("SO_SNDTIMEO", errno);
  }
  sockaddr_un address;
  const socklen_t length = abstract_address(name, address);
  if (connect(mailbox.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) return mailbox;
  if (errno == ECONNREFUSED || errno == ENOENT) return {};
  throw_system(text("connecting to the AF_UNIX socket of rank ", peer), errno);
}

// Copies to or from a peer's memory that is mapped here.
void copy_bytes(std::byte* to, const std::byte* from, const Transfer& transfer) {
  const int device =
      transfer.local->device != kHost ? transfer.local->device : transfer.remote->device;
  if (device == kHost) [[likely]] {
    pgasdl::copy(to, from, transfer.bytes);
  } else {
    device_copy(device, to, from, transfer.bytes);
  }
}

}  // namespace

ShmTransport::ShmTransport(Rank rank, Rank size, const std::string& token)
    : rank_(rank),
      token_(checked_token(token)),
      peers_(static_cast<std::size_t>(size)),
      forgotten_(peers_.size(), false) {
  register_wake_words();
  socket_.reset(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket_) throw_system("an AF_UNIX socket", errno);
  const int on = 1;
  if (setsockopt(socket_.get(), SOL_SOCKET, SO_PASSCRED, &on, sizeof on) != 0) {
    throw_system("SO_PASSCRED", errno);
  }
  filter_by_token(socket_.get(), token_);
  address_ = random_name();
  sockaddr_un address;
  const socklen_t length = abstract_address(address_, address);
  if (bind(socket_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    throw_system("binding an AF_UNIX socket", errno);
  }
}

std::string ShmTransport::endpoint() {
  Endpoint endpoint{};
  endpoint.pid = getpid();
  std::memcpy(endpoint.address, address_.data(), address_.size());
  return packed(endpoint);
}

void ShmTransport::connect(Rank peer, const std::string& bytes) {
  auto endpoint = unpacked<Endpoint>(bytes, "endpoint", peer);
  endpoint.address[sizeof endpoint.address - 1] = 0;
  Peer& known = peers_[static_cast<std::size_t>(peer)];
  known.pid = endpoint.pid;
  if (peer != rank_) known.mailbox = mailbox_of(peer, endpoint.address);
}

void ShmTransport::set_wake_word(Rank peer, WakeWord* wake_word) {
  peers_[static_cast<std::size_t>(peer)].wake_word = wake_word;
}

std::string ShmTransport::publish(LocalSegment& segment, std::span<const Rank> peers) {
  if (segment.bound && segment.device == kHost) admit_peers();
  // Each rank begins with the next one, as a mailbox holds few messages and all would fill one.
  const auto self = std::ranges::lower_bound(peers, rank_) - peers.begin();
  for (std::size_t i = 0; i < peers.size(); ++i) {
    const Rank peer = peers[(static_cast<std::size_t>(self) + i) % peers.size()];
    if (peer == rank_) continue;
    offer(segment.id, Part::kHost, segment.descriptor, peer);
    if (segment.device_descriptor) {
      offer(segment.id, Part::kDevice, segment.device_descriptor, peer);
    }
  }
  Description description{};
  description.bytes = segment.bytes;
  description.address = reinterpret_cast<std::uint64_t>(segment.data);
  description.board_offset = static_cast<std::uint64_t>(
      reinterpret_cast<std::byte*>(segment.board) - segment.region->data());
  description.region_bytes = segment.region->bytes();
  description.id = segment.id;
  description.notifications = segment.notifications;
  description.bound = segment.bound;
  description.on_device = segment.device != kHost;
  if (segment.device != kHost) description.device = segment.device_region->handle();
  return packed(description);
}

// Where Yama restricts access to bound memory, a process can name one process whose descendants get
// it: the peer, or the launcher of all. Without a common ancestor every process of this user does.
void ShmTransport::admit_peers() {
  std::vector<pid_t> pids;
  for (const Peer& peer : peers_) {
    if (peer.pid != 0 && peer.pid != getpid()) pids.push_back(peer.pid);
  }
  if (pids.empty()) return;
  const pid_t above = common_ancestor(pids);
  prctl(PR_SET_PTRACER, above != 0 ? static_cast<unsigned long>(above) : PR_SET_PTRACER_ANY, 0, 0,
        0);
}

// Sends a descriptor, or none. While the mailbox is full the kernel waits; the peer's service
// thread empties it regardless of the program. False with errno: not sent.
bool ShmTransport::send(SegmentId segment, Part part, int descriptor, Rank peer) {
  Offer offer{};
  std::memcpy(offer.token, token_.data(), kTokenBytes);
  offer.rank = rank_;
  offer.segment = segment;
  offer.part = static_cast<std::uint32_t>(part);
  iovec content{&offer, sizeof offer};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &content;
  message.msg_iovlen = 1;
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
  }
  const std::shared_lock lock(socket_mutex_);
  return sendmsg(peers_[static_cast<std::size_t>(peer)].mailbox.get(), &message, MSG_NOSIGNAL) >= 0;
}

void ShmTransport::offer(SegmentId segment, Part part, const UniqueFd& descriptor, Rank peer) {
  const Deadline deadline = Deadline::in(10);
  while (!send(segment, part, descriptor.get(), peer)) {
    if (errno == ECONNREFUSED || errno == ENOTCONN || errno == EBADF) {
      return;  // gone: attach and liveness will report it
    }
    if (errno != EAGAIN && errno != EINTR && errno != ETOOMANYREFS) {
      throw_system(text("handing a segment to rank ", peer), errno);
    }
    if (deadline.passed()) {
      throw Error(ErrorKind::kSystem, text("rank ", peer, " does not take our segment's handle"));
    }
    if (errno == ETOOMANYREFS) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// If members did not agree, peers hold descriptors that nobody will attach.
void ShmTransport::retract(const LocalSegment& segment) {
  if (!segment.descriptor) return;  // every peer took it
  for (Rank peer = 0; static_cast<std::size_t>(peer) < peers_.size(); ++peer) {
    // A peer that does not empty its mailbox within a second keeps them until its context ends.
    if (peer != rank_) (void)send(segment.id, Part::kNone, -1, peer);
  }
}

void ShmTransport::end_service() {
  const std::lock_guard lock(socket_mutex_);
  socket_.reset();
  for (Peer& peer : peers_) peer.mailbox.reset();
}

bool ShmTransport::service() {
  const std::shared_lock open(socket_mutex_);
  // Bounded: a sender that floods the mailbox must not keep the service thread from other work.
  for (int taken = 0; taken < kMailPerService; ++taken) {
    Offer offer{};
    iovec content{&offer, sizeof offer};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(ucred))] = {};
    msghdr message{};
    message.msg_iov = &content;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t received = recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received < 0) break;  // the mailbox is empty
    UniqueFd descriptor;
    bool same_user = false;
    for (auto* header = CMSG_FIRSTHDR(&message); header; header = CMSG_NXTHDR(&message, header)) {
      if (header->cmsg_level != SOL_SOCKET) continue;
      if (header->cmsg_type == SCM_RIGHTS) {
        // The kernel has installed all of them, so all are closed; a peer sends one.
        const std::size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (std::size_t i = 0; i < count; ++i) {
          int fd;
          std::memcpy(&fd, CMSG_DATA(header) + i * sizeof fd, sizeof fd);
          descriptor.reset(fd);
        }
        if (count != 1) descriptor.reset();
      } else if (header->cmsg_type == SCM_CREDENTIALS) {
        ucred credentials;
        std::memcpy(&credentials, CMSG_DATA(header), sizeof credentials);
        same_user = credentials.uid == geteuid();
      }
    }
    // Drops any other message as a stranger's, with its descriptor.
    const auto sent = static_cast<Part>(offer.part);
    if (received != sizeof offer || !same_user || bool{descriptor} == (sent == Part::kNone) ||
        std::memcmp(offer.token, token_.data(), kTokenBytes) != 0 || offer.rank < 0 ||
        static_cast<std::size_t>(offer.rank) >= forgotten_.size()) {
      continue;
    }
    const std::lock_guard lock(mailbox_mutex_);
    if (forgotten_[static_cast<std::size_t>(offer.rank)]) continue;
    if (sent == Part::kNone) {
      for (const Part part : {Part::kHost, Part::kDevice}) {
        mailbox_.erase({offer.rank, offer.segment, part});
      }
    } else {
      mailbox_[{offer.rank, offer.segment, sent}] = std::move(descriptor);
    }
  }
  return false;  // the descriptor stays readable while messages are left
}

bool ShmTransport::forget(Rank peer) {
  const std::lock_guard lock(mailbox_mutex_);
  forgotten_[static_cast<std::size_t>(peer)] = true;
  std::erase_if(mailbox_, [&](const auto& kept) { return std::get<Rank>(kept.first) == peer; });
  return false;
}

UniqueFd ShmTransport::await_descriptor(Rank peer, SegmentId segment, Part part,
                                        Deadline deadline) {
  for (;;) {
    service();
    {
      const std::lock_guard lock(mailbox_mutex_);
      const auto found = mailbox_.find({peer, segment, part});
      if (found != mailbox_.end()) {
        UniqueFd descriptor = std::move(found->second);
        mailbox_.erase(found);
        return descriptor;
      }
    }
    if (deadline.passed()) {
      throw Error(ErrorKind::kSystem,
                  text("rank ", peer, " did not hand over its copy of segment ", segment), peer);
    }
    const std::shared_lock open(socket_mutex_);
    pollfd readable{socket_.get(), POLLIN, 0};
    poll(&readable, 1, 1);
  }
}

RemoteSegment ShmTransport::attach(Rank peer, const std::string& bytes, int device,
                                   Deadline deadline) {
  const auto description = unpacked<Description>(bytes, "segment description", peer);
  const std::uint64_t board_bytes = std::uint64_t{description.notifications} * sizeof(FlagWord);
  if (description.board_offset > description.region_bytes ||
      description.board_offset % alignof(FlagWord) != 0 ||
      board_bytes > description.region_bytes - description.board_offset ||
      (!description.bound && !description.on_device &&
       description.bytes > description.board_offset)) {
    throw Error(ErrorKind::kMismatch, text("impossible segment description from rank ", peer));
  }
  const UniqueFd descriptor = await_descriptor(peer, description.id, Part::kHost, deadline);
  auto region = Region::attach(descriptor.get(), description.region_bytes);
  RemoteSegment remote;
  remote.bytes = description.bytes;
  remote.notifications = description.notifications;
  remote.board = reinterpret_cast<FlagWord*>(region->data() + description.board_offset);
  remote.region = region;
  if (description.on_device) {
    UniqueFd memory;
    if (description.device.kind == DeviceHandle::Kind::kDescriptor) {
      memory = await_descriptor(peer, description.id, Part::kDevice, deadline);
    }
    auto mapped = DeviceRegion::attach(description.device, memory.get(), description.bytes, device);
    remote.device = mapped->device();
    remote.data = mapped->data();
    using Both = std::pair<std::shared_ptr<Region>, std::shared_ptr<DeviceRegion>>;
    remote.keep = std::make_shared<Both>(std::move(region), std::move(mapped));
    return remote;
  }
  if (description.bound) {
    remote.address = description.address;
  } else {
    remote.data = region->data();
  }
  remote.keep = std::move(region);
  return remote;
}

bool ShmTransport::post_write(QueueId, Rank peer, std::span<const Transfer> transfers,
                              const RemoteFlag* flag) {
  for (const Transfer& transfer : transfers) {
    if (transfer.remote->data != nullptr) [[likely]] {
      copy_bytes(transfer.remote->data + transfer.remote_offset,
                 transfer.local->data + transfer.local_offset, transfer);
    } else {
      copy_across(peer, transfer, true);
    }
  }
  if (flag != nullptr) {
    raise_flag(flag->remote->board[flag->notification], flag->value, flag->add);
    if (WakeWord* wake_word = peers_[static_cast<std::size_t>(peer)].wake_word) wake_word->wake();
  }
  return true;
}

bool ShmTransport::post_read(QueueId, Rank peer, std::span<const Transfer> transfers,
                             const LocalFlag* flag) {
  for (const Transfer& transfer : transfers) {
    if (transfer.remote->data != nullptr) [[likely]] {
      copy_bytes(transfer.local->data + transfer.local_offset,
                 transfer.remote->data + transfer.remote_offset, transfer);
    } else {
      copy_across(peer, transfer, false);
    }
  }
  if (flag != nullptr) {
    flag->local->board[flag->notification].store(flag->value, std::memory_order_release);
    if (WakeWord* wake_word = peers_[static_cast<std::size_t>(rank_)].wake_word) wake_word->wake();
  }
  return true;
}

bool ShmTransport::post_atomic(QueueId, Rank peer, const Atomic& atomic) {
  if (atomic.remote->data == nullptr) {
    throw Error(ErrorKind::kUnavailable,
                text("atomics on rank ", peer,
                     "'s bound memory: shm can only reach segments it created; use ctx.segment()"));
  }
  processor_atomic(atomic, atomic.remote->data);
  return true;
}

void ShmTransport::copy_across(Rank peer, const Transfer& transfer, bool write) {
  std::byte* const here = transfer.local->data + transfer.local_offset;
  if (transfer.local->device == kHost) {
    call_across(peer, here, transfer.remote->address + transfer.remote_offset, transfer.bytes,
                write);
    return;
  }
  // The system call cannot reach GPU memory: pieces go through the host.
  std::vector<std::byte> piece(std::min(transfer.bytes, kPiece));
  for (std::uint64_t done = 0; done < transfer.bytes; done += piece.size()) {
    piece.resize(std::min(transfer.bytes - done, kPiece));
    const std::uint64_t there = transfer.remote->address + transfer.remote_offset + done;
    const int device = transfer.local->device;
    if (write) device_copy(device, piece.data(), here + done, piece.size());
    call_across(peer, piece.data(), there, piece.size(), write);
    if (!write) device_copy(device, here + done, piece.data(), piece.size());
  }
}

void ShmTransport::call_across(Rank peer, std::byte* mine, std::uint64_t theirs,
                               std::uint64_t bytes, bool write) {
  const pid_t pid = peers_[static_cast<std::size_t>(peer)].pid;
  std::uint64_t done = 0;
  while (done < bytes) {  // one call moves at most 2 GiB
    iovec here{mine + done, bytes - done};
    iovec there{reinterpret_cast<void*>(theirs + done), bytes - done};
    const ssize_t moved = write ? process_vm_writev(pid, &here, 1, &there, 1, 0)
                                : process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (moved <= 0) {
      const int error = errno;
      std::string what =
          text(write ? "writing to" : "reading from", " memory of rank ", peer, " by its address");
      if (error == ESRCH) {
        throw Error(ErrorKind::kPeerLost, text(what, ": ", std::strerror(error)), peer);
      }
      if (error == EPERM || error == ENOSYS) {
        what +=
            " (segments of ctx.segment need no such call; in docker --cap-add=SYS_PTRACE may "
            "allow it, and kernel.yama.ptrace_scope must be 0 or 1)";
      }
      throw_refused(what, write ? "process_vm_writev" : "process_vm_readv", error);
    }
    done += static_cast<std::uint64_t>(moved);
  }
}

}  // namespace pgasdl

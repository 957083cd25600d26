// A segment as one rank holds it: its own copy, and how it reaches the others'.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "pgas/board.hpp"
#include "transport/transport.hpp"

namespace pgasdl {

class Context;

// Where a segment's data lie: at `bound`, which must stay until the segment is deleted, or if null
// in new zero-filled memory. `device`: kHost, or the GPU that holds either. If not `reached`, peers
// reach only the board of a segment whose data are on a GPU.
struct SegmentHome {
  SegmentHome(std::byte* bound_to, int on_device = kHost) : bound(bound_to), device(on_device) {}
  bool operator==(const SegmentHome&) const = default;
  std::byte* bound;
  int device;
  bool reached = true;
};

class Segment {
 public:
  // `size`: of the world.
  Segment(SegmentId id, std::uint64_t bytes, std::uint32_t notifications, SegmentHome home,
          Rank size);
  // Memory of this rank only, for a plan's private buffers: no board, no peers.
  Segment(std::byte* memory, std::uint64_t bytes, int device = kHost);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  SegmentId id() const { return id_; }
  void set_id(SegmentId id) { id_ = id; }
  std::uint64_t bytes() const { return local_.bytes; }
  std::uint32_t notifications() const { return notifications_; }
  bool bound() const { return local_.bound; }
  int device() const { return local_.device; }
  // Peers may write and read its data, not only raise its flags.
  bool reached() const { return reached_; }
  // Some rank's copy lies on a GPU.
  bool on_devices() const { return on_devices_; }
  bool deleted() const { return deleted_.load(std::memory_order_relaxed); }

  LocalSegment& local() { return local_; }
  const LocalSegment& local() const { return local_; }
  // Null for ranks outside the segment's group.
  const RemoteSegment* remote(Rank peer) const {
    if (static_cast<std::size_t>(peer) >= remotes_.size()) return nullptr;
    const RemoteSegment& remote = remotes_[static_cast<std::size_t>(peer)];
    return remote.board == nullptr && remote.keep == nullptr ? nullptr : &remote;
  }
  void set_remote(Rank peer, RemoteSegment remote);
  // For peers whose board is not mapped; null if there are none.
  ToldMarks* told_marks() const { return told_marks_.get(); }
  // All peers are attached; from now on local() also shows data that peers do not reach.
  void set_self(Rank self);

  // Releases this rank's own copy; views keep its memory alive. Peers' copies stay reachable.
  // False: it was released before.
  bool release_local();

  // Where the next scan of the board begins, so that no notification starves.
  std::atomic<std::uint32_t> scan_from{0};

 private:
  SegmentId id_;
  LocalSegment local_;  // its board includes the marks
  std::uint32_t notifications_ = 0;
  std::vector<RemoteSegment> remotes_;  // their counts of notifications exclude the marks
  std::unique_ptr<ToldMarks> told_marks_;
  std::atomic<bool> deleted_{false};
  bool on_devices_ = false;
  bool reached_ = true;
  // Data that peers do not reach; local_ gets them in set_self().
  std::byte* unreached_data_ = nullptr;
  std::uint64_t unreached_bytes_ = 0;
  SegmentHome home_{nullptr};
};

// Never unmaps it: a GPU's stream may touch it at a time that nothing reports.
void keep_for_good(std::shared_ptr<const Segment> segment);

// A range of a segment: of this rank's copy as a source, of a peer's as a target.
struct Slice {
  std::shared_ptr<Segment> segment;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

}  // namespace pgasdl

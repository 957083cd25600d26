// The functions of the MPI that mpi4py has loaded, called without Python in between.
//
// Handles are integers in MPICH's ABI and pointers in Open MPI's and the standard's; above this
// file both are Handle. Predefined handles come from mpi4py, so no mpi.h is needed and one build
// serves all. Every function returns an error code, as all handles have MPI_ERRORS_RETURN; check()
// turns it into an Error that names the call and the peer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace pgasdl {

class MpiLibrary {
 public:
  using Handle = std::uintptr_t;
  using Aint = std::ptrdiff_t;

  struct Constants {
    Handle byte = 0;
    Handle uint64 = 0;
    Handle sum = 0;
    Handle info_null = 0;
    Handle errors_return = 0;
    int no_check = 0;
    int any_source = 0;
    int win_model = 0;
    int win_unified = 0;
    int source_in_status = 0;  // bytes from the beginning of a status
    bool own_by_processor =
        false;  // atomics on own memory crash; the library's are the processor's
    bool windows_by_turns =
        false;  // groups without a common rank take the same file for windows they make at once
    bool far_puts = false;  // long data go faster by puts to other machines, else by messages
  };

  // `file`: mpi4py's extension module, which links the library. Throws kUnavailable.
  static std::unique_ptr<MpiLibrary> load(const std::string& file, bool handles_are_pointers,
                                          const Constants& constants);
  virtual ~MpiLibrary() = default;
  const Constants& constants() const { return constants_; }

  // Throws kSystem unless `code` is success. `peer`: world rank, -1: none in particular.
  void check(int code, std::string_view call, int peer) const {
    if (code != 0) [[unlikely]]
      fail(code, call, peer);
  }

  // --- data path; bytes at most kMostBytes
  static constexpr std::uint64_t kMostBytes = 1u << 30;
  virtual int rput(const void* from, int bytes, int target, Aint at, Handle window,
                   Handle* request) = 0;
  virtual int rget(void* to, int bytes, int target, Aint at, Handle window, Handle* request) = 0;
  virtual int fetch_add(const std::uint64_t* operand, std::uint64_t* old, int target, Aint at,
                        Handle window) = 0;
  virtual int compare_swap(const std::uint64_t* swap, const std::uint64_t* compare,
                           std::uint64_t* old, int target, Aint at, Handle window) = 0;
  virtual int flush(int target, Handle window) = 0;
  virtual int test(Handle* request, bool* done) = 0;
  virtual int isend(const void* from, int bytes, int peer, int tag, Handle communicator,
                    Handle* request) = 0;
  virtual int irecv(void* to, int bytes, int peer, int tag, Handle communicator,
                    Handle* request) = 0;
  // Finds a message and its sender, and takes it out to be received by receive(). Also lets the
  // library handle what arrives.
  virtual int probe(int tag, Handle communicator, bool* there, Handle* message, int* source) = 0;
  virtual int receive(void* to, int bytes, Handle* message, Handle* request) = 0;

  // --- setup; collective calls block until all members have called them
  // `shared`: all of the communicator's ranks are on one machine.
  virtual int allocate(std::uint64_t bytes, bool shared, Handle communicator, void** base,
                       Handle* window) = 0;
  virtual int create(void* base, std::uint64_t bytes, Handle communicator, Handle* window) = 0;
  virtual int open(Handle window) = 0;  // sets the error handler, begins an endless passive epoch
  // Whether loads and stores see what peers wrote.
  virtual int unified(Handle window, bool* yes) = 0;
  virtual int close_and_free(Handle* window) = 0;
  // The address at which a target's memory is mapped here, or null.
  virtual std::byte* mapped(Handle window, int target) = 0;
  virtual int ibarrier(Handle communicator, Handle* request) = 0;
  virtual int allgather(std::uint64_t mine, std::uint64_t* all, Handle communicator) = 0;
  virtual int subset(Handle communicator, const int* ranks, int count, int tag, Handle* made) = 0;

 protected:
  explicit MpiLibrary(const Constants& constants) : constants_(constants) {}
  virtual std::string words(int code) const = 0;
  const Constants constants_;

 private:
  [[noreturn]] void fail(int code, std::string_view call, int peer) const;
};

}  // namespace pgasdl

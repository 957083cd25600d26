#include "transport/mpi/library.hpp"

#include <dlfcn.h>

#include <cstring>

#include "sys/error.hpp"

namespace pgasdl {
namespace {

// Large enough for every library's status.
struct Status {
  alignas(16) char bytes[256];
};

constexpr int kLongestWords = 4096;

// X-macro: name and parameters; all return an int. H: a handle.
#define PGASDL_MPI_FUNCTIONS(X)                                           \
  X(Rput, (const void*, int, H, int, Aint, int, H, H, H*))                \
  X(Rget, (void*, int, H, int, Aint, int, H, H, H*))                      \
  X(Isend, (const void*, int, H, int, int, H, H*))                        \
  X(Irecv, (void*, int, H, int, int, H, H*))                              \
  X(Improbe, (int, int, H, int*, H*, Status*))                            \
  X(Imrecv, (void*, int, H, H*, H*))                                      \
  X(Fetch_and_op, (const void*, void*, H, int, Aint, H, H))               \
  X(Compare_and_swap, (const void*, const void*, void*, H, int, Aint, H)) \
  X(Win_flush, (int, H))                                                  \
  X(Test, (H*, int*, Status*))                                            \
  X(Win_allocate, (Aint, int, H, H, void*, H*))                           \
  X(Win_allocate_shared, (Aint, int, H, H, void*, H*))                    \
  X(Win_create, (void*, Aint, int, H, H, H*))                             \
  X(Win_shared_query, (H, int, Aint*, int*, void*))                       \
  X(Win_lock_all, (int, H))                                               \
  X(Win_unlock_all, (H))                                                  \
  X(Win_free, (H*))                                                       \
  X(Win_set_errhandler, (H, H))                                           \
  X(Win_get_attr, (H, int, void*, int*))                                  \
  X(Ibarrier, (H, H*))                                                    \
  X(Allgather, (const void*, int, H, void*, int, H, H))                   \
  X(Comm_group, (H, H*))                                                  \
  X(Group_incl, (H, int, const int*, H*))                                 \
  X(Group_free, (H*))                                                     \
  X(Comm_create_group, (H, H, int, H*))                                   \
  X(Comm_set_errhandler, (H, H))                                          \
  X(Error_string, (int, char*, int*))

template <typename H>
class Calls final : public MpiLibrary {
 public:
  Calls(void* library, const std::string& file, const Constants& constants)
      : MpiLibrary(constants),
        byte_(native(constants.byte)),
        uint64_(native(constants.uint64)),
        sum_(native(constants.sum)),
        info_null_(native(constants.info_null)),
        errors_return_(native(constants.errors_return)) {
#define PGASDL_FIND(name, parameters)                                                      \
  name = reinterpret_cast<int(*) parameters>(dlsym(library, "MPI_" #name));                \
  if (name == nullptr) {                                                                   \
    throw Error(ErrorKind::kUnavailable, text("the MPI of ", file, " has no MPI_" #name)); \
  }
    PGASDL_MPI_FUNCTIONS(PGASDL_FIND)
#undef PGASDL_FIND
  }

  int rput(const void* from, int bytes, int target, Aint at, Handle window,
           Handle* request) override {
    H made;
    const int code = Rput(from, bytes, byte_, target, at, bytes, byte_, native(window), &made);
    *request = ours(made);
    return code;
  }
  int rget(void* to, int bytes, int target, Aint at, Handle window, Handle* request) override {
    H made;
    const int code = Rget(to, bytes, byte_, target, at, bytes, byte_, native(window), &made);
    *request = ours(made);
    return code;
  }
  int fetch_add(const std::uint64_t* operand, std::uint64_t* old, int target, Aint at,
                Handle window) override {
    return Fetch_and_op(operand, old, uint64_, target, at, sum_, native(window));
  }
  int compare_swap(const std::uint64_t* swap, const std::uint64_t* compare, std::uint64_t* old,
                   int target, Aint at, Handle window) override {
    return Compare_and_swap(swap, compare, old, uint64_, target, at, native(window));
  }
  int flush(int target, Handle window) override { return Win_flush(target, native(window)); }
  int test(Handle* request, bool* done) override {
    H tested = native(*request);
    int flag = 0;
    Status status;
    const int code = Test(&tested, &flag, &status);
    *request = ours(tested);
    *done = flag != 0;
    return code;
  }
  int isend(const void* from, int bytes, int peer, int tag, Handle communicator,
            Handle* request) override {
    H made;
    const int code = Isend(from, bytes, byte_, peer, tag, native(communicator), &made);
    *request = ours(made);
    return code;
  }
  int irecv(void* to, int bytes, int peer, int tag, Handle communicator, Handle* request) override {
    H made;
    const int code = Irecv(to, bytes, byte_, peer, tag, native(communicator), &made);
    *request = ours(made);
    return code;
  }
  int probe(int tag, Handle communicator, bool* there, Handle* message, int* source) override {
    int flag = 0;
    H found;
    Status status;
    const int code =
        Improbe(constants_.any_source, tag, native(communicator), &flag, &found, &status);
    *there = code == 0 && flag != 0;
    if (*there) {
      *message = ours(found);
      std::memcpy(source, status.bytes + constants_.source_in_status, sizeof *source);
    }
    return code;
  }
  int receive(void* to, int bytes, Handle* message, Handle* request) override {
    H received = native(*message);
    H made;
    const int code = Imrecv(to, bytes, byte_, &received, &made);
    *request = ours(made);
    return code;
  }

  int allocate(std::uint64_t bytes, bool shared, Handle communicator, void** base,
               Handle* window) override {
    H made;
    const int code = (shared ? Win_allocate_shared : Win_allocate)(
        static_cast<Aint>(bytes), 1, info_null_, native(communicator), base, &made);
    *window = ours(made);
    return code;
  }
  int create(void* base, std::uint64_t bytes, Handle communicator, Handle* window) override {
    H made;
    const int code =
        Win_create(base, static_cast<Aint>(bytes), 1, info_null_, native(communicator), &made);
    *window = ours(made);
    return code;
  }
  int open(Handle window) override {
    const int code = Win_set_errhandler(native(window), errors_return_);
    return code != 0 ? code : Win_lock_all(constants_.no_check, native(window));
  }
  int unified(Handle window, bool* yes) override {
    const int* model = nullptr;
    int known = 0;
    const int code = Win_get_attr(native(window), constants_.win_model, &model, &known);
    *yes = code == 0 && known != 0 && *model == constants_.win_unified;
    return code;
  }
  int close_and_free(Handle* window) override {
    H freed = native(*window);
    const int code = Win_unlock_all(freed);
    return code != 0 ? code : Win_free(&freed);
  }
  std::byte* mapped(Handle window, int target) override {
    Aint bytes = 0;
    int unit = 0;
    void* base = nullptr;
    const int code = Win_shared_query(native(window), target, &bytes, &unit, &base);
    return code == 0 && bytes > 0 ? static_cast<std::byte*>(base) : nullptr;
  }
  int ibarrier(Handle communicator, Handle* request) override {
    H made;
    const int code = Ibarrier(native(communicator), &made);
    *request = ours(made);
    return code;
  }
  int allgather(std::uint64_t mine, std::uint64_t* all, Handle communicator) override {
    return Allgather(&mine, 1, uint64_, all, 1, uint64_, native(communicator));
  }
  int subset(Handle communicator, const int* ranks, int count, int tag, Handle* made) override {
    H all;
    H chosen;
    H result;
    int code = Comm_group(native(communicator), &all);
    if (code != 0) return code;
    code = Group_incl(all, count, ranks, &chosen);
    if (code == 0) {
      code = Comm_create_group(native(communicator), chosen, tag, &result);
      Group_free(&chosen);
    }
    Group_free(&all);
    if (code != 0) return code;
    *made = ours(result);
    return Comm_set_errhandler(result, errors_return_);
  }

 protected:
  std::string words(int code) const override {
    char said[kLongestWords];
    int length = 0;
    if (Error_string(code, said, &length) != 0) return text("error ", code);
    return std::string(said, static_cast<std::size_t>(length));
  }

 private:
  static H native(Handle handle) {
    if constexpr (sizeof(H) == sizeof(Handle)) {
      return reinterpret_cast<H>(handle);
    } else {
      return static_cast<H>(handle);
    }
  }
  static Handle ours(H handle) {
    if constexpr (sizeof(H) == sizeof(Handle)) {
      return reinterpret_cast<Handle>(handle);
    } else {
      return static_cast<Handle>(static_cast<unsigned>(handle));
    }
  }

#define PGASDL_DECLARE(name, parameters) int(*name) parameters = nullptr;
  PGASDL_MPI_FUNCTIONS(PGASDL_DECLARE)
#undef PGASDL_DECLARE

  const H byte_;
  const H uint64_;
  const H sum_;
  const H info_null_;
  const H errors_return_;
};

}  // namespace

std::unique_ptr<MpiLibrary> MpiLibrary::load(const std::string& file, bool handles_are_pointers,
                                             const Constants& constants) {
  // The module is loaded already; a look-up in it includes the libraries that it links.
  void* library = dlopen(file.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    throw Error(ErrorKind::kUnavailable, text(file, " is not loaded: ", dlerror()));
  }
  if (handles_are_pointers) return std::make_unique<Calls<void*>>(library, file, constants);
  return std::make_unique<Calls<int>>(library, file, constants);
}

void MpiLibrary::fail(int code, std::string_view call, int peer) const {
  const std::string to = peer < 0 ? "" : text(" to rank ", peer);
  throw Error(ErrorKind::kSystem, text(call, to, ": ", words(code)), peer);
}

}  // namespace pgasdl

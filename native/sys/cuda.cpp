#include "sys/cuda.hpp"

#include <dlfcn.h>

#include <mutex>
#include <vector>

#include "sys/error.hpp"
#include "sys/process.hpp"

namespace pgasdl::cuda {
namespace {

constexpr const char* kFile = "libcuda.so.1";

struct Library : Driver {
  std::uint64_t born = fork_depth();
  int n_devices = 0;
};

template <typename Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
}

std::string describe(const Driver& driver, Result result) {
  const char* name = nullptr;
  const char* words = nullptr;
  driver.get_error_name(result, &name);
  driver.get_error_string(result, &words);
  return text(name != nullptr ? name : "no error that the driver knows", ": ",
              words != nullptr ? words : "no words for it", " (", result, ")");
}

const char* advice(Result result) {
  switch (result) {
    case kNoDevice:
      return "nvidia-smi lists the devices, CUDA_VISIBLE_DEVICES selects among them; containers "
             "get them by `docker run --gpus all`";
    case kNotInitialized:
      return "CUDA does not outlive a fork: start processes by spawn";
    case kStubLibrary:
      return "the CUDA toolkit's stub was found before the driver: look into LD_LIBRARY_PATH";
    case kDriverMismatch:
      return "the driver was updated and its kernel module was not: reload it or restart the "
             "machine";
    case kUnknown:
      return "is the kernel module nvidia_uvm loaded, and /dev/nvidia-uvm there?";
    default:
      return "nvidia-smi tells whether the driver works";
  }
}

void initialised(const Driver& driver, Result result, const char* call) {
  if (result == kSuccess) return;
  throw Error(ErrorKind::kUnavailable, text("no CUDA device here: ", call, ": ",
                                            describe(driver, result), "; ", advice(result)));
}

Library load() {
  void* handle = dlopen(kFile, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    throw Error(ErrorKind::kUnavailable,
                text("no CUDA driver here: ", dlerror(),
                     "; install NVIDIA's driver (containers get it by `docker run --gpus all`)"));
  }
  Library library;
#define PGASDL_FIND(member, name, parameters)                                            \
  find(handle, name, library.member);                                                    \
  if (library.member == nullptr) {                                                       \
    throw Error(ErrorKind::kUnavailable,                                                 \
                text(kFile, " has no ", name,                                            \
                     ": too old? It has to be the driver of CUDA 11.7 or a later one")); \
  }
  PGASDL_CUDA_FUNCTIONS(PGASDL_FIND)
#undef PGASDL_FIND
#define PGASDL_FIND(member, name, parameters) find(handle, name, library.member);
  PGASDL_CUDA_OPTIONAL_FUNCTIONS(PGASDL_FIND)
#undef PGASDL_FIND
  initialised(library, library.init(0), "cuInit");
  initialised(library, library.device_get_count(&library.n_devices), "cuDeviceGetCount");
  if (library.n_devices == 0) initialised(library, kNoDevice, "cuDeviceGetCount");
  return library;
}

const Library& inherited() {
  static const Library library = load();  // the next call repeats a failed attempt
  return library;
}

const Library& loaded() {
  const Library& library = inherited();
  if (library.born != fork_depth()) {
    throw Error(ErrorKind::kUnavailable,
                text("a parent of this process used CUDA, and ", advice(kNotInitialized)));
  }
  return library;
}

}  // namespace

const Driver& driver() { return loaded(); }

Context primary_context(Device device) {
  static std::mutex mutex;
  static std::vector<Context> contexts(static_cast<std::size_t>(loaded().n_devices));
  const std::scoped_lock lock(mutex);
  if (device < 0 || static_cast<std::size_t>(device) >= contexts.size()) {
    throw Error(ErrorKind::kUnavailable,
                text("there is no CUDA device ", device, ": this process sees ", contexts.size()));
  }
  Context& context = contexts[static_cast<std::size_t>(device)];
  if (context == nullptr) {
    check(driver().primary_ctx_retain(&context, device),
          text("retaining the primary context of CUDA device ", device));
  }
  return context;
}

std::string missing() {
  try {
    loaded();
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

int device_count() { return missing().empty() ? loaded().n_devices : 0; }

int attribute(Device device, DeviceAttribute which) {
  int value = 0;
  const Result result = driver().device_get_attribute(&value, which, device);
  if (result == kInvalidValue || result == kNotSupported) return 0;
  check(result, text("attribute ", static_cast<int>(which), " of CUDA device ", device));
  return value;
}

void check(Result result, const std::string& what) {
  if (result == kSuccess) return;
  throw Error(result == kNotSupported ? ErrorKind::kUnavailable : ErrorKind::kSystem,
              text(what, ": ", describe(driver(), result)));
}

Current::Current(Device device) {
  check(driver().ctx_push(primary_context(device)),
        text("making CUDA device ", device, " the current one"));
  (void)driver().thread_exchange_capture_mode(&capture_mode_);
}

Current::~Current() {
  Context context = nullptr;
  (void)inherited().thread_exchange_capture_mode(&capture_mode_);
  // Fails at the end of the process and in a child, which does not matter.
  inherited().ctx_pop(&context);
}

}  // namespace pgasdl::cuda

// Modules, which may be any text that begins like PTX; their kernels, which are functions of this
// library; and host functions in a stream.
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fake_kernels.hpp"
#include "handles.hpp"
#include "memory.hpp"
#include "streams.hpp"

struct pgasdl::cuda::FunctionObject {
  const fake_cuda::FakeKernel* kernel;
  Context context;
};

struct pgasdl::cuda::ModuleObject {
  Context context;
  std::string text;
  std::mutex mutex;
  std::list<FunctionObject> functions;
};

namespace fake_cuda {
namespace {

std::map<std::string_view, const FakeKernel*>& kernels() {
  static auto& all = *new std::map<std::string_view, const FakeKernel*>;
  return all;
}

Handles<ModuleObject>& modules() {
  static auto& all = *new Handles<ModuleObject>;
  return all;
}

// The parameters' values when the kernel was launched.
class Parameters {
 public:
  Parameters(const FakeKernel& kernel, void** given) {
    for (std::size_t i = 0; i < kernel.parameter_bytes.size(); ++i) {
      const std::size_t bytes = kernel.parameter_bytes[i];
      auto& copy = copies_.emplace_back((bytes + sizeof(Unit) - 1) / sizeof(Unit));
      std::memcpy(copy.data(), given[i], bytes);
    }
  }
  std::vector<void*> addresses() {
    std::vector<void*> all;
    for (auto& copy : copies_) all.push_back(copy.data());
    return all;
  }

 private:
  struct alignas(16) Unit {
    std::byte bytes[16];
  };
  std::vector<std::vector<Unit>> copies_;
};

bool is_launchable(Dim grid, Dim block, unsigned shared_bytes) {
  return grid.x > 0 && grid.y > 0 && grid.z > 0 && grid.y < 65536 && grid.z < 65536 &&
         block.x > 0 && block.y > 0 && block.z > 0 && block.z <= 64 &&
         std::uint64_t{block.x} * block.y * block.z <= 1024 && shared_bytes <= 232448;
}

}  // namespace

FakeKernel::FakeKernel(const char* kernel, Run function, std::vector<std::size_t> bytes)
    : name(kernel), run(function), parameter_bytes(std::move(bytes)) {
  kernels()[name] = this;
}

std::size_t n_modules() { return modules().size(); }

Result module_load_data(Module* module, const void* image) {
  if (const Result refused = enter(Entry::module_load_data, Needs::kContext)) return refused;
  if (image == nullptr) return kInvalidValue;
  const std::string text = static_cast<const char*>(image);
  const std::size_t at = text.find(".version");
  if (at == text.npos) return kInvalidImage;
  if (text.find(".target", at) == text.npos && text.find(".entry") != text.npos) return kInvalidPtx;
  wait_for_streams();
  auto made = std::make_shared<ModuleObject>();
  made->context = current_context();
  made->text = text;
  *module = modules().add(std::move(made));
  return kSuccess;
}

Result module_unload(Module module) {
  if (const Result refused = enter(Entry::module_unload, Needs::kContext)) return refused;
  return modules().remove(module) == nullptr ? kInvalidHandle : kSuccess;
}

Result module_get_function(Function* function, Module module, const char* name) {
  if (const Result refused = enter(Entry::module_get_function, Needs::kContext)) return refused;
  const auto found = modules().find(module);
  if (found == nullptr) return kInvalidHandle;
  const auto kernel = kernels().find(name);
  if (kernel == kernels().end()) return kNotFound;
  // A text with entries must have this one.
  const bool entries = found->text.find(".entry") != found->text.npos;
  if (entries && found->text.find(name) == found->text.npos) return kNotFound;
  const std::scoped_lock lock(found->mutex);
  *function = &found->functions.emplace_back(FunctionObject{kernel->second, found->context});
  return kSuccess;
}

Result launch_kernel(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                     unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                     Stream handle, void** parameters, void** extra) {
  if (const Result refused = enter(Entry::launch_kernel, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  const Dim grid{grid_x, grid_y, grid_z};
  const Dim block{block_x, block_y, block_z};
  if (function == nullptr || function->context != stream->context) return kInvalidHandle;
  if (extra != nullptr || !is_launchable(grid, block, shared_bytes)) return kInvalidValue;
  const FakeKernel& kernel = *function->kernel;
  if (parameters == nullptr && !kernel.parameter_bytes.empty()) return kInvalidValue;
  submit(*stream, [&kernel, grid, block, copies = Parameters(kernel, parameters),
                   device = stream->context->device]() mutable {
    const Touching touch(device);
    kernel.run(copies.addresses().data(), grid, block);
  });
  return kSuccess;
}

Result launch_host_func(Stream handle, HostFunction function, void* argument) {
  if (const Result refused = enter(Entry::launch_host_func, Needs::kContext)) return refused;
  std::shared_ptr<StreamObject> stream;
  if (const Result refused = find_stream(handle, &stream)) return refused;
  if (function == nullptr) return kInvalidValue;
  submit(*stream, [=] {
    set_in_host_function(true);
    function(argument);
    set_in_host_function(false);
  });
  return kSuccess;
}

}  // namespace fake_cuda

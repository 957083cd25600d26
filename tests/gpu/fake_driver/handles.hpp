// Objects that the program holds by address: any other address is refused.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace fake_cuda {

template <typename Object>
class Handles {
 public:
  Object* add(std::shared_ptr<Object> object) {
    const std::scoped_lock lock(mutex_);
    Object* address = object.get();
    objects_[address] = std::move(object);
    return address;
  }
  std::shared_ptr<Object> find(Object* address) const {
    const std::shared_lock lock(mutex_);
    const auto found = objects_.find(address);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Object> remove(Object* address) {
    const std::scoped_lock lock(mutex_);
    auto node = objects_.extract(address);
    return node.empty() ? nullptr : std::move(node.mapped());
  }
  std::vector<std::shared_ptr<Object>> all() const {
    const std::shared_lock lock(mutex_);
    std::vector<std::shared_ptr<Object>> copy;
    for (const auto& [address, object] : objects_) copy.push_back(object);
    return copy;
  }
  std::size_t size() const {
    const std::shared_lock lock(mutex_);
    return objects_.size();
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<Object*, std::shared_ptr<Object>> objects_;
};

}  // namespace fake_cuda

#include "memory/pinned_word.hpp"

#include <mutex>
#include <vector>

#include "memory/region.hpp"
#include "sys/error.hpp"
#include "sys/process.hpp"

namespace pgasdl {
namespace {

using Word = std::atomic<std::uint32_t>;
constexpr std::size_t kLine = 64;  // a word has a cache line of its own

std::mutex words_mutex;
// Never destroyed, nor their pages: a stream may still read a word.
std::vector<Word*>& idle_words() {
  static auto* const idle = new std::vector<Word*>;
  return *idle;
}

void add_page() {
  static auto* const pages = new std::vector<std::shared_ptr<Region>>;
  auto page = Region::create_private(page_bytes());
  page->pin();
  pages->push_back(page);
  auto& idle = idle_words();
  idle.reserve(pages->size() * page->bytes() / kLine);  // so that giving back needs no memory
  for (std::size_t at = 0; at < page->bytes(); at += kLine) {
    idle.push_back(new (page->data() + at) Word(0));
  }
}

}  // namespace

PinnedWord::PinnedWord() : born_(fork_depth()) {
  const std::lock_guard lock(words_mutex);
  if (idle_words().empty()) add_page();
  word_ = idle_words().back();
  idle_words().pop_back();
}

PinnedWord::~PinnedWord() {
  if (fork_depth() != born_) return;  // its parent's, as is the lock
  const std::lock_guard lock(words_mutex);
  idle_words().push_back(word_);
}

void PinnedWord::enqueue(cuda::Device device, cuda::Stream stream, std::uint32_t more) const {
  const auto& driver = cuda::driver();
  const cuda::Current current(device);
  cuda::DevicePtr address = 0;
  cuda::check(driver.mem_host_get_device_pointer(&address, word_, 0), "a word for the GPU");
  // Reached if it is not behind, of numbers that wrap.
  const std::uint32_t value = word_->load(std::memory_order_relaxed) + more;
  cuda::check(driver.stream_wait_value(stream, address, value, cuda::kWaitValueGeq),
              "letting a stream wait (streams of this driver must be able to wait for values)");
}

}  // namespace pgasdl

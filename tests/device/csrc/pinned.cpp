// Pinned memory of the host.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>

#include "memory.h"

namespace test_device {

namespace {

std::mutex& range_lock() {
  static auto* held = new std::mutex;
  return *held;
}

std::map<const char*, size_t>& pinned_ranges() {
  static auto* held = new std::map<const char*, size_t>;
  return *held;
}

void free_pinned(void* data) {
  {
    std::lock_guard guard(range_lock());
    pinned_ranges().erase(static_cast<const char*>(data));
  }
  std::free(data);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::memset(data, kPoison, bytes);
    std::lock_guard guard(range_lock());
    pinned_ranges()[static_cast<const char*>(data)] = bytes;
    return {data, data, free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return free_pinned;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
};

}  // namespace

c10::Allocator* pinned_allocator() {
  static auto* held = new PinnedAllocator;
  return held;
}

bool is_pinned(const void* data) {
  auto at = static_cast<const char*>(data);
  std::lock_guard guard(range_lock());
  auto next = pinned_ranges().upper_bound(at);
  if (next == pinned_ranges().begin()) return false;
  auto found = std::prev(next);
  return at < found->first + std::max<size_t>(found->second, 1);
}

}  // namespace test_device

// Memory of the devices. No host code can touch it: its pages are readable and writable only while a kernel runs.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <memory>
#include <vector>

#include "streams.h"

namespace test_device {

constexpr int kPoison = 0xff;  // NaN in every floating-point type, -1 in every signed one

// One allocation. Its address is never used again.
struct Block {
  uint64_t number;
  c10::DeviceIndex device;
  char* base;
  size_t bytes;  // as requested
  size_t span;   // whole pages
  StreamState* stream;                 // that it was allocated on
  std::vector<StreamState*> recorded;  // other streams that use it, by `record_stream`
  History history;
  bool of_graph = false;  // allocated while a graph was recorded: it belongs to the graph, also when it is freed
  int openings = 0;

  ~Block();
};
using BlockRef = std::shared_ptr<Block>;

// Makes blocks accessible for as long as it lives.
class Opening {
 public:
  explicit Opening(std::vector<BlockRef> blocks);
  ~Opening();
  Opening(const Opening&) = delete;
  Opening& operator=(const Opening&) = delete;

 private:
  std::vector<BlockRef> blocks_;
};

c10::DeviceAllocator* device_allocator();
c10::DataPtr allocate(c10::DeviceIndex device, size_t bytes);
BlockRef block_of(const c10::DataPtr& data);  // null for no memory
void record_stream(const c10::DataPtr& data, StreamState& stream);
c10::DeviceIndex device_of_pointer(const void* data);

// Raise the error for touches of device memory by the host since the last call.
void raise_host_touches();
int64_t take_host_touches();

c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);

}  // namespace test_device

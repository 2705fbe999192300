#include "memory.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "current.h"
#include "recording.h"

namespace test_device {

namespace {

constexpr size_t kArena = size_t{1} << 40;  // addresses of one device; they cost nothing until they are used
constexpr size_t kKeptBytes = size_t{64} << 20;  // of freed blocks whose poison is kept

struct Arena {
  char* base;
  size_t used = 0;
};

// Guards the protection of pages and the arenas; a leaf lock.
std::mutex& page_lock() {
  static auto* held = new std::mutex;
  return *held;
}

size_t page_size() {
  static const size_t size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

std::vector<Arena>& arenas() {
  static auto* held = [] {
    auto* made = new std::vector<Arena>;
    for (c10::DeviceIndex d = 0; d < device_count(); ++d) {
      void* base = mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(base != MAP_FAILED, "mmap of the memory of mesh:", int(d), " failed: ", strerror(errno));
      made->push_back({static_cast<char*>(base)});
    }
    return made;
  }();
  return *held;
}

void protect(char* base, size_t span, int access) {
  int failed = mprotect(base, span, access);
  TORCH_CHECK(!failed, "mprotect of device memory failed: ", strerror(errno));
}

// ---- touches by the host ----

std::atomic<int64_t> touches{0};
std::atomic<uintptr_t> touched_address{0};  // of the last touch
constexpr int64_t kKnownPages = 64;
std::atomic<uintptr_t> touched_pages[kKnownPages];
int64_t open_blocks = 0;  // under the lock of the pages
std::atomic<int64_t> reported{0};
struct sigaction previous_action;

bool is_device_address(uintptr_t address) {
  for (const Arena& arena : arenas()) {
    auto base = reinterpret_cast<uintptr_t>(arena.base);
    if (base <= address && address < base + kArena) return true;
  }
  return false;
}

// Opens the touched page, so that the host goes on; the next call of the device raises an error.
void on_fault(int number, siginfo_t* info, void* context) {
  auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (is_device_address(address)) {
    auto page = address & ~(page_size() - 1);
    touched_address = address;
    touched_pages[touches++ % kKnownPages] = page;
    if (mprotect(reinterpret_cast<void*>(page), page_size(), PROT_READ | PROT_WRITE) == 0) return;
  }
  sigaction(number, &previous_action, nullptr);  // the access is repeated, and ends as without this handler
}

void install_fault_handler() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_action);
}

// ---- blocks ----

void fill_with_poison(const BlockRef& block) {
  Opening opening({block});
  std::memset(block->base, kPoison, block->span);
}

// Keeps the last freed blocks, so that work that still uses them finds poison.
void keep_for_a_while(BlockRef block) {
  static auto* kept = new std::deque<BlockRef>;
  static size_t bytes = 0;
  std::vector<BlockRef> dropped;  // destroyed after the lock is released
  std::lock_guard guard(state_lock());
  bytes += block->span;
  kept->push_back(std::move(block));
  while (bytes > kKeptBytes && kept->size() > 1) {
    bytes -= kept->front()->span;
    dropped.push_back(std::move(kept->front()));
    kept->pop_front();
  }
}

struct Allocation {
  BlockRef block;
};

struct Statistics {
  c10::CachingDeviceAllocator::DeviceStats of[16];
};

Statistics& statistics() {
  static auto* held = new Statistics;
  return *held;
}

template <class F>
void for_each_statistic(c10::DeviceIndex device, F change) {
  auto& stats = statistics().of[device];
  for (auto* each : {&stats.allocated_bytes, &stats.active_bytes, &stats.requested_bytes, &stats.reserved_bytes})
    change((*each)[0], true);
  for (auto* each : {&stats.allocation, &stats.active}) change((*each)[0], false);
}

// Poison the block once the streams that use it have run what is queued on them now.
void poison_after_users(const BlockRef& block, bool keeps) {
  StreamState& owner = replayed(*block->stream);
  std::vector<StreamState*> users;
  {
    std::lock_guard guard(state_lock());
    users = block->recorded;
    Clock used;
    for (StreamState* user : users) used.join(user->clock);
    note(owner, "free", {{block, {0, block->bytes}, true}}, 0, used);
  }
  // the last copy of `poison` to go fills the block
  std::shared_ptr<void> poison(nullptr, [block, keeps](void*) {
    fill_with_poison(block);
    if (keeps) keep_for_a_while(block);
  });
  users.push_back(&owner);
  for (StreamState* user : users) after_queued_work(*user, [poison] {});
}

void release(void* context) {
  std::unique_ptr<Allocation> allocation(static_cast<Allocation*>(context));
  BlockRef block = allocation->block;
  {
    std::lock_guard guard(state_lock());
    for_each_statistic(block->device, [&](auto& stat, bool is_bytes) { stat.decrease(is_bytes ? block->bytes : 1); });
  }
  if (record([block] { poison_after_users(block, false); }) || block->of_graph) return;
  poison_after_users(block, true);
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    return test_device::allocate(current_device(), bytes);
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    TORCH_CHECK(false, "the host cannot copy device memory");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_stream(data, stream_state(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard guard(state_lock());
    return statistics().of[device];
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard guard(state_lock());
    for_each_statistic(device, [](auto& stat, bool) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard guard(state_lock());
    for_each_statistic(device, [](auto& stat, bool) { stat.reset_peak(); });
  }
};

}  // namespace

Block::~Block() {
  madvise(base, span, MADV_DONTNEED);
}

Opening::Opening(std::vector<BlockRef> blocks) : blocks_(std::move(blocks)) {
  std::erase(blocks_, nullptr);
  std::lock_guard guard(page_lock());
  for (const BlockRef& block : blocks_)
    if (block->openings++ == 0) protect(block->base, block->span, PROT_READ | PROT_WRITE), ++open_blocks;
}

Opening::~Opening() {
  std::lock_guard guard(page_lock());
  for (const BlockRef& block : blocks_)
    if (--block->openings == 0) mprotect(block->base, block->span, PROT_NONE), --open_blocks;
}

c10::DataPtr allocate(c10::DeviceIndex device, size_t bytes) {
  raise_host_touches();
  c10::Device place(c10::DeviceType::PrivateUse1, device);
  if (bytes == 0) return {nullptr, place};
  auto block = std::make_shared<Block>();
  block->bytes = bytes;
  block->span = (bytes + page_size() - 1) / page_size() * page_size();
  block->device = device;
  block->stream = &current_stream(device);
  block->of_graph = is_recording();
  {
    std::lock_guard guard(page_lock());
    Arena& arena = arenas().at(device);
    TORCH_CHECK(arena.used + block->span < kArena, "out of memory on mesh:", int(device));
    block->base = arena.base + arena.used;
    arena.used += block->span;
  }
  fill_with_poison(block);
  {
    std::lock_guard guard(state_lock());
    block->number = static_cast<uint64_t>(++counters().allocations);
    for_each_statistic(device, [&](auto& stat, bool is_bytes) { stat.increase(is_bytes ? bytes : 1); });
  }
  auto note_write = [block] {
    std::lock_guard guard(state_lock());
    note(replayed(*block->stream), "allocate", {{block, {0, block->bytes}, true}});
  };
  if (!record(note_write)) note_write();  // in a recording, each replay takes the memory of its pool again
  void* base = block->base;
  return {base, new Allocation{std::move(block)}, release, place};
}

BlockRef block_of(const c10::DataPtr& data) {
  if (!data.get_context() || data.get_deleter() != release) return nullptr;
  return static_cast<Allocation*>(data.get_context())->block;
}

void record_stream(const c10::DataPtr& data, StreamState& stream) {
  BlockRef block = block_of(data);
  std::lock_guard guard(state_lock());
  if (block && block->stream != &stream) block->recorded.push_back(&stream);
}

c10::DeviceIndex device_of_pointer(const void* data) {
  for (c10::DeviceIndex d = 0; d < device_count(); ++d) {
    const char* base = arenas()[d].base;
    if (base <= data && data < base + kArena) return d;
  }
  TORCH_CHECK(false, "not an address of a test device");
}

int64_t take_host_touches() {
  int64_t all = touches, found = all - reported.exchange(all);
  std::lock_guard guard(page_lock());
  for (int64_t i = all - std::min(found, kKnownPages); i < all && open_blocks == 0; ++i)
    mprotect(reinterpret_cast<void*>(touched_pages[i % kKnownPages].load()), page_size(), PROT_NONE);
  return found;
}

void raise_host_touches() {
  if (touches == reported) return;
  int64_t found = take_host_touches();
  TORCH_CHECK(
      false, "the host touched memory of mesh:", int(device_of_pointer(reinterpret_cast<void*>(touched_address.load()))),
      ": ", found, " pages since the last call of the device; fix: copy the tensor to the CPU first");
}

c10::DeviceAllocator* device_allocator() {
  static auto* held = [] {
    arenas();
    install_fault_handler();
    return new DeviceAllocator;
  }();
  return held;
}

}  // namespace test_device

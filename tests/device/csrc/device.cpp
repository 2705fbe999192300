// Registers the devices with torch: guard (devices, streams, events), hooks, generators and allocator.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "current.h"
#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace test_device {

namespace {
thread_local c10::DeviceIndex current = 0;

c10::Device device_at(c10::DeviceIndex index) {
  return c10::Device(c10::DeviceType::PrivateUse1, index);
}

c10::Stream as_stream(const StreamState& stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(stream.device), stream.id);
}

StreamState& state_of(const c10::Stream& stream) {
  return stream_state(stream.device_index(), stream.id());
}

c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current;
}

struct Event {
  MarkRef mark;
};

const MarkRef& mark_of(void* event) {
  return static_cast<Event*>(event)->mark;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(exchange_device(index_of(device)));
  }
  c10::Device getDevice() const override {
    return device_at(current);
  }
  void setDevice(c10::Device device) const override {
    exchange_device(index_of(device));
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current = index_of(device);
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {};
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_stream(current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(stream_state(index_of(device), 0));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_stream(new_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(exchange_stream(state_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_finished(mark(state_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(state_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (StreamState* stream : streams_of(device < 0 ? current : device)) synchronize(*stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->mark = mark(state_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_on_stream(mark_of(event), state_of(stream));
  }
  bool queryEvent(void* event) const override {
    return !event || is_finished(mark_of(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait_on_host(mark_of(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const MarkRef &from = mark_of(first), &to = mark_of(second);
    TORCH_CHECK(!from->in_replay && !to->in_replay, "the time of an event of a graph");
    return (to->time - from->time) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, state_of(stream));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    exchange_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchange_device(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    return device_at(device_of_pointer(data));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

c10::DeviceIndex current_device() {
  return current;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  if (device < 0) return current;
  stream_state(device, 0);  // checks the index
  return std::exchange(current, device);
}

void register_device() {
  c10::impl::registerDeviceGuard(c10::DeviceType::PrivateUse1, new Guard);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, device_allocator(), 0);
}

// ---- generators ----

namespace {

// Draws the same numbers as a CPU generator with the same state.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex device, at::Generator inner)
      : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}

  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t) override {
    TORCH_CHECK(false, "generators of test devices have no offset");
  }
  uint64_t get_offset() const override {
    TORCH_CHECK(false, "generators of test devices have no offset");
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    return new Generator(device().index(), inner.clone());
  }

  at::Generator inner;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* held = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex d = 0; d < device_count(); ++d) made->push_back(new_generator(d));
    return made;
  }();
  return held->at(device);
}

at::Generator& cpu_generator_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

}  // namespace test_device

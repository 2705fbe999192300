#include "recording.h"

#include <c10/util/Exception.h>

#if __has_include(<ATen/core/GraphImplInterface.h>)  // torch 2.13
#include <ATen/core/GraphImplInterface.h>
#endif

#include "current.h"

namespace test_device {

namespace {
thread_local std::shared_ptr<Recording> recording;
thread_local const Recording* replaying = nullptr;
}  // namespace

bool is_recording() {
  return recording != nullptr;
}

bool record(std::function<void()> action) {
  if (recording) recording->actions.push_back(std::move(action));
  return recording != nullptr;
}

void record_on(const StreamState& stream, std::function<void()> action) {
  TORCH_CHECK(
      recording->joined.contains(&stream), "work on stream ", stream.id, " while a graph is recorded on stream ",
      recording->origin->id, "; fix: make the stream wait for an event of the recording first");
  record(std::move(action));
}

void join_recording(StreamState& stream) {
  if (recording) recording->joined.insert(&stream);
}

StreamState& replayed(StreamState& stream) {
  return replaying && &stream == replaying->origin ? current_stream(stream.device) : stream;
}

void refuse_in_recording(const char* name, const char* what) {
  TORCH_CHECK(!recording, name, " ", what, " while a graph is recorded");
}

void begin_recording() {
  StreamState& origin = current_stream(current_device());
  TORCH_CHECK(!recording && origin.lazy(), "a graph is recorded on another stream than the default one, one at a time");
  recording = std::make_shared<Recording>(Recording{&origin, {&origin}, {}});
}

std::shared_ptr<Recording> end_recording() {
  return std::exchange(recording, nullptr);
}

void replay(const Recording& recorded) {
  const Recording* before = std::exchange(replaying, &recorded);
  auto restore = [before](const Recording*) { replaying = before; };
  std::unique_ptr<const Recording, decltype(restore)> end(&recorded, restore);
  for (const auto& action : recorded.actions) action();
}

#if __has_include(<ATen/core/GraphImplInterface.h>)
struct DeviceGraph final : at::GraphImplInterface {
  explicit DeviceGraph(const at::GraphImplArgs&) {}

  void capture_begin(c10::MempoolId_t, at::GraphCaptureMode) override {
    begin_recording();
  }
  void capture_end() override {
    recorded_ = end_recording();
  }
  void instantiate() override {}
  void replay() override {
    TORCH_CHECK(recorded_, "a graph without a recording");
    test_device::replay(*recorded_);
  }
  void reset() override {
    recorded_.reset();
  }
  c10::MempoolId_t pool() const override {
    return {0, 1};
  }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  std::shared_ptr<Recording> recorded_;
};
#endif

}  // namespace test_device

#if __has_include(<ATen/core/GraphImplInterface.h>)
namespace at {
REGISTER_GRAPH_IMPL(MESH, test_device::DeviceGraph)  // the name of the devices, as torch writes it
}
#endif

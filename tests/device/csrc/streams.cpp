#include "streams.h"

#include <Python.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "memory.h"
#include "recording.h"

namespace test_device {

namespace {

constexpr c10::DeviceIndex kDevices = 4;

struct Host {
  Actor actor;
  Clock clock;
  double time = 0;
};

struct State {
  std::mutex lock;
  std::vector<std::vector<std::unique_ptr<StreamState>>> streams;
  std::vector<std::unique_ptr<Host>> hosts;
  Counters counters;
  std::vector<Timing> timeline;
  bool records_timeline = false;
};

State& state() {
  static auto* held = [] {
    auto* made = new State;
    made->streams.resize(kDevices);
    for (c10::DeviceIndex d = 0; d < kDevices; ++d) made->streams[d].push_back(std::make_unique<StreamState>(d, 0));
    return made;
  }();
  return *held;
}

thread_local size_t current_host = 0;
thread_local std::vector<StreamState*> current_streams;

// The caller holds the lock.
Host& host() {
  auto& hosts = state().hosts;
  while (hosts.size() <= current_host) {
    hosts.push_back(std::make_unique<Host>());
    hosts.back()->actor = new_actor("host " + std::to_string(hosts.size() - 1));
  }
  return *hosts[current_host];
}

// Releases the interpreter's lock while the thread waits or runs queued work.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : saved_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutInterpreter() {
    if (saved_) PyEval_RestoreThread(saved_);
  }
  WithoutInterpreter(const WithoutInterpreter&) = delete;
  WithoutInterpreter& operator=(const WithoutInterpreter&) = delete;

 private:
  PyThreadState* saved_;
};

void run_now(StreamState& stream, const Work& work) {
  double start = std::max(stream.time, work.issued);
  double end = work.run(start);
  std::lock_guard guard(state().lock);
  stream.time = std::max(stream.time, end);
  if (state().records_timeline && work.shown) state().timeline.push_back({work.name, &stream, start, end});
}

bool pop(StreamState& stream, uint64_t position, Work& work) {
  std::lock_guard guard(state().lock);
  if (stream.begun >= position || stream.queue.empty()) return false;
  work = std::move(stream.queue.front());
  stream.queue.pop_front();
  ++stream.begun;
  return true;
}

// True if copies before the mark are not visible to the host yet; the caller holds the lock.
bool has_landing(const Mark& mark) {
  const StreamState& stream = *mark.stream;
  return !stream.landing.empty() && stream.landed - stream.landing.size() < mark.landed;
}

}  // namespace

StreamState::StreamState(c10::DeviceIndex device, int64_t id)
    : device(device), id(id), actor(new_actor("stream " + std::to_string(id) + " of mesh:" + std::to_string(device))) {}

std::mutex& state_lock() {
  return state().lock;
}

c10::DeviceIndex device_count() {
  return kDevices;
}

StreamState& stream_state(c10::DeviceIndex device, int64_t id) {
  std::lock_guard guard(state().lock);
  TORCH_CHECK(0 <= device && device < kDevices, "mesh:", int(device), " does not exist; use a device below ", int(kDevices));
  return *state().streams[device].at(id);
}

StreamState& new_stream(c10::DeviceIndex device) {
  std::lock_guard guard(state().lock);
  auto& streams = state().streams.at(device);
  streams.push_back(std::make_unique<StreamState>(device, static_cast<int64_t>(streams.size())));
  return *streams.back();
}

StreamState& current_stream(c10::DeviceIndex device) {
  if (current_streams.empty()) current_streams.resize(kDevices);
  StreamState* set = current_streams.at(device);
  return set ? *set : stream_state(device, 0);
}

StreamState& exchange_stream(StreamState& stream) {
  StreamState& before = current_stream(stream.device);
  current_streams.at(stream.device) = &stream;
  return before;
}

std::vector<StreamState*> streams_of(c10::DeviceIndex device) {
  std::lock_guard guard(state().lock);
  std::vector<StreamState*> found;
  for (const auto& stream : state().streams.at(device)) found.push_back(stream.get());
  return found;
}

void note(
    StreamState& stream, const char* name, const std::vector<Touch>& touches, int place, const Clock& more) {
  stream.clock.join(host().clock);
  uint64_t epoch = stream.clock.tick(stream.actor);
  Clock clock = stream.clock;
  clock.join(more);
  for (const Touch& touch : touches) {
    Access access{stream.actor, epoch, touch.range, touch.write, name, place};
    touch.block->history.add(access, clock, touch.block->number, touch.block->bytes);
  }
}

void launch(StreamState& stream, Launch launch) {
  raise_host_touches();
  if (is_recording()) {
    record_on(stream, [&stream, launch] { test_device::launch(replayed(stream), launch); });
    return;
  }
  int place = python_place();
  Work work{launch.name, std::move(launch.timed), 0, true};
  if (!work.run)
    work.run = [run = std::move(launch.run), price = launch.price](double start) {
      run();
      return start + price;
    };
  {
    std::lock_guard guard(state().lock);
    note(stream, launch.name, launch.touches, place);
    ++state().counters.launches;
    work.issued = host().time;
    if (stream.lazy()) {
      stream.queue.push_back(std::move(work));
      ++stream.issued;
      return;
    }
  }
  run_now(stream, work);
}

void after_queued_work(StreamState& stream, std::function<void()> run) {
  {
    std::lock_guard guard(state().lock);
    if (stream.done < stream.issued) {
      auto work = [run = std::move(run)](double start) {
        run();
        return start;
      };
      stream.queue.push_back({"", std::move(work), 0, false});
      ++stream.issued;
      return;
    }
  }
  run();
}

MarkRef mark(StreamState& stream) {
  auto made = std::make_shared<Mark>();
  made->stream = &stream;
  if (is_recording()) {
    made->in_replay = std::make_shared<MarkRef>();
    record_on(stream, [in_replay = made->in_replay, &stream] { *in_replay = mark(replayed(stream)); });
    return made;
  }
  std::lock_guard guard(state().lock);
  made->landed = stream.landed;
  made->clock = stream.clock;
  made->clock.join(host().clock);
  made->time = std::max(stream.time, host().time);
  if (stream.done < stream.issued) {
    auto set_time = [made](double start) {
      made->time = start;
      return start;
    };
    stream.queue.push_back({"", std::move(set_time), host().time, false});
    ++stream.issued;
  }
  made->position = stream.issued;
  return made;
}

void run_to(StreamState& stream, uint64_t position) {
  WithoutInterpreter released;
  {
    // a thread that runs the rest of the stream may wait for what comes behind this position
    std::lock_guard guard(state().lock);
    if (stream.done >= position) return;
  }
  std::lock_guard order(stream.running);
  for (Work work; pop(stream, position, work); work = {}) {
    auto ended = [&](void*) {
      std::lock_guard guard(state().lock);
      ++stream.done;
    };
    std::unique_ptr<StreamState, decltype(ended)> end(&stream, ended);  // also if the work raises an error
    run_now(stream, work);
  }
}

void wait_on_stream(const MarkRef& mark, StreamState& waiting) {
  if (is_recording()) {
    TORCH_CHECK(mark->in_replay, "a wait for work from before the recording of a graph; fix: wait before it begins");
    join_recording(waiting);
    record([in_replay = mark->in_replay, &waiting] { wait_on_stream(*in_replay, replayed(waiting)); });
    return;
  }
  TORCH_CHECK(!mark->in_replay, "a wait for an event of a graph outside of its recording");
  Work wait{"", nullptr, 0, false};
  wait.run = [mark](double start) {
    run_to(*mark->stream, mark->position);
    return std::max(start, mark->time);
  };
  {
    std::lock_guard guard(state().lock);
    waiting.clock.join(mark->clock);
    wait.issued = host().time;
    if (waiting.lazy()) {
      waiting.queue.push_back(std::move(wait));
      ++waiting.issued;
      return;
    }
  }
  run_now(waiting, wait);
}

static void finish(const MarkRef& mark) {
  refuse_in_recording("the host", "waits for a stream");
  TORCH_CHECK(!mark->in_replay, "the host waits for an event of a graph");
  run_to(*mark->stream, mark->position);
  std::vector<Work> landing;
  {
    std::lock_guard guard(state().lock);
    host().clock.join(mark->clock);
    host().time = std::max(host().time, mark->time);
    while (has_landing(*mark)) {
      landing.push_back(std::move(mark->stream->landing.front()));
      mark->stream->landing.pop_front();
    }
  }
  for (const Work& work : landing) work.run(0);
  raise_host_touches();
}

void wait_on_host(const MarkRef& mark) {
  {
    std::lock_guard guard(state().lock);
    ++state().counters.host_waits;
  }
  finish(mark);
}

void synchronize(StreamState& stream) {
  refuse_in_recording("the host", "waits for a stream");
  wait_on_host(mark(stream));
}

bool is_finished(const MarkRef& mark) {
  {
    std::lock_guard guard(state().lock);
    bool done = mark->stream->done >= mark->position && !has_landing(*mark);
    // a loop that asks again and again must end, so the second question makes the work run
    if (!done && ++mark->refused < 2) return false;
  }
  finish(mark);
  return true;
}

void land_later(StreamState& stream, Work work) {
  std::lock_guard guard(state().lock);
  stream.landing.push_back(std::move(work));
  ++stream.landed;
}

void set_host(size_t number) {
  current_host = number;
}

double host_time() {
  std::lock_guard guard(state().lock);
  return host().time;
}

Counters& counters() {
  return state().counters;
}

std::vector<Timing>& timeline() {
  return state().timeline;
}

void record_timeline(bool on) {
  state().records_timeline = on;
}

}  // namespace test_device

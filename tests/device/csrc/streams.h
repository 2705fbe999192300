// Streams, events and hosts. Work on the default stream of a device runs at once. Work on any other stream is queued, and
// runs when the host or another stream waits for it.
#pragma once

#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clocks.h"

namespace test_device {

struct Block;

// Guards clocks, histories, queues and counters. Nothing waits, and nothing runs foreign code, while it holds the lock.
std::mutex& state_lock();

struct Work {
  const char* name;
  // Receives the virtual time at which the work starts; returns the time at which it ends.
  std::function<double(double)> run;
  double issued;  // virtual time of the host at the launch
  bool shown;     // part of the timeline
};

struct StreamState {
  StreamState(c10::DeviceIndex device, int64_t id);
  bool lazy() const {
    return id != 0;
  }

  const c10::DeviceIndex device;
  const int64_t id;
  const Actor actor;
  Clock clock;
  uint64_t issued = 0;  // position of the last work in the queue
  uint64_t begun = 0;
  uint64_t done = 0;  // less than `begun` while a thread runs work
  double time = 0;  // virtual time at which the work that has run ends
  std::deque<Work> queue;
  uint64_t landed = 0;  // number of copies to pinned memory so far
  std::deque<Work> landing;  // those that become visible when the host waits
  std::recursive_mutex running;
};

// A point in a stream, as an event records it.
struct Mark {
  StreamState* stream;
  uint64_t position;
  uint64_t landed;
  Clock clock;
  double time;
  int refused = 0;  // queries that found the work unfinished
  std::shared_ptr<std::shared_ptr<Mark>> in_replay;  // of a recorded mark: the mark that the latest replay has made
};
using MarkRef = std::shared_ptr<Mark>;

// One memory access of a launch.
struct Touch {
  std::shared_ptr<Block> block;
  Range range;
  bool write;
};

struct Launch {
  const char* name;
  std::vector<Touch> touches;
  double price;                          // virtual seconds
  std::function<void()> run;             // reads and writes memory
  std::function<double(double)> timed{};  // instead of `run` and `price`
};

struct Counters {
  int64_t launches = 0, allocations = 0, host_reads = 0, host_waits = 0, forced_waits = 0;
};

struct Timing {
  const char* name;
  const StreamState* stream;
  double start, end;
};

c10::DeviceIndex device_count();
StreamState& stream_state(c10::DeviceIndex device, int64_t id);
StreamState& new_stream(c10::DeviceIndex device);
StreamState& current_stream(c10::DeviceIndex device);
StreamState& exchange_stream(StreamState& stream);
std::vector<StreamState*> streams_of(c10::DeviceIndex device);

// Queue or run work; check its accesses. The order of launches of one host is the order of these calls.
void launch(StreamState& stream, Launch launch);
// Note accesses at the present point of a stream, without work, after everything that `more` knows; the caller holds the
// lock of the state.
void note(
    StreamState& stream, const char* name, const std::vector<Touch>& touches, int place = 0, const Clock& more = {});
// Queue silent work, for the memory of a block; runs at once if nothing is queued before it.
void after_queued_work(StreamState& stream, std::function<void()> run);

MarkRef mark(StreamState& stream);
void wait_on_stream(const MarkRef& mark, StreamState& waiting);
void wait_on_host(const MarkRef& mark);
void synchronize(StreamState& stream);
bool is_finished(const MarkRef& mark);
void run_to(StreamState& stream, uint64_t position);
// Store a copy that the host may read once it has waited for the default stream.
void land_later(StreamState& stream, Work work);

// The host that the calling thread belongs to; 0 unless set.
void set_host(size_t host);
double host_time();

Counters& counters();
std::vector<Timing>& timeline();
void record_timeline(bool on);

// Number of the innermost line of Python outside torch that the thread runs; 0 if unknown.
int python_place();
void record_places(bool on);
std::string place_name(int place);
// A copy of a name that lives as long as the process.
const char* lasting(const std::string& name);

}  // namespace test_device

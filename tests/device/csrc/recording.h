// Recordings of what a thread queues, to be queued again and again: the graphs of the devices.
#pragma once

#include <set>

#include "streams.h"

namespace test_device {

// What a thread has queued while it recorded, in order. Nothing of it has run.
struct Recording {
  StreamState* origin;  // the stream that was current at the begin; a replay takes the one that is current then
  std::set<const StreamState*> joined;  // the origin, and streams that have waited for a joined stream
  std::vector<std::function<void()>> actions;
};

// True while this thread records. Nothing that it queues may need the host then.
bool is_recording();
// Store an action for replays; false if this thread does not record, so that the caller acts now.
bool record(std::function<void()> action);
// Store work on a stream. Raises an error for a stream that does not wait for the recording.
void record_on(const StreamState& stream, std::function<void()> action);
// Note that a stream waits for a point of the recording.
void join_recording(StreamState& stream);
// The stream that takes the place of a recorded one, in a replay.
StreamState& replayed(StreamState& stream);
// Raise an error if this thread records.
void refuse_in_recording(const char* name, const char* what);

void begin_recording();
std::shared_ptr<Recording> end_recording();
void replay(const Recording& recording);

}  // namespace test_device

// Vector clocks, and the check that conflicting accesses to memory are ordered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace test_device {

// Number of a stream or of a host; clocks count the work of each.
using Actor = size_t;

class Clock {
 public:
  uint64_t of(Actor actor) const {
    return actor < counts_.size() ? counts_[actor] : 0;
  }
  void join(const Clock& other);
  uint64_t tick(Actor actor);

 private:
  std::vector<uint64_t> counts_;
};

// Half-open range of bytes in a block.
struct Range {
  size_t begin, end;
  bool overlaps(Range other) const {
    return begin < other.end && other.begin < end;
  }
  bool covers(Range other) const {
    return begin <= other.begin && other.end <= end;
  }
};

struct Access {
  Actor actor;
  uint64_t epoch;
  Range range;
  bool write;
  const char* work;  // name of the kernel; lives as long as the process
  int place;         // number of the line of Python that launched the work, 0 if unknown
};

// The accesses to one block that later ones may conflict with.
class History {
 public:
  // Add an access by work whose clock is `clock`; report every earlier access that conflicts and is not ordered.
  void add(const Access& access, const Clock& clock, uint64_t block, size_t bytes);

 private:
  std::vector<Access> accesses_;
};

struct Report {
  uint64_t block;
  size_t bytes;
  Access first, second;
};

Actor new_actor(std::string name);
std::string actor_name(Actor actor);

// The caller holds the lock of the state.
std::vector<Report>& reports();

}  // namespace test_device

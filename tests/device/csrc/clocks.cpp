#include "clocks.h"

#include <algorithm>

namespace test_device {

namespace {
constexpr size_t kMostReports = 1000;

std::vector<std::string>& names() {
  static auto* held = new std::vector<std::string>;
  return *held;
}

bool conflict(const Access& a, const Access& b) {
  return (a.write || b.write) && a.range.overlaps(b.range);
}

bool happened_before(const Access& earlier, const Clock& clock) {
  return clock.of(earlier.actor) >= earlier.epoch;
}

// True if a check against `newer` finds every conflict that a check against `older` would find.
bool replaces(const Access& newer, const Clock& clock, const Access& older) {
  bool as_strict = newer.write || !older.write;
  return as_strict && newer.range.covers(older.range) && happened_before(older, clock);
}
}  // namespace

void Clock::join(const Clock& other) {
  if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
  for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] = std::max(counts_[i], other.counts_[i]);
}

uint64_t Clock::tick(Actor actor) {
  if (counts_.size() <= actor) counts_.resize(actor + 1);
  return ++counts_[actor];
}

void History::add(const Access& access, const Clock& clock, uint64_t block, size_t bytes) {
  if (access.range.begin == access.range.end) return;
  for (const Access& earlier : accesses_) {
    if (conflict(earlier, access) && !happened_before(earlier, clock) && reports().size() < kMostReports)
      reports().push_back({block, bytes, earlier, access});
  }
  std::erase_if(accesses_, [&](const Access& earlier) { return replaces(access, clock, earlier); });
  accesses_.push_back(access);
}

Actor new_actor(std::string name) {
  names().push_back(std::move(name));
  return names().size() - 1;
}

std::string actor_name(Actor actor) {
  return names().at(actor);
}

std::vector<Report>& reports() {
  static auto* held = new std::vector<Report>;
  return *held;
}

}  // namespace test_device

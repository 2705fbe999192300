// The Python module `_test_device`.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <tuple>
#include <utility>

#include "current.h"
#include "generator.h"
#include "kernels.h"
#include "recording.h"

namespace py = pybind11;

namespace test_device {

namespace {

py::dict access_dict(const Access& access) {
  py::dict shown;
  shown["work"] = access.work;
  shown["stream"] = actor_name(access.actor);
  shown["writes"] = access.write;
  shown["bytes"] = py::make_tuple(access.range.begin, access.range.end);
  shown["place"] = place_name(access.place);
  return shown;
}

// Take what has been recorded. A new object of Python may start a collection of garbage, which frees tensors and takes
// the lock. So callers make objects when the lock is free again.
template <typename T>
T taken(T& recorded) {
  std::lock_guard guard(state_lock());
  return std::exchange(recorded, T{});
}

py::list take_reports() {
  py::list shown;
  for (const Report& report : taken(reports())) {
    py::dict each;
    each["block"] = report.block;
    each["size"] = report.bytes;
    each["first"] = access_dict(report.first);
    each["second"] = access_dict(report.second);
    shown.append(each);
  }
  return shown;
}

py::dict counters_dict() {
  const Counters now = [] {
    std::lock_guard guard(state_lock());
    return counters();
  }();
  py::dict shown;
  shown["launches"] = now.launches;
  shown["allocations"] = now.allocations;
  shown["host_reads"] = now.host_reads;
  shown["host_waits"] = now.host_waits;
  shown["forced_waits"] = now.forced_waits;
  return shown;
}

py::list take_timeline() {
  py::list shown;
  for (const Timing& each : taken(timeline()))
    shown.append(py::make_tuple(each.name, int(each.stream->device), each.stream->id, each.start, each.end));
  return shown;
}

StreamState& state_of(const c10::Stream& stream) {
  return stream_state(stream.device_index(), stream.id());
}

// An object of Python that may go without the interpreter's lock.
std::shared_ptr<py::object> held_object(py::object object) {
  return std::shared_ptr<py::object>(new py::object(std::move(object)), [](py::object* each) {
    py::gil_scoped_acquire acquired;
    delete each;
  });
}

// Store a function of Python for each replay of the graph that is recorded; false if none is.
bool record_python(py::object action) {
  return record([held = held_object(std::move(action))] {
    py::gil_scoped_acquire acquired;
    (*held)();
  });
}

// Queue work of Python on a stream. `run(start)` returns the virtual time at which the work ends.
void launch_python(
    const c10::Stream& stream, const std::string& name, const std::vector<Operand>& reads,
    const std::vector<Operand>& writes, py::object run) {
  std::vector<Touch> touches;
  for (const Operand& x : reads)
    if (x.block) touches.push_back(x.touch(false));
  for (const Operand& x : writes)
    if (x.block) touches.push_back(x.touch(true));
  auto held = held_object(std::move(run));
  auto timed = [held](double start) {
    py::gil_scoped_acquire acquired;
    return (*held)(start).cast<double>();
  };
  held.reset();
  py::gil_scoped_release released;
  launch(state_of(stream), {lasting(name), std::move(touches), 0, nullptr, std::move(timed)});
}

at::Tensor read_operand(const Operand& x) {
  OnlyKernels only;
  Opening opening({x.block});
  HostMirror mirror;
  return mirror.tensor(x).clone();
}

void write_operand(const Operand& x, const at::Tensor& values) {
  OnlyKernels only;
  Opening opening({x.block});
  HostMirror mirror;
  mirror.tensor(x).copy_(values);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  register_device();
  prefer_kernels_of_cpu();

  m.def("device_count", [] { return int(device_count()); });
  m.def("current_device", [] { return int(current_device()); });
  m.def("exchange_device", [](int device) { return int(exchange_device(static_cast<c10::DeviceIndex>(device))); });
  m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });

  m.def("take_reports", take_reports);
  m.def("record_places", record_places);
  m.def("take_host_touches", take_host_touches);
  m.def("counters", counters_dict);

  m.def("take_timeline", take_timeline);
  m.def("record_timeline", record_timeline);
  m.def("exchange_prices", [](double kernel, double bytes_per_second, double flops) {
    Prices before = std::exchange(prices(), {kernel, bytes_per_second, flops});
    return std::make_tuple(before.kernel, before.bytes_per_second, before.flops);
  });
  m.def("set_host", set_host);
  m.def("host_time", host_time);

  py::class_<Operand>(m, "Operand")
      .def(py::init([](const at::Tensor& x) {
        TORCH_CHECK(on_device(x), "an operand is a tensor of a test device");
        return Operand(x);
      }))
      .def("read", read_operand, py::call_guard<py::gil_scoped_release>())
      .def("write", write_operand, py::call_guard<py::gil_scoped_release>());
  m.def("launch", launch_python);
  m.def("record", record_python);
  m.def("position", [](const c10::Stream& stream) { return state_of(stream).issued; });
  m.def("run_to", [](const c10::Stream& stream, uint64_t position) { run_to(state_of(stream), position); });
  m.def("stream_time", [](const c10::Stream& stream) { return state_of(stream).time; });
}

}  // namespace test_device

"""A test device: four devices `mesh:0` to `mesh:3` in one process, stricter than any vendor's.

README.md says what the device finds and how a test uses it. Modules, in reading order:

* `csrc`: the devices in C++ (memory, streams, clocks, kernels, operators, autocast, bindings),
* `build`: compile and import the C++ part,
* `backend`: register the devices with torch,
* `inspection`: races, counters, the timeline and prices, as Python values,
* `transport`: collectives and messages between devices, in virtual time,
* `communicator`: a communicator of simulated ranks on the devices,
* `waits`: the waits of a program, and a program without one of them,
* `process_backend`: a backend of torch.distributed for processes on the devices,
* `training`: training programs with data, tensor and ZeRO parallelism,
* `fixture`: the fixture `mesh_device`, and the process in which its tests run,
* `child`: the loop of that process.
"""

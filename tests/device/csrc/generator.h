// Generators of the devices, and the registration of the device.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>

namespace test_device {

at::Generator new_generator(c10::DeviceIndex device);
const at::Generator& default_generator(c10::DeviceIndex device);
// The CPU generator whose numbers the generator of a device draws.
at::Generator& cpu_generator_of(const at::Generator& generator);

void register_device();
// Run the kernels of the CPU, not the compositions that torch has for devices without a kernel.
void prefer_kernels_of_cpu();
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace test_device

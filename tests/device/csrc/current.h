// The current device of the calling thread.
#pragma once

#include <c10/core/Device.h>

namespace test_device {

c10::DeviceIndex current_device();
// Returns the device that was current before.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);

}  // namespace test_device

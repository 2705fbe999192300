// Kernels of the device: those of the CPU, run on the memory of the device.
#pragma once

#include "call.h"

namespace test_device {

// Run an operator on the current stream of its device; the boxed fallback of all operators without a kernel of their own.
void run_on_device(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

// Virtual seconds of a kernel.
struct Prices {
  double kernel = 1e-6, bytes_per_second = 1e12, flops = 1e14;
};
Prices& prices();
double price_of(const char* name, const std::vector<Operand>& operands, double more_bytes);

// Excludes everything above kernels: autograd, autocast, Python modes.
struct OnlyKernels {
  OnlyKernels();
  c10::impl::ExcludeDispatchKeyGuard guard;
};

}  // namespace test_device

// One call of an operator on tensors of a device, taken from the dispatcher's stack.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "operands.h"

namespace test_device {

// The arguments of a call without references to tensors of the device.
class Arguments {
 public:
  // `tensors` receives the tensors of the device, in the order of `operands`.
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::vector<at::Tensor>& tensors);

  // The arguments for a kernel of another device: `give(i)` is the tensor that takes the place of operand i.
  torch::jit::Stack with(const std::function<at::Tensor(size_t)>& give, c10::Device device, const at::Generator& generator)
      const;

  std::vector<Operand> operands;
  std::vector<bool> written;
  c10::DeviceIndex device = 0;
  std::optional<at::Generator> generator;  // of the device

 private:
  // Where a tensor of the device goes in an argument.
  struct Place {
    size_t argument;
    int64_t at;  // in a list, -1 for no list
    size_t operand;
  };

  void add(const at::Tensor& x, size_t argument, int64_t at, bool write, std::vector<at::Tensor>& tensors);
  void add_list(size_t argument, bool write, std::vector<at::Tensor>& tensors);
  void add_plain(size_t argument, const c10::Argument& declared);
  void check_devices(const c10::OperatorHandle& op, const std::vector<at::Tensor>& tensors) const;

  // A list of tensors, in which those of the device are left out.
  struct List {
    size_t argument;
    bool optional;
    std::vector<at::Tensor> items;
  };

  torch::jit::Stack plain_;  // tensors of the device and lists are left out
  std::vector<Place> places_;
  std::vector<List> lists_;
  std::vector<size_t> devices_, generators_;  // arguments of these types
  std::vector<std::pair<size_t, at::Tensor>> host_tensors_;
  std::optional<c10::DeviceIndex> asked_;
};

bool returns_only_tensors(const c10::FunctionSchema& schema);
bool is_view(const c10::FunctionSchema& schema);
// Call `visit` for every tensor in results, in order; what it returns takes the place of the tensor.
void replace_tensors(torch::jit::Stack& results, const std::function<at::Tensor(const at::Tensor&)>& visit);

}  // namespace test_device

#include "kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <cstring>

#include "generator.h"
#include "recording.h"

namespace test_device {

namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

constexpr auto kCpu = c10::DeviceType::CPU;

std::vector<BlockRef> blocks_of(const std::vector<Operand>& operands) {
  std::vector<BlockRef> found;
  for (const Operand& operand : operands) found.push_back(operand.block);
  return found;
}

std::vector<Touch> touches_of(const Arguments& arguments) {
  std::vector<Touch> found;
  for (size_t i = 0; i < arguments.operands.size(); ++i)
    if (arguments.operands[i].block) found.push_back(arguments.operands[i].touch(arguments.written[i]));
  return found;
}

// Gives torch's default CPU generator another state, for kernels that draw numbers and take no generator.
class DefaultGenerator {
 public:
  DefaultGenerator(const OperatorHandle& op, at::Generator& source) : source_(source) {
    swaps_ = op.hasTag(at::Tag::nondeterministic_seeded);
    for (const auto& argument : op.schema().arguments()) swaps_ = swaps_ && argument.type()->str() != "Generator?";
    if (!swaps_) return;
    before_ = torch_default().get_state();
    torch_default().set_state(source_.get_state());
  }
  ~DefaultGenerator() {
    if (!swaps_) return;
    source_.set_state(torch_default().get_state());
    torch_default().set_state(before_);
  }

 private:
  static at::Generator& torch_default() {
    static auto* held = new at::Generator(at::detail::getDefaultCPUGenerator());
    return *held;
  }
  at::Generator& source_;
  at::Tensor before_;
  bool swaps_ = false;
};

Stack call_on(
    const OperatorHandle& op, const Arguments& arguments, const std::vector<at::Tensor>& given, c10::DeviceType kind,
    at::Generator& generator) {
  OnlyKernels only;
  Stack stack = arguments.with([&](size_t i) { return given[i]; }, c10::Device(kind), generator);
  DefaultGenerator swapped(op, generator);
  auto key = kind == kCpu ? c10::DispatchKey::CPU : c10::DispatchKey::Meta;
  op.redispatchBoxed(c10::DispatchKeySet(key), &stack);
  return stack;
}

std::vector<at::Tensor> mirrored(Mirror& mirror, const std::vector<Operand>& operands) {
  std::vector<at::Tensor> given;
  for (const Operand& operand : operands) given.push_back(mirror.tensor(operand));
  return given;
}

bool is_dense(const at::Tensor& x) {
  return x.is_non_overlapping_and_dense();
}

// A tensor of the device with the shape of a fresh result, and its strides if they can be kept.
at::Tensor fresh_like(const at::Tensor& result, c10::DeviceIndex device) {
  if (is_dense(result)) return device_empty(result.sizes(), result.strides(), result.dtype(), device);
  return device_empty(result.sizes(), dense_strides(result.sizes()), result.dtype(), device);
}

void store(const Operand& target, const at::Tensor& result) {
  OnlyKernels only;
  Opening opening({target.block});
  HostMirror mirror;
  mirror.tensor(target).copy_(result);
}

// One call from its arguments to its results.
class Call {
 public:
  Call(const OperatorHandle& op, const Stack& stack)
      : op_(op),
        name_(op.schema().name().c_str()),
        arguments_(op, stack, tensors_),
        stream_(current_stream(arguments_.device)),
        generator_(cpu_generator_of(arguments_.generator.value_or(default_generator(arguments_.device)))) {}

  Stack run() {
    if (is_view(op_.schema())) return view();
    bool reads = reads_to_host();
    if (reads) {
      refuse_in_recording(name_, "reads values to the host");
      std::lock_guard guard(state_lock());
      ++counters().host_reads;
    }
    if (stream_.lazy() && !reads) {
      std::optional<Stack> queued = queue();
      if (queued) return *queued;
      refuse_in_recording(name_, "has no meta kernel, so it cannot be queued");
      std::lock_guard guard(state_lock());
      ++counters().forced_waits;
    }
    Stack results = at_once();
    if (reads) synchronize(stream_);
    return results;
  }

 private:
  // Results whose number or shape depends on values: real devices wait for the values too.
  bool reads_to_host() const {
    return !returns_only_tensors(op_.schema()) || op_.hasTag(at::Tag::dynamic_output_shape) ||
        op_.hasTag(at::Tag::data_dependent_output);
  }

  Stack view() {
    HostMirror mirror;
    auto given = mirrored(mirror, arguments_.operands);
    Stack results = call_on(op_, arguments_, given, kCpu, generator_);
    replace_tensors(results, [&](const at::Tensor& x) { return known(x, given, mirror).value_or(at::Tensor()); });
    return results;
  }

  // The argument that a result is, or the view of an argument that it is; nothing for fresh memory.
  std::optional<at::Tensor> known(const at::Tensor& x, const std::vector<at::Tensor>& given, const Mirror& mirror) {
    if (!x.defined()) return x;
    for (size_t i = 0; i < given.size(); ++i)
      if (x.is_same(given[i])) return tensors_[i];
    BlockRef block = mirror.block_of(x);
    for (size_t i = 0; i < given.size(); ++i)
      if (block && arguments_.operands[i].block == block) return device_view(tensors_[i], x);
    bool of_argument = !given.empty() && x.storage().is_alias_of(given[0].storage());
    if (of_argument) return device_view(tensors_[0], x);
    return std::nullopt;
  }

  Stack at_once() {
    Stack results;
    std::vector<Touch> written;
    int place = python_place();
    run_to(stream_, stream_.issued);
    auto run = [&](double start) {
      Opening opening(blocks_of(arguments_.operands));
      HostMirror mirror;
      auto given = mirrored(mirror, arguments_.operands);
      results = call_on(op_, arguments_, given, kCpu, generator_);
      for (size_t i = 0; i < given.size(); ++i) take_resized(i, given[i]);
      double bytes = 0;
      replace_tensors(results, [&](const at::Tensor& x) {
        if (auto found = known(x, given, mirror)) return *found;
        at::Tensor made = fresh_like(x, arguments_.device);
        Operand target(made);
        store(target, x);
        bytes += target.bytes();
        if (target.block) written.push_back(target.touch(true));
        return made;
      });
      return start + price_of(name_, arguments_.operands, bytes);
    };
    launch(stream_, {name_, touches_of(arguments_), 0, nullptr, run});
    run_to(stream_, stream_.issued);
    std::lock_guard guard(state_lock());
    note(stream_, name_, written, place);
    return results;
  }

  // Give the tensor of the device the shape that a kernel gave to its CPU counterpart.
  void take_resized(size_t i, const at::Tensor& given) {
    const Operand& operand = arguments_.operands[i];
    if (given.sizes() == operand.sizes && given.strides() == operand.strides) return;
    const at::Tensor& x = tensors_[i];
    bool moved = given.storage().data() != (operand.block ? operand.block->base : nullptr);
    if (moved) resize_storage(x.storage(), given.storage().nbytes());
    set_shape(x, given.sizes(), given.strides(), given.storage_offset());
    if (moved) store(Operand(x), given);
  }

  // Queue the call, with results of the shapes that the meta kernel gives; nothing if there is none.
  std::optional<Stack> queue() {
    MetaMirror mirror;
    auto given = mirrored(mirror, arguments_.operands);
    Stack results;
    try {
      results = call_on(op_, arguments_, given, c10::DeviceType::Meta, generator_);
    } catch (const std::exception&) {
      return std::nullopt;
    }
    for (size_t i = 0; i < given.size(); ++i) resize_as(i, given[i]);
    std::vector<std::optional<Operand>> targets;
    std::vector<Touch> touches = touches_of(arguments_);
    double bytes = 0;
    replace_tensors(results, [&](const at::Tensor& x) {
      targets.emplace_back();
      if (auto found = known(x, given, mirror)) return *found;
      at::Tensor made = fresh_like(x, arguments_.device);
      targets.back().emplace(made);
      bytes += targets.back()->bytes();
      if (targets.back()->block) touches.push_back(targets.back()->touch(true));
      return made;
    });
    double price = price_of(name_, arguments_.operands, bytes);
    auto run = [op = op_, arguments = arguments_, targets, generator = drawn()]() mutable {
      run_queued(op, arguments, targets, generator);
    };
    launch(stream_, {name_, touches, price, run});
    return results;
  }

  void resize_as(size_t i, const at::Tensor& given) {
    Operand& operand = arguments_.operands[i];
    if (given.sizes() == operand.sizes && given.strides() == operand.strides) return;
    const at::Tensor& x = tensors_[i];
    if (given.storage().nbytes() > x.storage().nbytes()) resize_storage(x.storage(), given.storage().nbytes());
    set_shape(x, given.sizes(), given.strides(), given.storage_offset());
    operand = Operand(x);
  }

  static void run_queued(
      const OperatorHandle& op, const Arguments& arguments, const std::vector<std::optional<Operand>>& targets,
      at::Generator& generator) {
    Opening opening(blocks_of(arguments.operands));
    HostMirror mirror;
    Stack results = call_on(op, arguments, mirrored(mirror, arguments.operands), kCpu, generator);
    size_t at = 0;
    replace_tensors(results, [&](const at::Tensor& x) {
      const auto& target = targets[at++];
      if (target && x.defined()) store(*target, x);  // a meta kernel may return more than the CPU's
      return x;
    });
  }

  // The generator for a queued call; this one advances by what the call will draw.
  at::Generator drawn() {
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) return generator_;
    refuse_in_recording(name_, "draws random numbers");
    at::Generator before = generator_.clone();
    FilledMirror mirror;
    call_on(op_, arguments_, mirrored(mirror, arguments_.operands), kCpu, generator_);
    return before;
  }

  OperatorHandle op_;
  const char* name_;
  std::vector<at::Tensor> tensors_;
  Arguments arguments_;
  StreamState& stream_;
  at::Generator& generator_;
};

bool is_named(const char* name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* each) { return std::strcmp(name, each) == 0; });
}

double numel(const Operand& x) {
  double product = 1;
  for (int64_t size : x.sizes) product *= static_cast<double>(size);
  return product;
}

}  // namespace

OnlyKernels::OnlyKernels()
    : guard(
          c10::autograd_dispatch_keyset_with_ADInplaceOrView |
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}) |
          c10::autocast_dispatch_keyset) {}

Prices& prices() {
  static Prices held;
  return held;
}

double price_of(const char* name, const std::vector<Operand>& operands, double more_bytes) {
  double bytes = more_bytes, flops = 0;
  for (const Operand& operand : operands) bytes += operand.bytes();
  size_t first = is_named(name, {"aten::addmm", "aten::baddbmm"}) ? 1 : 0;
  bool product = first == 1 || is_named(name, {"aten::mm", "aten::bmm"});
  if (product && operands.size() >= first + 2)
    flops = 2 * numel(operands[first]) * static_cast<double>(operands[first + 1].sizes.back());
  return prices().kernel + bytes / prices().bytes_per_second + flops / prices().flops;
}

void run_on_device(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Stack results = Call(op, *stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

}  // namespace test_device

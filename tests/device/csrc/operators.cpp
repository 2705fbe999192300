// Operators that know about memory or about both devices of a copy; all others run by the fallback.
#include <ATen/EmptyTensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DefaultDtype.h>
#include <torch/library.h>

#include <algorithm>

#include "current.h"
#include "generator.h"
#include "kernels.h"

namespace test_device {

namespace {

using at::IntArrayRef;
using at::Tensor;

c10::DeviceIndex asked_device(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device();
}

caffe2::TypeMeta asked_dtype(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::scalarTypeToTypeMeta(*dtype) : c10::get_default_dtype();
}

StreamState& stream_of(const Tensor& x) {
  return current_stream(x.device().index());
}

std::vector<int64_t> strides_for(IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (format == at::MemoryFormat::ChannelsLast) return c10::get_channels_last_strides_2d(sizes);
  if (format == at::MemoryFormat::ChannelsLast3d) return c10::get_channels_last_strides_3d(sizes);
  return dense_strides(sizes);
}

Tensor empty(
    IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<c10::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  for (int64_t size : sizes) TORCH_CHECK(size >= 0, "Trying to create tensor with negative dimension ", size);
  return device_empty(sizes, strides_for(sizes, format), asked_dtype(dtype), asked_device(device));
}

Tensor empty_strided(
    IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  return device_empty(sizes, strides, asked_dtype(dtype), asked_device(device));
}

const Tensor& resize_(const Tensor& x, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (x.sizes() == sizes && !format) return x;
  auto strides = strides_for(sizes, format);
  size_t bytes = at::detail::computeStorageNbytes(sizes, strides, x.dtype().itemsize(), x.storage_offset());
  if (bytes > x.storage().nbytes()) resize_storage(x.storage(), bytes);
  set_shape(x, sizes, strides, x.storage_offset());
  return x;
}

Tensor& set_storage(Tensor& x, at::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  x.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  auto dense = dense_strides(sizes);
  set_shape(x, sizes, strides.data() ? strides : IntArrayRef(dense), offset);
  size_t bytes = at::detail::computeStorageNbytes(sizes, x.strides(), x.dtype().itemsize(), offset);
  if (x.numel() && bytes > storage.nbytes()) resize_storage(storage, bytes);
  return x;
}

Tensor& set_whole_storage(Tensor& x, at::Storage storage) {
  int64_t count = static_cast<int64_t>(storage.nbytes() / x.dtype().itemsize());
  return set_storage(x, std::move(storage), 0, {count}, {});
}

Tensor& set_tensor(Tensor& x, const Tensor& source) {
  return set_storage(x, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_nothing(Tensor& x) {
  c10::DeviceIndex device = x.device().index();
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocate(device, 0), device_allocator(), true);
  return set_storage(x, std::move(storage), 0, {0}, {});
}

// ---- copies ----

void launch_copy(StreamState& stream, const char* name, std::vector<Touch> touches, std::function<void()> run) {
  std::erase_if(touches, [](const Touch& touch) { return !touch.block; });
  double bytes = 0;
  for (const Touch& touch : touches) bytes += static_cast<double>(touch.range.end - touch.range.begin);
  launch(stream, {name, std::move(touches), prices().kernel + bytes / prices().bytes_per_second, std::move(run)});
}

void copy_operand(const Operand& source, const Operand& target) {
  OnlyKernels only;
  Opening opening({source.block, target.block});
  HostMirror mirror;
  mirror.tensor(target).copy_(mirror.tensor(source));
}

// Runs on the stream of the source; the stream of another target device waits before and after.
void copy_on_devices(const Tensor& source, const Tensor& target) {
  StreamState &from = stream_of(source), &to = stream_of(target);
  bool crosses = &from != &to;
  if (crosses) wait_on_stream(mark(to), from);
  Operand x(source), y(target);
  launch_copy(from, "copy", {x.touch(false), y.touch(true)}, [x, y] { copy_operand(x, y); });
  if (crosses) wait_on_stream(mark(from), to);
}

void copy_from_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  StreamState& stream = stream_of(target);
  bool reads_later = non_blocking && is_pinned(source.storage().data());
  OnlyKernels only;
  Tensor held = reads_later ? source.detach() : source.clone();
  Operand y(target);
  launch_copy(stream, "copy from host", {y.touch(true)}, [held, y] {
    OnlyKernels only;
    Opening opening({y.block});
    HostMirror mirror;
    mirror.tensor(y).copy_(held);
  });
  bool waits = !non_blocking || !reads_later;
  if (waits && stream.lazy()) synchronize(stream);
}

void read_to(const Operand& x, const Tensor& target) {
  OnlyKernels only;
  Opening opening({x.block});
  HostMirror mirror;
  target.copy_(mirror.tensor(x));
}

void copy_to_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  StreamState& stream = stream_of(source);
  Operand x(source);
  OnlyKernels only;
  Tensor plain = target.detach();
  if (!non_blocking || !is_pinned(target.storage().data())) {
    {
      std::lock_guard guard(state_lock());
      ++counters().host_reads;
    }
    launch_copy(stream, "copy to host", {x.touch(false)}, [x, plain] { read_to(x, plain); });
    synchronize(stream);
    return;
  }
  // the host sees poison until it waits
  Tensor values = at::empty_like(plain);
  plain.view(at::kByte).fill_(kPoison);
  if (stream.lazy()) {
    launch_copy(stream, "copy to host", {x.touch(false)}, [x, plain] { read_to(x, plain); });
    return;
  }
  launch_copy(stream, "copy to host", {x.touch(false)}, [x, values] { read_to(x, values); });
  auto land = [values, plain](double start) {
    OnlyKernels only;
    plain.copy_(values);
    return start;
  };
  land_later(stream, {"", land, 0, false});
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  TORCH_CHECK(on_device(source) || on_device(target), "a copy without a tensor of the test device");
  Tensor expanded = source.expand(target.sizes());
  if (!on_device(source))
    copy_from_host(expanded, target, non_blocking);
  else if (!on_device(target))
    copy_to_host(expanded, target, non_blocking);
  else
    copy_on_devices(expanded, target);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar item(const Tensor& x) {
  OnlyKernels only;
  Tensor value = at::detail::empty_cpu(x.sizes(), x.scalar_type());
  copy_to_host(x, value, false);
  return value.item();
}

void record_use(Tensor& x, c10::Stream stream) {
  record_stream(x.storage().data_ptr(), stream_state(stream.device_index(), stream.id()));
}

// ---- convolutions: torch calls these names on devices that it does not know ----

void convolution(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_device(op, keys, stack);
}

void convolution_backward(const c10::OperatorHandle&, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  constexpr ptrdiff_t kArguments = 10, kWeight = 2, kTransposed = 6, kGroups = 8;
  auto first = stack->end() - kArguments;
  auto sizes = (first + kWeight)->toTensor().sizes();
  bool transposed = (first + kTransposed)->toBool();
  int64_t features = transposed ? sizes[1] * (first + kGroups)->toInt() : sizes[0];
  stack->insert(first + kWeight + 1, c10::IValue(std::vector<int64_t>{features}));
  run_on_device(op, keys, stack);
}

// ---- attention: the same choice of a kernel as on the CPU ----

Tensor counterpart(HostMirror& mirror, const Tensor& x) {
  return mirror.tensor(Operand(x)).requires_grad_(x.requires_grad());
}

int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  OnlyKernels only;  // a mode of Python must not see this call, which other devices do not make
  HostMirror mirror;
  std::optional<Tensor> mask_here;
  if (mask && mask->defined()) mask_here = counterpart(mirror, *mask);
  return at::_fused_sdp_choice(
      counterpart(mirror, query), counterpart(mirror, key), counterpart(mirror, value), mask_here, dropout, is_causal,
      scale, enable_gqa);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  m.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(item));
  m.impl("record_stream", TORCH_FN(record_use));
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// A copy of conjugated or negated values resolves them itself.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace

void prefer_kernels_of_cpu() {
  constexpr c10::DispatchKey kCompositions[] = {
      c10::DispatchKey::CompositeExplicitAutograd, c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
      c10::DispatchKey::CompositeImplicitAutograd};
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(name);
    bool composed = false;
    for (auto key : kCompositions) composed = composed || op->hasKernelForDispatchKey(key);
    bool own = op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1);
    if (!composed || own || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
  }
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  c10::DeviceIndex device = storage.device().index();
  BlockRef before = block_of(storage.data_ptr());
  c10::DataPtr data = allocate(device, bytes);
  BlockRef after = block_of(data);
  if (before && after) {
    size_t kept = std::min(before->bytes, bytes);
    launch_copy(current_stream(device), "resize", {{before, {0, kept}, false}, {after, {0, kept}, true}}, [=] {
      Opening opening({before, after});
      std::copy_n(before->base, kept, after->base);
    });
  }
  auto* impl = storage.unsafeGetStorageImpl();
  impl->set_data_ptr_noswap(std::move(data));
  impl->set_nbytes(bytes);
}

}  // namespace test_device

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &test_device::choose_attention)
}  // namespace at::native

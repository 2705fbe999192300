#include "operands.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

namespace test_device {

Operand::Operand(const at::Tensor& x)
    : block(test_device::block_of(x.storage().data_ptr())),
      sizes(x.sizes().vec()),
      strides(x.strides().vec()),
      offset(x.storage_offset()),
      dtype(x.dtype()),
      conj(x.is_conj()),
      neg(x.is_neg()),
      number(x.unsafeGetTensorImpl()->is_wrapped_number()) {}

Range Operand::range() const {
  int64_t last = offset;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return {0, 0};
    last += (sizes[i] - 1) * strides[i];
  }
  if (!block) return {0, 0};
  return {offset * dtype.itemsize(), (last + 1) * dtype.itemsize()};
}

at::Tensor Mirror::tensor(const Operand& operand) {
  auto x = at::detail::make_tensor<c10::TensorImpl>(storage_of(operand.block), keys(), operand.dtype);
  set_shape(x, operand.sizes, operand.strides, operand.offset);
  if (operand.conj) x._set_conj(true);
  if (operand.neg) x._set_neg(true);
  if (operand.number) x.unsafeGetTensorImpl()->set_wrapped_number(true);
  return x;
}

// Operands without memory have storages of their own: a kernel may resize each of them.
c10::Storage Mirror::storage_of(const BlockRef& block) {
  if (!block) return make_storage(block);
  auto [found, is_new] = storages_.try_emplace(block.get(), block, c10::Storage{});
  if (is_new) found->second.second = make_storage(block);
  return found->second.second;
}

BlockRef Mirror::block_of(const at::Tensor& x) const {
  for (const auto& [block, pair] : storages_)
    if (block && pair.second.is_alias_of(x.storage())) return pair.first;
  return nullptr;
}

c10::Storage HostMirror::make_storage(const BlockRef& block) {
  size_t bytes = block ? block->bytes : 0;
  c10::DataPtr data(block ? block->base : nullptr, c10::Device(c10::DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, std::move(data), c10::GetCPUAllocator(), true);
}

c10::Storage MetaMirror::make_storage(const BlockRef& block) {
  size_t bytes = block ? block->bytes : 0;
  c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::Meta);
  return c10::Storage(c10::Storage::use_byte_size_t(), bytes, allocator->allocate(bytes), allocator, true);
}

c10::Storage FilledMirror::make_storage(const BlockRef& block) {
  size_t bytes = block ? block->bytes : 0;
  c10::Storage made(c10::Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true);
  // 0x3f3f… is a positive number below one in every floating-point type
  if (bytes) std::memset(made.mutable_data(), 0x3f, bytes);
  return made;
}

at::Tensor device_empty(at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype, c10::DeviceIndex device) {
  size_t bytes = at::detail::computeStorageNbytes(sizes, strides, dtype.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate(device, bytes), device_allocator(), true);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  auto x = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, dtype);
  set_shape(x, sizes, strides, 0);
  return x;
}

std::vector<int64_t> dense_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
  return strides;
}

at::Tensor device_view(const at::Tensor& base, const at::Tensor& like) {
  auto x = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  set_shape(x, like.sizes(), like.strides(), like.storage_offset());
  x._set_conj(like.is_conj());
  x._set_neg(like.is_neg());
  return x;
}

void set_shape(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  x.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
}

}  // namespace test_device

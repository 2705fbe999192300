// Tensors as kernels need them: memory and shape, without the tensor that owns the memory. So a queued kernel does not
// keep a tensor alive.
#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_map>
#include <vector>

#include "memory.h"

namespace test_device {

struct Operand {
  BlockRef block;  // null without memory
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  caffe2::TypeMeta dtype;
  bool conj, neg, number;

  explicit Operand(const at::Tensor& x);
  Range range() const;  // the bytes from the first to the last element
  Touch touch(bool write) const {
    return {block, range(), write};
  }
  double bytes() const {
    return static_cast<double>(range().end - range().begin);
  }
};

// Gives tensors on another device with the shapes of operands; operands of one block share a storage.
class Mirror {
 public:
  virtual ~Mirror() = default;
  at::Tensor tensor(const Operand& operand);
  // The block whose storage this is; null for other storages.
  BlockRef block_of(const at::Tensor& x) const;

 protected:
  virtual c10::Storage make_storage(const BlockRef& block) = 0;
  virtual c10::DispatchKeySet keys() const = 0;

 private:
  c10::Storage storage_of(const BlockRef& block);

  std::unordered_map<const Block*, std::pair<BlockRef, c10::Storage>> storages_;
};

// CPU tensors over the memory of the device; valid while an `Opening` makes it accessible.
class HostMirror final : public Mirror {
 protected:
  c10::Storage make_storage(const BlockRef& block) override;
  c10::DispatchKeySet keys() const override {
    return c10::DispatchKeySet(c10::DispatchKey::CPU);
  }
};

// Tensors without data, to find the shapes of results.
class MetaMirror final : public Mirror {
 protected:
  c10::Storage make_storage(const BlockRef& block) override;
  c10::DispatchKeySet keys() const override {
    return c10::DispatchKeySet(c10::DispatchKey::Meta);
  }
};

// CPU tensors full of one positive number, to advance a generator by as much as a queued kernel will draw. The guess is
// wrong for kernels that draw more for some values, such as `poisson`.
class FilledMirror final : public Mirror {
 protected:
  c10::Storage make_storage(const BlockRef& block) override;
  c10::DispatchKeySet keys() const override {
    return c10::DispatchKeySet(c10::DispatchKey::CPU);
  }
};

inline bool on_device(const at::Tensor& x) {
  return x.defined() && x.device().type() == c10::DeviceType::PrivateUse1;
}

// A new tensor, as `torch.empty_strided` returns it; without autograd.
at::Tensor device_empty(at::IntArrayRef sizes, at::IntArrayRef strides, caffe2::TypeMeta dtype, c10::DeviceIndex device);
std::vector<int64_t> dense_strides(at::IntArrayRef sizes);
// A view of the storage of `base`.
at::Tensor device_view(const at::Tensor& base, const at::Tensor& like);
void set_shape(const at::Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset);

}  // namespace test_device

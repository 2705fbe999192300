// Autocast of the device: products in the lower precision, sums of many terms in float32, as on other accelerators.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

// Declared here because the header that declares them includes all operators.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API at::Tensor cached_cast(at::ScalarType to_type, const at::Tensor& arg, at::DeviceType device_type);
}  // namespace at::autocast

namespace test_device {

namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

constexpr const char* kLowerPrecision[] = {
    "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linear", "addbmm",
    "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "scaled_dot_product_attention"};

constexpr const char* kFloat32[] = {
    "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm", "group_norm", "cosine_similarity",
    "nll_loss", "nll_loss2d", "cross_entropy_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
    "binary_cross_entropy_with_logits", "dist", "cdist", "renorm", "logsumexp", "prod", "prod.dim_int", "softmax.int",
    "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "sum", "sum.dim_IntList", "norm.Scalar",
    "norm.ScalarOpt_dim"};

constexpr const char* kWidest[] = {
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot",
    "scatter_add"};

// Call `visit` for every tensor among the last arguments of the stack; what it returns takes the place of the tensor.
template <class F>
void replace_arguments(const OperatorHandle& op, Stack& stack, F visit) {
  size_t count = op.schema().arguments().size();
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      stack[i] = visit(stack[i].toTensor());
    } else if (stack[i].isTensorList()) {
      std::vector<at::Tensor> list = stack[i].toTensorVector();
      for (at::Tensor& x : list) x = visit(x);
      stack[i] = c10::IValue(list);
    }
  }
}

void call_cast(const OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::autocast_dispatch_keyset);
  replace_arguments(op, *stack, [&](const at::Tensor& x) {
    return x.defined() ? at::autocast::cached_cast(dtype, x, kDevice) : x;
  });
  op.callBoxed(stack);
}

void in_lower_precision(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  call_cast(op, stack, at::autocast::get_autocast_dtype(kDevice));
}

void in_float32(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  call_cast(op, stack, at::kFloat);
}

void in_widest(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  at::ScalarType widest = at::autocast::get_autocast_dtype(kDevice);
  replace_arguments(op, *stack, [&](const at::Tensor& x) {
    if (x.defined() && x.is_floating_point()) widest = c10::promoteTypes(widest, x.scalar_type());
    return x;
  });
  call_cast(op, stack, widest);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : kLowerPrecision) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
  for (const char* name : kFloat32) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_float32>());
  for (const char* name : kWidest) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_widest>());
}

}  // namespace

}  // namespace test_device

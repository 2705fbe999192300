// Fused cells of LSTM and GRU, which torch calls on devices that it does not know: compositions of other operators.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace test_device {

namespace {

using at::Tensor;
using Bias = std::optional<Tensor>;

Tensor biased(const Tensor& x, const Bias& bias) {
  return bias && bias->defined() ? x + *bias : x;
}

Tensor or_zeros(const Bias& gradient, const Tensor& like) {
  return gradient && gradient->defined() ? *gradient : at::zeros_like(like);
}

// The gradient of sigmoid(x), by its value.
Tensor through_sigmoid(const Tensor& gradient, const Tensor& y) {
  return gradient * y * (1 - y);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& cx, const Bias& input_bias, const Bias& hidden_bias) {
  auto gates = (biased(input, input_bias) + biased(hidden, hidden_bias)).chunk(4, 1);
  Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), cell = gates[2].tanh(), out = gates[3].sigmoid();
  Tensor cy = forget * cx + in * cell;
  return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Bias& grad_hy, const Bias& grad_cy, const Tensor& cx, const Tensor& cy, const Tensor& workspace,
    bool has_bias) {
  auto saved = workspace.chunk(4, 1);
  const Tensor &in = saved[0], &forget = saved[1], &cell = saved[2], &out = saved[3];
  Tensor of_hy = or_zeros(grad_hy, cy), squashed = cy.tanh();
  Tensor of_cy = or_zeros(grad_cy, cy) + of_hy * out * (1 - squashed * squashed);
  Tensor gates = at::cat(
      {through_sigmoid(of_cy * cell, in), through_sigmoid(of_cy * cx, forget), of_cy * in * (1 - cell * cell),
       through_sigmoid(of_hy * squashed, out)},
      1);
  return {gates, of_cy * forget, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& input, const Tensor& hidden, const Tensor& hx, const Bias& input_bias, const Bias& hidden_bias) {
  auto of_input = biased(input, input_bias).chunk(3, 1), of_hidden = biased(hidden, hidden_bias).chunk(3, 1);
  Tensor reset = (of_input[0] + of_hidden[0]).sigmoid(), update = (of_input[1] + of_hidden[1]).sigmoid();
  Tensor made = (of_input[2] + reset * of_hidden[2]).tanh();
  return {made + update * (hx - made), at::cat({reset, update, made, hx, of_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& workspace, bool has_bias) {
  auto saved = workspace.chunk(5, 1);
  const Tensor &reset = saved[0], &update = saved[1], &made = saved[2], &hx = saved[3], &of_hidden = saved[4];
  Tensor of_made = grad_hy * (1 - update) * (1 - made * made);
  Tensor of_reset = through_sigmoid(of_made * of_hidden, reset);
  Tensor of_update = through_sigmoid(grad_hy * (hx - made), update);
  Tensor input = at::cat({of_reset, of_update, of_made}, 1), hidden = at::cat({of_reset, of_update, of_made * reset}, 1);
  return {
      input, hidden, grad_hy * update, has_bias ? input.sum(0) : Tensor(), has_bias ? hidden.sum(0) : Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  m.impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
}

}  // namespace

}  // namespace test_device

#include "call.h"

#include <algorithm>

#include "current.h"

namespace test_device {

namespace {

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

// Arguments that operators of real devices take from the CPU, whatever their number of dims.
bool may_be_on_host(const std::string& op, const std::string& argument) {
  return argument == "indices" || argument == "scalars" || op == "aten::_pack_padded_sequence";
}

c10::IValue optional_list(const std::vector<at::Tensor>& items) {
  c10::List<std::optional<at::Tensor>> list;
  for (const at::Tensor& x : items) list.push_back(x.defined() ? std::optional<at::Tensor>(x) : std::nullopt);
  return list;
}

}  // namespace

Arguments::Arguments(
    const c10::OperatorHandle& op, const torch::jit::Stack& stack, std::vector<at::Tensor>& tensors) {
  const auto& declared = op.schema().arguments();
  plain_.assign(stack.end() - static_cast<ptrdiff_t>(declared.size()), stack.end());
  for (size_t i = 0; i < declared.size(); ++i) {
    bool write = is_written(declared[i]);
    if (plain_[i].isTensor()) {
      at::Tensor x = plain_[i].toTensor();
      add(x, i, -1, write, tensors);
      if (on_device(x)) plain_[i] = c10::IValue();
    } else if (plain_[i].isTensorList() || plain_[i].isOptionalTensorList()) {
      add_list(i, write, tensors);
    } else {
      add_plain(i, declared[i]);
    }
  }
  device = !tensors.empty() ? tensors[0].device().index() : current_device();
  if (asked_) device = *asked_;
  check_devices(op, tensors);
}

void Arguments::add_list(size_t argument, bool write, std::vector<at::Tensor>& tensors) {
  List list{argument, plain_[argument].isOptionalTensorList(), {}};
  c10::List<c10::IValue> values = plain_[argument].toList();
  for (size_t at = 0; at < values.size(); ++at) {
    c10::IValue item = values.get(at);
    at::Tensor x = item.isTensor() ? item.toTensor() : at::Tensor();
    add(x, argument, static_cast<int64_t>(at), write, tensors);
    list.items.push_back(on_device(x) ? at::Tensor() : x);
  }
  plain_[argument] = c10::IValue();
  lists_.push_back(std::move(list));
}

void Arguments::add_plain(size_t argument, const c10::Argument& declared) {
  const c10::IValue& value = plain_[argument];
  if (value.isDevice()) {
    devices_.push_back(argument);
    c10::Device place = value.toDevice();
    if (place.type() == c10::DeviceType::PrivateUse1) asked_ = place.has_index() ? place.index() : current_device();
  } else if (value.isGenerator()) {
    generators_.push_back(argument);
    generator = value.toGenerator();
  } else if (value.isNone() && declared.type()->str() == "Generator?") {
    generators_.push_back(argument);
  }
}

void Arguments::add(
    const at::Tensor& x, size_t argument, int64_t at, bool write, std::vector<at::Tensor>& tensors) {
  if (!x.defined()) return;
  if (!on_device(x)) {
    host_tensors_.emplace_back(argument, x);
    return;
  }
  auto found = std::find_if(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return t.is_same(x); });
  size_t operand = static_cast<size_t>(found - tensors.begin());
  if (found == tensors.end()) {
    tensors.push_back(x);
    operands.emplace_back(x);
    written.push_back(false);
  }
  written[operand] = written[operand] || write;
  places_.push_back({argument, at, operand});
}

void Arguments::check_devices(const c10::OperatorHandle& op, const std::vector<at::Tensor>& tensors) const {
  const auto& schema = op.schema();
  for (const at::Tensor& x : tensors)
    TORCH_CHECK(
        x.device() == tensors[0].device(), "Expected all tensors to be on the same device, but found ",
        tensors[0].device(), " and ", x.device(), " in ", schema.name());
  for (const auto& [argument, x] : host_tensors_)
    TORCH_CHECK(
        tensors.empty() || x.dim() == 0 || may_be_on_host(schema.name(), schema.arguments()[argument].name()),
        "Expected all tensors to be on the same device, but found ", tensors[0].device(), " and ", x.device(), " in ",
        schema.name(), ", argument '", schema.arguments()[argument].name(), "'");
}

torch::jit::Stack Arguments::with(
    const std::function<at::Tensor(size_t)>& give, c10::Device device, const at::Generator& generator) const {
  torch::jit::Stack filled = plain_;
  std::vector<at::Tensor> given;
  for (size_t i = 0; i < operands.size(); ++i) given.push_back(give(i));
  std::vector<List> lists = lists_;
  for (const Place& place : places_) {
    if (place.at < 0) {
      filled[place.argument] = given[place.operand];
      continue;
    }
    auto list = std::find_if(lists.begin(), lists.end(), [&](const List& l) { return l.argument == place.argument; });
    list->items[static_cast<size_t>(place.at)] = given[place.operand];
  }
  for (const List& list : lists) filled[list.argument] = list.optional ? optional_list(list.items) : list.items;
  for (size_t at : devices_) filled[at] = device;
  if (generator.defined())
    for (size_t at : generators_) filled[at] = generator;
  return filled;
}

bool returns_only_tensors(const c10::FunctionSchema& schema) {
  return std::all_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    auto name = result.type()->str();
    return name == "Tensor" || name == "Tensor[]";
  });
}

bool is_view(const c10::FunctionSchema& schema) {
  bool aliases = false;
  for (const c10::Argument& result : schema.returns()) aliases = aliases || result.alias_info();
  for (const c10::Argument& argument : schema.arguments())
    if (is_written(argument)) return false;
  return aliases;
}

void replace_tensors(torch::jit::Stack& results, const std::function<at::Tensor(const at::Tensor&)>& visit) {
  for (c10::IValue& value : results) {
    if (value.isTensor()) {
      value = visit(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list = value.toTensorVector();
      for (at::Tensor& x : list) x = visit(x);
      value = c10::IValue(list);
    }
  }
}

}  // namespace test_device

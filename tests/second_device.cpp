// A second device for PyTorch, 'gpu': its memory is the CPU's and the CPU computes, but it is no CPU. Whatever mixes
// tensors of both raises "two devices", and what must be waited for is counted. See test_second_device.py.
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <set>

using at::Tensor;
using Maybe = std::optional<Tensor>;
using Sizes = at::IntArrayRef;
constexpr auto GPU = c10::DeviceType::PrivateUse1;
static int64_t waits = 0;

// --- memory, streams, random numbers: what torch asks of every device ---

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = bytes ? malloc(bytes) : nullptr;
    return {start, start, &free, c10::Device(GPU, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} memory;
REGISTER_ALLOCATOR(GPU, &memory);

static c10::Stream only(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

struct Guard : c10::impl::NoOpDeviceGuardImpl<GPU> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return {GPU, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {GPU, 0}; }
  c10::Stream getStream(c10::Device device) const noexcept override { return only(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return only(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static auto generator = at::make_generator<at::CPUGeneratorImpl>(0);
    return generator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto start = memory.allocate(bytes);
    if (storage.data()) memcpy(start.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(start));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
} hooks;
static const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// --- tensors ---

static bool on_gpu(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == GPU; }

static Tensor host(const Tensor& tensor) {  // the same memory, as the CPU sees it
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}
static Maybe host(const Maybe& tensor) { return tensor && tensor->defined() ? Maybe(host(*tensor)) : std::nullopt; }
static Tensor back(const Tensor& tensor) { return tensor.defined() ? tensor.to(c10::Device(GPU, 0)) : tensor; }

static void refuse_two_devices(const std::string& name, const std::vector<Maybe>& tensors) {
  bool there = false, here = false;
  for (const Maybe& tensor : tensors)
    if (tensor && tensor->defined()) (on_gpu(*tensor) ? there : here) |= on_gpu(*tensor) || tensor->dim() > 0;
  TORCH_CHECK(!(there && here), "two devices in ", name);
}

Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  (on_gpu(to) ? host(to) : to).copy_(on_gpu(from) ? host(from) : from);
  return to;
}
Tensor copy_resized(const Tensor& from, const Tensor& to) { return copy_from(from, to.resize_(from.sizes()), false); }
at::Scalar item(const Tensor& tensor) { return ++waits, host(tensor).item(); }

// --- what computes: these three by hand, all else by torch's fallback on the CPU ---

Tensor convolution(const Tensor& x, const Tensor& weight, const Maybe& bias, Sizes stride, Sizes padding,
                   Sizes dilation, bool transposed, Sizes output_padding, int64_t groups) {
  refuse_two_devices("convolution", {x, weight, bias});
  return back(at::convolution(host(x), host(weight), host(bias), stride, padding, dilation, transposed,
                              output_padding, groups));
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, Sizes stride, Sizes padding, Sizes dilation,
    bool transposed, Sizes output_padding, int64_t groups, std::array<bool, 3> wanted) {
  refuse_two_devices("convolution_backward", {grad, x, weight});
  std::vector<int64_t> bias = {transposed ? weight.size(1) * groups : weight.size(0)};
  auto [dx, dw, db] = at::convolution_backward(host(grad), host(x), host(weight), at::OptionalIntArrayRef(bias),
                                               stride, padding, dilation, transposed, output_padding, groups, wanted);
  return {back(dx), back(dw), back(db)};
}
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const Maybe& weight, const Maybe& bias,
                                              const Maybe& mean, const Maybe& var, bool train, double momentum,
                                              double eps) {  // its schema does not tell that it changes mean and var
  refuse_two_devices("native_batch_norm", {x, weight, bias, mean, var});
  auto [y, m, v] = at::native_batch_norm(host(x), host(weight), host(bias), host(mean), host(var), train, momentum, eps);
  return {back(y), back(m), back(v)};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::set<std::string> mixes = {"aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_",
                                              "aten::_index_put_impl_"};  // CUDA takes indices of the CPU too
  static const std::set<std::string> waiting = {"aten::is_nonzero", "aten::equal", "aten::nonzero", "aten::bincount",
                                                "aten::_unique2", "aten::masked_select"};
  auto name = op.schema().operator_name().name;
  std::vector<Maybe> tensors;
  for (auto value = stack->end() - op.schema().arguments().size(); value != stack->end(); ++value) {
    if (value->isTensor()) tensors.push_back(value->toTensor());
    if (value->isTensorList()) for (const Tensor& tensor : value->toTensorVector()) tensors.push_back(tensor);
  }
  if (!mixes.count(name)) refuse_two_devices(name, tensors);
  waits += waiting.count(name);
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_resized);
  m.impl("_local_scalar_dense", item);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("native_batch_norm", batch_norm);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("resize_", TORCH_FN(at::native::resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
}

// --- autocast, with the lists of operations that CUDA has ---

using namespace at;
using namespace at::autocast;
#define IN_16_BITS(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { AT_FORALL_LOWER_PRECISION_FP(IN_16_BITS) AT_FORALL_FP32(IN_FLOAT32) }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("waits", [] { return waits; }); }

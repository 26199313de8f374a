#include "program/python.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <alloca.h>

#include <chrono>
#include <cstring>
#include <map>
#include <memory>

#include "cuda/driver.h"
#include "program/program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace opgraph {
namespace {

using cuda::Driver;

[[noreturn]] void raise(PyObject* type, const std::string& text) {
  PyErr_SetString(type, text.c_str());
  throw nb::python_error();
}

void check(const Driver& driver, cuda::Result result, const char* what) {
  if (result != cuda::kSuccess) raise(PyExc_RuntimeError, cuda::explain(driver, result, what));
}

const Driver& loaded() {
  const Driver& driver = cuda::driver();
  if (!driver.loaded()) raise(PyExc_RuntimeError, cuda::driver_failure());
  return driver;
}

// ---- modules and functions ---------------------------------------------------------------------------------------

// A loaded module. Unloaded with its last user, in its own context; the driver waits for work in flight by itself.
struct LoadedModule {
  const Driver& driver;
  int device;
  cuda::Module module = nullptr;

  LoadedModule(const Driver& d, int ordinal) : driver(d), device(ordinal) {}
  ~LoadedModule() {
    if (!module) return;
    const cuda::ContextGuard guard(driver, device);
    if (guard.result() == cuda::kSuccess) driver.module_unload(module);
  }
};

struct LoadedFunction {
  std::shared_ptr<LoadedModule> module;
  cuda::Function function;
  std::string name;
};

std::shared_ptr<LoadedModule> load_module(nb::bytes image, int device) {
  const Driver& driver = loaded();
  auto out = std::make_shared<LoadedModule>(driver, device);
  cuda::Result result;
  {
    nb::gil_scoped_release release;  // loading an image can take a while
    const cuda::ContextGuard guard(driver, device);
    result = guard.result();
    if (result == cuda::kSuccess) result = driver.module_load(&out->module, image.c_str(), 0, nullptr, nullptr);
  }
  check(driver, result, "cuModuleLoadDataEx");
  return out;
}

std::shared_ptr<LoadedFunction> get_function(std::shared_ptr<LoadedModule> module, const std::string& name, int shared_bytes) {
  const Driver& driver = module->driver;
  const cuda::ContextGuard guard(driver, module->device);
  check(driver, guard.result(), "cuCtxSetCurrent");
  auto out = std::make_shared<LoadedFunction>();
  out->module = module;
  out->name = name;
  check(driver, driver.module_function(&out->function, module->module, name.c_str()), "cuModuleGetFunction");
  constexpr int kStaticLimit = 48 * 1024;  // beyond it a kernel has to ask
  if (shared_bytes > kStaticLimit)
    check(driver, driver.function_attribute_set(out->function, cuda::kMaxDynamicSharedBytes, shared_bytes), "cuFuncSetAttribute");
  return out;
}

// ---- descriptions ------------------------------------------------------------------------------------------------

const std::map<std::string, ExprOp> kOps = {
    {"add", ExprOp::add},           {"sub", ExprOp::sub},           {"mul", ExprOp::mul}, {"floor_div", ExprOp::floor_div},
    {"ceil_div", ExprOp::ceil_div}, {"min", ExprOp::min},           {"max", ExprOp::max}, {"dim", ExprOp::dim},
    {"stride", ExprOp::stride},
};

void compile(nb::handle e, Expr& out) {
  if (nb::isinstance<nb::int_>(e)) {
    out.push_back({ExprOp::constant, 0, 0, nb::cast<int64_t>(e)});
    return;
  }
  if (!nb::isinstance<nb::tuple>(e) || nb::len(e) != 3)
    raise(PyExc_TypeError, "an expression is an int or (operation, a, b)");
  const auto name = nb::cast<std::string>(e[0]);
  const auto op = kOps.find(name);
  if (op == kOps.end()) raise(PyExc_ValueError, "no operation '" + name + "' in an expression");
  if (op->second == ExprOp::dim || op->second == ExprOp::stride) {
    out.push_back({op->second, nb::cast<uint8_t>(e[2]), nb::cast<int32_t>(e[1]), 0});
    return;
  }
  compile(e[1], out);
  compile(e[2], out);
  out.push_back({op->second, 0, 0, 0});
}

Expr compiled(nb::handle e) {
  Expr out;
  compile(e, out);
  return out;
}

uint32_t place(KernelStep& k, uint32_t bytes, uint32_t alignment) {
  const auto at = static_cast<uint32_t>((k.arguments.size() + alignment - 1) / alignment * alignment);
  k.arguments.resize(at + bytes, 0);
  k.parameter_at.push_back(at);
  return at;
}

void add_parameter(KernelStep& k, nb::tuple p) {
  const auto kind = nb::cast<std::string>(p[0]);
  if (kind == "address") {
    const uint32_t at = place(k, 8, 8);
    k.addresses.push_back({at, nb::cast<int32_t>(p[1]), nb::cast<int64_t>(p[2])});
  } else if (kind == "int32" || kind == "int64") {
    const uint8_t bytes = kind == "int32" ? 4 : 8;
    const uint32_t at = place(k, bytes, bytes);
    k.integers.push_back({at, bytes, compiled(p[1])});
  } else if (kind == "scalar") {
    const auto bytes = nb::cast<uint8_t>(p[2]);
    const uint32_t at = place(k, bytes, bytes);
    k.scalars.push_back({at, bytes, nb::cast<int32_t>(p[1])});
  } else if (kind == "bytes") {
    const auto data = nb::cast<nb::bytes>(p[1]);
    const auto alignment = nb::cast<uint32_t>(p[2]);
    const uint32_t at = place(k, static_cast<uint32_t>(data.size()), alignment);
    std::memcpy(k.arguments.data() + at, data.c_str(), data.size());
  } else {
    raise(PyExc_ValueError, "no kernel parameter of kind '" + kind + "'");
  }
}

KernelStep kernel_step(nb::dict d, std::vector<std::shared_ptr<void>>& keep) {
  KernelStep k;
  auto function = nb::cast<std::shared_ptr<LoadedFunction>>(d["function"]);
  k.function = function->function;
  keep.push_back(function);
  const auto grid = nb::cast<nb::tuple>(d["grid"]);
  const auto block = nb::cast<nb::tuple>(d["block"]);
  for (int i = 0; i < 3; i++) {
    k.grid[i] = compiled(grid[i]);
    k.block[i] = nb::cast<unsigned>(block[i]);
  }
  k.shared_bytes = nb::cast<unsigned>(d["shared"]);
  for (nb::handle a : nb::cast<nb::list>(d["attributes"])) {
    cuda::Attribute attribute{};
    attribute.id = nb::cast<int>(a[0]);
    int i = 0;
    for (nb::handle w : nb::cast<nb::tuple>(a[1])) {
      if (i == 16) raise(PyExc_ValueError, "a launch attribute has at most 16 words");
      attribute.value.words[i++] = nb::cast<uint32_t>(w);
    }
    k.attributes.push_back(attribute);
  }
  for (nb::handle p : nb::cast<nb::list>(d["parameters"])) add_parameter(k, nb::cast<nb::tuple>(p));
  return k;
}

void memset_steps(nb::dict d, std::vector<MemsetStep>& out) {
  Layout layout;
  const auto dims = nb::cast<std::vector<int64_t>>(d["dims"]), strides = nb::cast<std::vector<int64_t>>(d["strides"]);
  if (dims.size() != strides.size() || dims.size() > kMaxRank) raise(PyExc_ValueError, "a memset's dims and strides do not fit");
  layout.rank = static_cast<int32_t>(dims.size());
  for (size_t i = 0; i < dims.size(); i++) layout.dims[i] = dims[i], layout.strides[i] = strides[i];
  std::string reason;
  if (!plan_memsets(nb::cast<int32_t>(d["target"]), layout, nb::cast<uint8_t>(d["element"]), nb::cast<uint64_t>(d["pattern"]),
                    nb::cast<int>(d["most"]), out, reason))
    raise(PyExc_ValueError, reason);
}

std::shared_ptr<Program> make_program(int device, nb::list steps, std::vector<int> ranks,
                                      std::vector<std::pair<int, uint32_t>> needs, std::shared_ptr<Program> otherwise) {
  auto program = std::make_shared<Program>();
  program->device = device;
  for (nb::handle s : steps) {
    const auto d = nb::cast<nb::dict>(s);
    const auto kind = nb::cast<std::string>(d["kind"]);
    if (kind == "kernel") {
      program->steps.push_back({Step::Kind::kernel, static_cast<uint32_t>(program->kernels.size())});
      program->kernels.push_back(kernel_step(d, program->keep));
    } else if (kind == "memset") {
      const size_t before = program->memsets.size();
      memset_steps(d, program->memsets);
      for (size_t i = before; i < program->memsets.size(); i++)
        program->steps.push_back({Step::Kind::memset, static_cast<uint32_t>(i)});
    } else {
      raise(PyExc_ValueError, "no step of kind '" + kind + "'");
    }
  }
  for (const auto& [operand, bytes] : needs) {
    if (operand < 0 || operand >= static_cast<int>(ranks.size()) || bytes == 0) raise(PyExc_ValueError, "an alignment names no operand");
    program->needs.push_back({operand, bytes});
  }
  if (!needs.empty() && !otherwise) raise(PyExc_ValueError, "a program with alignment needs has to name another for the rest");
  program->otherwise = otherwise;
  if (std::string why = program->check(ranks); !why.empty()) raise(PyExc_ValueError, why);
  return program;
}

// Nanoseconds of host time per launch of the program's first kernel in a C loop, arguments laid out once. `layouts` are
// not needed: grids of the programs measured here are constants.
double bare_launch_ns(const Program& program, std::vector<uint64_t> addresses, int64_t stream, int repeat) {
  const Driver& driver = loaded();
  if (program.kernels.empty()) raise(PyExc_ValueError, "the program has no kernel");
  std::vector<void*> at;
  for (const uint64_t a : addresses) at.push_back(reinterpret_cast<void*>(a));
  const CallView view{at.data(), nullptr, nullptr, nullptr, reinterpret_cast<cuda::Stream>(static_cast<uintptr_t>(stream))};
  const cuda::ContextGuard guard(driver, program.device);
  check(driver, guard.result(), "cuCtxSetCurrent");
  Failure failure;
  const auto start = std::chrono::steady_clock::now();
  program.launch_bare(driver, view, repeat, failure);
  const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
  check(driver, failure.result, "cuLaunchKernelEx");
  return ns / repeat;
}

// ---- devices -----------------------------------------------------------------------------------------------------

nb::dict describe_device(int ordinal) {
  const Driver& driver = loaded();
  cuda::Device device;
  check(driver, driver.device_get(&device, ordinal), "cuDeviceGet");
  char name[256] = {};
  check(driver, driver.device_name(name, sizeof name, device), "cuDeviceGetName");
  auto attribute = [&](int id) {
    int value = 0;
    check(driver, driver.device_attribute(&value, id, device), "cuDeviceGetAttribute");
    return value;
  };
  int version = 0;
  check(driver, driver.driver_version(&version), "cuDriverGetVersion");
  nb::dict out;
  out["name"] = std::string(name);
  out["compute_capability"] = nb::make_tuple(attribute(cuda::kComputeMajor), attribute(cuda::kComputeMinor));
  out["sm_count"] = attribute(cuda::kMultiprocessorCount);
  out["shared_bytes"] = attribute(cuda::kMaxSharedPerBlockOptin);
  out["driver_version"] = version;
  return out;
}

// The device of the calling thread's current context; 0 when it has none.
int current_device() {
  const Driver& driver = cuda::driver();
  cuda::Device device = 0;
  return driver.loaded() && driver.context_device(&device) == cuda::kSuccess ? device : 0;
}

int device_count() {
  const Driver& driver = cuda::driver();
  int n = 0;
  if (!driver.loaded() || driver.device_count(&n) != cuda::kSuccess) return 0;
  return n;
}

}  // namespace

const Program* program_of(PyObject* object) {
  std::shared_ptr<Program> program;
  return nb::try_cast(nb::handle(object), program) ? program.get() : nullptr;
}

OG_COLD bool fail_driver(const Failure& failure) {
  const std::string text = cuda::explain(cuda::driver(), failure.result, failure.what) +
                           (failure.step >= 0 ? " [step " + std::to_string(failure.step) + " of the plan]" : "");
  PyErr_SetString(PyExc_RuntimeError, text.c_str());
  return false;
}

bool run_program(const Program& program, Call& call) {
  const int n = call.ex->n;
  auto** addresses = static_cast<void**>(alloca(sizeof(void*) * (n + 1)));
  auto** layouts = static_cast<const Layout**>(alloca(sizeof(Layout*) * (n + 1)));
  auto** scalars = static_cast<const unsigned char**>(alloca(sizeof(void*) * (n + 1)));
  for (int i = 0; i < n; i++) {
    const Operand& op = call.operands[i];
    addresses[i] = op.value ? op.reading.t.data : nullptr;
    layouts[i] = op.layout;
    scalars[i] = op.scalar;
  }
  const CallView view{addresses, layouts, scalars, call.workspace ? call.workspace_reading.t.data : nullptr,
                      reinterpret_cast<cuda::Stream>(static_cast<uintptr_t>(call.stream))};
  Failure failure;
  // The GIL stays: issuing a few launches costs less than giving it up and taking it back.
  return OG_LIKELY(program.select(addresses).run(cuda::driver(), view, failure)) || fail_driver(failure);
}

void program_init(PyObject* module) {
  nb::module_ m = nb::borrow<nb::module_>(module);
  nb::class_<LoadedModule>(m, "CudaModule", "A kernel image loaded into a device's primary context.");
  nb::class_<LoadedFunction>(m, "CudaFunction", "A kernel of a loaded image.")
      .def_ro("name", &LoadedFunction::name, "Name of the kernel.");
  nb::class_<Program>(m, "Program", "A compiled plan as a list of native steps. Immutable; safe from many threads.")
      .def_prop_ro("step_count", [](const Program& p) { return p.steps.size(); }, "Number of driver calls a run makes.");
  m.def("make_program", &make_program, "device"_a, "steps"_a, "ranks"_a, "needs"_a = std::vector<std::pair<int, uint32_t>>(),
        "otherwise"_a.none() = nb::none(),
        "A Program from step descriptions (see opgraph.engines.program); ValueError for one that is not well-formed.");
  m.def("bare_launch_ns", &bare_launch_ns, "program"_a, "addresses"_a, "stream"_a, "repeat"_a,
        "Nanoseconds per launch of the first kernel in a C loop: the floor that benchmarks measure a call against.");
  m.def("load_module", &load_module, "image"_a, "device"_a, "Loads a cubin into the primary context of a device.");
  m.def("get_function", &get_function, "module"_a, "name"_a, "shared_bytes"_a = 0,
        "A kernel of a module; shared_bytes is the dynamic shared memory its launches will use.");
  m.def("use_driver", &cuda::use_driver, "path"_a,
        "Loads the CUDA driver from another library (tests); '' restores the usual one. Returns why it could not, or ''.");
  m.def("driver_failure", [] { return cuda::driver_failure(); }, "Why no CUDA driver is in use; '' when one is.");
  m.def("device_count", &device_count, "CUDA devices the driver shows; 0 without a driver.");
  m.def("current_device", &current_device, "Ordinal of the calling thread's current CUDA device; 0 when none is current.");
  m.def("describe_device", &describe_device, "ordinal"_a, "Name, compute capability, sm_count, shared_bytes, driver_version.");
}

}  // namespace opgraph

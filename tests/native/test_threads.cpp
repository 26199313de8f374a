// Eight threads on the records that calls share: layouts published and read side by side on one operand, the tables of an
// executable, the driver's primary contexts, and one program that all of them patch and run at once against a fake
// driver. No Python: what is tested is plain C++. Built by sanitize.sh under the thread and the leak sanitizer.
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pack/layout.h"
#include "pack/publish.h"
#include "program/program.h"

using namespace opgraph;

namespace {

constexpr int kThreads = 8;
constexpr int kTurns = 400;
std::atomic<int> failures{0};

void expect(int line, const char* what, bool holds) {
  if (holds) return;
  std::printf("test_threads.cpp:%d: %s\n", line, what);
  failures.fetch_add(1);
}
#define CHECK(x) expect(__LINE__, #x, x)

// Starts all threads at one moment, as nearly as an atomic can.
template <class F>
void together(F work) {
  std::atomic<int> waiting{kThreads};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; i++)
    threads.emplace_back([&waiting, &work, i] {
      waiting.fetch_sub(1);
      while (waiting.load()) std::this_thread::yield();
      work(i);
    });
  for (std::thread& t : threads) t.join();
}

// ---- layouts of one operand

struct Given {
  int rank;
  int64_t dims[3], strides[3];
  int64_t bytes;  // 0: refused
};

// Of a declaration [6, 4] stored column by column; more accepted ones than are remembered.
constexpr Given kGiven[] = {
    {1, {24}, {1}, 96},
    {2, {4, 6}, {6, 1}, 96},
    {2, {6, 4}, {1, 6}, 96},
    {2, {6, 5}, {1, 6}, 120},
    {2, {5, 6}, {6, 1}, 120},
    {3, {2, 2, 6}, {12, 6, 1}, 96},
    {3, {4, 2, 3}, {6, 3, 1}, 96},
    {3, {4, 1, 6}, {6, 99, 1}, 96},
    {1, {31}, {1}, 124},
    {2, {6, 4}, {4, 1}, 0},
    {2, {4, 6}, {7, 1}, 0},
    {1, {23}, {1}, 0},
    {1, {24}, {2}, 0},
    {1, {4}, {6}, 0},  // the beginning of one that is accepted
    {0, {}, {}, 0},
};
constexpr int kCases = sizeof(kGiven) / sizeof(kGiven[0]);

void declare(OperandSpec& spec) {
  spec.dtype = {kDLFloat, 32, 1};
  spec.item_shift = 2;
  spec.declared.rank = 2;
  spec.declared.dims[0] = 6, spec.declared.dims[1] = 4;
  spec.declared.strides[0] = 1, spec.declared.strides[1] = 6;
  spec.span_bytes = 96;
}

// What a call does with a buffer that is not as declared: look at the records, else match and publish.
int64_t accepted_bytes(OperandSpec& spec, std::mutex& mutex, const Given& given) {
  const BufferLayout buffer{given.rank, given.dims, given.strides};
  if (const SeenLayout* s = find_seen(spec, buffer)) return s->bytes;
  int64_t bytes = 0;
  if (match_layout(spec, buffer, &bytes) != Rule::ok) return 0;
  publish_seen(spec, buffer, bytes, mutex);
  return bytes;
}

void layouts() {
  for (int round = 0; round < 20; round++) {
    OperandSpec spec;
    std::mutex mutex;
    declare(spec);
    together([&](int thread) {
      for (int turn = 0; turn < kTurns; turn++) {
        const Given& given = kGiven[(turn * 7 + thread * 3 + turn / kCases) % kCases];
        CHECK(accepted_bytes(spec, mutex, given) == given.bytes);
      }
    });
    for (auto& place : spec.seen) {
      CHECK(place.load() != nullptr);  // every place is taken, and nothing leaks beyond them
      delete place.load();
    }
  }
}

// ---- tables of records

struct Record {
  std::vector<int64_t> words;
};

void tables() {
  for (int round = 0; round < 20; round++) {
    std::atomic<const Record*> table[16] = {};
    std::mutex mutex;
    std::atomic<int> kept{0};
    together([&](int thread) {
      for (int turn = 0; turn < kTurns; turn++) {
        const int64_t wanted = (turn + thread) % 24;
        bool found = false;
        for (auto& place : table) {
          const Record* r = place.load(std::memory_order_acquire);
          if (!r) break;
          CHECK(r->words.size() == 8 && r->words.front() == r->words.back());
          found = found || r->words.front() == wanted;
        }
        if (found) continue;
        auto fresh = std::make_unique<Record>();
        fresh->words.assign(8, wanted);
        if (publish(table, mutex, std::move(fresh))) kept.fetch_add(1);
      }
    });
    CHECK(kept.load() == 16);
    for (auto& place : table) delete place.load();
  }
}

// ---- a program against a fake driver

struct Launch {
  uint64_t address;
  int64_t rows;
  float scale;
};

thread_local std::vector<Launch> t_launches;
thread_local std::vector<std::pair<cuda::Address, size_t>> t_memsets;
thread_local cuda::Context t_current = nullptr;
std::atomic<int> g_retained{0};

cuda::Result fake_launch(const cuda::LaunchConfig* config, cuda::Function, void** parameters, void**) {
  Launch launch;
  std::memcpy(&launch.address, parameters[0], 8);
  std::memcpy(&launch.rows, parameters[1], 8);
  std::memcpy(&launch.scale, parameters[2], 4);
  CHECK(config->grid[0] == static_cast<unsigned>(launch.rows));
  CHECK(t_current != nullptr);
  t_launches.push_back(launch);
  return cuda::kSuccess;
}

cuda::Result fake_memset(cuda::Address at, unsigned value, size_t count, cuda::Stream) {
  CHECK(value == 7);
  t_memsets.emplace_back(at, count);
  return cuda::kSuccess;
}

cuda::Driver fake_driver() {
  cuda::Driver d;
  d.device_get = [](cuda::Device* device, int ordinal) { return *device = ordinal, cuda::kSuccess; };
  d.primary_retain = [](cuda::Context* out, cuda::Device) {
    g_retained.fetch_add(1);
    *out = reinterpret_cast<cuda::Context>(0x40);
    return cuda::kSuccess;
  };
  d.context_current = [](cuda::Context* out) { return *out = t_current, cuda::kSuccess; };
  d.context_set = [](cuda::Context c) { return t_current = c, cuda::kSuccess; };
  d.launch = fake_launch;
  d.memset32 = fake_memset;
  return d;
}

Expr dimension(int operand, int axis) {
  return {ExprTerm{ExprOp::dim, static_cast<uint8_t>(axis), operand, 0}};
}
Expr constant(int64_t v) { return {ExprTerm{ExprOp::constant, 0, 0, v}}; }

Program make_program() {
  Program p;
  KernelStep k;
  k.function = reinterpret_cast<cuda::Function>(0x1000);
  k.arguments.assign(24, 0xAA);
  k.parameter_at = {0, 8, 16};
  k.grid[0] = dimension(0, 0), k.grid[1] = constant(1), k.grid[2] = constant(1);
  k.addresses = {{0, 0, 16}};
  k.integers = {{8, 8, dimension(0, 0)}};
  k.scalars = {{16, 4, 1}};
  MemsetStep m;
  m.target = kFromWorkspace;
  m.pattern = 7;
  m.element = 4;
  m.width = dimension(0, 0), m.height = constant(1), m.pitch = constant(4);
  p.kernels.push_back(k);
  p.memsets.push_back(m);
  p.steps = {{Step::Kind::memset, 0}, {Step::Kind::kernel, 0}};
  return p;
}

void programs() {
  const cuda::Driver driver = fake_driver();
  const Program program = make_program();
  CHECK(program.check({2, 1}).empty());
  together([&](int thread) {
    for (int turn = 0; turn < kTurns; turn++) {
      Layout live[2];
      live[0].rank = 2, live[0].dims[0] = 1 + turn % 5 + thread, live[0].dims[1] = 3;
      live[1].rank = 1, live[1].dims[0] = 1;
      const float scale = static_cast<float>(thread * kTurns + turn);
      void* addresses[2] = {reinterpret_cast<void*>(0x10000ull * (thread + 1) + turn), nullptr};
      const Layout* layouts[2] = {&live[0], &live[1]};
      const unsigned char* scalars[2] = {nullptr, reinterpret_cast<const unsigned char*>(&scale)};
      void* workspace = reinterpret_cast<void*>(0x900000ull + thread);
      t_launches.clear(), t_memsets.clear();
      Failure failure;
      CHECK(program.run(driver, {addresses, layouts, scalars, workspace, nullptr}, failure));
      CHECK(t_launches.size() == 1 && t_memsets.size() == 1);
      CHECK(t_launches[0].address == reinterpret_cast<uint64_t>(addresses[0]) + 16);
      CHECK(t_launches[0].rows == live[0].dims[0] && t_launches[0].scale == scale);
      CHECK(t_memsets[0].first == reinterpret_cast<uint64_t>(workspace));
      CHECK(t_memsets[0].second == static_cast<size_t>(live[0].dims[0]));
      CHECK(t_current == nullptr);  // what was current before is current again
    }
  });
  CHECK(g_retained.load() >= 1 && g_retained.load() <= kThreads);
}

// The driver's table is loaded once, whichever thread comes first; here from a library that is none.
void drivers() {
  const char* missing = "/nonexistent/driver.so";
  CHECK(!cuda::use_driver(missing).empty());
  together([](int) {
    for (int turn = 0; turn < kTurns; turn++) CHECK(!cuda::driver().loaded() && !cuda::driver_failure().empty());
  });
}

}  // namespace

int main() {
  layouts();
  tables();
  programs();
  drivers();
  if (failures.load()) return std::printf("%d failed\n", failures.load()), 1;
  std::puts("native thread tests passed");
  return 0;
}

// Kernels without a GPU: the part of CUDA C++ that the kernels use, for a C++ compiler.
//
// A thread of a block is a fiber. It runs up to a barrier and gives way to the next one, in an order that a seed shuffles anew
// after every barrier; blocks run one after the other, in an order of that seed too. Shared memory begins as garbage. A barrier
// that some threads of a block meet while others have ended fails the launch.
//
// What it cannot show: races between barriers within a warp, alignment, registers, launch limits of a card, speed.

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <functional>
#include <utility>
#include <vector>
#include <sys/mman.h>

#if !defined(__x86_64__)
#error "fibers are written for x86-64"
#endif

#define ON_CPU
#define __device__
#define __global__
#define __constant__
#define APART __attribute__((noinline))

namespace on_cpu {

struct Index {
    unsigned x = 0, y = 0;
};

extern "C" void on_cpu_switch(void** leave, void* enter);
asm(R"(
.text
.globl on_cpu_switch
.hidden on_cpu_switch
.type on_cpu_switch,@function
on_cpu_switch:
  pushq %rbx
  pushq %rbp
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbp
  popq %rbx
  ret
.size on_cpu_switch, .-on_cpu_switch
)");

constexpr size_t STACK = 128 << 10;

struct Fiber {
    char* stack = nullptr;
    void* at = nullptr;
    Index thread;
    bool ended = false;
};

// What runs on this OS thread.
struct Core {
    std::vector<Fiber> fibers;
    Fiber* now = nullptr;
    void* outside = nullptr;
    const std::function<void()>* body = nullptr;
    Index block, grid;
    std::vector<unsigned char> shared;
    uint64_t state = 0;

    uint64_t random() {
        state ^= state << 13;
        state ^= state >> 7;
        return state ^= state << 17;
    }
    ~Core() {
        for (auto& fiber : fibers) munmap(fiber.stack, STACK);
    }
};
inline thread_local Core core;

// 0: fibers and blocks in order.
inline thread_local uint64_t seed = 0;

inline void give_way() { on_cpu_switch(&core.now->at, core.outside); }

inline void begin() {
    (*core.body)();
    core.now->ended = true;
    give_way();
    abort();
}

// One block; whether all its threads met the same barriers.
inline bool run_block(unsigned threads) {
    while (core.fibers.size() < threads) {
        Fiber fiber;
        fiber.stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        core.fibers.push_back(fiber);
    }
    std::vector<unsigned> order(threads);
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = core.fibers[i];
        fiber.ended = false;
        fiber.thread.x = i;
        // A call's alignment: the return address lies 8 bytes below a multiple of 16. Six registers are popped first.
        void** top = (void**)(fiber.stack + STACK - 64);
        top[-1] = nullptr;
        top[-2] = (void*)begin;
        for (int i = 3; i <= 8; i++) top[-i] = nullptr;
        fiber.at = top - 8;
        order[i] = i;
    }
    for (;;) {
        if (seed)
            for (unsigned i = threads - 1; i > 0; i--) std::swap(order[i], order[core.random() % (i + 1)]);
        unsigned ended = 0;
        for (unsigned i : order) {
            core.now = &core.fibers[i];
            on_cpu_switch(&core.outside, core.now->at);
            ended += core.now->ended;
        }
        if (ended == threads) return true;
        if (ended != 0) return false;
    }
}

inline bool run(Index grid, unsigned threads, size_t shared, const std::function<void()>& body) {
    core.body = &body;
    core.grid = grid;
    core.state = seed * 0x9e3779b97f4a7c15ull + 1;
    uint64_t blocks = (uint64_t)grid.x * grid.y;
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t block = seed % 2 ? blocks - 1 - i : i;
        core.block.x = block % grid.x;
        core.block.y = block / grid.x;
        core.shared.assign(shared + 16, 0xff);
        if (!run_block(threads)) return false;
    }
    return true;
}

// A kernel: the size of its parameters, as they lie one after the other, and how it is called with them.
struct Kernel {
    size_t bytes;
    std::function<void(const char*)> call;
};
inline std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

template <class T> size_t place(size_t& end) {
    size_t start = (end + alignof(T) - 1) / alignof(T) * alignof(T);
    end = start + sizeof(T);
    return start;
}
template <class T> T parameter(const char* at) {
    T value;
    memcpy(&value, at, sizeof value);
    return value;
}
template <class... A> struct Registered {
    template <size_t... I> static void call(void (*f)(A...), const size_t* places, const char* bytes, std::index_sequence<I...>) {
        f(parameter<A>(bytes + places[I])...);
    }
    Registered(const char* name, void (*f)(A...)) {
        std::vector<size_t> places;
        size_t end = 0;
        (places.push_back(place<A>(end)), ...);
        kernels()[name] = {end, [f, places](const char* bytes) {
                               call(f, places.data(), bytes, std::index_sequence_for<A...>{});
                           }};
    }
};

} // namespace on_cpu

#define KERNEL(name, ...)                                            \
    static void name(__VA_ARGS__);                                   \
    static on_cpu::Registered registered_##name(#name, name);        \
    static void name(__VA_ARGS__)
#define SHARED(T, name) T* name = (T*)(((uintptr_t)on_cpu::core.shared.data() + 15) / 16 * 16)

#define threadIdx (on_cpu::core.now->thread)
#define blockIdx (on_cpu::core.block)
#define gridDim (on_cpu::core.grid)
inline void __syncthreads() { on_cpu::give_way(); }

inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline long long __double_as_longlong(double x) {
    long long bits;
    memcpy(&bits, &x, 8);
    return bits;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ull2double_rn(unsigned long long x) { return (double)x; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline float cospif(float x) { return (float)cos(3.14159265358979323846 * (double)x); }

// Fibers take turns, so that plain arithmetic is atomic.
template <class T> inline T atomicAdd(T* at, T x) {
    T before = *at;
    *at += x;
    return before;
}
template <class T> inline T atomicMin(T* at, T x) {
    T before = *at;
    if (x < before) *at = x;
    return before;
}
template <class T> inline T atomicMax(T* at, T x) {
    T before = *at;
    if (x > before) *at = x;
    return before;
}

inline float f16_value(unsigned short bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}
inline unsigned short to_f16(float x) {
    _Float16 narrow = (_Float16)x;
    unsigned short bits;
    memcpy(&bits, &narrow, 2);
    return bits;
}

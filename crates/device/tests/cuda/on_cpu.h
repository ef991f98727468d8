// Kernels without a GPU: the part of CUDA C++ that the kernels use, for a C++ compiler.
//
// A thread of a block is a fiber. It runs up to a barrier and gives way to the next one, in an order that a seed shuffles anew
// after every barrier; blocks run one after the other, in an order of that seed too. What the threads of a warp do together is a
// barrier of the warp; with a seed one warp runs as far ahead of the others as barriers of the block let it. Shared memory begins
// as garbage. A barrier that some threads meet while others have ended fails the launch, and so do threads that wait for each other.
//
// What it cannot show: races between barriers within a warp, alignment, registers, launch limits of a card, speed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <cstdio>
#include <deque>
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

constexpr unsigned WARP_THREADS = 32;

// A copy to shared memory that has begun.
struct Copy {
    void* to;
    const void* from;
    unsigned width, bytes;
};

enum State { READY, AT_WARP, AT_BLOCK, ENDED };

struct Fiber {
    char* stack = nullptr;
    void* at = nullptr;
    Index thread;
    State state = READY;
    // What threads of a warp do together goes by two places in turn, so that one barrier each is enough.
    unsigned turn = 0;
    std::vector<Copy> begun;
    std::deque<std::vector<Copy>> groups;
};

// What the threads of a warp show each other.
struct Shown {
    float numbers[WARP_THREADS];
    const void* rows[WARP_THREADS];
    float a[16][16], b[16][8];
};

// A barrier in shared memory, and the copies that it counts.
struct Barrier {
    unsigned count = 0, left = 0, phase = 0;
    int64_t bytes = 0;
    std::vector<std::pair<int64_t, std::function<void()>>> copies;

    void complete() {
        if (left || bytes) return;
        left = count;
        phase++;
    }
};

// What runs on this OS thread.
struct Core {
    std::vector<Fiber> fibers;
    Fiber* now = nullptr;
    void* outside = nullptr;
    const std::function<void()>* body = nullptr;
    Index block, grid;
    std::vector<unsigned char> shared;
    std::vector<Shown> shown;
    std::map<const void*, Barrier> barriers;
    uint64_t state = 0;
    // Threads of the block that go on, and how many wait: of each warp for their warp, and of all for their block.
    std::vector<unsigned> ready, at_warp;
    unsigned at_block = 0;

    // Less than `end`.
    unsigned random(unsigned end) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return (state >> 32) * end >> 32;
    }
    ~Core() {
        for (auto& fiber : fibers) munmap(fiber.stack, STACK);
    }
};
// Asked for at every index of a thread: a pointer whose place the loader fixes, as a call for each would take half of all time.
#define FIXED_PLACE __attribute__((tls_model("initial-exec")))
inline constinit thread_local Core* core FIXED_PLACE = nullptr;

// 0: fibers and blocks in order.
inline constinit thread_local uint64_t seed FIXED_PLACE = 0;

inline void give_way(State state) {
    core->now->state = state;
    on_cpu_switch(&core->now->at, core->outside);
}

inline void begin() {
    (*core->body)();
    give_way(ENDED);
    abort();
}

inline void check(bool holds, const char* what) {
    if (holds) return;
    fprintf(stderr, "a kernel does what no card lets it do: %s\n", what);
    abort();
}

// Lets those go on who wait for others that have all come. With a seed, one warp alone.
inline void let_go(unsigned threads) {
    unsigned warps = (threads + WARP_THREADS - 1) / WARP_THREADS, first = seed ? core->random(warps) : 0;
    auto go_on = [&](unsigned from, unsigned to) {
        for (unsigned i = from; i < to; i++) core->fibers[i].state = READY;
        for (unsigned i = from; i < to; i++) core->ready.push_back(i);
    };
    bool any = false;
    for (unsigned n = 0; n < warps && !(any && seed); n++) {
        unsigned warp = (first + n) % warps, from = warp * WARP_THREADS;
        unsigned to = from + WARP_THREADS < threads ? from + WARP_THREADS : threads;
        if (core->at_warp[warp] < to - from) continue;
        core->at_warp[warp] = 0;
        go_on(from, to);
        any = true;
    }
    if (any || core->at_block < threads) return;
    core->at_block = 0;
    go_on(0, threads);
}

// One block; whether all its threads met the same barriers.
inline bool run_block(unsigned threads) {
    while (core->fibers.size() < threads) {
        Fiber fiber;
        fiber.stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        core->fibers.push_back(fiber);
    }
    core->shown.resize(2 * ((threads + WARP_THREADS - 1) / WARP_THREADS));
    core->barriers.clear();
    core->at_warp.assign((threads + WARP_THREADS - 1) / WARP_THREADS, 0);
    core->at_block = 0;
    core->ready.clear();
    for (unsigned i = 0; i < threads; i++) {
        Fiber& fiber = core->fibers[i];
        fiber.state = READY;
        fiber.thread.x = i;
        fiber.turn = 0;
        fiber.begun.clear();
        fiber.groups.clear();
        // A call's alignment: the return address lies 8 bytes below a multiple of 16. Six registers are popped first.
        // Stacks end at different lines of the cache: it holds few of the same place.
        void** top = (void**)(fiber.stack + STACK - 64 - i * 320 % 16384);
        top[-1] = nullptr;
        top[-2] = (void*)begin;
        for (int i = 3; i <= 8; i++) top[-i] = nullptr;
        fiber.at = top - 8;
        core->ready.push_back(i);
    }
    std::vector<unsigned> now;
    unsigned ended = 0;
    for (unsigned rounds = 0; rounds < 1 << 24 && !core->ready.empty(); rounds++) {
        now.swap(core->ready);
        core->ready.clear();
        if (seed)
            for (unsigned i = now.size() - 1; i > 0; i--) std::swap(now[i], now[core->random(i + 1)]);
        for (unsigned i : now) {
            core->now = &core->fibers[i];
            on_cpu_switch(&core->outside, core->now->at);
            switch (core->now->state) {
            case READY: core->ready.push_back(i); break;
            case AT_WARP: core->at_warp[i / WARP_THREADS]++; break;
            case AT_BLOCK: core->at_block++; break;
            case ENDED: ended++; break;
            }
        }
        let_go(threads);
        if (!seed && !std::is_sorted(core->ready.begin(), core->ready.end())) std::sort(core->ready.begin(), core->ready.end());
    }
    return ended == threads;
}

inline bool run(Index grid, unsigned threads, size_t shared, const std::function<void()>& body) {
    static thread_local Core own;
    core = &own;
    core->body = &body;
    core->grid = grid;
    core->state = seed * 0x9e3779b97f4a7c15ull + 1;
    uint64_t blocks = (uint64_t)grid.x * grid.y;
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t block = seed % 2 ? blocks - 1 - i : i;
        core->block.x = block % grid.x;
        core->block.y = block / grid.x;
        core->shared.assign(shared + 1024, 0xff);
        if (!run_block(threads)) return false;
    }
    return true;
}

// A kernel: the size of its parameters, as they lie one after the other, and how it is called with them.
struct Kernel {
    size_t bytes;
    // Where each parameter is, and its size.
    std::vector<std::pair<size_t, size_t>> parameters;
    std::function<void(const char*)> call;
    // Shared memory that a launch may ask for.
    size_t most_shared = 48 << 10;
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
        std::vector<std::pair<size_t, size_t>> parameters;
        size_t sizes[] = {sizeof(A)...};
        for (size_t i = 0; i < places.size(); i++) parameters.push_back({places[i], sizes[i]});
        kernels()[name] = {end, parameters, [f, places](const char* bytes) {
                               call(f, places.data(), bytes, std::index_sequence_for<A...>{});
                           }};
    }
};

} // namespace on_cpu

#define KERNEL(name, ...)                                            \
    static void name(__VA_ARGS__);                                   \
    static on_cpu::Registered registered_##name(#name, name);        \
    static void name(__VA_ARGS__)
#define KERNEL_FOUR KERNEL
#define SHARED(T, name) T* name = (T*)(((uintptr_t)on_cpu::core->shared.data() + 15) / 16 * 16)

#define threadIdx (on_cpu::core->now->thread)
#define blockIdx (on_cpu::core->block)
#define gridDim (on_cpu::core->grid)
inline void __syncthreads() { on_cpu::give_way(on_cpu::AT_BLOCK); }

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

// ---- what the threads of a warp do together ----

namespace on_cpu {

inline unsigned lane() { return core->now->thread.x % WARP_THREADS; }

// The place of this turn. What is put there can be read after the barrier, until the turn after the next.
inline Shown& shown() {
    unsigned turn = core->now->turn++ % 2;
    return core->shown[core->now->thread.x / WARP_THREADS * 2 + turn];
}

// Matrix n has its rows where threads 8 n to 8 n + 7 say. PTX ISA, "Warp-level matrix load instruction: ldmatrix": thread T gets of
// each matrix elements 2 (T % 4) and the next one of row T / 4, the first one in the lower half; with .trans it is rows
// 2 (T % 4) and the next one of column T / 4.
inline void load_matrices(unsigned* out, const void* row, bool transposed) {
    check((uintptr_t)row % 16 == 0, "a row of a matrix that is not aligned to 16 bytes");
    Shown& all = shown();
    unsigned t = lane();
    all.rows[t] = row;
    give_way(AT_WARP);
    for (unsigned n = 0; n < 4; n++) {
        unsigned halves[2];
        for (unsigned half = 0; half < 2; half++) {
            unsigned line = transposed ? 2 * (t % 4) + half : t / 4, place = transposed ? t / 4 : 2 * (t % 4) + half;
            halves[half] = ((const uint16_t*)all.rows[8 * n + line])[place];
        }
        out[n] = halves[0] | halves[1] << 16;
    }
}

// PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type": with group = lane / 4 and t = lane % 4, numbers 0 to 7 of
// a (two in a word, the first one low) are of row group (0, 1, 4, 5) or group + 8 (2, 3, 6, 7) and of column 2 t + (i & 1), from
// number 4 on 8 more; numbers 0 to 3 of b are of row 2 t + (i & 1), from number 2 on 8 more, and of column group; the sums are of
// row group (0, 1) or group + 8 (2, 3) and of column 2 t + (i & 1).
inline void multiply_add(float* sums, const unsigned* a, const unsigned* b, float (*value)(unsigned short)) {
    Shown& all = shown();
    unsigned group = lane() / 4, t = lane() % 4;
    for (unsigned i = 0; i < 8; i++)
        all.a[group + (i / 2 % 2) * 8][2 * t + i % 2 + i / 4 * 8] = value((unsigned short)(a[i / 2] >> (i % 2 * 16)));
    for (unsigned i = 0; i < 4; i++) all.b[2 * t + i % 2 + i / 2 * 8][group] = value((unsigned short)(b[i / 2] >> (i % 2 * 16)));
    give_way(AT_WARP);
    for (unsigned i = 0; i < 4; i++) {
        unsigned row = group + i / 2 * 8, column = 2 * t + i % 2;
        float sum = sums[i];
        for (unsigned k = 0; k < 16; k++) sum += all.a[row][k] * all.b[k][column];
        sums[i] = sum;
    }
}

inline float bf16_number(unsigned short bits) { return __uint_as_float((unsigned)bits << 16); }

} // namespace on_cpu

inline float of_neighbour(float x, unsigned mask) {
    on_cpu::Shown& all = on_cpu::shown();
    all.numbers[on_cpu::lane()] = x;
    on_cpu::give_way(on_cpu::AT_WARP);
    return all.numbers[on_cpu::lane() ^ mask];
}

// A copy happens when it is waited for, so that a missing wait shows.
template <unsigned WIDTH> inline void copy_begin(void* to, const void* from, unsigned bytes) {
    on_cpu::check((uintptr_t)to % WIDTH == 0 && (uintptr_t)from % WIDTH == 0, "a copy that is not aligned to its size");
    on_cpu::check(bytes <= WIDTH, "a copy of more than its size");
    on_cpu::core->now->begun.push_back({to, from, WIDTH, bytes});
}
inline void copy_group() {
    on_cpu::core->now->groups.push_back(std::move(on_cpu::core->now->begun));
    on_cpu::core->now->begun.clear();
}
template <unsigned LEFT> inline void copy_wait() {
    auto& groups = on_cpu::core->now->groups;
    for (; groups.size() > LEFT; groups.pop_front()) {
        for (auto& copy : groups.front()) {
            memset(copy.to, 0, copy.width);
            memcpy(copy.to, copy.from, copy.bytes);
        }
    }
}
inline void load_matrices(unsigned* out, const void* row) { on_cpu::load_matrices(out, row, false); }
inline void load_transposed(unsigned* out, const void* row) { on_cpu::load_matrices(out, row, true); }
template <bool HALF> inline void multiply_add(float* sums, const unsigned* a, const unsigned* b) {
    on_cpu::multiply_add(sums, a, b, HALF ? f16_value : on_cpu::bf16_number);
}

// ---- what two warpgroups do together ----

#define KERNEL_90 KERNEL
#define MAP_PARAMETER const TensorMap
#define SHARED_TILES(name) u8* name = on_cpu::shared_tiles()

namespace on_cpu {

inline unsigned char* shared_tiles() { return (unsigned char*)(((uintptr_t)core->shared.data() + 1023) / 1024 * 1024); }

// The driver's encoding is its own; here it is what it was made of. Strides are in bytes; that of the first size is a number's.
struct Boxes {
    uint64_t address, sizes[4], strides[4];
    unsigned box[4];
};

// Lines of 128 bytes are placed by turns: bits 4 to 6 of an address are turned by bits 7 to 9.
inline uint64_t turned(uint64_t address) { return address ^ (address >> 3 & 0x70); }

struct Place {
    int at[4];
};

// Lines of a box follow each other, whatever they are apart in memory.
inline void copy_box(unsigned char* to, const Boxes& m, const Place& from) {
    uint64_t numbers = 1;
    for (unsigned box : m.box) numbers *= box;
    for (uint64_t n = 0; n < numbers; n++) {
        uint64_t rest = n, address = m.address;
        bool there = true;
        for (unsigned i = 0; i < 4; i++) {
            int64_t at = from.at[i] + (int64_t)(rest % m.box[i]);
            rest /= m.box[i];
            there = there && at >= 0 && at < (int64_t)m.sizes[i];
            address += at * m.strides[i];
        }
        uint16_t number = 0;
        if (there) memcpy(&number, (const char*)address, 2);
        memcpy(to + turned(n / m.box[0] * 128 + n % m.box[0] * 2), &number, 2);
    }
}

// PTX ISA, "Shared memory matrix layout" and "Matrix descriptor": groups of eight lines are `stride` bytes apart. Where lines lie
// along the inner length, a line is a row; else it is one place of the inner length, with 64 numbers across, and further runs of 64 numbers
// are `leading` bytes apart.
struct Operand {
    uint64_t start, leading, stride;
    bool across;

    Operand(uint64_t bits, bool across)
        : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4), across(across) {
        check(bits >> 62 == 1, "a tile whose lines are not placed by turns of 128 bytes");
    }
    // What lies at a place of the outer length and the next one, an even one first: sixteen numbers along the inner length of each.
    void pair(unsigned outer, float (*numbers)[2]) const {
        const unsigned char* tiles = shared_tiles();
        if (across) {
            uint64_t over = start + outer / 64 * leading + 2 * (outer % 64);
            for (unsigned k = 0; k < 16; k++) {
                uint16_t two[2];
                memcpy(two, tiles + turned(over + k / 8 * stride + k % 8 * 128), sizeof two);
                for (unsigned i = 0; i < 2; i++) numbers[k][i] = bf16_number(two[i]);
            }
            return;
        }
        for (unsigned i = 0; i < 2; i++) line(outer + i, numbers[0] + i, 2);
    }
    // The sixteen of one place, each `apart` after the one before. Eight that follow each other are turned together.
    void line(unsigned outer, float* numbers, unsigned apart) const {
        const unsigned char* tiles = shared_tiles();
        if (across) {
            uint64_t over = start + outer / 64 * leading + 2 * (outer % 64);
            for (unsigned k = 0; k < 16; k++) {
                uint16_t number;
                memcpy(&number, tiles + turned(over + k / 8 * stride + k % 8 * 128), 2);
                numbers[k * apart] = bf16_number(number);
            }
            return;
        }
        for (unsigned half = 0; half < 2; half++) {
            uint16_t eight[8];
            memcpy(eight, tiles + turned(start + outer / 8 * stride + outer % 8 * 128 + 16 * half), sizeof eight);
            for (unsigned k = 0; k < 8; k++) numbers[(8 * half + k) * apart] = bf16_number(eight[k]);
        }
    }
};

} // namespace on_cpu

inline unsigned shared_address(const void* p) { return (unsigned)((const unsigned char*)p - on_cpu::shared_tiles()); }

inline void barrier_begin(unsigned long long* barrier, unsigned count) {
    auto& own = on_cpu::core->barriers[barrier];
    own.count = own.left = count;
}
inline void barriers_begun() {}
inline void barrier_arrive(unsigned long long* barrier) {
    auto& own = on_cpu::core->barriers[barrier];
    on_cpu::check(own.left > 0, "more arrivals at a barrier than it counts");
    own.left--;
    own.complete();
}
inline void barrier_expect(unsigned long long* barrier, unsigned bytes) {
    on_cpu::core->barriers[barrier].bytes += bytes;
    barrier_arrive(barrier);
}
// Copies happen when somebody waits for them.
inline void barrier_wait(unsigned long long* barrier, unsigned parity) {
    auto& own = on_cpu::core->barriers[barrier];
    for (;;) {
        for (auto& [bytes, copy] : std::exchange(own.copies, {})) {
            copy();
            own.bytes -= bytes;
            own.complete();
        }
        if (own.phase % 2 != parity) return;
        on_cpu::give_way(on_cpu::READY);
    }
}
namespace on_cpu {

inline void begin_box(void* to, const void* map, Place from, unsigned long long* barrier) {
    Boxes boxes;
    memcpy(&boxes, map, sizeof boxes);
    check(shared_address(to) % 1024 == 0, "a tile that does not begin at a multiple of 1024 bytes");
    int64_t bytes = 2;
    for (unsigned box : boxes.box) bytes *= box;
    core->barriers[barrier].copies.push_back({bytes, [=] { copy_box((unsigned char*)to, boxes, from); }});
}

} // namespace on_cpu

template <class Map> inline void tile_begin(void* to, const Map* map, unsigned x, unsigned y, unsigned long long* barrier) {
    on_cpu::begin_box(to, map, {(int)x, (int)y, 0, 0}, barrier);
}
template <class Map>
inline void lines_begin(void* to, const Map* map, unsigned x, unsigned head, unsigned line, unsigned batch, unsigned long long* barrier) {
    on_cpu::begin_box(to, map, {(int)x, (int)head, (int)line, (int)batch}, barrier);
}
template <unsigned COUNT> inline void registers_less() {}
template <unsigned COUNT> inline void registers_more() {}
inline void warp_barrier() { on_cpu::give_way(on_cpu::AT_WARP); }
inline unsigned long long tile_descriptor(const void* tile, unsigned leading) {
    return (unsigned long long)(shared_address(tile) >> 4) | (unsigned long long)(leading >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
inline float exp2_of(float x) { return exp2f(x); }
template <unsigned COUNT> inline void settle(float*) {}
// The threads of a warp go together here; products are done at once.
inline void products_begin() { on_cpu::give_way(on_cpu::AT_WARP); }
inline void products_group() {}
template <unsigned LEFT, unsigned COUNT> inline void products_wait(float*) { on_cpu::give_way(on_cpu::AT_WARP); }

// PTX ISA, "Matrix fragments for wgmma.mma_async.m64nNk16": with group = lane / 4 and t = lane % 4, number 4 j + n of warp w of a
// warpgroup is of row 16 w + group + n / 2 * 8 and of column 8 j + 2 t + n % 2.
template <unsigned COLUMNS, bool A_ACROSS, bool B_ACROSS>
inline void multiply_tiles(float* sums, unsigned long long a, unsigned long long b) {
    on_cpu::Operand of_a(a, A_ACROSS), of_b(b, B_ACROSS);
    unsigned thread = threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    float rows[2][16], own[16][2];
    for (unsigned half = 0; half < 2; half++) of_a.line(row + 8 * half, rows[half], 1);
    for (unsigned j = 0; j < COLUMNS / 8; j++) {
        of_b.pair(column + 8 * j, own);
        for (unsigned k = 0; k < 16; k++)
            for (unsigned n = 0; n < 4; n++) sums[4 * j + n] += rows[n / 2][k] * own[k][n % 2];
    }
}

inline unsigned narrow_pair(float low, float high) {
    auto narrow = [](float x) {
        unsigned bits = __float_as_uint(x);
        return x != x ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    };
    return narrow(low) | narrow(high) << 16;
}

// The rows' numbers come from the threads that have them: each four have two rows, as of `multiply_add` above.
template <unsigned COLUMNS> inline void multiply_rows(float* sums, const unsigned* a, unsigned long long b) {
    on_cpu::Operand of_b(b, true);
    on_cpu::Shown& all = on_cpu::shown();
    unsigned group = on_cpu::lane() / 4, t = on_cpu::lane() % 4;
    for (unsigned i = 0; i < 8; i++) {
        float number = on_cpu::bf16_number((unsigned short)(a[i / 2] >> (i % 2 * 16)));
        all.a[group + (i / 2 % 2) * 8][2 * t + i % 2 + i / 4 * 8] = number;
    }
    on_cpu::give_way(on_cpu::AT_WARP);
    float own[16][2];
    for (unsigned j = 0; j < COLUMNS / 8; j++) {
        of_b.pair(8 * j + 2 * t, own);
        for (unsigned k = 0; k < 16; k++)
            for (unsigned n = 0; n < 4; n++) sums[4 * j + n] += all.a[group + n / 2 * 8][k] * own[k][n % 2];
    }
}

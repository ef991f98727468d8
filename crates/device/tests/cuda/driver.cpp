// A driver library without a GPU: the functions that the device calls, over host memory and kernels that run on the CPU.
//
// Streams are as late as they may be: what is put on one happens when somebody waits for it, so that a missing wait shows. Device
// memory is garbage at first, and ends where an unmapped page begins. Any call can be made to fail.

#include <condition_variable>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <unistd.h>

typedef int Code;
typedef uint64_t Address;
#define EXPORT extern "C" __attribute__((visibility("default")))
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 100, NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILED = 719 };

// ---- what tests set and ask ----

static uint64_t setting(const char* name, uint64_t otherwise) {
    const char* value = getenv(name);
    return value ? strtoull(value, nullptr, 10) : otherwise;
}
struct Machine {
    uint64_t cards = setting("MOCK_CARDS", 1), capability = setting("MOCK_CAPABILITY", 90);
    uint64_t driver = setting("MOCK_DRIVER", 12040), memory = setting("MOCK_MEMORY", 8ull << 30);
};
static thread_local Machine machine;
// Calls until one fails, and with what; never where negative.
static thread_local int64_t calls_left = -1;
static thread_local int failure = OK;
static thread_local uint64_t calls = 0;

static std::mutex books;
static std::map<Address, size_t> allocations;
static std::set<Address> registered;
static int64_t live = 0;
static const uint64_t CONTEXT = 300ull << 20, MODULE = 20ull << 20;
static uint64_t bytes_of_graph = setting("MOCK_GRAPH", 64 << 10);
static int contexts = 0, modules = 0, executables = 0;
EXPORT void mock_graph_bytes(uint64_t bytes) { bytes_of_graph = bytes; }

EXPORT void mock_machine(uint64_t cards, uint64_t capability, uint64_t driver, uint64_t memory) {
    machine.cards = cards;
    machine.capability = capability;
    machine.driver = driver;
    machine.memory = memory;
}
EXPORT void mock_fail_after(int64_t count, int code) {
    calls_left = count;
    failure = code;
}
EXPORT uint64_t mock_calls() { return calls; }
EXPORT int64_t mock_live() {
    std::lock_guard<std::mutex> lock(books);
    return live + (int64_t)allocations.size() + (int64_t)registered.size();
}
EXPORT void mock_order(uint64_t seed) { on_cpu::seed = seed; }

static int counted() {
    calls++;
    if (calls_left < 0) return OK;
    return calls_left-- == 0 ? failure : OK;
}
#define CALL                                \
    if (int failed = counted()) return failed

static void count(int64_t by) {
    std::lock_guard<std::mutex> lock(books);
    live += by;
}

static uint64_t taken() {
    uint64_t sum = contexts * CONTEXT + modules * MODULE + executables * bytes_of_graph;
    for (auto& [at, bytes] : allocations) sum += bytes;
    return sum;
}

static bool is_device_memory(Address at, size_t bytes) {
    if (at >= (Address)&tables && at + bytes <= (Address)(&tables + 1)) return true;
    std::lock_guard<std::mutex> lock(books);
    auto next = allocations.upper_bound(at);
    if (next == allocations.begin()) return bytes == 0;
    --next;
    return at + bytes <= next->first + next->second;
}

// ---- streams and events ----

struct Stream {
    std::mutex guard;
    std::condition_variable moved;
    std::deque<std::function<int()>> waiting;
    uint64_t put = 0, done = 0;
    bool busy = false;
    int failed = OK;
    // Who asks instead of waiting has somebody else do what there is to do.
    std::thread asked;
    bool asking = false;

    ~Stream() {
        if (asked.joinable()) asked.join();
    }

    void add(std::function<int()> work) {
        std::lock_guard<std::mutex> lock(guard);
        waiting.push_back(std::move(work));
        put++;
    }
    // Does what was put on it up to a place.
    int reach(uint64_t place) {
        std::unique_lock<std::mutex> lock(guard);
        while (done < place) {
            if (busy) {
                moved.wait(lock);
                continue;
            }
            busy = true;
            auto work = std::move(waiting.front());
            waiting.pop_front();
            lock.unlock();
            int code = work();
            lock.lock();
            if (code && !failed) failed = code;
            busy = false;
            done++;
            moved.notify_all();
        }
        return failed;
    }
    int finish() {
        uint64_t all;
        {
            std::lock_guard<std::mutex> lock(guard);
            all = put;
        }
        return reach(all);
    }
    int query() {
        std::unique_lock<std::mutex> lock(guard);
        if (done == put) return failed;
        if (!asking) {
            uint64_t all = put;
            asking = true;
            lock.unlock();
            if (asked.joinable()) asked.join();
            asked = std::thread([this, all] {
                reach(all);
                std::lock_guard<std::mutex> lock(guard);
                asking = false;
            });
        }
        return NOT_READY;
    }
};
typedef std::shared_ptr<Stream> StreamHandle;
struct Event {
    StreamHandle stream;
    uint64_t place = 0;
};
static StreamHandle& of(void* stream) { return *(StreamHandle*)stream; }

EXPORT Code cuStreamCreate(void** out, unsigned) {
    CALL;
    *out = new StreamHandle(new Stream);
    count(1);
    return OK;
}
EXPORT Code cuStreamDestroy_v2(void* stream) {
    of(stream)->finish();
    delete (StreamHandle*)stream;
    count(-1);
    return OK;
}
EXPORT Code cuStreamSynchronize(void* stream) {
    CALL;
    return of(stream)->finish();
}
EXPORT Code cuStreamQuery(void* stream) {
    CALL;
    return of(stream)->query();
}
// For other libraries that put work on streams.
EXPORT void mock_put(void* stream, int (*work)(void*), void* given) {
    of(stream)->add([work, given] { return work(given); });
}
EXPORT Code cuEventCreate(void** out, unsigned) {
    CALL;
    *out = new Event;
    count(1);
    return OK;
}
EXPORT Code cuEventDestroy_v2(void* event) {
    delete (Event*)event;
    count(-1);
    return OK;
}
EXPORT Code cuEventRecord(void* event, void* stream) {
    CALL;
    Event& own = *(Event*)event;
    own.stream = of(stream);
    std::lock_guard<std::mutex> lock(own.stream->guard);
    own.place = own.stream->put;
    return OK;
}
EXPORT Code cuStreamWaitEvent(void* stream, void* event, unsigned) {
    CALL;
    Event waited = *(Event*)event;
    if (waited.stream) of(stream)->add([waited] { return waited.stream->reach(waited.place); });
    return OK;
}

// ---- memory ----

EXPORT Code cuMemGetInfo_v2(size_t* free, size_t* total) {
    CALL;
    std::lock_guard<std::mutex> lock(books);
    *total = machine.memory;
    *free = machine.memory > taken() ? machine.memory - taken() : 0;
    return OK;
}
EXPORT Code cuMemAlloc_v2(Address* out, size_t bytes) {
    CALL;
    if (bytes == 0) return INVALID;
    std::lock_guard<std::mutex> lock(books);
    if (taken() + bytes > machine.memory) return NO_MEMORY;
    size_t page = sysconf(_SC_PAGESIZE), whole = (bytes + page - 1) / page * page;
    char* start = (char*)mmap(nullptr, whole + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NO_MEMORY;
    mprotect(start + whole, page, PROT_NONE);
    // It ends with the page, but for what its alignment leaves.
    Address at = ((Address)start + whole - bytes) / 256 * 256;
    // Large ones are left as they are, or their pages would all be touched.
    if (bytes <= 64 << 20) memset((void*)at, 0xff, bytes);
    allocations[at] = bytes;
    *out = at;
    return OK;
}
EXPORT Code cuMemFree_v2(Address at) {
    std::lock_guard<std::mutex> lock(books);
    auto found = allocations.find(at);
    if (found == allocations.end()) return INVALID;
    size_t page = sysconf(_SC_PAGESIZE);
    Address start = at / page * page, end = (at + found->second + page - 1) / page * page + page;
    munmap((void*)start, end - start);
    allocations.erase(found);
    return OK;
}
EXPORT Code cuMemHostRegister_v2(void* at, size_t, unsigned) {
    CALL;
    std::lock_guard<std::mutex> lock(books);
    registered.insert((Address)at);
    return OK;
}
EXPORT Code cuMemHostUnregister(void* at) {
    std::lock_guard<std::mutex> lock(books);
    return registered.erase((Address)at) ? OK : INVALID;
}
EXPORT Code cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    CALL;
    if (!is_device_memory(to, bytes)) return INVALID;
    of(stream)->add([=] {
        memcpy((void*)to, from, bytes);
        return (int)OK;
    });
    return OK;
}
EXPORT Code cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    CALL;
    if (!is_device_memory(from, bytes)) return INVALID;
    of(stream)->add([=] {
        memcpy(to, (const void*)from, bytes);
        return (int)OK;
    });
    return OK;
}

// ---- the card ----

static int context;
EXPORT Code cuInit(unsigned) {
    CALL;
    return machine.cards ? OK : NO_DEVICE;
}
EXPORT Code cuDriverGetVersion(int* version) {
    CALL;
    *version = (int)machine.driver;
    return OK;
}
EXPORT Code cuDeviceGetCount(int* count) {
    CALL;
    *count = (int)machine.cards;
    return OK;
}
EXPORT Code cuDeviceGet(int* device, int index) {
    CALL;
    *device = index;
    return OK;
}
EXPORT Code cuDeviceGetName(char* name, int room, int index) {
    CALL;
    snprintf(name, room, "Mock %d", index);
    return OK;
}
EXPORT Code cuDeviceGetPCIBusId(char* bus, int room, int index) {
    CALL;
    snprintf(bus, room, "0000:%02x:00.0", index);
    return OK;
}
EXPORT Code cuDeviceTotalMem_v2(size_t* bytes, int) {
    CALL;
    *bytes = machine.memory;
    return OK;
}
EXPORT Code cuDeviceGetAttribute(int* value, int attribute, int index) {
    CALL;
    // Cards but the first may be of another kind.
    uint64_t capability = index ? setting("MOCK_OTHERS", machine.capability) : machine.capability;
    switch (attribute) {
    case 16: *value = 4; break;
    case 75: *value = (int)capability / 10; break;
    case 76: *value = (int)capability % 10; break;
    default: *value = 0;
    }
    return OK;
}
EXPORT Code cuDevicePrimaryCtxRetain(void** out, int) {
    CALL;
    std::lock_guard<std::mutex> lock(books);
    contexts++;
    live++;
    *out = &context;
    return OK;
}
EXPORT Code cuDevicePrimaryCtxRelease_v2(int) {
    std::lock_guard<std::mutex> lock(books);
    contexts--;
    live--;
    return OK;
}
EXPORT Code cuCtxSetCurrent(void*) {
    CALL;
    return OK;
}
EXPORT Code cuModuleLoadData(void** out, const void* image) {
    CALL;
    if (!strstr((const char*)image, ".version")) return 200;
    std::lock_guard<std::mutex> lock(books);
    modules++;
    live++;
    *out = &context;
    return OK;
}
EXPORT Code cuModuleUnload(void*) {
    std::lock_guard<std::mutex> lock(books);
    modules--;
    live--;
    return OK;
}
EXPORT Code cuModuleGetFunction(void** out, void*, const char* name) {
    CALL;
    auto found = on_cpu::kernels().find(name);
    if (found == on_cpu::kernels().end()) return NOT_FOUND;
    *out = &found->second;
    return OK;
}
EXPORT Code cuModuleGetGlobal_v2(Address* at, size_t* bytes, void*, const char* name) {
    CALL;
    if (strcmp(name, "tables")) return NOT_FOUND;
    *at = (Address)&tables;
    *bytes = sizeof tables;
    return OK;
}
EXPORT Code cuFuncSetAttribute(void* function, int attribute, int value) {
    CALL;
    // The most that a block of compute capability 9.0 may have.
    if (attribute != 8 || value < 0 || value > 227 << 10) return INVALID;
    ((on_cpu::Kernel*)function)->most_shared = value;
    return OK;
}
EXPORT Code cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                                   const unsigned* box, const unsigned* steps, int interleave, int swizzle, int, int fill) {
    CALL;
    // bf16 numbers, lines of 128 bytes that are placed by turns, zeros outside.
    if (type != 9 || rank < 2 || rank > 4 || interleave != 0 || swizzle != 3 || fill != 0) return INVALID;
    if ((Address)map % 64 || (Address)address % 16 || box[0] * 2 > 128) return INVALID;
    on_cpu::Boxes boxes = {(Address)address, {1, 1, 1, 1}, {2, 0, 0, 0}, {1, 1, 1, 1}};
    for (unsigned i = 0; i < rank; i++) {
        if (sizes[i] == 0 || sizes[i] > 1ull << 32 || box[i] == 0 || box[i] > 256 || steps[i] != 1) return INVALID;
        if (i > 0 && (strides[i - 1] % 16 || strides[i - 1] >> 40)) return INVALID;
        boxes.sizes[i] = sizes[i];
        boxes.box[i] = box[i];
        if (i > 0) boxes.strides[i] = strides[i - 1];
    }
    memset(map, 0xff, 128);
    memcpy(map, &boxes, sizeof boxes);
    static_assert(sizeof boxes <= 128);
    return OK;
}
// A kernel with its parameters.
struct Work {
    on_cpu::Kernel* kernel = nullptr;
    unsigned blocks[2] = {0, 0}, threads = 0, shared = 0;
    std::vector<char> parameters;

    Code set(void* function, const unsigned* grid, const unsigned* block, unsigned bytes, void** given) {
        if (grid[0] == 0 || grid[1] == 0 || grid[2] != 1 || block[0] == 0 || block[1] != 1 || block[2] != 1) return INVALID;
        if (grid[1] > 65535) return INVALID;
        kernel = (on_cpu::Kernel*)function;
        if (bytes > kernel->most_shared) return INVALID;
        blocks[0] = grid[0];
        blocks[1] = grid[1];
        threads = block[0];
        shared = bytes;
        // Parameters that the kernel does not have are never meant; behind the last one is none.
        parameters.assign(kernel->bytes, 0);
        for (auto& [place, size] : kernel->parameters) {
            if (!given || !*given) return INVALID;
            memcpy(parameters.data() + place, *given++, size);
        }
        return *given ? INVALID : OK;
    }
    int carry_out(uint64_t order) const {
        uint64_t before = std::exchange(on_cpu::seed, order);
        std::vector<char> copy = parameters;
        bool whole = on_cpu::run({blocks[0], blocks[1]}, threads, shared, [&] { kernel->call(copy.data()); });
        on_cpu::seed = before;
        return whole ? (int)OK : (int)LAUNCH_FAILED;
    }
};
EXPORT Code cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                           unsigned shared, void* stream, void** parameters, void**) {
    CALL;
    unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    Work work;
    if (Code code = work.set(function, grid, block, shared, parameters)) return code;
    uint64_t order = on_cpu::seed;
    of(stream)->add([=] { return work.carry_out(order); });
    return OK;
}

// ---- graphs ----

struct NodeParameters {
    void* function;
    unsigned blocks[3], threads[3], shared;
    void **parameters, **extra;
    void *kernel, *context;
};
struct Graph;
struct Node {
    Graph* graph;
    size_t place;
};
struct Graph {
    std::vector<std::unique_ptr<Node>> nodes;
    std::vector<Work> works;
};
// It keeps a copy of what it was made of, which is set node by node.
struct Executable {
    Graph* graph;
    std::vector<Work> works;
};
EXPORT Code cuGraphCreate(void** out, unsigned flags) {
    CALL;
    if (flags) return INVALID;
    *out = new Graph;
    count(1);
    return OK;
}
EXPORT Code cuGraphDestroy(void* graph) {
    delete (Graph*)graph;
    count(-1);
    return OK;
}
EXPORT Code cuGraphAddKernelNode_v2(void** out, void* handle, void* const* before, size_t befores, const NodeParameters* of) {
    CALL;
    auto* graph = (Graph*)handle;
    // Each is behind the one before: what is put on a stream is.
    if (befores != (graph->nodes.empty() ? 0 : 1) || (befores && before[0] != graph->nodes.back().get())) return INVALID;
    if (of->extra || of->kernel || of->context) return INVALID;
    Work work;
    if (Code code = work.set(of->function, of->blocks, of->threads, of->shared, of->parameters)) return code;
    graph->works.push_back(work);
    graph->nodes.emplace_back(new Node{graph, graph->nodes.size()});
    *out = graph->nodes.back().get();
    return OK;
}
EXPORT Code cuGraphInstantiateWithFlags(void** out, void* handle, unsigned long long flags) {
    CALL;
    if (flags) return INVALID;
    auto* graph = (Graph*)handle;
    *out = new Executable{graph, graph->works};
    std::lock_guard<std::mutex> lock(books);
    live++;
    executables++;
    return OK;
}
EXPORT Code cuGraphExecDestroy(void* executable) {
    delete (Executable*)executable;
    std::lock_guard<std::mutex> lock(books);
    live--;
    executables--;
    return OK;
}
EXPORT Code cuGraphExecKernelNodeSetParams_v2(void* handle, void* node, const NodeParameters* of) {
    CALL;
    auto* executable = (Executable*)handle;
    auto* own = (Node*)node;
    if (own->graph != executable->graph || own->place >= executable->works.size()) return INVALID;
    Work& work = executable->works[own->place];
    if (work.kernel != of->function) return INVALID;
    return work.set(of->function, of->blocks, of->threads, of->shared, of->parameters);
}
EXPORT Code cuGraphLaunch(void* executable, void* stream) {
    CALL;
    uint64_t order = on_cpu::seed;
    // What is set later concerns later launches alone.
    of(stream)->add([works = ((Executable*)executable)->works, order] {
        for (const Work& work : works) {
            if (int code = work.carry_out(order)) return code;
        }
        return (int)OK;
    });
    return OK;
}
EXPORT Code cuGetErrorString(Code code, const char** text) {
    static const std::map<int, const char*> texts = {
        {INVALID, "invalid argument"},          {NO_MEMORY, "out of memory"},
        {NO_DEVICE, "no CUDA-capable device"},  {NOT_FOUND, "named symbol not found"},
        {LAUNCH_FAILED, "unspecified launch failure"}, {200, "device kernel image is invalid"},
        {999, "unknown error"},
    };
    auto found = texts.find(code);
    *text = found == texts.end() ? nullptr : found->second;
    return found == texts.end() ? INVALID : OK;
}

// NCCL without a GPU: its sends and receives between threads and processes of one machine, over pipes with names, put on the streams of
// the driver without a GPU. Memory of cards is memory of the host there.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <utility>
#include <string>
#include <cerrno>
#include <poll.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))
enum { OK = 0, SYSTEM = 2, INVALID = 4, IN_PROGRESS = 7 };
extern "C" void mock_put(void* stream, int (*work)(void*), void* given);
extern "C" int cuMemAlloc_v2(uint64_t* out, size_t bytes);
extern "C" int cuMemFree_v2(uint64_t at);

struct Id {
    char text[128];
};
struct Communicator {
    int rank, size;
    std::string folder;
    std::vector<int> to, from;
    // What a card keeps for each other rank.
    std::vector<uint64_t> buffers;
    std::atomic<bool> left{false};
    // What was sent, for tests that ask whether it was.
    std::atomic<uint64_t> sends{0}, bytes{0};

    ~Communicator() {
        for (int other = 0; other < size; other++) {
            if (other == rank) continue;
            close(to[other]);
            close(from[other]);
        }
    }
};
typedef std::shared_ptr<Communicator> Shared;
static Shared& of(void* communicator) { return *(Shared*)communicator; }
static std::atomic<int> live{0};
// What the other ranks are said to have done.
static std::atomic<int> failed{OK};
EXPORT void mock_nccl_lost(int code) { failed = code; }
// Calls until one fails; never where negative. The calling thread's.
static thread_local int64_t calls_left = -1;
static thread_local uint64_t calls = 0;
EXPORT void mock_nccl_fail_after(int64_t count) { calls_left = count; }
EXPORT uint64_t mock_nccl_calls() { return calls; }
EXPORT int mock_nccl_live() { return live; }
#define CALL \
    calls++; \
    if (calls_left >= 0 && calls_left-- == 0) return SYSTEM

static std::string pipe_of(const std::string& folder, int from, int to) {
    return folder + "/" + std::to_string(from) + "-" + std::to_string(to);
}
// Some bytes all the way, or until this rank gives up.
static bool all(const Communicator& own, int file, char* bytes, size_t count, bool write) {
    while (count) {
        pollfd one = {file, (short)(write ? POLLOUT : POLLIN), 0};
        if (own.left) return false;
        if (poll(&one, 1, 20) == 0) continue;
        ssize_t done = write ? ::write(file, bytes, count) : ::read(file, bytes, count);
        if (done < 0 && errno == EAGAIN) continue;
        if (done <= 0) return false;
        bytes += done;
        count -= done;
    }
    return true;
}

EXPORT int ncclGetVersion(int* version) {
    CALL;
    const char* asked = getenv("MOCK_NCCL_VERSION");
    *version = asked ? atoi(asked) : 22703;
    return OK;
}
EXPORT int ncclGetUniqueId(Id* id) {
    CALL;
    memset(id, 0, sizeof *id);
    const char* root = getenv("TMPDIR");
    snprintf(id->text, sizeof id->text, "%s/nccl-XXXXXX", root ? root : "/tmp");
    return mkdtemp(id->text) ? OK : SYSTEM;
}
EXPORT int ncclCommInitRank(void** out, int size, Id id, int rank) {
    CALL;
    if (rank < 0 || rank >= size) return INVALID;
    Shared own(new Communicator);
    own->rank = rank;
    own->size = size;
    own->folder = id.text;
    own->to.assign(size, -1);
    own->from.assign(size, -1);
    for (int other = 0; other < size; other++) {
        if (other == rank) continue;
        // Whoever is first makes it. Open both ways, it waits for nobody to be there.
        for (auto [pipe, end] : {std::pair(pipe_of(own->folder, rank, other), &own->to[other]),
                                 std::pair(pipe_of(own->folder, other, rank), &own->from[other])}) {
            mkfifo(pipe.c_str(), 0600);
            *end = open(pipe.c_str(), O_RDWR | O_NONBLOCK);
            if (*end < 0) return SYSTEM;
        }
        uint64_t buffer = 0;
        if (cuMemAlloc_v2(&buffer, 1 << 20)) return SYSTEM;
        own->buffers.push_back(buffer);
    }
    live++;
    *out = new Shared(own);
    return OK;
}
static int leave(void* communicator, bool gives_up) {
    Shared own = of(communicator);
    if (gives_up) own->left = true;
    if (const char* log = getenv("MOCK_NCCL_LOG")) {
        if (FILE* file = fopen(log, "a")) {
            fprintf(file, "%d %llu %llu\n", own->rank, (unsigned long long)own->sends, (unsigned long long)own->bytes);
            fclose(file);
        }
    }
    for (int other = 0; other < own->size; other++) {
        if (other == own->rank) continue;
        unlink(pipe_of(own->folder, own->rank, other).c_str());
        unlink(pipe_of(own->folder, other, own->rank).c_str());
    }
    for (uint64_t buffer : own->buffers) cuMemFree_v2(buffer);
    // The last one leaves an empty folder.
    rmdir(own->folder.c_str());
    delete (Shared*)communicator;
    live--;
    return OK;
}
EXPORT int ncclCommDestroy(void* communicator) { return leave(communicator, false); }
EXPORT int ncclCommAbort(void* communicator) { return leave(communicator, true); }
// Not counted: how often it is asked depends on time.
EXPORT int ncclCommGetAsyncError(void*, int* code) {
    *code = failed;
    return OK;
}

struct Side {
    int file;
    char* bytes;
    size_t count;
    bool write;
};
// What is begun together goes on together: a thread for each side.
struct Group {
    Shared own;
    std::vector<Side> sides;
};
static thread_local int depth = 0;
static thread_local void* stream_of_group = nullptr;
static thread_local Group* group = nullptr;

static int carry_out(void* given) {
    auto* group = (Group*)given;
    std::atomic<bool> whole{true};
    std::vector<std::thread> threads;
    // Sides to or from the same rank go in order.
    std::vector<Side> left = group->sides;
    while (!left.empty()) {
        Side first = left[0];
        std::vector<Side> same, others;
        for (Side& side : left) (side.file == first.file && side.write == first.write ? same : others).push_back(side);
        threads.emplace_back([same, group, &whole] {
            for (const Side& side : same) whole = all(*group->own, side.file, side.bytes, side.count, side.write) && whole;
        });
        left = others;
    }
    for (auto& thread : threads) thread.join();
    delete group;
    return whole ? 0 : 719;
}

EXPORT int ncclGroupStart() {
    CALL;
    if (depth++ == 0) {
        group = new Group;
        stream_of_group = nullptr;
    }
    return OK;
}
EXPORT int ncclGroupEnd() {
    if (depth == 0) return INVALID;
    if (--depth > 0) return OK;
    Group* own = std::exchange(group, nullptr);
    calls++;
    if (calls_left >= 0 && calls_left-- == 0) {
        delete own;
        return SYSTEM;
    }
    if (!stream_of_group) {
        delete own;
        return OK;
    }
    mock_put(stream_of_group, carry_out, own);
    return OK;
}
static int side(void* bytes, size_t count, int type, int other, void* communicator, void* stream, bool write) {
    Shared own = of(communicator);
    if (type != 1 || other < 0 || other >= own->size || other == own->rank || !group) return INVALID;
    if (stream_of_group && stream_of_group != stream) return INVALID;
    stream_of_group = stream;
    group->own = own;
    if (write) {
        own->sends++;
        own->bytes += count;
    }
    group->sides.push_back({write ? own->to[other] : own->from[other], (char*)bytes, count, write});
    return OK;
}
EXPORT int ncclSend(const void* bytes, size_t count, int type, int other, void* communicator, void* stream) {
    CALL;
    return side((void*)bytes, count, type, other, communicator, stream, true);
}
EXPORT int ncclRecv(void* bytes, size_t count, int type, int other, void* communicator, void* stream) {
    CALL;
    return side(bytes, count, type, other, communicator, stream, false);
}
EXPORT const char* ncclGetErrorString(int code) {
    switch (code) {
    case SYSTEM: return "unhandled system error";
    case INVALID: return "invalid argument";
    case 6: return "remote process exited or there was a network error";
    default: return "unknown";
    }
}

// What all kernels share: names of types, how an element of any storage is read and written, random bits, sums over a block.
//
// One source for two compilers: NVRTC, and a C++ compiler with `tests/cuda/on_cpu.h` before this file, which defines ON_CPU. What
// only a GPU has stands behind small functions here that have a body for either. No NVIDIA header is needed.
//
// Rules that hold for every kernel: sums have a fixed order, so that the same call gives the same bits; every thread of a block
// meets the same barriers; where `flag` is given and 0 nothing is written.

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef ON_CPU
#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(THREADS, 1) name(__VA_ARGS__)
// With few enough registers for four blocks on a multiprocessor: where much must be on its way from memory.
#define KERNEL_FOUR(name, ...) extern "C" __global__ void __launch_bounds__(THREADS, 4) name(__VA_ARGS__)
#define APART __noinline__
#define SHARED(T, name)                                        \
    extern __shared__ __align__(16) unsigned char all_shared[]; \
    T* name = (T*)all_shared
#endif

// Threads of every block.
#define THREADS 256

#define INFINITE __uint_as_float(0x7f800000u)
#define SMALLEST_NORMAL 1.17549435e-38f
#define LARGEST 3.402823466e+38f

// Storage types, in the order of `DType`.
enum Type {
    F32, F64, BF16, F16, U32, I8, U8, E4M3, E5M2, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1,
    Q2K, Q3K, Q4K, Q5K, Q6K, Q8K, IQ4_NL, MXFP4, NF4, FP4, NF4_F32, FP4_F32, INT8
};

// A tensor: where it begins, and its type.
struct View {
    u64 at;
    u32 type;
    u32 unused;
};

// How a result becomes narrower. `first` is the place of the tensor's first element in what it is a piece of.
struct Rounding {
    u64 seed;
    u64 first;
    u32 stochastic;
    u32 unused;
};

// Values that codes stand for. The host fills it in when the module is loaded.
struct Tables {
    float magnitudes[256];    // of doubly quantised 4-bit weights
    float normal_float[16];
    float four_bit_float[16];
    float states[2][256];     // of 8-bit states: of either sign, and not negative
    float limits[2][256];     // a magnitude has a place above i where it exceeds the i-th
};
extern "C" {
__constant__ Tables tables;
}

// Words that are read or written at once.
struct alignas(16) Words {
    u32 x, y, z, w;
};
struct alignas(8) TwoWords {
    u32 x, y;
};

__device__ inline bool skipped(const float* flag) { return flag && *flag == 0.0f; }

__device__ inline u64 first_element() { return (u64)blockIdx.x * THREADS + threadIdx.x; }
__device__ inline u64 all_threads() { return (u64)gridDim.x * THREADS; }
// Elements one by one, over all threads of all blocks.
#define EACH(i, n) for (u64 i = first_element(); i < (n); i += all_threads())
// The same over the threads of a block.
#define EACH_OF_BLOCK(i, n) for (u64 i = threadIdx.x; i < (n); i += THREADS)

// ---- numbers of 16 bits ----

__device__ inline float bf16_value(u16 bits) { return __uint_as_float((u32)bits << 16); }

__device__ inline u16 bf16_cut(float x, u32 rounded) {
    u32 bits = __float_as_uint(x);
    return (u16)(x != x ? (bits >> 16) | 0x40 : rounded >> 16);
}

__device__ inline u16 to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    return bf16_cut(x, bits + 0x7fff + ((bits >> 16) & 1));
}

#ifndef ON_CPU
__device__ inline float f16_value(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ inline u16 to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

// ---- random bits: those that the CPU draws ----

__device__ inline u64 splitmix64(u64 seed, u64 index) {
    u64 z = seed + (index + 1) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

__device__ inline u32 mixed(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// 32 random bits for the element of that index.
__device__ inline u32 random_word(u64 seed, u64 index) {
    u64 keys = splitmix64(seed, index >> 32);
    return mixed(mixed((u32)index ^ (u32)keys) + (u32)(keys >> 32));
}

__device__ inline u16 to_f16_stochastically(float x, u32 random) {
    const float smallest_normal = 6.103515625e-05f, unit = 5.9604644775390625e-08f;
    if (fabsf(x) < smallest_normal) {
        u16 steps = (u16)(fabsf(x) / unit + (float)random / 65536.0f);
        return steps | (u16)((__float_as_uint(x) >> 31) << 15);
    }
    if (!(fabsf(x) <= LARGEST)) return to_f16(x);
    const u32 cut = (1u << 13) - 1;
    return to_f16(__uint_as_float((__float_as_uint(x) + (random & cut)) & ~cut));
}

// ---- elements of any storage ----

__device__ inline float f16_at(const u8* p) { return f16_value((u16)(p[0] | p[1] << 8)); }

__device__ inline u32 u32_at(const u8* p) {
    return (u32)p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
}

__device__ inline float f32_at(const u8* p) { return __uint_as_float(u32_at(p)); }

// The half of byte i % `half` of `codes` that element i of a block has: the low halves come first.
__device__ inline u32 nibble(const u8* codes, u32 i, u32 half) {
    u32 byte = codes[i % half];
    return i < half ? byte & 15 : byte >> 4;
}

__device__ inline float e4m3_value(u8 code) {
    // The bits of an f16 number with the exponent's bias moved: its value is 2^-8 times that of the code.
    u16 bits = (u16)((code & 0x80) << 8 | (code & 0x7f) << 7);
    if ((code & 0x7f) == 0x7f) return __uint_as_float(0x7fc00000u);
    return f16_value(bits) * 256.0f;
}

__device__ inline float e5m2_value(u8 code) { return f16_value((u16)((u16)code << 8)); }

// Scale and minimum of group j of the 12 bytes that Q4_K and Q5_K have them in.
__device__ inline void six_bits(const u8* p, u32 j, float* scale, float* minimum) {
    if (j < 4) {
        *scale = (float)(p[j] & 63);
        *minimum = (float)(p[4 + j] & 63);
    } else {
        *scale = (float)((p[4 + j] & 15) | (p[j - 4] >> 6) << 4);
        *minimum = (float)((p[4 + j] >> 4) | (p[j] >> 6) << 4);
    }
}

__device__ inline float super_block_element(const u8* p, u32 type, u32 i) {
    float scale, minimum;
    switch (type) {
    case Q2K: {
        u32 code = p[16 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        float d = f16_at(p + 80), dmin = f16_at(p + 82);
        return d * (float)(p[i / 16] & 15) * (float)code - dmin * (float)(p[i / 16] >> 4);
    }
    case Q3K: {
        u32 code = (p[32 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) | (p[i % 32] >> (i / 32) & 1) << 2;
        u32 j = i / 16;
        u32 low = j >= 8 ? p[96 + j % 8] >> 4 : p[96 + j % 8] & 15;
        u32 six = low | (p[104 + j % 4] >> (j / 4 * 2) & 3) << 4;
        return f16_at(p + 108) * ((float)six - 32.0f) * ((float)code - 4.0f);
    }
    case Q4K: {
        u32 byte = p[16 + i / 64 * 32 + i % 32];
        float code = (float)(i % 64 >= 32 ? byte >> 4 : byte & 15);
        six_bits(p + 4, i / 32, &scale, &minimum);
        return f16_at(p) * scale * code - f16_at(p + 2) * minimum;
    }
    case Q5K: {
        u32 byte = p[48 + i / 64 * 32 + i % 32];
        u32 low = i % 64 >= 32 ? byte >> 4 : byte & 15;
        float code = (float)(low | (p[16 + i % 32] >> (i / 32) & 1) << 4);
        six_bits(p + 4, i / 32, &scale, &minimum);
        return f16_at(p) * scale * code - f16_at(p + 2) * minimum;
    }
    case Q6K: {
        u32 byte = p[i / 128 * 64 + i % 64];
        u32 low = i % 128 >= 64 ? byte >> 4 : byte & 15;
        u32 code = low | (p[128 + i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3) << 4;
        return f16_at(p + 208) * (float)(i8)p[192 + i / 16] * ((float)code - 32.0f);
    }
    default: return f32_at(p) * (float)(i8)p[4 + i]; // Q8_K
    }
}

__device__ inline float half_e8m0(u8 exponent) {
    if (exponent < 2) return __uint_as_float(exponent == 0 ? 0x00200000u : 0x00400000u);
    return __uint_as_float(((u32)exponent - 1) << 23);
}

__device__ inline float block_element_inline(const u8* p, u32 type, u64 index) {
    if (type >= Q2K && type <= Q8K) {
        const u32 bytes[] = {84, 110, 144, 176, 210, 292};
        return super_block_element(p + index / 256 * bytes[type - Q2K], type, (u32)(index % 256));
    }
    u32 i = (u32)(index % 32), j = (u32)(index % 64);
    switch (type) {
    case Q8_0: p += index / 32 * 34; return f16_at(p) * (float)(i8)p[2 + i];
    case Q4_0: p += index / 32 * 18; return f16_at(p) * ((float)nibble(p + 2, i, 16) - 8.0f);
    case Q4_1: p += index / 32 * 20; return f16_at(p) * (float)nibble(p + 4, i, 16) + f16_at(p + 2);
    case Q5_0: {
        p += index / 32 * 22;
        u32 code = nibble(p + 6, i, 16) | (u32_at(p + 2) >> i & 1) << 4;
        return f16_at(p) * ((float)code - 16.0f);
    }
    case Q5_1: {
        p += index / 32 * 24;
        u32 code = nibble(p + 8, i, 16) | (u32_at(p + 4) >> i & 1) << 4;
        return f16_at(p) * (float)code + f16_at(p + 2);
    }
    case IQ4_NL: {
        const i8 values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
        p += index / 32 * 18;
        return f16_at(p) * (float)values[nibble(p + 2, i, 16)];
    }
    case MXFP4: {
        const i8 twice[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        p += index / 32 * 17;
        return half_e8m0(p[0]) * (float)twice[nibble(p + 1, i, 16)];
    }
    case NF4_F32: p += index / 64 * 36; return tables.normal_float[nibble(p + 4, j, 32)] * f32_at(p);
    case FP4_F32: p += index / 64 * 36; return tables.four_bit_float[nibble(p + 4, j, 32)] * f32_at(p);
    case INT8: p += index / 64 * 68; return f32_at(p) * (float)(i8)p[4 + j];
    default: { // NF4 and FP4, doubly quantised
        u64 block = index / 64;
        const u8* factor = p + block / 256 * (8 + 256 * 33);
        p = factor + 8 + block % 256 * 33;
        // Product and sum are rounded by themselves.
        float magnitude = __fadd_rn(__fmul_rn(tables.magnitudes[p[0]], f32_at(factor)), f32_at(factor + 4));
        const float* values = type == NF4 ? tables.normal_float : tables.four_bit_float;
        return values[nibble(p + 1, j, 32)] * magnitude;
    }
    }
}

// A call: it is rare where speed counts, and a tenfold of code where it is written out.
__device__ APART float block_element(const u8* p, u32 type, u64 index) { return block_element_inline(p, type, index); }

// Element i of a tensor whose type is no block of codes.
__device__ inline float plain_element(View x, u64 i) {
    const u8* p = (const u8*)x.at;
    switch (x.type) {
    case F32: return ((const float*)p)[i];
    case BF16: return bf16_value(((const u16*)p)[i]);
    case F16: return f16_value(((const u16*)p)[i]);
    case I8: return (float)((const i8*)p)[i];
    case U8: return (float)p[i];
    case E4M3: return e4m3_value(p[4 + i]) * f32_at(p);
    default: return e5m2_value(p[4 + i]) * f32_at(p);
    }
}

// Element i of a tensor of any type.
__device__ inline float load(View x, u64 i) {
    return x.type < Q8_0 ? plain_element(x, i) : block_element((const u8*)x.at, x.type, i);
}

// The same without a call, for kernels that would have to save much around one.
__device__ inline float load_inline(View x, u64 i) {
    return x.type < Q8_0 ? plain_element(x, i) : block_element_inline((const u8*)x.at, x.type, i);
}

// Element i of f32, bf16 or f16.
__device__ inline float load_float(View x, u64 i) {
    return x.type == F32 ? ((const float*)x.at)[i] : x.type == BF16 ? bf16_value(((const u16*)x.at)[i])
                                                                    : f16_value(((const u16*)x.at)[i]);
}

// Element i of a type that a cache of keys and values has.
__device__ inline float load_cached(View x, u64 i) {
    if (x.type < Q8_0) return load_float(x, i);
    const u8* p = (const u8*)x.at + i / 32 * (x.type == Q8_0 ? 34 : x.type == Q4_0 ? 18 : 20);
    u32 at = (u32)(i % 32);
    if (x.type == Q8_0) return f16_at(p) * (float)(i8)p[2 + at];
    if (x.type == Q4_0) return f16_at(p) * ((float)nibble(p + 2, at, 16) - 8.0f);
    return f16_at(p) * (float)nibble(p + 4, at, 16) + f16_at(p + 2);
}

// Writes element i of a float tensor, to nearest.
__device__ inline void store(View out, u64 i, float x) {
    switch (out.type) {
    case F32: ((float*)out.at)[i] = x; break;
    case BF16: ((u16*)out.at)[i] = to_bf16(x); break;
    default: ((u16*)out.at)[i] = to_f16(x);
    }
}

// The same with a rounding.
__device__ inline void store(View out, u64 i, float x, Rounding rounding) {
    if (out.type == F32 || !rounding.stochastic) return store(out, i, x);
    u32 random = random_word(rounding.seed, rounding.first + i) >> 16;
    ((u16*)out.at)[i] =
        out.type == BF16 ? bf16_cut(x, __float_as_uint(x) + random) : to_f16_stochastically(x, random);
}

// ---- elements that a thread takes at once ----
//
// Eight of them where all tensors are floats whose fours are aligned, else one. What a kernel does with them is written once, for
// either; it reads all that it needs before it uses any of it, so that many bytes are on their way.

// Fours of the threads of a block lie side by side; a thread's second one lies behind the first ones of all.
#define GAP (4 * THREADS)

// Places of eight elements; the last four may not be there.
struct Eight {
    static constexpr u32 N = 8;
    u64 at;
    bool both;

    __device__ u64 of(u32 k) const { return at + k % 4 + k / 4 * GAP; }
    __device__ bool has(u32 k) const { return k < 4 || both; }
    // The same so many elements on, which are whole fours.
    __device__ Eight behind(u64 start) const { return {at + start, both}; }
};

struct One {
    static constexpr u32 N = 1;
    u64 at;

    __device__ u64 of(u32) const { return at; }
    __device__ bool has(u32) const { return true; }
    __device__ One behind(u64 start) const { return {at + start}; }
};

// Whether fours of a tensor can be read and written.
__device__ inline bool in_fours(View x) {
    return x.type == F32 ? x.at % 16 == 0 : (x.type == BF16 || x.type == F16) && x.at % 8 == 0;
}

__device__ inline View floats(const float* at) { return {(u64)at, F32, 0}; }

// Gives `body` the places of n elements, over the threads of `blocks` blocks.
template <class Body> __device__ inline void each_over(u64 n, bool fours, u64 block, u64 blocks, const Body& body) {
    u64 whole = fours ? n / 4 * 4 : 0;
#pragma unroll 1
    for (u64 i = block * 2 * GAP + 4 * threadIdx.x; i < whole; i += blocks * 2 * GAP) body(Eight{i, i + GAP < whole});
#pragma unroll 1
    for (u64 i = whole + block * THREADS + threadIdx.x; i < n; i += blocks * THREADS) body(One{i});
}
// Over all blocks.
template <class Body> __device__ inline void each(u64 n, bool fours, const Body& body) {
    each_over(n, fours, blockIdx.x, gridDim.x, body);
}
template <class Body> __device__ inline void each_of_block(u64 n, bool fours, const Body& body) {
    each_over(n, fours, 0, 1, body);
}

template <u32 N> struct Numbers {
    float of[N];
    __device__ float& operator[](u32 k) { return of[k]; }
    __device__ float operator[](u32 k) const { return of[k]; }
};

// Elements as they lie in memory.
struct Fetched {
    u32 type;
    Words fours[2];
};

__device__ inline Words four_at(View x, u64 i) {
    if (x.type == F32) return *(const Words*)(x.at + 4 * i);
    TwoWords pair = *(const TwoWords*)(x.at + 2 * i);
    return {pair.x, pair.y, 0, 0};
}

__device__ inline Fetched fetch(View x, Eight places) {
    Fetched got = {x.type, {four_at(x, places.at), {0, 0, 0, 0}}};
    if (places.both) got.fours[1] = four_at(x, places.at + GAP);
    return got;
}
__device__ inline Numbers<1> fetch(View x, One place) { return {{load(x, place.at)}}; }

__device__ inline void four_of(u32 type, Words words, float* out) {
    if (type == F32) {
        out[0] = __uint_as_float(words.x);
        out[1] = __uint_as_float(words.y);
        out[2] = __uint_as_float(words.z);
        out[3] = __uint_as_float(words.w);
    } else if (type == BF16) {
        out[0] = __uint_as_float(words.x << 16);
        out[1] = __uint_as_float(words.x & 0xffff0000u);
        out[2] = __uint_as_float(words.y << 16);
        out[3] = __uint_as_float(words.y & 0xffff0000u);
    } else {
        out[0] = f16_value((u16)words.x);
        out[1] = f16_value((u16)(words.x >> 16));
        out[2] = f16_value((u16)words.y);
        out[3] = f16_value((u16)(words.y >> 16));
    }
}

__device__ inline Numbers<8> numbers(const Fetched& got) {
    Numbers<8> all;
    four_of(got.type, got.fours[0], all.of);
    four_of(got.type, got.fours[1], all.of + 4);
    return all;
}
__device__ inline Numbers<1> numbers(Numbers<1> got) { return got; }

__device__ inline void put_words(View out, u64 i, Words words) {
    if (out.type == F32) *(Words*)(out.at + 4 * i) = words;
    else *(TwoWords*)(out.at + 2 * i) = {words.x, words.y};
}

__device__ inline u32 two(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

__device__ inline Words four_words(u32 type, const float* x) {
    if (type == F32) return {__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])};
    if (type == BF16) return {two(to_bf16(x[0]), to_bf16(x[1])), two(to_bf16(x[2]), to_bf16(x[3])), 0, 0};
    return {two(to_f16(x[0]), to_f16(x[1])), two(to_f16(x[2]), to_f16(x[3])), 0, 0};
}

// Writes elements, to nearest.
__device__ inline void put(View out, Eight places, const Numbers<8>& x) {
    put_words(out, places.at, four_words(out.type, x.of));
    if (places.both) put_words(out, places.at + GAP, four_words(out.type, x.of + 4));
}
__device__ inline void put(View out, One place, Numbers<1> x) { store(out, place.at, x[0]); }

// A rounding for many elements: what their random words have in common is worked out once.
struct Rounder {
    Rounding rounding;
    u64 high, keys;

    __device__ Rounder(Rounding r) : rounding(r), high(r.first >> 32), keys(0) {
        if (r.stochastic) keys = splitmix64(r.seed, high);
    }
    // Four numbers as bf16.
    __device__ Words four(u64 i, const float* x) {
        u64 index = rounding.first + i, next = 0;
        if (index >> 32 != high) {
            high = index >> 32;
            keys = splitmix64(rounding.seed, high);
        }
        next = keys;
        if ((u32)index > 0xfffffffcu) next = splitmix64(rounding.seed, high + 1);
        u16 cut[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            u32 low = (u32)index + k;
            u64 own = low < k ? next : keys;
            u32 random = mixed(mixed(low ^ (u32)own) + (u32)(own >> 32)) >> 16;
            cut[k] = bf16_cut(x[k], __float_as_uint(x[k]) + random);
        }
        return {two(cut[0], cut[1]), two(cut[2], cut[3]), 0, 0};
    }
};

// Whether fours can be written with that rounding.
__device__ inline bool in_fours(View out, Rounding rounding) { return in_fours(out) && !(out.type == F16 && rounding.stochastic); }

__device__ inline void put(View out, Eight places, const Numbers<8>& x, Rounder& by) {
    if (out.type == F32 || !by.rounding.stochastic) return put(out, places, x);
    put_words(out, places.at, by.four(places.at, x.of));
    if (places.both) put_words(out, places.at + GAP, by.four(places.at + GAP, x.of + 4));
}
__device__ inline void put(View out, One place, Numbers<1> x, Rounder& by) { store(out, place.at, x[0], by.rounding); }

// ---- over the threads of a warp, of which each has something ----

#define WARP 32

#ifndef ON_CPU
__device__ inline float of_neighbour(float x, u32 mask) {
    float other;
    asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, 0xffffffff;" : "=f"(other) : "f"(x), "r"(mask));
    return other;
}
#endif

struct Sum {
    template <class T> __device__ T operator()(T a, T b) const { return a + b; }
};
struct Larger {
    template <class T> __device__ T operator()(T a, T b) const { return b > a ? b : a; }
};

// All threads' numbers as one: neighbours first, then neighbours of these. `both` does not mind which of two comes first.
template <class T, class F> __device__ inline T warp_fold(T x, F both) {
    for (u32 mask = WARP / 2; mask > 0; mask /= 2) {
        T other = x;
        u32* words = (u32*)&other;
        for (u32 i = 0; i < sizeof(T) / 4; i++) words[i] = __float_as_uint(of_neighbour(__uint_as_float(words[i]), mask));
        x = both(x, other);
    }
    return x;
}

__device__ inline float warp_sum(float x) { return warp_fold(x, Sum()); }

// ---- over the threads of a block; `scratch` has room for one number a thread ----

// All threads' numbers as one: each warp's, then the warps' in order.
template <class T, class F> __device__ inline T block_fold(T x, T* scratch, F both) {
    x = warp_fold(x, both);
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    T all = scratch[0];
    for (u32 i = 1; i < THREADS / WARP; i++) all = both(all, scratch[i]);
    __syncthreads();
    return all;
}

template <class T> __device__ inline T block_sum(T x, T* scratch) { return block_fold(x, scratch, Sum()); }

// The largest; what is not a number is passed over.
__device__ inline float block_largest(float x, float* scratch) {
    return block_fold(x == x ? x : -INFINITE, scratch, Larger());
}

// The largest magnitude as bits, which are in the order of the magnitudes; what is not a number is above all.
__device__ inline u32 block_magnitude(u32 bits, u32* scratch) {
    return block_fold(bits & 0x7fffffffu, scratch, Larger());
}

// Numbers that are no normal numbers become 0.
__device__ inline float normal_or_zero(float x) { return fabsf(x) < SMALLEST_NORMAL ? 0.0f : x; }

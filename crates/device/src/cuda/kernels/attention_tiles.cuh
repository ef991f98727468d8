// What attention on tensor cores has in common forward and backward: tiles of queries, keys and values, operands rounded to bf16.
//
// A block has 128 queries of one head, each of its 8 warps 16 of them; a thread has numbers of two: its own, and the eighth after that.
// Heads of up to HEAD numbers are filled up with zeros.

#define QUERIES 128
#define KEYS 32

// Begins to bring lines of a head to shared memory: line n is there where `begins(n)` says at which element, else it is zeros.
template <u32 HEAD, bool CODES, class Begins>
__device__ inline void fill_lines(u16* tile, View x, u32 width, u32 lines, u64 head_dim, const Begins& begins) {
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < lines * (HEAD / UNIT); unit += THREADS) {
        u32 line = unit / (HEAD / UNIT), place = unit % (HEAD / UNIT) * UNIT;
        u64 at = 0;
        bool there = begins(line, &at);
        ToLine<false> put = {tile, HEAD, line, place / 8};
        fill_line<false, CODES>(x, width, at + place, there ? unit_count(place, head_dim) : 0, put);
    }
}

// sums += a b^T of a fragment and 16 lines of a tile from `row` on, at part `part` of their length.
template <u32 HEAD>
__device__ inline void multiply_lines(float (*sums)[4], const u32* a, const u16* tile, u32 row, u32 part) {
    u32 b[2][2];
    b_along(b[0], tile, HEAD, row, part * 16);
    multiply_add<false>(sums[0], a, b[0]);
    multiply_add<false>(sums[1], a, b[1]);
}

// sums += a b, b being 16 lines of a tile from `row` on.
template <u32 HEAD>
__device__ inline void multiply_columns(float (*sums)[4], const u32* a, const u16* tile, u32 row) {
#pragma unroll
    for (u32 j = 0; j < HEAD / 8; j += 2) {
        u32 b[2][2];
        b_across(b[0], tile, HEAD, j * 8, row);
        multiply_add<false>(sums[j], a, b[0]);
        multiply_add<false>(sums[j + 1], a, b[1]);
    }
}

template <u32 COUNT> __device__ inline void clear(float (*sums)[4]) {
#pragma unroll
    for (u32 j = 0; j < COUNT; j++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) sums[j][n] = 0.0f;
}

// The largest, and the sum, over the four threads that have a row of scores.
__device__ inline float largest_of_four(float x) {
#pragma unroll
    for (u32 mask = 1; mask < 4; mask *= 2) {
        float other = of_neighbour(x, mask);
        x = other > x ? other : x;
    }
    return x;
}
__device__ inline float sum_of_four(float x) {
#pragma unroll
    for (u32 mask = 1; mask < 4; mask *= 2) x += of_neighbour(x, mask);
    return x;
}

// What a thread has of one of its two lines, divided, and added to what is there or instead of it.
template <u32 HEAD>
__device__ inline void put_lines(View x, const float (*values)[4], u32 half, float divisor,
                                 u64 place, u64 head_dim, u32 accumulate) {
    u32 lane = threadIdx.x % WARP;
    bool pairs = head_dim % 2 == 0 && x.at % 8 == 0;
#pragma unroll
    for (u32 j = 0; j < HEAD / 8; j++) {
        u32 d = j * 8 + lane % 4 * 2;
        float pair[2] = {values[j][half * 2] / divisor, values[j][half * 2 + 1] / divisor};
        if (d >= head_dim) continue;
        if (pairs && x.type == F32) {
            float* at = (float*)x.at + place + d;
            TwoWords before = accumulate ? *(const TwoWords*)at : TwoWords{0, 0};
            *(TwoWords*)at = {__float_as_uint(accumulate ? __uint_as_float(before.x) + pair[0] : pair[0]),
                              __float_as_uint(accumulate ? __uint_as_float(before.y) + pair[1] : pair[1])};
            continue;
        }
        if (pairs && x.type == BF16 && !accumulate) {
            *(u32*)((u16*)x.at + place + d) = pair_of_16_bits<false>(pair[0], pair[1]);
            continue;
        }
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
            if (d + n >= head_dim) continue;
            float value = pair[n];
            if (x.type == F32) {
                float* at = (float*)x.at + place + d + n;
                *at = accumulate ? *at + value : value;
            } else {
                u16* at = (u16*)x.at + place + d + n;
                if (x.type == F16) *at = to_f16(accumulate ? f16_value(*at) + value : value);
                else *at = to_bf16(accumulate ? bf16_value(*at) + value : value);
            }
        }
    }
}

// The queries of a block.
struct Queries {
    u64 batch, head, first, length, heads, head_dim;

    __device__ bool operator()(u32 line, u64* at) const {
        u64 i = first + line;
        *at = i < length ? ((batch * length + i) * heads + head) * head_dim : 0;
        return i < length;
    }
};

// A tile of keys, or of values.
struct Keys {
    const Shape& s;
    u64 batch, kv_head, first, end, columns;

    __device__ bool operator()(u32 line, u64* at) const {
        u64 key = first + line;
        *at = key < end ? key_place(s, batch, key, kv_head, columns) : 0;
        return key < end;
    }
};

// What a block of queries has to do: the queries from `first` on of a head, and the keys from `low` up to `end`, of which any of them sees
// one.
struct Block {
    u32 head, batch, first;
    u64 kv_head, low, end;
};

__device__ inline Block block_of(const Shape& s, const u32* documents, u64* lows) {
    // The blocks that take longest begin first; those that follow each other have the same keys.
    u32 length = (u32)s.q_len, heads = (u32)s.heads, rounds = (length + QUERIES - 1) / QUERIES;
    u32 head = blockIdx.x % heads, batch = blockIdx.x / heads % (u32)s.batch;
    u32 first = (rounds - 1 - blockIdx.x / heads / (u32)s.batch) * QUERIES;
    u64 kv_head = head / (heads / (u32)s.kv_heads), before = s.kv_len - s.q_len;

    // The first key that any of the queries sees; without documents it is the first one's.
    u64 end = before + (first + QUERIES < length ? first + QUERIES : length);
    if (!documents) return {head, batch, first, kv_head, earliest(s, before + first, 0), end};
    if (threadIdx.x < QUERIES) {
        u64 i = first + threadIdx.x;
        u64 document = i < length ? documents[batch * s.q_len + i] : 0;
        lows[threadIdx.x] = i < length ? earliest(s, before + i, document) : before + i;
    }
    __syncthreads();
    u64 low = lows[0];
#pragma unroll 1
    for (u32 i = 1; i < QUERIES; i++) low = lows[i] < low ? lows[i] : low;
    __syncthreads();
    return {head, batch, first, kv_head, low, end};
}

// The same of keys that may be a piece of all.
__device__ inline Block within_piece(const Shape& s, Block block) {
    u64 last = s.first + s.kv_capacity;
    block.low = block.low > s.first ? block.low : s.first;
    block.end = block.end < last ? block.end : last;
    return block;
}

// A thread's fragments of a block's queries, or of what lies like them.
template <u32 HEAD>
__device__ inline void queries_of_block(u32 (*out)[4], u16* tiles, View x, const Block& block, const Shape& s) {
    Queries lines = {block.batch, block.head, block.first, s.q_len, s.heads, s.head_dim};
    fill_lines<HEAD, false>(tiles, x, copy_width(x.at, s.head_dim), QUERIES, s.head_dim, lines);
    copy_group();
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (u32 part = 0; part < HEAD / 16; part++) a_along(out[part], tiles, HEAD, threadIdx.x / WARP * 16, part * 16);
    __syncthreads();
}

// Tiles of keys that a block goes over, the first one of which begins at a multiple of KEYS.
struct TilesOfKeys {
    u64 start;
    u32 count;
};

__device__ inline TilesOfKeys tiles_of(const Block& block) {
    u64 start = block.low / KEYS * KEYS;
    return {start, block.end > start ? (u32)((block.end - start + KEYS - 1) / KEYS) : 0};
}

// Where a tile of keys is in shared memory; its values are behind it. Two tiles take turns.
template <u32 HEAD> __device__ inline u16* place_of_tile(u16* tiles, u32 number) { return tiles + number % 2 * (2 * KEYS * HEAD); }

// Begins to bring a tile of keys and values, if there is one of that number. It is one group of copies.
template <u32 HEAD, bool CODES>
__device__ inline void begin_tile(u16* tiles, View k, View v, const Block& block, const TilesOfKeys& all, u32 number, const Shape& s) {
    if (number < all.count) {
        u16* tile = place_of_tile<HEAD>(tiles, number);
#pragma unroll 1
        for (u32 which = 0; which < 2; which++) {
            View x = which ? v : k;
            u64 columns = which ? s.v_columns : s.k_columns;
            Keys keys = {s, block.batch, block.kv_head, all.start + (u64)number * KEYS, block.end, columns};
            fill_lines<HEAD, CODES>(tile + which * KEYS * HEAD, x, copy_width(x.at, columns), KEYS, s.head_dim, keys);
        }
    }
    copy_group();
}

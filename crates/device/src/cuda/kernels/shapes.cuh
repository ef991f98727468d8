// What kernels for all cards and those for tensor cores know alike of products and of attention.

// Rows and columns of c that a block makes.
#define TILE 128
// Numbers of the inner length whose products are summed by themselves.
#define FOLD 1024
// Rows of which a product has a kernel of its own, at most.
#define FEW 16

// A matrix: element (row, column) is number row * row_stride + column * column_stride of a tensor. One of them is 1.
struct Matrix {
    View values;
    u64 row_stride;
    u64 column_stride;
};

// The tile of c that a block makes. It goes through shared memory in four parts of 32 rows: threads that follow each other then
// read and write columns that follow each other, whichever numbers of a tile a thread has in registers.
struct Result {
    View c, bias;
    u64 top, left, rows, columns;
    u32 accumulate;
    // Row n of part p is row n / 16 * 64 + n % 16 * apart + p * between of the tile.
    u32 apart, between;
};

#define PARTS_OF_TILE 4
#define ROWS_OF_PART (TILE / PARTS_OF_TILE)
// Numbers from a row of shared memory to the next: not all in the same banks.
#define PITCH (TILE + 4)

__device__ inline u64 row_of_part(const Result& r, u32 part, u32 row) {
    return r.top + row / 16 * (TILE / 2) + row % 16 * r.apart + part * r.between;
}

// Whether four numbers of c that follow each other can be read and written at once, wherever four begin.
__device__ inline bool by_fours(const Result& r) {
    return r.columns % 4 == 0 && r.c.at % (r.c.type == F32 ? 16 : 8) == 0;
}

// What sums of a part begin with: the numbers of c where they are added to, and the bias.
__device__ inline void begin_part(float* numbers, const Result& r, u32 part) {
    u32 place = threadIdx.x % (TILE / 4) * 4, first = threadIdx.x / (TILE / 4);
    u64 column = r.left + place;
    bool fours = by_fours(r);
    // All reads are begun before the first one is waited for.
    Words read[ROWS_OF_PART / 8];
#pragma unroll
    for (u32 n = 0; n < ROWS_OF_PART / 8; n++) {
        u64 row = row_of_part(r, part, first + 8 * n), at = row * r.columns + column;
        read[n] = Words{0, 0, 0, 0};
        if (!r.accumulate || !fours || row >= r.rows || column >= r.columns) continue;
        if (r.c.type == F32) {
            read[n] = *(const Words*)(r.c.at + 4 * at);
        } else {
            TwoWords pair = *(const TwoWords*)(r.c.at + 2 * at);
            read[n].x = pair.x;
            read[n].y = pair.y;
        }
    }
#pragma unroll
    for (u32 n = 0; n < ROWS_OF_PART / 8; n++) {
        float* to = numbers + (first + 8 * n) * PITCH + place;
        if (r.c.type == F32) {
            to[0] = __uint_as_float(read[n].x);
            to[1] = __uint_as_float(read[n].y);
            to[2] = __uint_as_float(read[n].z);
            to[3] = __uint_as_float(read[n].w);
        } else {
            put_pair(to, read[n].x, r.c.type == F16);
            put_pair(to + 2, read[n].y, r.c.type == F16);
        }
    }
    if (!r.bias.at && (!r.accumulate || fours)) return;
#pragma unroll 1
    for (u32 n = 0; n < ROWS_OF_PART / 2; n++) {
        u32 line = first + n / 4 * 8;
        u64 row = row_of_part(r, part, line), own = column + n % 4;
        if (row >= r.rows || own >= r.columns) continue;
        float* to = numbers + line * PITCH + place + n % 4;
        if (r.accumulate && !fours) *to = load_float(r.c, row * r.columns + own);
        if (r.bias.at) *to += load_float(r.bias, own);
    }
}

// Writes a part.
__device__ inline void end_part(const float* numbers, const Result& r, u32 part, const Rounding& rounding) {
    u32 place = threadIdx.x % (TILE / 4) * 4, first = threadIdx.x / (TILE / 4);
    u64 column = r.left + place;
    bool fours = by_fours(r) && (r.c.type == F32 || (r.c.type == BF16 && !rounding.stochastic));
#pragma unroll 1
    for (u32 line = first; line < ROWS_OF_PART; line += 8) {
        u64 row = row_of_part(r, part, line), at = row * r.columns + column;
        if (row >= r.rows || column >= r.columns) continue;
        const float* from = numbers + line * PITCH + place;
        if (!fours) {
            u64 end = r.columns - column < 4 ? r.columns - column : 4;
#pragma unroll 1
            for (u32 i = 0; i < end; i++) store(r.c, at + i, from[i], rounding);
        } else if (r.c.type == F32) {
            *(Words*)(r.c.at + 4 * at) = *(const Words*)from;
        } else {
            TwoWords pair = {two(to_bf16(from[0]), to_bf16(from[1])), two(to_bf16(from[2]), to_bf16(from[3]))};
            *(TwoWords*)(r.c.at + 2 * at) = pair;
        }
    }
}

// ---- attention ----

struct Shape {
    u64 batch, q_len, kv_len, kv_capacity, heads, kv_heads, head_dim;
    // Elements of a head in the storage of keys and of values: whole blocks.
    u64 k_columns, v_columns;
    // The position of the first key, where the keys are a piece; 0 of whole sequences.
    u64 first;
    // The largest u64 where there is none.
    u64 window;
    // 0 where there is no pattern of blocks.
    u64 block, local_blocks, global_blocks;
    float scale, soft_cap;
    u32 narrow;
    u32 unused;
};

// Positions fit 32 bits; 64-bit numbers are divided by a call, around which much would have to be saved.
__device__ inline u32 part_of(u64 position, u64 length) { return (u32)position / (u32)length; }

__device__ inline bool sees(const Shape& s, u64 query, u64 key, u64 first) {
    if (key > query) return false;
    if (key < first) return key == query;
    if (query - key >= s.window) return false;
    if (s.block == 0) return true;
    u32 of_key = part_of(key, s.block), of_query = part_of(query, s.block);
    return of_key < s.global_blocks || of_query - of_key < s.local_blocks;
}

// The first position that a query may see.
__device__ inline u64 earliest(const Shape& s, u64 query, u64 first) {
    u64 near = query + 1 > s.window ? query + 1 - s.window : 0;
    u64 low = near > first ? near : first;
    return low < query ? low : query;
}

// Where the head of a key begins among the elements of keys or values.
__device__ inline u64 key_place(const Shape& s, u64 batch, u64 key, u64 kv_head, u64 columns) {
    u64 row = batch * s.kv_capacity + (u32)(key - s.first) % (u32)s.kv_capacity;
    return (row * s.kv_heads + kv_head) * columns;
}

__device__ inline float narrowed(const Shape& s, float x) { return s.narrow ? bf16_value(to_bf16(x)) : x; }

// The score of a key whose product with a query is given.
__device__ inline float score_of(const Shape& s, float product) {
    float x = product * s.scale;
    return s.soft_cap > 0.0f ? s.soft_cap * tanhf(x / s.soft_cap) : x;
}

// The probability of a key and the gradient of its score before it was capped and scaled.
struct Pair {
    float probability, gradient;
};

__device__ inline Pair pair_of(const Shape& s, float product, float of_values, float lse, float delta, const float* kept) {
    float score = score_of(s, product);
    float probability = kept ? *kept : expf(score - lse);
    float slope = s.soft_cap > 0.0f ? 1.0f - (score / s.soft_cap) * (score / s.soft_cap) : 1.0f;
    Pair pair = {probability, probability * (of_values - delta) * slope * s.scale};
    return pair;
}

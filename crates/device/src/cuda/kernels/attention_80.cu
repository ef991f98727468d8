// Causal attention by tiles on tensor cores (FlashAttention-2, Dao 2023): operands rounded to bf16, sums and softmax in f32.
//
// A block has 128 queries of one head, each of its 8 warps 16 of them. It goes over tiles of 32 keys in order, of which the next one
// is on its way while one is multiplied. Scores stay in registers: what a product leaves there is what the next one asks for. Heads
// of up to DEPTH numbers are filled up with zeros.

#define QUERIES 128
#define KEYS 32
#define TILES_OF_KEYS (KEYS / 8)

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

// Begins to bring lines of a head to shared memory: line n is there where `begins(n)` says at which element, else it is zeros.
template <u32 DEPTH, bool CODES, class Begins>
__device__ inline void fill_lines(u16* tile, View x, u32 width, u32 lines, u64 head_dim, const Begins& begins) {
#pragma unroll 1
    for (u32 unit = threadIdx.x; unit < lines * (DEPTH / UNIT); unit += THREADS) {
        u32 line = unit / (DEPTH / UNIT), place = unit % (DEPTH / UNIT) * UNIT;
        u64 at = 0;
        bool there = begins(line, &at);
        ToLine<false> put = {tile, DEPTH, line, place / 8};
        fill_line<false, CODES>(x, width, at + place, there ? unit_count(place, head_dim) : 0, put);
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

template <u32 DEPTH>
__device__ inline void attention_of_tiles(u16* tiles, View q, View k, View v, const u32* documents, View out, float* lse,
                                          const Shape& s) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, matrix = lane / 8, line = lane % 8;
    // The blocks that take longest begin first; those that follow each other have the same keys.
    u32 length = (u32)s.q_len, heads = (u32)s.heads, rounds = (length + QUERIES - 1) / QUERIES;
    u32 head = blockIdx.x % heads, batch = blockIdx.x / heads % (u32)s.batch;
    u32 first = (rounds - 1 - blockIdx.x / heads / (u32)s.batch) * QUERIES;
    u64 kv_head = head / (heads / (u32)s.kv_heads), before = s.kv_len - s.q_len;

    // The first key that any of the queries sees.
    u64* lows = (u64*)tiles;
    if (threadIdx.x < QUERIES) {
        u64 i = first + threadIdx.x;
        u64 document = i < length && documents ? documents[batch * s.q_len + i] : 0;
        lows[threadIdx.x] = i < length ? earliest(s, before + i, document) : before + i;
    }
    __syncthreads();
    u64 low = lows[0];
#pragma unroll 1
    for (u32 i = 1; i < QUERIES; i++) low = lows[i] < low ? lows[i] : low;
    __syncthreads();
    u64 end = before + (first + QUERIES < length ? first + QUERIES : length);

    u32 q_width = copy_width(q.at, s.head_dim), k_width = copy_width(k.at, s.k_columns), v_width = copy_width(v.at, s.v_columns);
    u32 queries[DEPTH / 16][4];
    fill_lines<DEPTH, false>(tiles, q, q_width, QUERIES, s.head_dim, Queries{batch, head, first, s.q_len, s.heads, s.head_dim});
    copy_group();
    copy_wait<0>();
    __syncthreads();
#pragma unroll
    for (u32 part = 0; part < DEPTH / 16; part++)
        load_matrices(queries[part], tiles + place_in_lines(DEPTH, warp * 16 + matrix % 2 * 8 + line, part * 2 + matrix / 2));
    __syncthreads();

    // A thread has numbers of two rows: its own, and the eighth after that.
    u64 position[2], document[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 i = first + warp * 16 + lane / 4 + half * 8;
        position[half] = before + i;
        document[half] = i < length && documents ? documents[batch * s.q_len + i] : 0;
    }
    float most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f}, values[DEPTH / 8][4];
#pragma unroll
    for (u32 j = 0; j < DEPTH / 8; j++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) values[j][n] = 0.0f;

    u64 start = low / KEYS * KEYS;
    u32 count = end > start ? (u32)((end - start + KEYS - 1) / KEYS) : 0;
    for (u32 filled = 0; filled <= count; filled++) {
        if (filled < count) {
            u16* tile = tiles + filled % 2 * (2 * KEYS * DEPTH);
            u64 key = start + (u64)filled * KEYS;
#pragma unroll 1
            for (u32 which = 0; which < 2; which++) {
                Keys keys = {s, batch, kv_head, key, end, which ? s.v_columns : s.k_columns};
                fill_lines<DEPTH, true>(tile + which * KEYS * DEPTH, which ? v : k, which ? v_width : k_width, KEYS, s.head_dim, keys);
            }
        }
        copy_group();
        if (filled == 0) continue;
        copy_wait<1>();
        __syncthreads();
        u64 tile_first = start + (u64)(filled - 1) * KEYS;
        const u16 *of_keys = tiles + (filled - 1) % 2 * (2 * KEYS * DEPTH), *of_values = of_keys + KEYS * DEPTH;

        float scores[TILES_OF_KEYS][4];
#pragma unroll
        for (u32 j = 0; j < TILES_OF_KEYS; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) scores[j][n] = 0.0f;
#pragma unroll
        for (u32 part = 0; part < DEPTH / 16; part++) {
#pragma unroll
            for (u32 j = 0; j < TILES_OF_KEYS; j += 2) {
                u32 b[2][2];
                load_matrices(b[0], of_keys + place_in_lines(DEPTH, j * 8 + matrix / 2 * 8 + line, part * 2 + matrix % 2));
                multiply_add<false>(scores[j], queries[part], b[0]);
                multiply_add<false>(scores[j + 1], queries[part], b[1]);
            }
        }
        float higher[2] = {most[0], most[1]};
#pragma unroll
        for (u32 j = 0; j < TILES_OF_KEYS; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                u64 key = tile_first + j * 8 + lane % 4 * 2 + n % 2;
                bool seen = key < end && sees(s, position[n / 2], key, document[n / 2]);
                float score = seen ? score_of(s, scores[j][n]) : -INFINITE;
                scores[j][n] = score;
                higher[n / 2] = score > higher[n / 2] ? score : higher[n / 2];
            }
        float less[2], sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            higher[half] = largest_of_four(higher[half]);
            less[half] = most[half] == -INFINITE ? 0.0f : expf(most[half] - higher[half]);
            most[half] = higher[half];
        }
        u32 weights[TILES_OF_KEYS][2];
#pragma unroll
        for (u32 j = 0; j < TILES_OF_KEYS; j++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float pair[2];
#pragma unroll
                for (u32 n = 0; n < 2; n++) {
                    float score = scores[j][half * 2 + n];
                    pair[n] = score == -INFINITE ? 0.0f : expf(score - most[half]);
                    sum[half] += pair[n];
                }
                weights[j][half] = pair_of_16_bits<false>(pair[0], pair[1]);
            }
#pragma unroll
        for (u32 half = 0; half < 2; half++) total[half] = total[half] * less[half] + sum[half];
#pragma unroll
        for (u32 j = 0; j < DEPTH / 8; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) values[j][n] *= less[n / 2];
#pragma unroll
        for (u32 key = 0; key < KEYS; key += 16) {
            u32 a[4] = {weights[key / 8][0], weights[key / 8][1], weights[key / 8 + 1][0], weights[key / 8 + 1][1]};
#pragma unroll
            for (u32 j = 0; j < DEPTH / 8; j += 2) {
                u32 b[2][2];
                load_transposed(b[0], of_values + place_in_lines(DEPTH, key + matrix % 2 * 8 + line, j + matrix / 2));
                multiply_add<false>(values[j], a, b[0]);
                multiply_add<false>(values[j + 1], a, b[1]);
            }
        }
        // Nobody reads any more what is filled next.
        __syncthreads();
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 i = first + warp * 16 + lane / 4 + half * 8;
        float sum = sum_of_four(total[half]);
        if (i >= length) continue;
        u64 place = ((batch * s.q_len + i) * s.heads + head) * s.head_dim;
#pragma unroll
        for (u32 j = 0; j < DEPTH / 8; j++)
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                u32 d = j * 8 + lane % 4 * 2 + n;
                float value = values[j][half * 2 + n] / sum;
                if (d >= s.head_dim) continue;
                if (out.type == F32) ((float*)out.at)[place + d] = value;
                else ((u16*)out.at)[place + d] = out.type == F16 ? to_f16(value) : to_bf16(value);
            }
        if (lane % 4 == 0) lse[(batch * s.heads + head) * s.q_len + i] = most[half] + logf(sum);
    }
}

#define ATTENTION_80(name, depth)                                                                                           \
    KERNEL(name, const float* flag, View q, View k, View v, const u32* documents, View out, float* lse, Shape s) {           \
        SHARED(u16, tiles);                                                                                                  \
        if (skipped(flag)) return;                                                                                           \
        attention_of_tiles<depth>(tiles, q, k, v, documents, out, lse, s);                                                   \
    }

ATTENTION_80(attention_bf16_64, 64)
ATTENTION_80(attention_bf16_128, 128)

// Causal attention by tiles on tensor cores (FlashAttention-2, Dao 2023): operands rounded to bf16, sums and softmax in f32.
//
// A block has 128 queries of one head, each of its 8 warps 16 of them. It goes over tiles of 32 keys in order, of which the next one
// is on its way while one is multiplied. Scores stay in registers: what a product leaves there is what the next one asks for. Heads
// of up to HEAD numbers are filled up with zeros.

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

// Fragments of 16 lines from `row` on, for all of the inner length.
template <u32 HEAD> __device__ inline void lines_of_a(u32 (*out)[4], const u16* tile, u32 row) {
    u32 lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8;
#pragma unroll
    for (u32 part = 0; part < HEAD / 16; part++)
        load_matrices(out[part], tile + place_in_lines(HEAD, row + matrix % 2 * 8 + line, part * 2 + matrix / 2));
}

// sums += a b^T of 16 lines that are fragments and 16 lines of a tile from `row` on.
template <u32 HEAD>
__device__ inline void multiply_lines(float (*sums)[4], const u32* a, const u16* tile, u32 row, u32 part) {
    u32 lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8, b[2][2];
    load_matrices(b[0], tile + place_in_lines(HEAD, row + matrix / 2 * 8 + line, part * 2 + matrix % 2));
    multiply_add<false>(sums[0], a, b[0]);
    multiply_add<false>(sums[1], a, b[1]);
}

// sums += a b, b being 16 lines of a tile from `row` on.
template <u32 HEAD>
__device__ inline void multiply_columns(float (*sums)[4], const u32* a, const u16* tile, u32 row) {
    u32 lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8;
#pragma unroll
    for (u32 j = 0; j < HEAD / 8; j += 2) {
        u32 b[2][2];
        load_transposed(b[0], tile + place_in_lines(HEAD, row + matrix % 2 * 8 + line, j + matrix / 2));
        multiply_add<false>(sums[j], a, b[0]);
        multiply_add<false>(sums[j + 1], a, b[1]);
    }
}

// What a thread has of one of its two lines, divided, and added to what is there or instead of it.
template <u32 HEAD>
__device__ inline void put_lines(View x, const float (*values)[4], u32 half, float divisor,
                                 u64 place, u64 head_dim, u32 accumulate) {
    u32 lane = threadIdx.x % WARP;
#pragma unroll
    for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
        for (u32 n = 0; n < 2; n++) {
            u32 d = j * 8 + lane % 4 * 2 + n;
            float value = values[j][half * 2 + n] / divisor;
            if (d >= head_dim) continue;
            if (x.type == F32) {
                float* at = (float*)x.at + place + d;
                *at = accumulate ? *at + value : value;
            } else {
                u16* at = (u16*)x.at + place + d;
                if (x.type == F16) *at = to_f16(accumulate ? f16_value(*at) + value : value);
                else *at = to_bf16(accumulate ? bf16_value(*at) + value : value);
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

// What a block of queries has to do.
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

    // The first key that any of the queries sees.
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
    return {head, batch, first, kv_head, low, end};
}

template <u32 HEAD>
__device__ inline void attention_of_tiles(u16* tiles, View q, View k, View v, const u32* documents, View out, float* lse,
                                          float* sums, float* mosts, float* totals, const Shape& s) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Block own = block_of(s, documents, (u64*)tiles);
    u32 length = (u32)s.q_len, head = own.head, batch = own.batch, first = own.first;
    u64 kv_head = own.kv_head, before = s.kv_len - s.q_len, low = own.low, end = own.end;
    if (sums) {
        // The keys are a piece of all.
        low = low > s.first ? low : s.first;
        end = end < s.first + s.kv_capacity ? end : s.first + s.kv_capacity;
    }
    u64 start = low / KEYS * KEYS;
    u32 q_width = copy_width(q.at, s.head_dim), k_width = copy_width(k.at, s.k_columns), v_width = copy_width(v.at, s.v_columns);
    u32 queries[HEAD / 16][4];
    fill_lines<HEAD, false>(tiles, q, q_width, QUERIES, s.head_dim, Queries{batch, head, first, s.q_len, s.heads, s.head_dim});
    copy_group();
    copy_wait<0>();
    __syncthreads();
    lines_of_a<HEAD>(queries, tiles, warp * 16);
    __syncthreads();

    // A thread has numbers of two rows: its own, and the eighth after that.
    u64 position[2], document[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 i = first + warp * 16 + lane / 4 + half * 8;
        position[half] = before + i;
        document[half] = i < length && documents ? documents[batch * s.q_len + i] : 0;
    }
    float most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f}, values[HEAD / 8][4];
#pragma unroll
    for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) values[j][n] = 0.0f;
    if (sums) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u64 i = first + warp * 16 + lane / 4 + half * 8, row = ((u64)batch * s.heads + head) * s.q_len + i;
            if (i >= length) continue;
            most[half] = mosts[row];
            total[half] = totals[row];
#pragma unroll
            for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
                for (u32 n = 0; n < 2; n++) {
                    u32 d = j * 8 + lane % 4 * 2 + n;
                    u64 place = ((batch * s.q_len + i) * s.heads + head) * s.head_dim;
                    if (d < s.head_dim) values[j][half * 2 + n] = sums[place + d];
                }
        }
    }
    u32 count = end > start ? (u32)((end - start + KEYS - 1) / KEYS) : 0;
    for (u32 filled = 0; filled <= count; filled++) {
        if (filled < count) {
            u16* tile = tiles + filled % 2 * (2 * KEYS * HEAD);
            u64 key = start + (u64)filled * KEYS;
#pragma unroll 1
            for (u32 which = 0; which < 2; which++) {
                Keys keys = {s, batch, kv_head, key, end, which ? s.v_columns : s.k_columns};
                fill_lines<HEAD, true>(tile + which * KEYS * HEAD, which ? v : k, which ? v_width : k_width, KEYS, s.head_dim, keys);
            }
        }
        copy_group();
        if (filled == 0) continue;
        copy_wait<1>();
        __syncthreads();
        u64 tile_first = start + (u64)(filled - 1) * KEYS;
        const u16 *of_keys = tiles + (filled - 1) % 2 * (2 * KEYS * HEAD), *of_values = of_keys + KEYS * HEAD;

        float scores[TILES_OF_KEYS][4];
#pragma unroll
        for (u32 j = 0; j < TILES_OF_KEYS; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) scores[j][n] = 0.0f;
#pragma unroll
        for (u32 part = 0; part < HEAD / 16; part++)
#pragma unroll
            for (u32 j = 0; j < TILES_OF_KEYS; j += 2)
                multiply_lines<HEAD>(scores + j, queries[part], of_keys, j * 8, part);
        float higher[2] = {most[0], most[1]};
#pragma unroll
        for (u32 j = 0; j < TILES_OF_KEYS; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                u64 key = tile_first + j * 8 + lane % 4 * 2 + n % 2;
                bool seen = key >= low && key < end && sees(s, position[n / 2], key, document[n / 2]);
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
        for (u32 half = 0; half < 2; half++) total[half] = total[half] * less[half] + sum_of_four(sum[half]);
#pragma unroll
        for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) values[j][n] *= less[n / 2];
#pragma unroll
        for (u32 key = 0; key < KEYS; key += 16) {
            u32 a[4] = {weights[key / 8][0], weights[key / 8][1], weights[key / 8 + 1][0], weights[key / 8 + 1][1]};
            multiply_columns<HEAD>(values, a, of_values, key);
        }
        // Nobody reads any more what is filled next.
        __syncthreads();
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 i = first + warp * 16 + lane / 4 + half * 8;
        if (i >= length) continue;
        u64 place = ((batch * s.q_len + i) * s.heads + head) * s.head_dim;
        u64 row = ((u64)batch * s.heads + head) * s.q_len + i;
        View to = {(u64)sums, F32};
        put_lines<HEAD>(sums ? to : out, values, half, sums ? 1.0f : total[half], place, s.head_dim, 0);
        if (lane % 4) continue;
        if (sums) {
            mosts[row] = most[half];
            totals[row] = total[half];
        } else {
            lse[row] = most[half] + logf(total[half]);
        }
    }
}

#define ATTENTION_80(name, depth)                                                                                           \
    KERNEL(name, const float* flag, View q, View k, View v, const u32* documents, View out, float* lse, float* sums,         \
           float* mosts, float* totals, Shape s) {                                                                           \
        SHARED(u16, tiles);                                                                                                  \
        if (skipped(flag)) return;                                                                                           \
        attention_of_tiles<depth>(tiles, q, k, v, documents, out, lse, sums, mosts, totals, s);                              \
    }

ATTENTION_80(attention_bf16_64, 64)
ATTENTION_80(attention_bf16_128, 128)

// ---- gradients ----

// dq (+)= the gradients of 128 queries.
template <u32 HEAD>
__device__ inline void gradients_of_queries(u16* tiles, View q, View k, View v, const u32* documents, const float* lse,
                                            const float* delta, View dout, View dq, u32 accumulate, const Shape& s) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Block own = block_of(s, documents, (u64*)tiles);
    u32 length = (u32)s.q_len, first = own.first;
    // The keys may be a piece of all.
    u64 low = own.low > s.first ? own.low : s.first, last = s.first + s.kv_capacity, end = own.end < last ? own.end : last;
    u64 before = s.kv_len - s.q_len, start = low / KEYS * KEYS;
    u32 queries[HEAD / 16][4], from_above[HEAD / 16][4];
    Queries lines = {own.batch, own.head, first, s.q_len, s.heads, s.head_dim};
    fill_lines<HEAD, false>(tiles, q, copy_width(q.at, s.head_dim), QUERIES, s.head_dim, lines);
    copy_group();
    copy_wait<0>();
    __syncthreads();
    lines_of_a<HEAD>(queries, tiles, warp * 16);
    __syncthreads();
    fill_lines<HEAD, false>(tiles, dout, copy_width(dout.at, s.head_dim), QUERIES, s.head_dim, lines);
    copy_group();
    copy_wait<0>();
    __syncthreads();
    lines_of_a<HEAD>(from_above, tiles, warp * 16);
    __syncthreads();

    u64 position[2], document[2];
    float of_softmax[2], of_outputs[2], values[HEAD / 8][4];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 i = first + warp * 16 + lane / 4 + half * 8, row = ((u64)own.batch * s.heads + own.head) * s.q_len + i;
        bool there = i < length;
        position[half] = before + i;
        document[half] = there && documents ? documents[own.batch * s.q_len + i] : 0;
        of_softmax[half] = there ? lse[row] : 0.0f;
        of_outputs[half] = there ? delta[row] : 0.0f;
    }
#pragma unroll
    for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) values[j][n] = 0.0f;
    u32 count = end > start ? (u32)((end - start + KEYS - 1) / KEYS) : 0;
    u32 k_width = copy_width(k.at, s.k_columns), v_width = copy_width(v.at, s.v_columns);
    for (u32 filled = 0; filled <= count; filled++) {
        if (filled < count) {
            u16* tile = tiles + filled % 2 * (2 * KEYS * HEAD);
            u64 key = start + (u64)filled * KEYS;
#pragma unroll 1
            for (u32 which = 0; which < 2; which++) {
                Keys keys = {s, own.batch, own.kv_head, key, end, which ? s.v_columns : s.k_columns};
                fill_lines<HEAD, false>(tile + which * KEYS * HEAD, which ? v : k, which ? v_width : k_width, KEYS, s.head_dim, keys);
            }
        }
        copy_group();
        if (filled == 0) continue;
        copy_wait<1>();
        __syncthreads();
        u64 tile_first = start + (u64)(filled - 1) * KEYS;
        const u16 *of_keys = tiles + (filled - 1) % 2 * (2 * KEYS * HEAD), *of_values = of_keys + KEYS * HEAD;
#pragma unroll
        for (u32 half_tile = 0; half_tile < KEYS; half_tile += 16) {
            float scores[2][4], products[2][4];
#pragma unroll
            for (u32 j = 0; j < 2; j++)
#pragma unroll
                for (u32 n = 0; n < 4; n++) scores[j][n] = products[j][n] = 0.0f;
#pragma unroll
            for (u32 part = 0; part < HEAD / 16; part++) {
                multiply_lines<HEAD>(scores, queries[part], of_keys, half_tile, part);
                multiply_lines<HEAD>(products, from_above[part], of_values, half_tile, part);
            }
            u32 a[4];
#pragma unroll
            for (u32 j = 0; j < 2; j++)
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    float pair[2];
#pragma unroll
                    for (u32 n = 0; n < 2; n++) {
                        u64 key = tile_first + half_tile + j * 8 + lane % 4 * 2 + n;
                        u32 at = half * 2 + n;
                        bool seen = key >= low && key < end && sees(s, position[half], key, document[half]);
                        pair[n] = seen ? pair_of(s, scores[j][at], products[j][at], of_softmax[half], of_outputs[half], 0).gradient : 0.0f;
                    }
                    a[j * 2 + half] = pair_of_16_bits<false>(pair[0], pair[1]);
                }
            multiply_columns<HEAD>(values, a, of_keys, half_tile);
        }
        __syncthreads();
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 i = first + warp * 16 + lane / 4 + half * 8;
        if (i >= length) continue;
        put_lines<HEAD>(dq, values, half, 1.0f, ((own.batch * s.q_len + i) * s.heads + own.head) * s.head_dim, s.head_dim, accumulate);
    }
}

// Keys of a block. Two of its warps have the same 16 of them, and each of the two one half of the queries of a tile.
#define OWN_KEYS 64

// dk, dv (+)= the gradients of 64 keys and their values, over all queries of all heads that they serve.
template <u32 HEAD>
__device__ inline void gradients_of_keys(u16* tiles, View q, View k, View v, const u32* documents, const float* lse,
                                         const float* delta, View dout, View dk, View dv, u32 accumulate, const Shape& s) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, matrix = lane / 8, line = lane % 8;
    u32 kv_heads = (u32)s.kv_heads, group = (u32)s.heads / kv_heads, kv_head = blockIdx.x % kv_heads;
    u32 batch = blockIdx.x / kv_heads % (u32)s.batch, length = (u32)s.q_len, own_row = warp / 2 * 16, own_query = warp % 2 * 16;
    // The first keys are seen by most queries.
    u64 index = (u64)(blockIdx.x / kv_heads / (u32)s.batch) * OWN_KEYS, first = s.first + index;
    u64 before = s.kv_len - s.q_len, end = s.first + s.kv_capacity;
    end = end < s.kv_len ? end : s.kv_len;
    u16 *of_keys = tiles, *of_values = tiles + OWN_KEYS * HEAD, *of_queries = of_values + OWN_KEYS * HEAD;
    u16* from_above = of_queries + KEYS * HEAD;
    // Keys and values are whole numbers here: their columns are those of the head.
    Keys own_lines = {s, batch, kv_head, first, end, s.head_dim};
#pragma unroll 1
    for (u32 which = 0; which < 2; which++) {
        View x = which ? v : k;
        fill_lines<HEAD, false>(which ? of_values : of_keys, x, copy_width(x.at, s.head_dim), OWN_KEYS, s.head_dim, own_lines);
    }
    float of_key[HEAD / 8][4], of_value[HEAD / 8][4];
#pragma unroll
    for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) of_key[j][n] = of_value[j][n] = 0.0f;
    u32 q_width = copy_width(q.at, s.head_dim), d_width = copy_width(dout.at, s.head_dim);
    u32 first_query = first > before ? (u32)(first - before) / KEYS * KEYS : 0;
    for (u32 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (u32 tile = first_query; tile < length; tile += KEYS) {
            Queries lines = {batch, head, tile, s.q_len, s.heads, s.head_dim};
#pragma unroll 1
            for (u32 which = 0; which < 2; which++)
                fill_lines<HEAD, false>(which ? from_above : of_queries, which ? dout : q, which ? d_width : q_width, KEYS, s.head_dim,
                                         lines);
            copy_group();
            copy_wait<0>();
            __syncthreads();
            float scores[2][4], products[2][4];
#pragma unroll
            for (u32 j = 0; j < 2; j++)
#pragma unroll
                for (u32 n = 0; n < 4; n++) scores[j][n] = products[j][n] = 0.0f;
#pragma unroll
            for (u32 part = 0; part < HEAD / 16; part++) {
                u32 a[4], at = place_in_lines(HEAD, own_row + matrix % 2 * 8 + line, part * 2 + matrix / 2);
                load_matrices(a, of_keys + at);
                multiply_lines<HEAD>(scores, a, of_queries, own_query, part);
                load_matrices(a, of_values + at);
                multiply_lines<HEAD>(products, a, from_above, own_query, part);
            }
            u32 probabilities[4], gradients[4];
#pragma unroll
            for (u32 j = 0; j < 2; j++)
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    Pair pair[2];
#pragma unroll
                    for (u32 n = 0; n < 2; n++) {
                        u64 key = first + own_row + lane / 4 + half * 8;
                        u32 i = tile + own_query + j * 8 + lane % 4 * 2 + n, at = half * 2 + n;
                        pair[n] = {0.0f, 0.0f};
                        if (i >= length || key >= end) continue;
                        if (!sees(s, before + i, key, documents ? documents[batch * s.q_len + i] : 0)) continue;
                        u64 row = ((u64)batch * s.heads + head) * s.q_len + i;
                        pair[n] = pair_of(s, scores[j][at], products[j][at], lse[row], delta[row], 0);
                    }
                    probabilities[j * 2 + half] = pair_of_16_bits<false>(pair[0].probability, pair[1].probability);
                    gradients[j * 2 + half] = pair_of_16_bits<false>(pair[0].gradient, pair[1].gradient);
                }
            multiply_columns<HEAD>(of_value, probabilities, from_above, own_query);
            multiply_columns<HEAD>(of_key, gradients, of_queries, own_query);
            __syncthreads();
        }
    }
    // The warps of the second half of the queries hand over their sums.
    float* handed = (float*)tiles;
#pragma unroll
    for (u32 which = 0; which < 2; which++) {
        float(*sums)[4] = which ? of_value : of_key;
#pragma unroll
        for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                float* at = handed + ((warp / 2 * (HEAD / 8) + j) * 4 + n) * WARP + lane;
                if (warp % 2) *at = sums[j][n];
            }
        __syncthreads();
#pragma unroll
        for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                const float* at = handed + ((warp / 2 * (HEAD / 8) + j) * 4 + n) * WARP + lane;
                if (!(warp % 2)) sums[j][n] += *at;
            }
        __syncthreads();
    }
    if (warp % 2) return;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 own = index + own_row + lane / 4 + half * 8;
        if (own >= s.kv_capacity) continue;
        u64 place = ((batch * s.kv_capacity + own) * s.kv_heads + kv_head) * s.head_dim;
        put_lines<HEAD>(dk, of_key, half, 1.0f, place, s.head_dim, accumulate);
        put_lines<HEAD>(dv, of_value, half, 1.0f, place, s.head_dim, accumulate);
    }
}

#define GRADIENTS_OF_QUERIES_80(name, depth)                                                                                \
    KERNEL(name, const float* flag, View q, View k, View v, const u32* documents, const float* lse, const float* delta,      \
           View dout, View dq, u32 accumulate, Shape s) {                                                                    \
        SHARED(u16, tiles);                                                                                                  \
        if (skipped(flag)) return;                                                                                           \
        gradients_of_queries<depth>(tiles, q, k, v, documents, lse, delta, dout, dq, accumulate, s);                         \
    }
#define GRADIENTS_OF_KEYS_80(name, depth)                                                                                   \
    KERNEL(name, const float* flag, View q, View k, View v, const u32* documents, const float* lse, const float* delta,      \
           View dout, View dk, View dv, u32 accumulate, Shape s) {                                                           \
        SHARED(u16, tiles);                                                                                                  \
        if (skipped(flag)) return;                                                                                           \
        gradients_of_keys<depth>(tiles, q, k, v, documents, lse, delta, dout, dk, dv, accumulate, s);                        \
    }

GRADIENTS_OF_QUERIES_80(attention_bf16_queries_64, 64)
GRADIENTS_OF_QUERIES_80(attention_bf16_queries_128, 128)
GRADIENTS_OF_KEYS_80(attention_bf16_keys_64, 64)
GRADIENTS_OF_KEYS_80(attention_bf16_keys_128, 128)

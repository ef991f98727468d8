// Causal attention and its gradients on the tensor cores of compute capability 9.0, by tiles (FlashAttention-2, Dao 2023;
// FlashAttention-3, Shah et al. 2024): products of whole tiles by two warpgroups, which a third one brings the tiles.
//
// A block has 128 queries of a head, or 128 keys, each multiplying warpgroup 64 of them. Heads of up to HEAD numbers are filled up
// with zeros; a tile has a box for each 64 of them. Exponentials are powers of two.

#define LINES_90 128
#define KEYS_90 128
#define NARROW_90 64
#define LOG2_E 1.4426950408889634f

// A box for each 64 numbers of a head, of so many lines.
template <u32 HEAD>
__device__ inline void begin_lines(u8* tile, const TensorMap* map, u32 lines, u32 head, u64 line, u32 batch, u64* barrier) {
    for (u32 box = 0; box < HEAD / 64; box++)
        lines_begin(tile + box * lines * 128, map, box * 64, head, (u32)line, batch, barrier);
}

// Where fragment `k` along lines of tiles of so many lines lies behind the first one: four to a box.
__device__ inline u64 along_head(u32 k, u32 lines) { return (u64)(k / 4 * (lines * 128 >> 4) + k % 4 * 2); }

// sums += a b^T over the numbers of heads.
template <u32 HEAD, u32 COLUMNS>
__device__ inline void multiply_heads(float* sums, u64 a, u32 a_lines, u64 b, u32 b_lines) {
#pragma unroll
    for (u32 k = 0; k < HEAD / 16; k++) multiply_tiles<COLUMNS, false, false>(sums, a + along_head(k, a_lines), b + along_head(k, b_lines));
}

// sums += a b over so many lines of b.
template <u32 HEAD, u32 LINES> __device__ inline void multiply_lines_90(float* sums, const u32* a, u64 b) {
#pragma unroll
    for (u32 k = 0; k < LINES / 16; k++) multiply_rows<HEAD>(sums, a + 4 * k, b + k * 128);
}

// What a thread knows of its two rows of queries.
struct RowsOfQueries {
    u64 position[2], document[2], low[2];
    bool there[2];
};

__device__ inline RowsOfQueries rows_of_queries(const Shape& s, const u32* documents, const Block& own, u32 row) {
    RowsOfQueries rows;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 i = own.first + row + half * 8;
        rows.there[half] = i < s.q_len;
        rows.position[half] = s.kv_len - s.q_len + i;
        rows.document[half] = rows.there[half] && documents ? documents[own.batch * s.q_len + i] : 0;
        rows.low[half] = earliest(s, rows.position[half], rows.document[half]);
    }
    return rows;
}

// Whether both rows see all keys from `first` up to `end`.
__device__ inline bool see_all(const Shape& s, const RowsOfQueries& rows, const Block& own, u64 first, u64 end) {
    return s.block == 0 && end <= own.end && first >= own.low && end <= rows.position[0] + 1 && first >= rows.low[0] &&
           end <= rows.position[1] + 1 && first >= rows.low[1];
}

__device__ inline bool sees_one(const Shape& s, const RowsOfQueries& rows, const Block& own, u32 half, u64 key) {
    u64 position = half ? rows.position[1] : rows.position[0], document = half ? rows.document[1] : rows.document[0];
    return key >= own.low && key < own.end && sees(s, position, key, document);
}

// Which of 32 of a thread's scores are seen: bit 4 j + n is of number n of columns `first + j`.
template <class Sees> __device__ inline u32 seen_of(u32 first, const Sees& sees) {
    u32 seen = 0;
#pragma unroll 1
    for (u32 i = 0; i < 32; i++) seen |= (u32)sees(first + i / 4, i % 4) << i;
    return seen;
}

// What products are to be multiplied by: where they are capped, they become what the cap is multiplied by first.
template <u32 COUNT> __device__ inline float cap_scores(float* scores, const Shape& s) {
    if (!(s.soft_cap > 0.0f)) return s.scale;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) scores[i] = tanhf(scores[i] * s.scale / s.soft_cap);
    return s.soft_cap;
}

// The first key of the first tile, and how many tiles there are.
__device__ inline TilesOfKeys tiles_of_90(const Shape& s, const Block& own, u32 keys) {
    u64 start = own.low / keys * keys;
    if (start < s.first) start = s.first;
    return {start, own.end > start ? (u32)((own.end - start + keys - 1) / keys) : 0};
}

template <u32 HEAD>
__device__ inline void attention_of_tiles_90(u8* tiles, const TensorMap* of_q, const TensorMap* of_k, const TensorMap* of_v,
                                             const u32* documents, View out, float* lse, float* sums, float* mosts, float* totals,
                                             const Shape& s) {
    const u32 query_bytes = LINES_90 * HEAD * 2, key_bytes = KEYS_90 * HEAD * 2, places = 2;
    u8 *of_keys = tiles + query_bytes, *of_values = of_keys + places * key_bytes;
    u64 *lows = (u64*)(of_values + places * key_bytes), *queries_full = lows + QUERIES, *keys_full = queries_full + 1;
    u64 *keys_empty = keys_full + places, *values_full = keys_empty + places, *values_empty = values_full + places;
    if (threadIdx.x == 0) {
        barrier_begin(queries_full, 1);
        for (u32 place = 0; place < places; place++) {
            barrier_begin(keys_full + place, 1);
            barrier_begin(values_full + place, 1);
            barrier_begin(keys_empty + place, 8);
            barrier_begin(values_empty + place, 8);
        }
        barriers_begun();
    }
    Block own = block_of(s, documents, lows);
    if (sums) own = within_piece(s, own);
    TilesOfKeys all = tiles_of_90(s, own, KEYS_90);
    __syncthreads();
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, place = 0, phase = 0;
    if (warp < 4) {
        registers_less<24>();
        if (threadIdx.x > 0) return;
        barrier_expect(queries_full, query_bytes);
        begin_lines<HEAD>(tiles, of_q, LINES_90, own.head, own.first, own.batch, queries_full);
        for (u32 number = 0; number < all.count; number++) {
            u64 line = all.start + (u64)number * KEYS_90 - s.first;
            barrier_wait(keys_empty + place, phase ^ 1);
            barrier_expect(keys_full + place, key_bytes);
            begin_lines<HEAD>(of_keys + place * key_bytes, of_k, KEYS_90, (u32)own.kv_head, line, own.batch, keys_full + place);
            barrier_wait(values_empty + place, phase ^ 1);
            barrier_expect(values_full + place, key_bytes);
            begin_lines<HEAD>(of_values + place * key_bytes, of_v, KEYS_90, (u32)own.kv_head, line, own.batch, values_full + place);
            place ^= 1;
            phase ^= place == 0;
        }
        return;
    }
    registers_more<240>();
    u32 group = warp / 4 - 1, row = group * 64 + warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
    RowsOfQueries rows = rows_of_queries(s, documents, own, row);
    float most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f}, values[HEAD / 8][4];
    clear<HEAD / 8>(values);
    if (sums) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u64 i = own.first + row + half * 8, line = ((u64)own.batch * s.heads + own.head) * s.q_len + i;
            if (!rows.there[half]) continue;
            most[half] = mosts[line];
            total[half] = totals[line];
            u64 at = ((own.batch * s.q_len + i) * s.heads + own.head) * s.head_dim;
#pragma unroll
            for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
                for (u32 n = 0; n < 2; n++)
                    if (j * 8 + column + n < s.head_dim) values[j][half * 2 + n] = sums[at + j * 8 + column + n];
        }
    }
    u64 queries = tile_descriptor(tiles + group * 64 * 128, 16);
    barrier_wait(queries_full, 0);
    for (u32 number = 0; number < all.count; number++) {
        u64 first = all.start + (u64)number * KEYS_90;
        float scores[KEYS_90 / 8][4];
        clear<KEYS_90 / 8>(scores);
        barrier_wait(keys_full + place, phase);
        products_begin();
        multiply_heads<HEAD, KEYS_90>(scores[0], queries, LINES_90, tile_descriptor(of_keys + place * key_bytes, 16), KEYS_90);
        products_group();
        products_wait<0, KEYS_90 / 2>(scores[0]);
        if (lane == 0) barrier_arrive(keys_empty + place);
        float factor = cap_scores<KEYS_90 / 2>(scores[0], s), higher[2] = {most[0], most[1]};
#pragma unroll
        for (u32 j = 0; j < KEYS_90 / 8; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) scores[j][n] *= factor;
        if (!see_all(s, rows, own, first, first + KEYS_90)) {
            auto sees_number = [&](u32 j, u32 n) { return sees_one(s, rows, own, n / 2, first + j * 8 + column + n % 2); };
            u32 seen[2] = {seen_of(0, sees_number), seen_of(8, sees_number)};
#pragma unroll
            for (u32 j = 0; j < KEYS_90 / 8; j++)
#pragma unroll
                for (u32 n = 0; n < 4; n++)
                    if (!(seen[j / 8] >> (j % 8 * 4 + n) & 1)) scores[j][n] = -INFINITE;
        }
#pragma unroll
        for (u32 j = 0; j < KEYS_90 / 8; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) higher[n / 2] = scores[j][n] > higher[n / 2] ? scores[j][n] : higher[n / 2];
        float less[2], sum[2] = {0.0f, 0.0f}, base[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            higher[half] = largest_of_four(higher[half]);
            float from = higher[half] == -INFINITE ? 0.0f : higher[half];
            less[half] = exp2_of((most[half] - from) * LOG2_E);
            base[half] = from * LOG2_E;
            most[half] = higher[half];
        }
        u32 weights[KEYS_90 / 4];
#pragma unroll
        for (u32 j = 0; j < KEYS_90 / 8; j++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float x = exp2_of(scores[j][half * 2] * LOG2_E - base[half]), y = exp2_of(scores[j][half * 2 + 1] * LOG2_E - base[half]);
                sum[half] += x + y;
                weights[j * 2 + half] = narrow_pair(x, y);
            }
#pragma unroll
        for (u32 half = 0; half < 2; half++) total[half] = total[half] * less[half] + sum_of_four(sum[half]);
#pragma unroll
        for (u32 j = 0; j < HEAD / 8; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) values[j][n] *= less[n / 2];
        barrier_wait(values_full + place, phase);
        products_begin();
        multiply_lines_90<HEAD, KEYS_90>(values[0], weights, tile_descriptor(of_values + place * key_bytes, KEYS_90 * 128));
        products_group();
        products_wait<0, HEAD / 2>(values[0]);
        if (lane == 0) barrier_arrive(values_empty + place);
        place ^= 1;
        phase ^= place == 0;
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        if (!rows.there[half]) continue;
        u64 i = own.first + row + half * 8, line = ((u64)own.batch * s.heads + own.head) * s.q_len + i;
        View to = {(u64)sums, F32};
        put_lines<HEAD>(sums ? to : out, values, half, sums ? 1.0f : total[half],
                        ((own.batch * s.q_len + i) * s.heads + own.head) * s.head_dim, s.head_dim, 0);
        if (lane % 4) continue;
        if (sums) {
            mosts[line] = most[half];
            totals[line] = total[half];
        } else {
            lse[line] = most[half] + logf(total[half]);
        }
    }
}

// scores = probabilities, products = the gradients of scores before these were capped and scaled, but for the probability. `softmax(j, half,
// n)` is the softmax of a number in powers of two, `delta(j, half, n)` the same of what outputs add up to, which is scaled.
template <class Softmax, class Delta>
__device__ inline void gradients_of_scores(float (*scores)[4], float (*products)[4], const Shape& s, const Softmax& softmax,
                                           const Delta& delta) {
    float factor = cap_scores<NARROW_90 / 2>(scores[0], s) * LOG2_E;
    if (s.soft_cap > 0.0f)
#pragma unroll
        for (u32 i = 0; i < NARROW_90 / 2; i++) {
            float capped = scores[i / 4][i % 4], of_output = delta(i / 4, i % 4 / 2, i % 2) / s.scale;
            products[i / 4][i % 4] = (products[i / 4][i % 4] - of_output) * (1.0f - capped * capped) + of_output;
        }
#pragma unroll
    for (u32 j = 0; j < NARROW_90 / 8; j++)
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            scores[j][n] = exp2_of(scores[j][n] * factor - softmax(j, n / 2, n % 2));
            products[j][n] = products[j][n] * s.scale - delta(j, n / 2, n % 2);
        }
}

// Probabilities of what is not seen are zeros.
__device__ inline void hide_scores(float (*scores)[4], u32 seen) {
#pragma unroll
    for (u32 j = 0; j < NARROW_90 / 8; j++)
#pragma unroll
        for (u32 n = 0; n < 4; n++)
            if (!(seen >> (j * 4 + n) & 1)) scores[j][n] = 0.0f;
}

// dq (+)= the gradients of 128 queries.
template <u32 HEAD>
__device__ inline void gradients_of_queries_90(u8* tiles, const TensorMap* of_q, const TensorMap* of_k, const TensorMap* of_v,
                                               const u32* documents, const float* lse, const float* delta, const TensorMap* of_dout,
                                               View dq, u32 accumulate, const Shape& s) {
    const u32 query_bytes = LINES_90 * HEAD * 2, key_bytes = NARROW_90 * HEAD * 2, places = 3;
    u8 *of_outputs = tiles + query_bytes, *of_keys = of_outputs + query_bytes;
    u64 *lows = (u64*)(of_keys + places * 2 * key_bytes), *queries_full = lows + QUERIES, *full = queries_full + 1, *empty = full + places;
    if (threadIdx.x == 0) {
        barrier_begin(queries_full, 1);
        for (u32 place = 0; place < places; place++) {
            barrier_begin(full + place, 1);
            barrier_begin(empty + place, 8);
        }
        barriers_begun();
    }
    Block own = within_piece(s, block_of(s, documents, lows));
    TilesOfKeys all = tiles_of_90(s, own, NARROW_90);
    __syncthreads();
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, place = 0, phase = 0;
    if (warp < 4) {
        registers_less<24>();
        if (threadIdx.x > 0) return;
        barrier_expect(queries_full, 2 * query_bytes);
        begin_lines<HEAD>(tiles, of_q, LINES_90, own.head, own.first, own.batch, queries_full);
        begin_lines<HEAD>(of_outputs, of_dout, LINES_90, own.head, own.first, own.batch, queries_full);
        for (u32 number = 0; number < all.count; number++) {
            u64 line = all.start + (u64)number * NARROW_90 - s.first;
            u8* tile = of_keys + place * 2 * key_bytes;
            barrier_wait(empty + place, phase ^ 1);
            barrier_expect(full + place, 2 * key_bytes);
            begin_lines<HEAD>(tile, of_k, NARROW_90, (u32)own.kv_head, line, own.batch, full + place);
            begin_lines<HEAD>(tile + key_bytes, of_v, NARROW_90, (u32)own.kv_head, line, own.batch, full + place);
            place = place + 1 == places ? 0 : place + 1;
            phase ^= place == 0;
        }
        return;
    }
    registers_more<240>();
    u32 group = warp / 4 - 1, row = group * 64 + warp % 4 * 16 + lane / 4, column = lane % 4 * 2;
    RowsOfQueries rows = rows_of_queries(s, documents, own, row);
    float of_softmax[2], deltas[2], values[HEAD / 8][4];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 line = ((u64)own.batch * s.heads + own.head) * s.q_len + own.first + row + half * 8;
        of_softmax[half] = rows.there[half] ? lse[line] * LOG2_E : 0.0f;
        deltas[half] = rows.there[half] ? delta[line] * s.scale : 0.0f;
    }
    clear<HEAD / 8>(values);
    u64 queries = tile_descriptor(tiles + group * 64 * 128, 16), outputs = tile_descriptor(of_outputs + group * 64 * 128, 16);
    barrier_wait(queries_full, 0);
    for (u32 number = 0; number < all.count; number++) {
        u64 first = all.start + (u64)number * NARROW_90;
        const u8* tile = of_keys + place * 2 * key_bytes;
        float scores[NARROW_90 / 8][4], products[NARROW_90 / 8][4];
        clear<NARROW_90 / 8>(scores);
        clear<NARROW_90 / 8>(products);
        settle<NARROW_90 / 2>(scores[0]);
        settle<NARROW_90 / 2>(products[0]);
        barrier_wait(full + place, phase);
        products_begin();
        multiply_heads<HEAD, NARROW_90>(scores[0], queries, LINES_90, tile_descriptor(tile, 16), NARROW_90);
        multiply_heads<HEAD, NARROW_90>(products[0], outputs, LINES_90, tile_descriptor(tile + key_bytes, 16), NARROW_90);
        products_group();
        products_wait<0, NARROW_90 / 2>(scores[0]);
        products_wait<0, NARROW_90 / 2>(products[0]);
        gradients_of_scores(
            scores, products, s, [&](u32, u32 half, u32) { return of_softmax[half]; }, [&](u32, u32 half, u32) { return deltas[half]; });
        if (!see_all(s, rows, own, first, first + NARROW_90))
            hide_scores(scores, seen_of(0, [&](u32 j, u32 n) { return sees_one(s, rows, own, n / 2, first + j * 8 + column + n % 2); }));
        u32 gradients[NARROW_90 / 4];
#pragma unroll
        for (u32 j = 0; j < NARROW_90 / 8; j++)
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                gradients[j * 2 + half] = narrow_pair(scores[j][half * 2] * products[j][half * 2],
                                                      scores[j][half * 2 + 1] * products[j][half * 2 + 1]);
        products_begin();
        multiply_lines_90<HEAD, NARROW_90>(values[0], gradients, tile_descriptor(tile, NARROW_90 * 128));
        products_group();
        products_wait<0, HEAD / 2>(values[0]);
        if (lane == 0) barrier_arrive(empty + place);
        place = place + 1 == places ? 0 : place + 1;
        phase ^= place == 0;
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        if (!rows.there[half]) continue;
        u64 i = own.first + row + half * 8;
        put_lines<HEAD>(dq, values, half, 1.0f, ((own.batch * s.q_len + i) * s.heads + own.head) * s.head_dim, s.head_dim, accumulate);
    }
}

// dk, dv (+)= the gradients of 128 keys and their values, over all queries of all heads that they serve.
template <u32 HEAD>
__device__ inline void gradients_of_keys_90(u8* tiles, const TensorMap* of_q, const TensorMap* of_k, const TensorMap* of_v,
                                            const u32* documents, const float* lse, const float* delta, const TensorMap* of_dout,
                                            View dk, View dv, u32 accumulate, const Shape& s) {
    const u32 key_bytes = LINES_90 * HEAD * 2, query_bytes = NARROW_90 * HEAD * 2, places = 2;
    u8 *of_values = tiles + key_bytes, *of_queries = of_values + key_bytes;
    // Of each warpgroup, by turns: what the softmax and the outputs of a tile's queries add up to.
    float* numbers = (float*)(of_queries + places * 2 * query_bytes);
    u64 *keys_full = (u64*)(numbers + 2 * 2 * 2 * NARROW_90), *full = keys_full + 1, *empty = full + places, *numbers_full = empty + places;
    if (threadIdx.x == 0) {
        barrier_begin(keys_full, 1);
        for (u32 place = 0; place < places; place++) {
            barrier_begin(full + place, 1);
            barrier_begin(empty + place, 8);
        }
        barrier_begin(numbers_full, 128);
        barrier_begin(numbers_full + 1, 128);
        barriers_begun();
    }
    __syncthreads();
    u32 kv_heads = (u32)s.kv_heads, heads = (u32)s.heads / kv_heads, kv_head = blockIdx.x % kv_heads;
    u32 batch = blockIdx.x / kv_heads % (u32)s.batch, length = (u32)s.q_len;
    // The first keys are seen by most queries.
    u64 index = (u64)(blockIdx.x / kv_heads / (u32)s.batch) * LINES_90, first = s.first + index;
    u64 before = s.kv_len - s.q_len, end = s.first + s.kv_capacity;
    end = end < s.kv_len ? end : s.kv_len;
    u64 last = (first + LINES_90 < end ? first + LINES_90 : end) - 1;
    u32 first_query = first > before ? (u32)(first - before) / NARROW_90 * NARROW_90 : 0, end_query = length;
    if (s.window < s.kv_len && last + s.window < before + length) end_query = last + s.window > before ? (u32)(last + s.window - before) : 0;
    if (first >= end) end_query = 0;
    u32 warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, place = 0, phase = 0;
    if (warp < 4) {
        registers_less<24>();
        if (threadIdx.x > 0) return;
        barrier_expect(keys_full, 2 * key_bytes);
        begin_lines<HEAD>(tiles, of_k, LINES_90, kv_head, index, batch, keys_full);
        begin_lines<HEAD>(of_values, of_v, LINES_90, kv_head, index, batch, keys_full);
        for (u32 head = kv_head * heads; head < (kv_head + 1) * heads; head++)
            for (u32 query = first_query; query < end_query; query += NARROW_90) {
                u8* tile = of_queries + place * 2 * query_bytes;
                barrier_wait(empty + place, phase ^ 1);
                barrier_expect(full + place, 2 * query_bytes);
                begin_lines<HEAD>(tile, of_q, NARROW_90, head, query, batch, full + place);
                begin_lines<HEAD>(tile + query_bytes, of_dout, NARROW_90, head, query, batch, full + place);
                place ^= 1;
                phase ^= place == 0;
            }
        return;
    }
    registers_more<240>();
    u32 group = warp / 4 - 1, thread = threadIdx.x % 128, row = group * 64 + warp % 4 * 16 + lane / 4, column = lane % 4 * 2, turn = 0;
    float of_key[HEAD / 8][4], of_value[HEAD / 8][4];
    clear<HEAD / 8>(of_key);
    clear<HEAD / 8>(of_value);
    u64 keys = tile_descriptor(tiles + group * 64 * 128, 16), own_values = tile_descriptor(of_values + group * 64 * 128, 16);
    // What all of a warp's keys have in common.
    u64 highest = first + group * 64 + warp % 4 * 16 + 15;
    // A number of a tile's queries, read while the tile before it is multiplied.
    auto number_of = [&](u32 head, u32 query) {
        u32 i = query + thread % NARROW_90;
        u64 line = ((u64)batch * s.heads + head) * s.q_len + i;
        if (i >= length || head >= s.heads) return 0.0f;
        return thread < NARROW_90 ? lse[line] * LOG2_E : delta[line] * s.scale;
    };
    float ahead = number_of(kv_head * heads, first_query);
    barrier_wait(keys_full, 0);
    for (u32 head = kv_head * heads; head < (kv_head + 1) * heads; head++)
        for (u32 query = first_query; query < end_query; query += NARROW_90) {
            float* own = numbers + (group * 2 + turn % 2) * 2 * NARROW_90;
            own[thread] = ahead;
            barrier_arrive(numbers_full + group);
            bool last_one = query + NARROW_90 >= end_query;
            ahead = number_of(last_one ? head + 1 : head, last_one ? first_query : query + NARROW_90);
            const u8* tile = of_queries + place * 2 * query_bytes;
            float scores[NARROW_90 / 8][4], products[NARROW_90 / 8][4];
            clear<NARROW_90 / 8>(scores);
            clear<NARROW_90 / 8>(products);
            settle<NARROW_90 / 2>(scores[0]);
            settle<NARROW_90 / 2>(products[0]);
            barrier_wait(full + place, phase);
            products_begin();
            multiply_heads<HEAD, NARROW_90>(scores[0], keys, LINES_90, tile_descriptor(tile, 16), NARROW_90);
            multiply_heads<HEAD, NARROW_90>(products[0], own_values, LINES_90, tile_descriptor(tile + query_bytes, 16), NARROW_90);
            products_group();
            barrier_wait(numbers_full + group, turn % 2);
            products_wait<0, NARROW_90 / 2>(scores[0]);
            products_wait<0, NARROW_90 / 2>(products[0]);
            bool whole = s.block == 0 && !documents && s.window >= s.kv_len && query + NARROW_90 <= length && highest < end &&
                         highest <= before + query;
            const float* of_column = own + column;
            gradients_of_scores(
                scores, products, s, [&](u32 j, u32, u32 n) { return of_column[j * 8 + n]; },
                [&](u32 j, u32, u32 n) { return of_column[NARROW_90 + j * 8 + n]; });
            if (!whole)
                hide_scores(scores, seen_of(0, [&](u32 j, u32 n) {
                                u32 i = query + j * 8 + column + n % 2;
                                u64 key = first + row + n / 2 * 8;
                                return i < length && key < end && sees(s, before + i, key, documents ? documents[batch * s.q_len + i] : 0);
                            }));
            u32 probabilities[NARROW_90 / 4], gradients[NARROW_90 / 4];
#pragma unroll
            for (u32 j = 0; j < NARROW_90 / 8; j++)
#pragma unroll
                for (u32 half = 0; half < 2; half++) {
                    float x = scores[j][half * 2], y = scores[j][half * 2 + 1];
                    probabilities[j * 2 + half] = narrow_pair(x, y);
                    gradients[j * 2 + half] = narrow_pair(x * products[j][half * 2], y * products[j][half * 2 + 1]);
                }
            products_begin();
            multiply_lines_90<HEAD, NARROW_90>(of_value[0], probabilities, tile_descriptor(tile + query_bytes, NARROW_90 * 128));
            multiply_lines_90<HEAD, NARROW_90>(of_key[0], gradients, tile_descriptor(tile, NARROW_90 * 128));
            products_group();
            products_wait<0, HEAD / 2>(of_value[0]);
            products_wait<0, HEAD / 2>(of_key[0]);
            if (lane == 0) barrier_arrive(empty + place);
            place ^= 1;
            phase ^= place == 0;
            turn++;
        }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 own = index + row + half * 8;
        if (own >= s.kv_capacity) continue;
        u64 at = ((batch * s.kv_capacity + own) * s.kv_heads + kv_head) * s.head_dim;
        put_lines<HEAD>(dk, of_key, half, 1.0f, at, s.head_dim, accumulate);
        put_lines<HEAD>(dv, of_value, half, 1.0f, at, s.head_dim, accumulate);
    }
}

#define ATTENTION_90(name, depth)                                                                                            \
    KERNEL_90(name, const float* flag, MAP_PARAMETER q, MAP_PARAMETER k, MAP_PARAMETER v, const u32* documents, View out,     \
              float* lse, float* sums, float* mosts, float* totals, Shape s) {                                                \
        SHARED_TILES(tiles);                                                                                                  \
        if (skipped(flag)) return;                                                                                            \
        attention_of_tiles_90<depth>(tiles, &q, &k, &v, documents, out, lse, sums, mosts, totals, s);                         \
    }
#define GRADIENTS_OF_QUERIES_90(name, depth)                                                                                 \
    KERNEL_90(name, const float* flag, MAP_PARAMETER q, MAP_PARAMETER k, MAP_PARAMETER v, const u32* documents,               \
              const float* lse, const float* delta, MAP_PARAMETER dout, View dq, u32 accumulate, Shape s) {                   \
        SHARED_TILES(tiles);                                                                                                  \
        if (skipped(flag)) return;                                                                                            \
        gradients_of_queries_90<depth>(tiles, &q, &k, &v, documents, lse, delta, &dout, dq, accumulate, s);                   \
    }
#define GRADIENTS_OF_KEYS_90(name, depth)                                                                                    \
    KERNEL_90(name, const float* flag, MAP_PARAMETER q, MAP_PARAMETER k, MAP_PARAMETER v, const u32* documents,               \
              const float* lse, const float* delta, MAP_PARAMETER dout, View dk, View dv, u32 accumulate, Shape s) {          \
        SHARED_TILES(tiles);                                                                                                  \
        if (skipped(flag)) return;                                                                                            \
        gradients_of_keys_90<depth>(tiles, &q, &k, &v, documents, lse, delta, &dout, dk, dv, accumulate, s);                  \
    }

ATTENTION_90(attention_90_64, 64)
ATTENTION_90(attention_90_128, 128)
GRADIENTS_OF_QUERIES_90(attention_90_queries_64, 64)
GRADIENTS_OF_QUERIES_90(attention_90_queries_128, 128)
GRADIENTS_OF_KEYS_90(attention_90_keys_64, 64)
GRADIENTS_OF_KEYS_90(attention_90_keys_128, 128)

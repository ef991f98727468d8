// Gradients of attention on tensor cores: scores are computed again, tile by tile, from the softmax's sums (FlashAttention-2, Dao 2023).

// dq (+)= the gradients of 128 queries.
template <u32 HEAD>
__device__ inline void gradients_of_queries(u16* tiles, View q, View k, View v, const u32* documents, const float* lse,
                                            const float* delta, View dout, View dq, u32 accumulate, const Shape& s) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    // The keys may be a piece of all.
    Block own = within_piece(s, block_of(s, documents, (u64*)tiles));
    u32 length = (u32)s.q_len, first = own.first;
    u64 before = s.kv_len - s.q_len;
    TilesOfKeys all = tiles_of(own);
    u32 queries[HEAD / 16][4], from_above[HEAD / 16][4];
    queries_of_block<HEAD>(queries, tiles, q, own, s);
    queries_of_block<HEAD>(from_above, tiles, dout, own, s);

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
    clear<HEAD / 8>(values);
    for (u32 begun = 0; begun <= all.count; begun++) {
        begin_tile<HEAD, false>(tiles, k, v, own, all, begun, s);
        if (begun == 0) continue;
        u32 number = begun - 1;
        copy_wait<1>();
        __syncthreads();
        u64 tile_first = all.start + (u64)number * KEYS;
        const u16 *of_keys = place_of_tile<HEAD>(tiles, number), *of_values = of_keys + KEYS * HEAD;
#pragma unroll
        for (u32 half_tile = 0; half_tile < KEYS; half_tile += 16) {
            float scores[2][4], products[2][4];
            clear<2>(scores);
            clear<2>(products);
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
                        bool seen = key >= own.low && key < own.end && sees(s, position[half], key, document[half]);
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
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 kv_heads = (u32)s.kv_heads, group = (u32)s.heads / kv_heads, kv_head = blockIdx.x % kv_heads;
    u32 batch = blockIdx.x / kv_heads % (u32)s.batch, length = (u32)s.q_len, own_row = warp / 2 * 16, own_query = warp % 2 * 16;
    // The first keys are seen by most queries.
    u64 index = (u64)(blockIdx.x / kv_heads / (u32)s.batch) * OWN_KEYS, first = s.first + index;
    u64 before = s.kv_len - s.q_len, end = s.first + s.kv_capacity;
    end = end < s.kv_len ? end : s.kv_len;
    u16 *of_keys = tiles, *of_values = tiles + OWN_KEYS * HEAD, *of_queries = of_values + OWN_KEYS * HEAD;
    u16* from_above = of_queries + KEYS * HEAD;
    // Keys and values are of plain types here: their columns are those of the head.
    Keys own_lines = {s, batch, kv_head, first, end, s.head_dim};
#pragma unroll 1
    for (u32 which = 0; which < 2; which++) {
        View x = which ? v : k;
        fill_lines<HEAD, false>(which ? of_values : of_keys, x, copy_width(x.at, s.head_dim), OWN_KEYS, s.head_dim, own_lines);
    }
    float of_key[HEAD / 8][4], of_value[HEAD / 8][4];
    clear<HEAD / 8>(of_key);
    clear<HEAD / 8>(of_value);
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
            clear<2>(scores);
            clear<2>(products);
#pragma unroll
            for (u32 part = 0; part < HEAD / 16; part++) {
                u32 a[4];
                a_along(a, of_keys, HEAD, own_row, part * 16);
                multiply_lines<HEAD>(scores, a, of_queries, own_query, part);
                a_along(a, of_values, HEAD, own_row, part * 16);
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

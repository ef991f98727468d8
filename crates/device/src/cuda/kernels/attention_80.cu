// Causal attention by tiles on tensor cores (FlashAttention-2, Dao 2023), sums and softmax in f32.
//
// A block goes over tiles of 32 keys in order, of which the next one is on its way while one is multiplied. Scores stay in registers:
// what a product leaves there is what the next one asks for.

#define TILES_OF_KEYS (KEYS / 8)

template <u32 HEAD>
__device__ inline void attention_of_tiles(u16* tiles, View q, View k, View v, const u32* documents, View out, float* lse,
                                          float* sums, float* mosts, float* totals, const Shape& s) {
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    Block own = block_of(s, documents, (u64*)tiles);
    // The keys may be a piece of all.
    if (sums) own = within_piece(s, own);
    u32 length = (u32)s.q_len, head = own.head, batch = own.batch, first = own.first;
    u64 before = s.kv_len - s.q_len;
    TilesOfKeys all = tiles_of(own);
    u32 queries[HEAD / 16][4];
    queries_of_block<HEAD>(queries, tiles, q, own, s);

    u64 position[2], document[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u64 i = first + warp * 16 + lane / 4 + half * 8;
        position[half] = before + i;
        document[half] = i < length && documents ? documents[batch * s.q_len + i] : 0;
    }
    float most[2] = {-INFINITE, -INFINITE}, total[2] = {0.0f, 0.0f}, values[HEAD / 8][4];
    clear<HEAD / 8>(values);
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
    for (u32 begun = 0; begun <= all.count; begun++) {
        begin_tile<HEAD, true>(tiles, k, v, own, all, begun, s);
        if (begun == 0) continue;
        u32 number = begun - 1;
        copy_wait<1>();
        __syncthreads();
        u64 tile_first = all.start + (u64)number * KEYS;
        const u16 *of_keys = place_of_tile<HEAD>(tiles, number), *of_values = of_keys + KEYS * HEAD;
        float scores[TILES_OF_KEYS][4];
        clear<TILES_OF_KEYS>(scores);
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
                bool seen = key >= own.low && key < own.end && sees(s, position[n / 2], key, document[n / 2]);
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

// Causal attention with grouped heads, forward and backward; and writing to its cache.
//
// A block has one query of one head, or one key of one key head in the gradient of keys and values. It goes over tiles of keys, or
// of queries, in order: no sum depends on the schedule. What a query sees is decided key by key.

// Keys or queries that are taken together: one for each thread.
#define TOGETHER THREADS
// Values of a head that a thread adds up at most: heads are no wider than PARTS * THREADS.
#define PARTS 3

// A query, or what lies like one.
__device__ inline float query_value(const Shape& s, View x, u64 batch, u64 i, u64 head, u64 d) {
    return narrowed(s, load_float(x, ((batch * s.q_len + i) * s.heads + head) * s.head_dim + d));
}

// A query of a head: its row among scores, its place among queries, and what it may see. Where its keys and values lie in pages, those
// of its sequence.
struct Query {
    u64 batch, kv_head, position, document, row, place;
    const u32* pages;
    u64 page;
};

// Where the head of a key that the query sees begins.
__device__ inline u64 key_of(const Shape& s, const Query& own, u64 key, u64 columns) {
    if (!own.pages) return key_place(s, own.batch, key, own.kv_head, columns);
    u32 number = (u32)key / (u32)own.page, within = (u32)key - number * (u32)own.page;
    return ((own.pages[number] * own.page + within) * s.kv_heads + own.kv_head) * columns;
}

// What a query has of the keys so far: `sums` and what is beside them are read and written where they are given, else results are finished.
__device__ inline void attend(float* all, const Query& own, View q, View k, View v, View out, float* lse, float* probabilities,
                              float* sums, float* mosts, float* totals, const Shape& s) {
    float *scratch = all, *weights = all + THREADS, *query = weights + TOGETHER;
    u64 position = own.position, document = own.document, row = own.row, place = own.place;
    EACH_OF_BLOCK(d, s.head_dim) query[d] = narrowed(s, load_float(q, place + d));
    __syncthreads();
    float most = sums ? mosts[row] : -INFINITE, total = sums ? totals[row] : 0.0f, values[PARTS];
    for (u32 part = 0; part < PARTS; part++) {
        u64 d = threadIdx.x + part * THREADS;
        values[part] = sums && d < s.head_dim ? sums[place + d] : 0.0f;
    }
    u64 low = earliest(s, position, document), end = position + 1;
    if (sums) {
        low = low > s.first ? low : s.first;
        end = end < s.first + s.kv_capacity ? end : s.first + s.kv_capacity;
    }
    for (u64 tile = low / TOGETHER * TOGETHER; tile < end; tile += TOGETHER) {
        u64 key = tile + threadIdx.x;
        bool seen = key >= low && key < end && sees(s, position, key, document);
        float score = -INFINITE;
        if (seen) {
            u64 at = key_of(s, own, key, s.k_columns);
            float product = 0.0f;
            for (u64 d = 0; d < s.head_dim; d++) product += query[d] * narrowed(s, load_cached(k, at + d));
            score = score_of(s, product);
        }
        float higher = block_largest(score, scratch);
        if (most > higher) higher = most;
        float weight = seen ? expf(score - higher) : 0.0f;
        float sum = block_sum(weight, scratch);
        // Of a tile of which nothing is seen, nothing changes.
        if (higher == -INFINITE) continue;
        weights[threadIdx.x] = narrowed(s, weight);
        __syncthreads();
        float less = most == -INFINITE ? 0.0f : expf(most - higher);
        total = total * less + sum;
        most = higher;
        u64 from = tile < low ? low - tile : 0, to = end - tile < TOGETHER ? end - tile : TOGETHER;
        for (u32 part = 0; part < PARTS; part++) {
            u64 d = threadIdx.x + part * THREADS;
            if (d >= s.head_dim) continue;
            float value = values[part] * less;
            for (u64 t = from; t < to; t++) {
                if (weights[t] == 0.0f) continue;
                value += weights[t] * narrowed(s, load_cached(v, key_of(s, own, tile + t, s.v_columns) + d));
            }
            values[part] = value;
        }
        __syncthreads();
    }
    for (u32 part = 0; part < PARTS; part++) {
        u64 d = threadIdx.x + part * THREADS;
        if (d >= s.head_dim) continue;
        if (sums) sums[place + d] = values[part];
        else store(out, place + d, values[part] / total);
    }
    if (threadIdx.x == 0) {
        if (sums) {
            mosts[row] = most;
            totals[row] = total;
        } else {
            lse[row] = most + logf(total);
        }
    }
    if (!probabilities) return;
    float* written = probabilities + row * s.kv_len;
    EACH_OF_BLOCK(key, s.kv_len) {
        float weight = 0.0f;
        if (key >= low && key < end && sees(s, position, key, document)) {
            u64 at = key_of(s, own, key, s.k_columns);
            float product = 0.0f;
            for (u64 d = 0; d < s.head_dim; d++) product += query[d] * narrowed(s, load_cached(k, at + d));
            weight = expf(score_of(s, product) - most) / total;
        }
        written[key] = weight;
    }
}

KERNEL(attention, const float* flag, View q, View k, View v, const u32* documents, View out, float* lse, float* probabilities,
       float* sums, float* mosts, float* totals, Shape s) {
    SHARED(float, all);
    if (skipped(flag)) return;
    u32 length = (u32)s.q_len, heads = (u32)s.heads;
    u64 i = blockIdx.x % length, head = blockIdx.x / length % heads, batch = blockIdx.x / length / heads;
    Query own;
    own.batch = batch;
    own.kv_head = (u32)head / (heads / (u32)s.kv_heads);
    own.position = s.kv_len - s.q_len + i;
    own.document = documents ? documents[batch * s.q_len + i] : 0;
    own.row = (batch * s.heads + head) * s.q_len + i;
    own.place = ((batch * s.q_len + i) * s.heads + head) * s.head_dim;
    own.pages = 0;
    own.page = 0;
    attend(all, own, q, k, v, out, lse, probabilities, sums, mosts, totals, s);
}

// Of sequences whose keys and values lie in pages. The table has four words of each run: the number of queries up to its end, its own
// queries, its positions, and where its pages begin in the table.
KERNEL(attention_paged, const float* flag, View q, View k, View v, View out, float* lse, const u32* table, u64 queries, u64 page,
       Shape s) {
    SHARED(float, all);
    if (skipped(flag)) return;
    u32 i = blockIdx.x % (u32)queries, head = blockIdx.x / (u32)queries, heads = (u32)s.heads;
    const u32* run = table;
    while (i >= run[0]) run += 4;
    u32 first = run[0] - run[1], within = i - first;
    Query own;
    own.batch = 0;
    own.kv_head = head / (heads / (u32)s.kv_heads);
    own.position = run[2] - run[1] + within;
    own.document = 0;
    own.row = (u64)first * s.heads + (u64)head * run[1] + within;
    own.place = ((u64)i * s.heads + head) * s.head_dim;
    own.pages = table + run[3];
    own.page = page;
    attend(all, own, q, k, v, out, lse, 0, 0, 0, 0, s);
}

KERNEL(attention_finish, const float* flag, const float* sums, const float* mosts, const float* totals, View out, float* lse,
       Shape s) {
    if (skipped(flag)) return;
    EACH(at, s.batch * s.q_len * s.heads * s.head_dim) {
        u64 d = at % s.head_dim, head = at / s.head_dim % s.heads, i = at / s.head_dim / s.heads;
        u64 row = (i / s.q_len * s.heads + head) * s.q_len + i % s.q_len;
        store(out, at, sums[at] / totals[row]);
        if (d == 0) lse[row] = mosts[row] + logf(totals[row]);
    }
}

// delta = the sum of dout * out over a head.
// A warp has a head of a query at a time: those that follow each other in memory go to warps that do.
KERNEL(attention_deltas, const float* flag, View out, View dout, float* delta, Shape s) {
    if (skipped(flag)) return;
    u32 lane = threadIdx.x % WARP, heads = (u32)s.heads, length = (u32)s.q_len;
    for (u64 row = first_element() / WARP; row < s.batch * s.heads * s.q_len; row += all_threads() / WARP) {
        u64 query = row / heads, head = row - query * heads, batch = query / length;
        float sum = 0.0f;
        for (u64 d = lane; d < s.head_dim; d += WARP) sum += load_float(out, row * s.head_dim + d) * load_float(dout, row * s.head_dim + d);
        sum = warp_sum(sum);
        if (lane == 0) delta[(batch * heads + head) * length + query - batch * length] = sum;
    }
}

// dq (+)= the gradient of one query.
KERNEL(attention_backward_queries, const float* flag, View q, View k, View v, const u32* documents, const float* lse,
       const float* delta, const float* probabilities, View dout, View dq, u32 accumulate, Shape s) {
    SHARED(float, all);
    if (skipped(flag)) return;
    float *gradients = all, *query = all + TOGETHER, *from_above = query + s.head_dim;
    u32 length = (u32)s.q_len, heads = (u32)s.heads;
    u64 i = blockIdx.x % length, head = blockIdx.x / length % heads, batch = blockIdx.x / length / heads;
    u64 kv_head = (u32)head / (heads / (u32)s.kv_heads), position = s.kv_len - s.q_len + i;
    u64 document = documents ? documents[batch * s.q_len + i] : 0;
    u64 row = (batch * s.heads + head) * s.q_len + i, place = ((batch * s.q_len + i) * s.heads + head) * s.head_dim;
    EACH_OF_BLOCK(d, s.head_dim) {
        query[d] = query_value(s, q, batch, i, head, d);
        from_above[d] = query_value(s, dout, batch, i, head, d);
    }
    __syncthreads();
    float values[PARTS] = {};
    u64 low = earliest(s, position, document), end = position + 1;
    low = low > s.first ? low : s.first;
    end = end < s.first + s.kv_capacity ? end : s.first + s.kv_capacity;
    for (u64 tile = low / TOGETHER * TOGETHER; tile < end; tile += TOGETHER) {
        u64 key = tile + threadIdx.x;
        float gradient = 0.0f;
        if (key >= low && key < end && sees(s, position, key, document)) {
            u64 of_k = key_place(s, batch, key, kv_head, s.k_columns), of_v = key_place(s, batch, key, kv_head, s.v_columns);
            float product = 0.0f, of_values = 0.0f;
            for (u64 d = 0; d < s.head_dim; d++) {
                product += query[d] * narrowed(s, load_cached(k, of_k + d));
                of_values += from_above[d] * narrowed(s, load_cached(v, of_v + d));
            }
            const float* kept = probabilities ? probabilities + row * s.kv_len + key : 0;
            gradient = pair_of(s, product, of_values, lse[row], delta[row], kept).gradient;
        }
        gradients[threadIdx.x] = narrowed(s, gradient);
        __syncthreads();
        u64 from = tile < low ? low - tile : 0, to = end - tile < TOGETHER ? end - tile : TOGETHER;
        for (u32 part = 0; part < PARTS; part++) {
            u64 d = threadIdx.x + part * THREADS;
            if (d >= s.head_dim) continue;
            for (u64 t = from; t < to; t++) {
                if (gradients[t] == 0.0f) continue;
                u64 at = key_place(s, batch, tile + t, kv_head, s.k_columns) + d;
                values[part] += gradients[t] * narrowed(s, load_cached(k, at));
            }
        }
        __syncthreads();
    }
    for (u32 part = 0; part < PARTS; part++) {
        u64 d = threadIdx.x + part * THREADS;
        if (d < s.head_dim) store(dq, place + d, accumulate ? load_float(dq, place + d) + values[part] : values[part]);
    }
}

// dk, dv (+)= the gradients of one key and its value, over all queries of all heads that it serves.
KERNEL(attention_backward_keys, const float* flag, View q, View k, View v, const u32* documents, const float* lse,
       const float* delta, const float* probabilities, View dout, View dk, View dv, u32 accumulate, Shape s) {
    SHARED(float, all);
    if (skipped(flag)) return;
    float *weights = all, *gradients = all + TOGETHER, *own_key = gradients + TOGETHER, *own_value = own_key + s.head_dim;
    u32 capacity = (u32)s.kv_capacity, kv_heads = (u32)s.kv_heads, group = (u32)s.heads / kv_heads;
    u64 index = blockIdx.x % capacity, kv_head = blockIdx.x / capacity % kv_heads;
    u64 batch = blockIdx.x / capacity / kv_heads, key = s.first + index;
    u64 before = s.kv_len - s.q_len, place = ((batch * s.kv_capacity + index) * s.kv_heads + kv_head) * s.head_dim;
    EACH_OF_BLOCK(d, s.head_dim) {
        own_key[d] = narrowed(s, load_cached(k, place + d));
        own_value[d] = narrowed(s, load_cached(v, place + d));
    }
    __syncthreads();
    float of_key[PARTS] = {}, of_value[PARTS] = {};
    u64 first_query = key > before ? key - before : 0;
    for (u64 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (u64 tile = first_query; tile < s.q_len; tile += TOGETHER) {
            u64 i = tile + threadIdx.x;
            Pair pair = {0.0f, 0.0f};
            if (i < s.q_len && sees(s, before + i, key, documents ? documents[batch * s.q_len + i] : 0)) {
                float product = 0.0f, of_values = 0.0f;
                for (u64 d = 0; d < s.head_dim; d++) {
                    product += query_value(s, q, batch, i, head, d) * own_key[d];
                    of_values += query_value(s, dout, batch, i, head, d) * own_value[d];
                }
                u64 row = (batch * s.heads + head) * s.q_len + i;
                const float* kept = probabilities ? probabilities + row * s.kv_len + key : 0;
                pair = pair_of(s, product, of_values, lse[row], delta[row], kept);
            }
            weights[threadIdx.x] = narrowed(s, pair.probability);
            gradients[threadIdx.x] = narrowed(s, pair.gradient);
            __syncthreads();
            u64 to = s.q_len - tile < TOGETHER ? s.q_len - tile : TOGETHER;
            for (u32 part = 0; part < PARTS; part++) {
                u64 d = threadIdx.x + part * THREADS;
                if (d >= s.head_dim) continue;
                for (u64 t = 0; t < to; t++) {
                    if (weights[t] == 0.0f && gradients[t] == 0.0f) continue;
                    of_value[part] += weights[t] * query_value(s, dout, batch, tile + t, head, d);
                    of_key[part] += gradients[t] * query_value(s, q, batch, tile + t, head, d);
                }
            }
            __syncthreads();
        }
    }
    for (u32 part = 0; part < PARTS; part++) {
        u64 d = threadIdx.x + part * THREADS;
        if (d >= s.head_dim) continue;
        store(dk, place + d, accumulate ? load_float(dk, place + d) + of_key[part] : of_key[part]);
        store(dv, place + d, accumulate ? load_float(dv, place + d) + of_value[part] : of_value[part]);
    }
}

// ---- the cache ----

__device__ inline float stored_half(u8* at, float x) {
    const float limit = 65504.0f;
    float held = x > limit ? limit : x < -limit ? -limit : x;
    u16 bits = to_f16(held);
    at[0] = (u8)bits;
    at[1] = (u8)(bits >> 8);
    return f16_value(bits);
}

__device__ inline float reciprocal(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }

// The nearest code between two; 0 of what is not a number.
__device__ inline int code_of(float x, float low, float high) {
    const float magic = 12582912.0f;
    if (x != x) return 0;
    float held = x < low ? low : x > high ? high : x;
    return (int)__fadd_rn(__fadd_rn(held, magic), -magic);
}

__device__ inline void quantize_block(const float* values, u32 type, u8* out) {
    float sum = 0.0f, low = INFINITE, high = -INFINITE, furthest = 0.0f;
    for (u32 i = 0; i < 32; i++) {
        sum += values[i];
        if (values[i] < low) low = values[i];
        if (values[i] > high) high = values[i];
        if (fabsf(values[i]) > fabsf(furthest)) furthest = values[i];
    }
    // Not a number where one of them is none, or infinite.
    float broken = sum * 0.0f;
    if (type == Q8_0) {
        float factor = reciprocal(stored_half(out, fabsf(furthest) / 127.0f + broken));
        for (u32 i = 0; i < 32; i++) out[2 + i] = (u8)(i8)code_of(values[i] * factor, -127.0f, 127.0f);
        return;
    }
    float minimum = 0.0f, scale;
    u8* codes = out + 2;
    if (type == Q4_0) {
        scale = stored_half(out, furthest / -8.0f + broken);
    } else {
        minimum = stored_half(out + 2, low + broken);
        scale = stored_half(out, (high - minimum) / 15.0f + broken);
        codes = out + 4;
    }
    float factor = reciprocal(scale);
    for (u32 i = 0; i < 16; i++) {
        int pair[2];
        for (u32 half = 0; half < 2; half++) {
            float value = values[i + 16 * half];
            pair[half] = type == Q4_0 ? code_of(value * factor, -8.0f, 7.0f) + 8
                                      : code_of((value - minimum) * factor, 0.0f, 15.0f);
        }
        codes[i] = (u8)(pair[0] | pair[1] << 4);
    }
}

// Row (first + n) % cache_rows of the cache = row n of x; a thread has a block of a head, or an element of a plain type.
// A block of a head of a row of x, number `at` of all, into row `to` of a cache.
__device__ inline void cache_block(View x, View cache, u64 at, u64 to, u64 heads, u64 head_dim, u64 blocks, u64 block_bytes) {
    u64 block = at % blocks, head = at / blocks % heads, row = at / blocks / heads;
    u64 place = (to * heads + head) * blocks + block, from = (row * heads + head) * head_dim;
    if (cache.type == F32 || cache.type == BF16 || cache.type == F16) {
        store(cache, place, load(x, from + block));
        return;
    }
    float values[32];
    u64 start = block * 32, count = head_dim - start < 32 ? head_dim - start : 32;
    // What fills up does not widen the range.
    for (u32 i = 0; i < 32; i++) values[i] = load(x, from + start + (i < count ? i : count - 1));
    quantize_block(values, cache.type, (u8*)cache.at + place * block_bytes);
}

KERNEL(write_cache, const float* flag, View x, View cache, u64 rows, u64 cache_rows, u64 first, u64 heads, u64 head_dim,
       u64 blocks, u64 block_bytes) {
    if (skipped(flag)) return;
    EACH(at, rows * heads * blocks) {
        u64 to = (first % cache_rows + at / blocks / heads) % cache_rows;
        cache_block(x, cache, at, to, heads, head_dim, blocks, block_bytes);
    }
}

KERNEL(write_rows, const float* flag, View x, View cache, const u32* to, u64 rows, u64 heads, u64 head_dim, u64 blocks,
       u64 block_bytes) {
    if (skipped(flag)) return;
    EACH(at, rows * heads * blocks) cache_block(x, cache, at, to[at / blocks / heads], heads, head_dim, blocks, block_bytes);
}

// Words of the host's, for kernels that follow.
struct Words512 {
    u32 words[512];
};
KERNEL(host_words, const float* flag, Words512 from, u64 count, u32* to) {
    if (skipped(flag)) return;
    EACH(i, count) to[i] = from.words[i];
}

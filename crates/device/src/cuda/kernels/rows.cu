// Row by row: norms, rotary embeddings, rows of tables; and sums over rows, one for each column.

// A block takes rows one after the other.
#define EACH_ROW(row, rows) for (u64 row = blockIdx.x; row < (rows); row += gridDim.x)

KERNEL(rms_norm, const float* flag, View x, View weight, float offset, float epsilon, View out, float* rstd, u64 rows,
       u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    bool fours = columns % 4 == 0 && in_fours(x) && in_fours(weight) && in_fours(out);
    EACH_ROW(row, rows) {
        float sum = 0.0f;
        each_of_block(columns, fours, [&](auto i) {
            auto got = fetch(x, i.behind(row * columns));
            auto all = numbers(got);
            for (u32 k = 0; k < i.N; k++) sum += all[k] * all[k];
        });
        sum = block_sum(sum, scratch);
        float factor = 1.0f / sqrtf(sum / (float)columns + epsilon);
        each_of_block(columns, fours, [&](auto i) {
            auto of_x = fetch(x, i.behind(row * columns));
            auto of_weight = fetch(weight, i);
            auto all = numbers(of_x), by = numbers(of_weight);
            for (u32 k = 0; k < i.N; k++) all[k] = all[k] * factor * (offset + by[k]);
            put(out, i.behind(row * columns), all);
        });
        if (threadIdx.x == 0) rstd[row] = factor;
    }
}

KERNEL(layer_norm, const float* flag, View x, View weight, View bias, float epsilon, View out, float* mean, float* rstd,
       u64 rows, u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    bool fours = columns % 4 == 0 && in_fours(x) && in_fours(weight) && in_fours(bias) && in_fours(out);
    EACH_ROW(row, rows) {
        float sum = 0.0f, squares = 0.0f;
        each_of_block(columns, fours, [&](auto i) {
            auto got = fetch(x, i.behind(row * columns));
            auto all = numbers(got);
            for (u32 k = 0; k < i.N; k++) sum += all[k];
        });
        float middle = block_sum(sum, scratch) / (float)columns;
        each_of_block(columns, fours, [&](auto i) {
            auto got = fetch(x, i.behind(row * columns));
            auto all = numbers(got);
            for (u32 k = 0; k < i.N; k++)
                if (i.has(k)) squares += (all[k] - middle) * (all[k] - middle);
        });
        squares = block_sum(squares, scratch);
        float factor = 1.0f / sqrtf(squares / (float)columns + epsilon);
        each_of_block(columns, fours, [&](auto i) {
            auto of_x = fetch(x, i.behind(row * columns));
            auto of_weight = fetch(weight, i);
            auto of_bias = fetch(bias, i);
            auto all = numbers(of_x), by = numbers(of_weight), add = numbers(of_bias);
            for (u32 k = 0; k < i.N; k++) all[k] = (all[k] - middle) * factor * by[k] + add[k];
            put(out, i.behind(row * columns), all);
        });
        if (threadIdx.x == 0) {
            mean[row] = middle;
            rstd[row] = factor;
        }
    }
}

// dx += the gradient through a norm. Without `mean` it is RMSNorm.
KERNEL_FOUR(norm_backward, const float* flag, View x, View weight, float offset, const float* mean, const float* rstd, View dout,
       View dx, u64 rows, u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    bool fours = columns % 4 == 0 && in_fours(x) && in_fours(weight) && in_fours(dout) && in_fours(dx);
    EACH_ROW(row, rows) {
        float middle = mean ? mean[row] : 0.0f, factor = rstd[row], sum = 0.0f, along = 0.0f;
        each_of_block(columns, fours, [&](auto i) {
            auto of_dout = fetch(dout, i.behind(row * columns));
            auto of_x = fetch(x, i.behind(row * columns));
            auto of_weight = fetch(weight, i);
            auto d = numbers(of_dout), all = numbers(of_x), by = numbers(of_weight);
            // Of what is not there, d is 0.
            for (u32 k = 0; k < i.N; k++) {
                // Rounded by itself: of one column nothing is left of it.
                float g = __fmul_rn(d[k], offset + by[k]);
                sum += g;
                along += g * ((all[k] - middle) * factor);
            }
        });
        sum = mean ? block_sum(sum, scratch) : 0.0f;
        along = block_sum(along, scratch) / (float)columns;
        float shift = mean ? sum / (float)columns : 0.0f;
        each_of_block(columns, fours, [&](auto i) {
            auto there = i.behind(row * columns);
            auto of_dout = fetch(dout, there);
            auto of_x = fetch(x, there);
            auto of_dx = fetch(dx, there);
            auto of_weight = fetch(weight, i);
            auto d = numbers(of_dout), all = numbers(of_x), before = numbers(of_dx), by = numbers(of_weight);
            for (u32 k = 0; k < i.N; k++) {
                float g = __fmul_rn(d[k], offset + by[k]);
                float unit = (all[k] - middle) * factor;
                before[k] += factor * (g - shift - unit * along);
            }
            put(dx, there, before);
        });
    }
}

// What is summed over rows.
enum Summed { OF_A, OF_PRODUCT, OF_UNIT };

// Columns that a block of `column_sums` has: four for each thread of a warp.
#define SUMMED_COLUMNS (4 * WARP)
// Rows that a warp of it reads at once.
#define SUMMED_ROWS 4

// Partial sums of `piece_rows` rows for each column from `first` on: of a; of a b over the divisor; of a times x as a norm has it.
// Block (x, y) has columns x and piece y. Each warp sums up rows by turns, then the warps' sums are added in order.
KERNEL_FOUR(column_sums, const float* flag, u32 what, View a, View b, const float* mean, const float* rstd, const float* divisors,
       u64 rows, u64 columns, u64 first, u64 width, u64 piece_rows, float* partials, u64 stride) {
    SHARED(float, of_warps);
    if (skipped(flag)) return;
    const u32 warps = THREADS / WARP;
    u32 warp = threadIdx.x / WARP;
    u64 own = (u64)blockIdx.x * SUMMED_COLUMNS + 4 * (threadIdx.x % WARP), start = blockIdx.y * piece_rows;
    u64 end = start + piece_rows < rows ? start + piece_rows : rows;
    bool fours = columns % 4 == 0 && first % 4 == 0 && width % 4 == 0 && in_fours(a) && (what == OF_A || in_fours(b));
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    auto sum_up = [&](const float* x, const float* y, u64 row) {
        float middle = what == OF_UNIT && mean ? mean[row] : 0.0f, by = what == OF_UNIT ? rstd[row] : 1.0f;
        for (u32 k = 0; k < 4; k++) sums[k] += what == OF_A ? x[k] : what == OF_PRODUCT ? x[k] * y[k] : x[k] * ((y[k] - middle) * by);
    };
    if (fours && own < width) {
        for (u64 begin = start + warp; begin < end; begin += SUMMED_ROWS * warps) {
            Words of_a[SUMMED_ROWS], of_b[SUMMED_ROWS];
#pragma unroll
            for (u32 r = 0; r < SUMMED_ROWS; r++) {
                u64 row = begin + r * warps, at = row * columns + first + own;
                if (row < end) of_a[r] = four_at(a, at);
                if (row < end && what != OF_A) of_b[r] = four_at(b, at);
            }
#pragma unroll
            for (u32 r = 0; r < SUMMED_ROWS; r++) {
                float x[4], y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (begin + r * warps >= end) break;
                four_of(a.type, of_a[r], x);
                if (what != OF_A) four_of(b.type, of_b[r], y);
                sum_up(x, y, begin + r * warps);
            }
        }
    } else {
        for (u64 row = start + warp; row < end; row += warps) {
            float x[4] = {0.0f, 0.0f, 0.0f, 0.0f}, y[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 k = 0; k < 4; k++) {
                if (own + k >= width) continue;
                x[k] = load(a, row * columns + first + own + k);
                if (what != OF_A) y[k] = load(b, row * columns + first + own + k);
            }
            sum_up(x, y, row);
        }
    }
    for (u32 k = 0; k < 4; k++) of_warps[warp * SUMMED_COLUMNS + 4 * (threadIdx.x % WARP) + k] = sums[k];
    __syncthreads();
    u64 i = (u64)blockIdx.x * SUMMED_COLUMNS + threadIdx.x;
    if (threadIdx.x >= SUMMED_COLUMNS || i >= width) return;
    float sum = 0.0f;
    for (u32 w = 0; w < warps; w++) sum += of_warps[w * SUMMED_COLUMNS + threadIdx.x];
    if (divisors) sum /= divisors[first + i] == 0.0f ? 1.0f : divisors[first + i];
    partials[blockIdx.y * stride + i] = sum;
}

// out (+)= the partial sums, in order.
KERNEL(add_partials, const float* flag, const float* partials, u64 pieces, u64 stride, View out, u64 first, u64 width,
       u32 accumulate) {
    if (skipped(flag)) return;
    EACH(i, width) {
        float sum = accumulate ? load(out, first + i) : 0.0f;
#pragma unroll 8
        for (u64 piece = 0; piece < pieces; piece++) sum += partials[piece * stride + i];
        store(out, first + i, sum);
    }
}

// Pairs of a head lie side by side, or its first half goes with its second.
KERNEL(rope, const float* flag, View x, const u32* positions, const float* cosines, const float* sines, u64 table_rows,
       u64 rows, u64 heads, u64 head_dim, u64 first, u64 pairs, u32 interleaved, u32 inverse) {
    if (skipped(flag)) return;
    float sign = inverse ? -1.0f : 1.0f;
    bool fours = pairs % 4 == 0 && head_dim % 4 == 0 && first % 4 == 0 && in_fours(x) && in_fours(floats(cosines)) &&
                 in_fours(floats(sines));
    // Pairs that a thread has at once.
    u64 at_once = fours ? 4 : 1, steps = pairs / at_once;
    EACH(i, rows * heads * steps) {
        u64 pair = i % steps * at_once, head = i / steps % heads, row = i / steps / heads, position = positions[row];
        if (position >= table_rows) continue;
        u64 begin = (row * heads + head) * head_dim + first, angle = position * pairs + pair;
        u64 low = begin + (interleaved ? 2 * pair : pair), high = low + (interleaved ? at_once : pairs);
        if (!fours) {
            float a = load(x, low), b = load(x, high), c = cosines[angle], s = sines[angle] * sign;
            store(x, low, a * c - b * s);
            store(x, high, b * c + a * s);
            continue;
        }
        float values[8], c[4], s[4];
        Words of_low = four_at(x, low), of_high = four_at(x, high);
        four_of(F32, four_at(floats(cosines), angle), c);
        four_of(F32, four_at(floats(sines), angle), s);
        four_of(x.type, of_low, values);
        four_of(x.type, of_high, values + 4);
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            float a = interleaved ? values[2 * k] : values[k], b = interleaved ? values[2 * k + 1] : values[4 + k];
            s[k] *= sign;
            float turned = a * c[k] - b * s[k], other = b * c[k] + a * s[k];
            c[k] = turned;
            s[k] = other;
        }
        if (interleaved) {
            float own[8] = {c[0], s[0], c[1], s[1], c[2], s[2], c[3], s[3]};
            put_words(x, low, four_words(x.type, own));
            put_words(x, high, four_words(x.type, own + 4));
        } else {
            put_words(x, low, four_words(x.type, c));
            put_words(x, high, four_words(x.type, s));
        }
    }
}

// to[n, h, i] = from[n, h, i].
KERNEL(copy_heads, const float* flag, View from, u64 from_columns, u64 from_first, u64 from_stride, View to, u64 to_columns,
       u64 to_first, u64 to_stride, u64 rows, u64 heads, u64 width) {
    if (skipped(flag)) return;
    EACH(i, rows * heads * width) {
        u64 place = i % width, head = i / width % heads, row = i / width / heads;
        store(to, row * to_columns + to_first + head * to_stride + place,
              load(from, row * from_columns + from_first + head * from_stride + place));
    }
}

// to[n, i] = the sum over h of from[n, h, i], in order.
KERNEL(sum_heads, const float* flag, View from, u64 from_columns, u64 from_first, u64 from_stride, View to, u64 to_columns,
       u64 to_first, u64 rows, u64 heads, u64 width) {
    if (skipped(flag)) return;
    EACH(i, rows * width) {
        u64 place = i % width, row = i / width;
        float sum = 0.0f;
        for (u64 head = 0; head < heads; head++)
            sum += load(from, row * from_columns + from_first + head * from_stride + place);
        store(to, row * to_columns + to_first + place, sum);
    }
}

// out[n] = table[tokens[n] - first_row]; other tokens' rows stay as they are.
KERNEL(embedding, const float* flag, const u32* tokens, View table, u64 first_row, u64 table_rows, View out, u64 rows,
       u64 columns) {
    if (skipped(flag)) return;
    bool fours = columns % 4 == 0 && in_fours(table) && in_fours(out);
    EACH_ROW(row, rows) {
        u64 token = tokens[row];
        if (token < first_row || token - first_row >= table_rows) continue;
        each_of_block(columns, fours, [&](auto i) {
            auto got = fetch(table, i.behind((token - first_row) * columns));
            put(out, i.behind(row * columns), numbers(got));
        });
    }
}

__device__ inline u32 lowest_bit(u32 bits) { return 63 - __clzll((i64)(bits & (0u - bits))); }

// Gives `body` those of the places from `start` on that have the token, in order. A word of `words` has a bit for each of 32 places,
// `filled` one for each of 32 words. Every thread gets all of them.
template <class Body>
__device__ inline void each_same(const u32* tokens, u64 start, u64 rows, u32* words, u32* filled, const Body& body) {
    u32 token = tokens[start];
    for (u64 first = start; first < rows; first += 32 * THREADS) {
        u64 count = rows - first < 32 * THREADS ? rows - first : 32 * THREADS;
        u32 found = 0;
        if (threadIdx.x < THREADS / 32) filled[threadIdx.x] = 0;
        __syncthreads();
        for (u32 i = 0; i < 32 && 32 * threadIdx.x + i < count; i++)
            found |= (u32)(tokens[first + 32 * threadIdx.x + i] == token) << i;
        words[threadIdx.x] = found;
        // Each adds a bit of its own.
        if (found) atomicAdd(filled + threadIdx.x / 32, 1u << threadIdx.x % 32);
        __syncthreads();
        for (u32 group = 0; group < THREADS / 32; group++) {
            for (u32 left = filled[group]; left; left &= left - 1) {
                u32 word = 32 * group + lowest_bit(left);
                for (u32 bits = words[word]; bits; bits &= bits - 1) body(first + 32 * word + lowest_bit(bits));
            }
        }
        __syncthreads();
    }
}

// dtable[tokens[n] - first_row] += dout[n]: the first place of a token adds all of them, in order, and rounds once.
KERNEL(embedding_backward, const float* flag, const u32* tokens, View dout, View dtable, u64 first_row, u64 table_rows,
       u64 rows, u64 columns, Rounding rounding) {
    SHARED(u32, words);
    if (skipped(flag)) return;
    u32* filled = words + THREADS;
    bool fours = columns % 4 == 0 && in_fours(dout) && in_fours(dtable, rounding);
    u64 at_once = fours ? 8 * THREADS : THREADS;
    Rounder by(rounding);
    EACH_ROW(place, rows) {
        u32 token = tokens[place], seen = 0;
        if (token < first_row || token - first_row >= table_rows) continue;
        EACH_OF_BLOCK(i, place) seen |= tokens[i] == token;
        if (block_sum(seen, words)) continue;
        u64 begin = (token - first_row) * columns;
        auto add_to = [&](auto i, bool own) {
            Numbers<i.N> sum = {};
            if (own) {
                auto got = fetch(dtable, i.behind(begin));
                sum = numbers(got);
            }
            each_same(tokens, place, rows, words, filled, [&](u64 other) {
                if (!own) return;
                auto got = fetch(dout, i.behind(other * columns));
                auto d = numbers(got);
                for (u32 k = 0; k < i.N; k++) sum[k] += d[k];
            });
            if (own) put(dtable, i.behind(begin), sum, by);
        };
        // All threads look for places, whether they have columns or not.
        for (u64 start = 0; start < columns; start += at_once) {
            u64 i = start + threadIdx.x * (fours ? 4 : 1);
            if (fours) add_to(Eight{i, i + GAP < columns}, i < columns);
            else add_to(One{i}, i < columns);
        }
    }
}

// out[o] = the sum of squares of row o, whose elements may be in any storage.
KERNEL(row_squares, const float* flag, View x, float* out, u64 rows, u64 columns) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    bool fours = columns % 4 == 0 && in_fours(x);
    EACH_ROW(row, rows) {
        double sum = 0.0;
        each_of_block(columns, fours, [&](auto i) {
            auto got = fetch(x, i.behind(row * columns));
            auto all = numbers(got);
            for (u32 k = 0; k < i.N; k++) sum += (double)all[k] * (double)all[k];
        });
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0) out[row] = (float)sum;
    }
}

// `each` rows are of one matrix, those after them of the next.
KERNEL(row_lengths, const float* flag, const float* squares, const float* cross, const float* gram, const float* b,
       float scale, float* lengths, u64 outputs, u64 rank, u64 each) {
    if (skipped(flag)) return;
    EACH(row, outputs) {
        u64 first = row / each * rank;
        double beside = 0.0, own = 0.0, by = scale;
        for (u64 k = 0; k < rank; k++) {
            double value = b[row * rank + k], product = 0.0;
            beside += value * (double)cross[(first + k) * each + row % each];
            for (u64 l = 0; l < rank; l++) product += (double)gram[(first + k) * rank + l] * (double)b[row * rank + l];
            own += value * product;
        }
        double square = (double)squares[row] + 2.0 * by * beside + by * by * own;
        lengths[row] = (float)sqrt(square > 0.0 ? square : 0.0);
    }
}

KERNEL(scale_columns, const float* flag, View x, const float* factors, const float* divisors, View bias, View out, u64 n,
       u64 columns, u32 accumulate) {
    if (skipped(flag)) return;
    EACH(i, n) {
        u64 column = i % columns;
        float divisor = divisors ? divisors[column] : 1.0f;
        float factor = factors[column] / (divisor == 0.0f ? 1.0f : divisor);
        float value = load(x, i) * factor + (bias.at ? load(bias, column) : 0.0f);
        store(out, i, accumulate ? load(out, i) + value : value);
    }
}

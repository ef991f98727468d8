// Row by row: norms, rotary embeddings, rows of tables; and sums over rows, one for each column.

// A block takes rows one after the other.
#define EACH_ROW(row, rows) for (u64 row = blockIdx.x; row < (rows); row += gridDim.x)

KERNEL(rms_norm, const float* flag, View x, View weight, float offset, float epsilon, View out, float* rstd, u64 rows,
       u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    EACH_ROW(row, rows) {
        float sum = 0.0f;
        EACH_OF_BLOCK(i, columns) {
            float value = load(x, row * columns + i);
            sum += value * value;
        }
        sum = block_sum(sum, scratch);
        float factor = 1.0f / sqrtf(sum / (float)columns + epsilon);
        EACH_OF_BLOCK(i, columns)
            store(out, row * columns + i, load(x, row * columns + i) * factor * (offset + load(weight, i)));
        if (threadIdx.x == 0) rstd[row] = factor;
    }
}

KERNEL(layer_norm, const float* flag, View x, View weight, View bias, float epsilon, View out, float* mean, float* rstd,
       u64 rows, u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    EACH_ROW(row, rows) {
        float sum = 0.0f, squares = 0.0f;
        EACH_OF_BLOCK(i, columns) sum += load(x, row * columns + i);
        float middle = block_sum(sum, scratch) / (float)columns;
        EACH_OF_BLOCK(i, columns) {
            float value = load(x, row * columns + i) - middle;
            squares += value * value;
        }
        squares = block_sum(squares, scratch);
        float factor = 1.0f / sqrtf(squares / (float)columns + epsilon);
        EACH_OF_BLOCK(i, columns) {
            float value = (load(x, row * columns + i) - middle) * factor;
            store(out, row * columns + i, value * load(weight, i) + load(bias, i));
        }
        if (threadIdx.x == 0) {
            mean[row] = middle;
            rstd[row] = factor;
        }
    }
}

// dx += the gradient through a norm. Without `mean` it is RMSNorm.
KERNEL(norm_backward, const float* flag, View x, View weight, float offset, const float* mean, const float* rstd, View dout,
       View dx, u64 rows, u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    EACH_ROW(row, rows) {
        float middle = mean ? mean[row] : 0.0f, factor = rstd[row], sum = 0.0f, along = 0.0f;
        EACH_OF_BLOCK(i, columns) {
            float g = load_float(dout, row * columns + i) * (offset + load_float(weight, i));
            sum += g;
            along += g * ((load_float(x, row * columns + i) - middle) * factor);
        }
        sum = block_sum(sum, scratch);
        along = block_sum(along, scratch) / (float)columns;
        float shift = mean ? sum / (float)columns : 0.0f;
        EACH_OF_BLOCK(i, columns) {
            u64 at = row * columns + i;
            float g = load_float(dout, at) * (offset + load_float(weight, i));
            float unit = (load_float(x, at) - middle) * factor;
            store(dx, at, load_float(dx, at) + factor * (g - shift - unit * along));
        }
    }
}

// What is summed over rows.
enum Summed { OF_A, OF_PRODUCT, OF_UNIT };

// Partial sums of `piece_rows` rows for each column from `first` on: of a; of a b over the divisor; of a times x as a norm has it.
// Block (x, y) has columns x and piece y.
KERNEL(column_sums, const float* flag, u32 what, View a, View b, const float* mean, const float* rstd, const float* divisors,
       u64 rows, u64 columns, u64 first, u64 width, u64 piece_rows, float* partials, u64 stride) {
    if (skipped(flag)) return;
    u64 i = first_element();
    if (i >= width) return;
    u64 column = first + i, end = (blockIdx.y + 1) * piece_rows;
    float sum = 0.0f;
    for (u64 row = blockIdx.y * piece_rows; row < (end < rows ? end : rows); row++) {
        u64 at = row * columns + column;
        float value = load(a, at);
        if (what == OF_PRODUCT) value *= load(b, at);
        if (what == OF_UNIT) value *= (load(b, at) - (mean ? mean[row] : 0.0f)) * rstd[row];
        sum += value;
    }
    if (divisors) sum /= divisors[column] == 0.0f ? 1.0f : divisors[column];
    partials[blockIdx.y * stride + i] = sum;
}

// out (+)= the partial sums, in order.
KERNEL(add_partials, const float* flag, const float* partials, u64 pieces, u64 stride, View out, u64 first, u64 width,
       u32 accumulate) {
    if (skipped(flag)) return;
    EACH(i, width) {
        float sum = accumulate ? load(out, first + i) : 0.0f;
        for (u64 piece = 0; piece < pieces; piece++) sum += partials[piece * stride + i];
        store(out, first + i, sum);
    }
}

KERNEL(rope, const float* flag, View x, const u32* positions, const float* cosines, const float* sines, u64 table_rows,
       u64 rows, u64 heads, u64 head_dim, u64 first, u64 pairs, u32 interleaved, u32 inverse) {
    if (skipped(flag)) return;
    EACH(i, rows * heads * pairs) {
        u64 pair = i % pairs, head = i / pairs % heads, row = i / pairs / heads, position = positions[row];
        if (position >= table_rows) continue;
        u64 begin = (row * heads + head) * head_dim + first;
        u64 low = begin + (interleaved ? 2 * pair : pair), high = low + (interleaved ? 1 : pairs);
        float a = load(x, low), b = load(x, high), c = cosines[position * pairs + pair];
        float s = sines[position * pairs + pair] * (inverse ? -1.0f : 1.0f);
        store(x, low, a * c - b * s);
        store(x, high, b * c + a * s);
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
    EACH(i, rows * columns) {
        u64 token = tokens[i / columns];
        if (token < first_row || token - first_row >= table_rows) continue;
        store(out, i, load(table, (token - first_row) * columns + i % columns));
    }
}

// dtable[tokens[n] - first_row] += dout[n]: the first place of a token adds all of them, in order, and rounds once.
KERNEL(embedding_backward, const float* flag, const u32* tokens, View dout, View dtable, u64 first_row, u64 table_rows,
       u64 rows, u64 columns, Rounding rounding) {
    SHARED(u32, before);
    if (skipped(flag)) return;
    EACH_ROW(place, rows) {
        u32 token = tokens[place], seen = 0;
        EACH_OF_BLOCK(i, place) seen |= tokens[i] == token;
        seen = block_sum(seen, before);
        if (seen || token < first_row || token - first_row >= table_rows) continue;
        EACH_OF_BLOCK(i, columns) {
            u64 at = (token - first_row) * columns + i;
            float sum = load_float(dtable, at);
            for (u64 other = place; other < rows; other++)
                if (tokens[other] == token) sum += load_float(dout, other * columns + i);
            store(dtable, at, sum, rounding);
        }
    }
}

// out[o] = the sum of squares of row o, whose elements may be in any storage.
KERNEL(row_squares, const float* flag, View x, float* out, u64 rows, u64 columns) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    EACH_ROW(row, rows) {
        double sum = 0.0;
        EACH_OF_BLOCK(i, columns) {
            double value = load(x, row * columns + i);
            sum += value * value;
        }
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

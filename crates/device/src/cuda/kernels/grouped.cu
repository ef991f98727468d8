// Products of rows that belong together with a matrix of their own, and biases of such groups. Rows offsets[e]..offsets[e + 1] are
// of group e.
//
// A block makes a tile of 64 x 64, each thread 4 x 4 of its numbers. How many tiles a group has only the card knows: there are blocks
// for as many as there may be, and those without a tile end.

#define GROUP_TILE 64
#define GROUP_DEPTH 16
#define GROUP_PITCH (GROUP_TILE + 1)

// A group's rows, and the first of a tile.
struct GroupTile {
    u64 group, first, end;
};

// The tile of that number, over all groups and what is behind them, which is group `groups`; its first row is `rows` where there is none.
__device__ inline GroupTile group_tile(const u32* offsets, u64 groups, u64 rows, u64 number) {
    for (u64 group = 0; group <= groups; group++) {
        u64 start = offsets[group], end = group < groups ? offsets[group + 1] : rows;
        if (end > rows) end = rows;
        u64 tiles = start < end ? (end - start + GROUP_TILE - 1) / GROUP_TILE : 0;
        if (number < tiles) return {group, start + number * GROUP_TILE, end};
        number -= tiles;
    }
    return {groups, rows, rows};
}

// The group of a row; `groups` of one behind all.
__device__ inline u64 group_of(const u32* offsets, u64 groups, u64 row) {
    u64 low = 0, high = groups;
    while (low < high) {
        u64 middle = (low + high) / 2;
        if (offsets[middle + 1] <= row) low = middle + 1;
        else high = middle;
    }
    return low;
}

__device__ inline float group_operand(View x, u64 at, u32 narrow) {
    float value = load(x, at);
    return narrow ? bf16_value(to_bf16(value)) : value;
}

// What a tile's lines add to a thread's numbers, which are 16 rows and 16 columns apart.
__device__ inline void add_products(float (*sums)[4], const float* a_lines, const float* b_lines) {
    for (u32 depth = 0; depth < GROUP_DEPTH; depth++) {
        float a[4], b[4];
        for (u32 i = 0; i < 4; i++) a[i] = a_lines[depth * GROUP_PITCH + 16 * i];
        for (u32 j = 0; j < 4; j++) b[j] = b_lines[depth * GROUP_PITCH + 16 * j];
        for (u32 i = 0; i < 4; i++)
            for (u32 j = 0; j < 4; j++) sums[i][j] += a[i] * b[j];
    }
}

// c[r] (+)= x[r] times the matrix of r's group, whose element (k, column) is number k * down + column * right of it; and its bias.
KERNEL(grouped_product, const float* flag, View x, View weight, const u32* offsets, u64 groups, View bias, View c, u64 rows,
       u64 inner, u64 columns, u64 down, u64 right, u32 narrow, u32 accumulate) {
    SHARED(float, of_x);
    if (skipped(flag)) return;
    float* of_weight = of_x + GROUP_DEPTH * GROUP_PITCH;
    u64 across = (columns + GROUP_TILE - 1) / GROUP_TILE, left = blockIdx.x % across * GROUP_TILE;
    GroupTile tile = group_tile(offsets, groups, rows, blockIdx.x / across);
    if (tile.first >= rows) return;
    bool behind = tile.group == groups;
    if (behind && accumulate) return;
    u64 matrix = tile.group * inner * columns, depth_end = behind ? 0 : inner;
    u32 y = threadIdx.x / 16, z = threadIdx.x % 16;
    float sums[4][4] = {};
    for (u64 k = 0; k < depth_end; k += GROUP_DEPTH) {
        for (u32 at = threadIdx.x; at < GROUP_TILE * GROUP_DEPTH; at += THREADS) {
            u32 line = at / GROUP_DEPTH, depth = at % GROUP_DEPTH;
            bool there = tile.first + line < tile.end && k + depth < inner;
            of_x[depth * GROUP_PITCH + line] =
                there ? group_operand(x, (tile.first + line) * inner + k + depth, narrow) : 0.0f;
            // Threads that follow each other read what lies beside each other.
            line = down == 1 ? at / GROUP_DEPTH : at % GROUP_TILE;
            depth = down == 1 ? at % GROUP_DEPTH : at / GROUP_TILE;
            there = left + line < columns && k + depth < inner;
            of_weight[depth * GROUP_PITCH + line] =
                there ? group_operand(weight, matrix + (k + depth) * down + (left + line) * right, narrow) : 0.0f;
        }
        __syncthreads();
        add_products(sums, of_x + y, of_weight + z);
        __syncthreads();
    }
    for (u32 i = 0; i < 4; i++) {
        for (u32 j = 0; j < 4; j++) {
            u64 row = tile.first + y + 16 * i, column = left + z + 16 * j;
            if (row >= tile.end || column >= columns) continue;
            float before = accumulate ? load(c, row * columns + column) : 0.0f;
            if (bias.at && !behind) before += load(bias, tile.group * columns + column);
            store(c, row * columns + column, before + sums[i][j]);
        }
    }
}

// dweight[e] (+)= dout^T x over the rows of e. Block (x, y) has a tile of group y.
KERNEL(grouped_weight, const float* flag, View dout, View x, const u32* offsets, View dweight, u64 rows, u64 outputs, u64 inputs,
       u32 narrow, u32 accumulate, Rounding rounding) {
    SHARED(float, of_dout);
    if (skipped(flag)) return;
    float* of_x = of_dout + GROUP_DEPTH * GROUP_PITCH;
    u64 across = (inputs + GROUP_TILE - 1) / GROUP_TILE, left = blockIdx.x % across * GROUP_TILE;
    u64 top = blockIdx.x / across * GROUP_TILE, group = blockIdx.y;
    u64 first = offsets[group], end = offsets[group + 1] < rows ? offsets[group + 1] : rows;
    if (first >= end && accumulate) return;
    u32 y = threadIdx.x / 16, z = threadIdx.x % 16;
    float sums[4][4] = {};
    for (u64 row = first; row < end; row += GROUP_DEPTH) {
        for (u32 at = threadIdx.x; at < GROUP_TILE * GROUP_DEPTH; at += THREADS) {
            u32 line = at % GROUP_TILE, depth = at / GROUP_TILE;
            bool there = row + depth < end && top + line < outputs;
            of_dout[depth * GROUP_PITCH + line] =
                there ? group_operand(dout, (row + depth) * outputs + top + line, narrow) : 0.0f;
            there = row + depth < end && left + line < inputs;
            of_x[depth * GROUP_PITCH + line] = there ? group_operand(x, (row + depth) * inputs + left + line, narrow) : 0.0f;
        }
        __syncthreads();
        add_products(sums, of_dout + y, of_x + z);
        __syncthreads();
    }
    for (u32 i = 0; i < 4; i++) {
        for (u32 j = 0; j < 4; j++) {
            u64 row = top + y + 16 * i, column = left + z + 16 * j;
            if (row >= outputs || column >= inputs) continue;
            u64 at = (group * outputs + row) * inputs + column;
            store(dweight, at, (accumulate ? load(dweight, at) : 0.0f) + sums[i][j], rounding);
        }
    }
}

// dbias[e] (+)= the sum over the rows of e of dout, each times its factor where there are any.
KERNEL(grouped_bias, const float* flag, View dout, const float* factors, u64 places, const u32* sources, const u32* offsets,
       View dbias, u64 groups, u64 rows, u64 columns, u32 accumulate) {
    if (skipped(flag)) return;
    EACH(i, groups * columns) {
        u64 group = i / columns, end = offsets[group + 1] < rows ? offsets[group + 1] : rows;
        float sum = accumulate ? load(dbias, i) : 0.0f;
        for (u64 row = offsets[group]; row < end; row++) {
            float factor = 1.0f;
            if (factors) factor = sources[row] < places ? factors[sources[row]] : 0.0f;
            sum += factor * load(dout, row * columns + i % columns);
        }
        store(dbias, i, sum);
    }
}

// out[r] (+)= x[r] times the factors over the divisors of r's group, and its bias; nothing of a row behind all groups.
KERNEL(grouped_scale_columns, const float* flag, View x, const float* factors, const float* divisors, View bias, const u32* offsets,
       u64 groups, View out, u64 n, u64 columns, u32 accumulate) {
    if (skipped(flag)) return;
    EACH(i, n) {
        u64 group = group_of(offsets, groups, i / columns), own = group * columns + i % columns;
        float value = 0.0f;
        if (group < groups) {
            float divisor = divisors ? divisors[own] : 1.0f;
            float factor = factors[own] / (divisor == 0.0f ? 1.0f : divisor);
            value = load(x, i) * factor + (bias.at ? load(bias, own) : 0.0f);
        }
        store(out, i, accumulate ? load(out, i) + value : value);
    }
}

// out[e] (+)= the sum over the rows of e of a times b, over the divisors of e.
KERNEL(grouped_column_dots, const float* flag, View a, View b, const float* divisors, const u32* offsets, View out, u64 groups,
       u64 rows, u64 columns, u32 accumulate) {
    if (skipped(flag)) return;
    EACH(i, groups * columns) {
        u64 group = i / columns, end = offsets[group + 1] < rows ? offsets[group + 1] : rows;
        float sum = 0.0f;
        for (u64 row = offsets[group]; row < end; row++) {
            u64 at = row * columns + i % columns;
            sum += load(a, at) * load(b, at);
        }
        sum /= divisors[i] == 0.0f ? 1.0f : divisors[i];
        store(out, i, accumulate ? load(out, i) + sum : sum);
    }
}

// out[r] += the bias of r's group times r's factor.
KERNEL(weighted_bias, const float* flag, View bias, const float* factors, u64 places, const u32* sources, const u32* offsets,
       u64 groups, View out, u64 rows, u64 columns) {
    if (skipped(flag)) return;
    EACH(i, rows * columns) {
        u64 row = i / columns, group = group_of(offsets, groups, row);
        if (group == groups || sources[row] >= places) continue;
        store(out, i, load(out, i) + factors[sources[row]] * load(bias, group * columns + i % columns));
    }
}

// dfactors[p] += the dot product of p's row of dout with the bias of its group.
KERNEL(bias_factors_backward, const float* flag, View dout, View bias, const u32* places, const u32* offsets, u64 groups,
       float* dfactors, u64 count, u64 rows, u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    EACH_ROW(p, count) {
        u64 row = places[p], group = row < rows ? group_of(offsets, groups, row) : groups;
        float sum = 0.0f;
        if (group < groups)
            EACH_OF_BLOCK(i, columns) sum += load(dout, row * columns + i) * load(bias, group * columns + i);
        sum = block_sum(sum, scratch);
        if (threadIdx.x == 0 && group < groups) dfactors[p] += sum;
    }
}

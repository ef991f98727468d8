// Matrix products of any storages on ordinary units, summed in f32: c (+)= a b. Those of bf16 and f16 on tensor cores are in
// `product_80.cu`.
//
// A block makes a tile of c; each thread makes 8 x 8 of its numbers. Sums over the inner length are folded after every FOLD: what
// is computed from pieces of that length, one after the other, has the bits of the whole.

#define DEPTH 16
#define OF_THREAD 8

struct ToFloats {
    float* first;
    u32 step;
    bool narrow;

    __device__ void one(u32 i, float value) const { first[i * step] = narrow ? bf16_value(to_bf16(value)) : value; }
    __device__ void all(const float* values) const {
#pragma unroll
        for (u32 i = 0; i < UNIT; i++) one(i, values[i]);
    }
};

KERNEL(product, const float* flag, Matrix a, Matrix b, View c, View bias, u64 rows, u64 inner, u64 columns, u32 narrow,
       u32 accumulate, Rounding rounding) {
    SHARED(float, tiles);
    if (skipped(flag)) return;
    u64 across = (columns + TILE - 1) / TILE;
    u64 top = blockIdx.x / across * TILE, left = blockIdx.x % across * TILE;
    // Each thread reads one unit of either operand: half of them have a, the other half b.
    bool of_b = threadIdx.x >= THREADS / 2;
    View values = of_b ? b.values : a.values;
    bool along = of_b ? b.row_stride == 1 : a.column_stride == 1;
    u64 stride = of_b ? b.row_stride * b.column_stride : a.row_stride * a.column_stride;
    u64 outer = of_b ? left : top, outer_end = of_b ? columns : rows;
    u32 unit = threadIdx.x % (THREADS / 2), line = along ? unit : unit / (TILE / UNIT), place = along ? 0 : unit % (TILE / UNIT) * UNIT;
    float* own = tiles + (of_b ? DEPTH * PITCH : 0);
    ToFloats put = {own + (along ? line : line * PITCH + place), along ? (u32)PITCH : 1u, narrow != 0};

    u32 down = threadIdx.x / 16 * 4, right = threadIdx.x % 16 * 4;
    Result result = {c, bias, top, left, rows, columns, accumulate, 4, 1};
    float sums[OF_THREAD][OF_THREAD], run[OF_THREAD][OF_THREAD];
#pragma unroll
    for (u32 i = 0; i < OF_THREAD; i++)
#pragma unroll
        for (u32 j = 0; j < OF_THREAD; j++) sums[i][j] = run[i][j] = 0.0f;
    // A thread has two rows of each part. Rows move up part by part, so that one piece of code is enough for all.
    float* own_part = tiles + threadIdx.x / 16 * PITCH + right;
    if (accumulate || bias.at) {
#pragma unroll 1
        for (u32 part = 0; part < PARTS_OF_TILE; part++) {
            begin_part(tiles, result, part);
            __syncthreads();
#pragma unroll
            for (u32 i = 0; i < OF_THREAD; i++)
#pragma unroll
                for (u32 j = 0; j < OF_THREAD; j++)
                    sums[i][j] = i % 4 < 3 ? sums[i + 1][j] : own_part[i / 4 * 16 * PITCH + j % 4 + j / 4 * (TILE / 2)];
            __syncthreads();
        }
    }
    for (u64 k = 0; k < inner; k += DEPTH) {
        u64 lines = along ? outer + line : k + line, from = along ? k : outer + place;
        bool there = lines < (along ? outer_end : inner);
        u32 count = there ? unit_count(from, along ? inner : outer_end) : 0;
        load_unit<true>(values, lines * stride + from, count, put);
        __syncthreads();
        const float *x = tiles + down, *y = tiles + DEPTH * PITCH + right;
#pragma unroll 4
        for (u32 depth = 0; depth < DEPTH; depth++, x += PITCH, y += PITCH) {
            float own_a[OF_THREAD], own_b[OF_THREAD];
#pragma unroll
            for (u32 i = 0; i < OF_THREAD; i++) {
                own_a[i] = x[i % 4 + i / 4 * (TILE / 2)];
                own_b[i] = y[i % 4 + i / 4 * (TILE / 2)];
            }
#pragma unroll
            for (u32 i = 0; i < OF_THREAD; i++)
#pragma unroll
                for (u32 j = 0; j < OF_THREAD; j++) run[i][j] += own_a[i] * own_b[j];
        }
        __syncthreads();
        if ((k + DEPTH) % FOLD == 0 || k + DEPTH >= inner) {
#pragma unroll
            for (u32 i = 0; i < OF_THREAD; i++) {
#pragma unroll
                for (u32 j = 0; j < OF_THREAD; j++) {
                    sums[i][j] += run[i][j];
                    run[i][j] = 0.0f;
                }
            }
        }
    }
#pragma unroll 1
    for (u32 part = 0; part < PARTS_OF_TILE; part++) {
#pragma unroll
        for (u32 i = 0; i < OF_THREAD; i++)
#pragma unroll
            for (u32 j = 0; j < OF_THREAD; j++) {
                if (i % 4 == 0) own_part[i / 4 * 16 * PITCH + j % 4 + j / 4 * (TILE / 2)] = sums[i][j];
                if (i % 4 < 3) sums[i][j] = sums[i + 1][j];
            }
        __syncthreads();
        end_part(tiles, result, part, rounding);
        __syncthreads();
    }
}

// c (+)= x weight^T of few rows: a warp has a column of c, so that each weight is read once; its sum of a row is that lane's. x is
// of no block type.
KERNEL(product_few, const float* flag, View x, View weight, View c, View bias, u64 rows, u64 inner, u64 columns, u32 narrow,
       u32 accumulate, Rounding rounding) {
    if (skipped(flag)) return;
    u32 lane = threadIdx.x % WARP;
    u64 column = (u64)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    bool there = column < columns;
    float sum = 0.0f;
    for (u64 start = 0; start < inner; start += WARP * UNIT) {
        u64 k = start + lane * UNIT;
        float weights[UNIT], values[UNIT];
        u32 count = there ? unit_count(k, inner) : 0;
        load_unit<true>(weight, column * inner + k, count, ToRegisters{weights});
#pragma unroll
        for (u32 i = 0; i < UNIT; i++) weights[i] = narrow ? bf16_value(to_bf16(weights[i])) : weights[i];
#pragma unroll 1
        for (u32 row = 0; row < rows; row++) {
            load_unit<false>(x, row * inner + k, count, ToRegisters{values});
            float part = 0.0f;
#pragma unroll
            for (u32 i = 0; i < UNIT; i++) part += (narrow ? bf16_value(to_bf16(values[i])) : values[i]) * weights[i];
            part = warp_sum(part);
            sum += lane == row ? part : 0.0f;
        }
    }
    if (!there || lane >= rows) return;
    u64 at = lane * columns + column;
    float before = accumulate ? load_float(c, at) : 0.0f;
    if (bias.at) before += load_float(bias, column);
    store(c, at, before + sum, rounding);
}

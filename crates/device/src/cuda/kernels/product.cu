// Matrix products of any storages, summed in f32: c (+)= a b.
//
// A block makes a tile of c; each thread makes 4 x 4 of its numbers. Sums over the inner length are folded after every FOLD: what
// is computed from pieces of that length, one after the other, has the bits of the whole.

#define TILE 64
#define DEPTH 16
#define OF_THREAD 4
#define FOLD 1024

// A matrix: element (row, column) is number row * row_stride + column * column_stride of a tensor.
struct Matrix {
    View values;
    u64 row_stride;
    u64 column_stride;
};

__device__ inline float operand(const Matrix& m, u64 row, u64 column, u32 narrow) {
    float value = load(m.values, row * m.row_stride + column * m.column_stride);
    return narrow ? bf16_value(to_bf16(value)) : value;
}

KERNEL(product, const float* flag, Matrix a, Matrix b, View c, View bias, u64 rows, u64 inner, u64 columns, u32 narrow,
       u32 accumulate, Rounding rounding) {
    SHARED(float, tiles);
    if (skipped(flag)) return;
    float *of_a = tiles, *of_b = tiles + DEPTH * (TILE + 1);
    u64 across = (columns + TILE - 1) / TILE;
    u64 top = blockIdx.x / across * TILE, left = blockIdx.x % across * TILE;
    u32 down = threadIdx.x / 16, right = threadIdx.x % 16;
    float sums[OF_THREAD][OF_THREAD], run[OF_THREAD][OF_THREAD];
    for (u32 i = 0; i < OF_THREAD; i++) {
        for (u32 j = 0; j < OF_THREAD; j++) {
            u64 row = top + down + 16 * i, column = left + right + 16 * j;
            bool inside = row < rows && column < columns;
            sums[i][j] = inside && accumulate ? load(c, row * columns + column) : 0.0f;
            if (inside && bias.at) sums[i][j] += load(bias, column);
            run[i][j] = 0.0f;
        }
    }
    for (u64 k = 0; k < inner; k += DEPTH) {
        for (u32 at = threadIdx.x; at < TILE * DEPTH; at += THREADS) {
            // Threads that follow each other read what lies beside each other.
            u32 line = a.column_stride == 1 ? at / DEPTH : at % TILE;
            u32 depth = a.column_stride == 1 ? at % DEPTH : at / TILE;
            bool there = top + line < rows && k + depth < inner;
            of_a[depth * (TILE + 1) + line] = there ? operand(a, top + line, k + depth, narrow) : 0.0f;
            line = b.row_stride == 1 ? at / DEPTH : at % TILE;
            depth = b.row_stride == 1 ? at % DEPTH : at / TILE;
            there = left + line < columns && k + depth < inner;
            of_b[depth * (TILE + 1) + line] = there ? operand(b, k + depth, left + line, narrow) : 0.0f;
        }
        __syncthreads();
        u32 deep = inner - k < DEPTH ? (u32)(inner - k) : DEPTH;
        for (u32 depth = 0; depth < deep; depth++) {
            float x[OF_THREAD], y[OF_THREAD];
            for (u32 i = 0; i < OF_THREAD; i++) x[i] = of_a[depth * (TILE + 1) + down + 16 * i];
            for (u32 j = 0; j < OF_THREAD; j++) y[j] = of_b[depth * (TILE + 1) + right + 16 * j];
            for (u32 i = 0; i < OF_THREAD; i++)
                for (u32 j = 0; j < OF_THREAD; j++) run[i][j] += x[i] * y[j];
        }
        __syncthreads();
        if ((k + DEPTH) % FOLD == 0 || k + DEPTH >= inner) {
            for (u32 i = 0; i < OF_THREAD; i++) {
                for (u32 j = 0; j < OF_THREAD; j++) {
                    sums[i][j] += run[i][j];
                    run[i][j] = 0.0f;
                }
            }
        }
    }
    for (u32 i = 0; i < OF_THREAD; i++) {
        for (u32 j = 0; j < OF_THREAD; j++) {
            u64 row = top + down + 16 * i, column = left + right + 16 * j;
            if (row < rows && column < columns) store(c, row * columns + column, sums[i][j], rounding);
        }
    }
}

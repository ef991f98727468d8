// Matrix products of bf16 and f16 on tensor cores, summed in f32: c (+)= a b. Other storages are widened or narrowed on their way
// to shared memory, sixteen numbers at a time: nothing of the size of an operand is ever made.
//
// A block makes a tile of 128 x 128 of c, each of its 8 warps 64 x 32 of it. Tiles of the operands go round three places in shared
// memory: while one is multiplied, two are on their way. Sums are folded after every FOLD, as in `product.cu`.

#define STEP 32
#define STAGES 3
#define TILE_NUMBERS (TILE * STEP)
#define WARP_ROWS 64
#define WARP_COLUMNS 32

// An operand as it lies: `along` where the inner length runs along memory. A thread reads one unit of each tile.
struct Source {
    View values;
    u64 stride, outer, outer_end;
    u32 width;
    bool along;
};

template <bool HALF, bool CODES> __device__ inline void fill_tile(const Source& s, u64 k, u64 inner, u16* tile) {
    u32 length = s.along ? STEP : TILE, line = threadIdx.x / (length / UNIT), place = threadIdx.x % (length / UNIT) * UNIT;
    u64 at = s.along ? s.outer + line : k + line, from = s.along ? k + place : s.outer + place;
    bool there = at < (s.along ? s.outer_end : inner);
    u32 count = there ? unit_count(from, s.along ? inner : s.outer_end) : 0;
    ToLine<HALF> put = {tile, length, line, place / 8};
    fill_line<HALF, CODES>(s.values, s.width, at * s.stride + from, count, put);
}

template <bool HALF, bool A_ALONG, bool B_ALONG, bool CODES>
__device__ inline void product_of_tiles(u16* tiles, const Matrix& a, const Matrix& b, View c, View bias, u64 rows, u64 inner,
                                        u64 columns, u32 accumulate, const Rounding& rounding) {
    u64 across = (columns + TILE - 1) / TILE, down = (rows + TILE - 1) / TILE;
    // Blocks that follow each other make tiles of the same columns, eight rows of tiles at a time: both operands stay in the cache.
    u64 band = blockIdx.x / (across * 8), band_rows = down - band * 8 < 8 ? down - band * 8 : 8;
    u64 within = blockIdx.x - band * across * 8;
    u64 top = (band * 8 + within % band_rows) * TILE, left = within / band_rows * TILE;
    u64 a_stride = A_ALONG ? a.row_stride : a.column_stride, b_stride = B_ALONG ? b.column_stride : b.row_stride;
    Source of_a = {a.values, a_stride, top, rows, copy_width(a.values.at, a_stride), A_ALONG};
    Source of_b = {b.values, b_stride, left, columns, copy_width(b.values.at, b_stride), B_ALONG};
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 warp_row = warp / 4 * WARP_ROWS, warp_column = warp % 4 * WARP_COLUMNS;

    Result result = {c, bias, top, left, rows, columns, accumulate, 1, 16};
    float sums[4][4][4], run[4][4][4];
#pragma unroll
    for (u32 i = 0; i < 4; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) sums[i][j][n] = run[i][j][n] = 0.0f;
    // Each of a thread's four runs of rows is of one part. They move up part by part, so that one piece of code is enough for all.
    float* numbers = (float*)tiles;
    float* own_part = numbers + (warp / 4 * 16 + lane / 4) * PITCH + warp_column + lane % 4 * 2;
    if (accumulate || bias.at) {
#pragma unroll 1
        for (u32 part = 0; part < PARTS_OF_TILE; part++) {
            begin_part(numbers, result, part);
            __syncthreads();
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 j = 0; j < 4; j++)
#pragma unroll
                    for (u32 n = 0; n < 4; n++)
                        sums[i][j][n] = i < 3 ? sums[i + 1][j][n] : own_part[n / 2 * 8 * PITCH + 8 * j + n % 2];
            __syncthreads();
        }
    }
    u64 steps = (inner + STEP - 1) / STEP;
    u32 now = 0, next = 0;
    for (u64 filled = 0; filled < steps + STAGES - 1; filled++) {
        if (filled >= STAGES - 1) {
            copy_wait<STAGES - 2>();
            // What was copied is there for all, and nobody reads any more what is filled next.
            __syncthreads();
        }
        if (filled < steps) {
#pragma unroll 1
            for (u32 operand = 0; operand < 2; operand++) {
                Source source = operand ? of_b : of_a;
                fill_tile<HALF, CODES>(source, filled * STEP, inner, tiles + (2 * next + operand) * TILE_NUMBERS);
            }
        }
        copy_group();
        next = next + 1 == STAGES ? 0 : next + 1;
        if (filled < STAGES - 1) continue;
        u64 step = filled - (STAGES - 1);
        const u16 *tile_a = tiles + now * 2 * TILE_NUMBERS, *tile_b = tile_a + TILE_NUMBERS;
#pragma unroll
        for (u32 k = 0; k < STEP; k += 16) {
            u32 own_a[4][4], own_b[4][2];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (A_ALONG) a_along(own_a[i], tile_a, STEP, warp_row + 16 * i, k);
                else a_across(own_a[i], tile_a, TILE, warp_row + 16 * i, k);
            }
#pragma unroll
            for (u32 j = 0; j < 4; j += 2) {
                if (B_ALONG) b_along(own_b[j], tile_b, STEP, warp_column + 8 * j, k);
                else b_across(own_b[j], tile_b, TILE, warp_column + 8 * j, k);
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 j = 0; j < 4; j++) multiply_add<HALF>(run[i][j], own_a[i], own_b[j]);
        }
        if ((step + 1) % (FOLD / STEP) == 0 || step + 1 == steps) {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
#pragma unroll
                for (u32 j = 0; j < 4; j++)
#pragma unroll
                    for (u32 n = 0; n < 4; n++) {
                        sums[i][j][n] += run[i][j][n];
                        run[i][j][n] = 0.0f;
                    }
        }
        now = now + 1 == STAGES ? 0 : now + 1;
    }
    // Nobody reads the tiles any more.
    __syncthreads();
#pragma unroll 1
    for (u32 part = 0; part < PARTS_OF_TILE; part++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++)
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                own_part[n / 2 * 8 * PITCH + 8 * j + n % 2] = sums[0][j][n];
#pragma unroll
                for (u32 i = 0; i < 3; i++) sums[i][j][n] = sums[i + 1][j][n];
            }
        __syncthreads();
        end_part(numbers, result, part, rounding);
        __syncthreads();
    }
}

#define PRODUCT_80(name, half, a_along, b_along, codes)                                                                      \
    KERNEL(name, const float* flag, Matrix a, Matrix b, View c, View bias, u64 rows, u64 inner, u64 columns, u32 accumulate,  \
           Rounding rounding) {                                                                                              \
        SHARED(u16, tiles);                                                                                                  \
        if (skipped(flag)) return;                                                                                           \
        product_of_tiles<half, a_along, b_along, codes>(tiles, a, b, c, bias, rows, inner, columns, accumulate, rounding);   \
    }

PRODUCT_80(product_bf16, false, true, true, true)
PRODUCT_80(product_bf16_input, false, true, false, true)
PRODUCT_80(product_bf16_weight, false, false, false, false)
PRODUCT_80(product_f16, true, true, true, false)
PRODUCT_80(product_f16_input, true, true, false, false)
PRODUCT_80(product_f16_weight, true, false, false, false)

// Parts of a weight that a warp of `product_bf16_few` reads at once.
#define IN_FLIGHT 4

// Sixteen numbers of bf16 as they are stored, or zeros.
__device__ inline void words_of_bf16(View x, u64 index, bool there, Words* out) {
    const Words* from = (const Words*)(x.at + 2 * index);
    out[0] = there ? from[0] : Words{0, 0, 0, 0};
    out[1] = there ? from[1] : Words{0, 0, 0, 0};
}

// c (+)= x weight^T of up to 16 rows: a block has eight columns, each warp every eighth run of 64 of the inner length, in order;
// then the warps' sums are added in theirs. Fragments come straight from memory: a thread's sixteen numbers are the same places of
// the inner length for both operands, which is all that a product asks.
KERNEL(product_bf16_few, const float* flag, View x, View weight, View c, View bias, u64 rows, u64 inner, u64 columns,
       u32 accumulate, Rounding rounding) {
    SHARED(float, parts);
    if (skipped(flag)) return;
    u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, group = lane / 4;
    u64 first = (u64)blockIdx.x * 8, column = first + group;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const u64 step = (THREADS / WARP) * 4 * UNIT;
    bool as_they_are = x.type == BF16 && weight.type == BF16 && inner % UNIT == 0 && x.at % 16 == 0 && weight.at % 16 == 0;
    if (as_they_are) {
        // Several parts of the weight are on their way at once.
        for (u64 start = warp * 4 * UNIT; start < inner; start += IN_FLIGHT * step) {
            Words of_weight[IN_FLIGHT][2], of_x[IN_FLIGHT][2][2];
#pragma unroll
            for (u32 part = 0; part < IN_FLIGHT; part++) {
                u64 k = start + part * step + lane % 4 * UNIT;
                words_of_bf16(weight, column * inner + k, column < columns && k < inner, of_weight[part]);
                words_of_bf16(x, group * inner + k, group < rows && k < inner, of_x[part][0]);
                words_of_bf16(x, (group + 8) * inner + k, group + 8 < rows && k < inner, of_x[part][1]);
            }
#pragma unroll
            for (u32 part = 0; part < IN_FLIGHT; part++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    Words b = of_weight[part][i], low = of_x[part][0][i], high = of_x[part][1][i];
                    u32 first_a[4] = {low.x, high.x, low.y, high.y}, first_b[2] = {b.x, b.y};
                    multiply_add<false>(sums, first_a, first_b);
                    u32 second_a[4] = {low.z, high.z, low.w, high.w}, second_b[2] = {b.z, b.w};
                    multiply_add<false>(sums, second_a, second_b);
                }
        }
    }
    for (u64 start = as_they_are ? inner : warp * 4 * UNIT; start < inner; start += step) {
        u64 k = start + lane % 4 * UNIT;
        u32 count = unit_count(k, inner);
        float values[UNIT];
        u32 of_weight[8], of_x[2][8];
        load_unit<true>(weight, column * inner + k, column < columns ? count : 0, ToRegisters{values});
#pragma unroll
        for (u32 i = 0; i < 8; i++) of_weight[i] = pair_of_16_bits<false>(values[2 * i], values[2 * i + 1]);
#pragma unroll
        for (u32 part = 0; part < 2; part++) {
            u64 row = group + 8 * part;
            load_unit<false>(x, row * inner + k, row < rows ? count : 0, ToRegisters{values});
#pragma unroll
            for (u32 i = 0; i < 8; i++) of_x[part][i] = pair_of_16_bits<false>(values[2 * i], values[2 * i + 1]);
        }
#pragma unroll
        for (u32 i = 0; i < 8; i += 2) {
            u32 a[4] = {of_x[0][i], of_x[1][i], of_x[0][i + 1], of_x[1][i + 1]};
            multiply_add<false>(sums, a, of_weight + i);
        }
    }
#pragma unroll
    for (u32 n = 0; n < 4; n++) parts[warp * 128 + (group + n / 2 * 8) * 8 + lane % 4 * 2 + n % 2] = sums[n];
    __syncthreads();
    u64 row = threadIdx.x / 8, own = first + threadIdx.x % 8;
    if (threadIdx.x >= 128 || row >= rows || own >= columns) return;
    float sum = accumulate ? load_float(c, row * columns + own) : 0.0f, added = 0.0f;
    if (bias.at) sum += load_float(bias, own);
    for (u32 part = 0; part < THREADS / WARP; part++) added += parts[part * 128 + threadIdx.x];
    store(c, row * columns + own, sum + added, rounding);
}

// Matrix products of bf16 on the tensor cores of compute capability 9.0, summed in f32: c (+)= a b.
//
// A block makes tiles of 128 x COLUMNS of c, one after the other; each of its two multiplying warpgroups makes 64 rows of them. The
// third warpgroup brings tiles of the operands, PLACES of them ahead, of the next tile of c too. Sums begin with what they are added to
// and go along the inner length sixteen at a time: a sum in pieces, one after the other, has the bits of the whole.

#define STEP_90 64
#define ROWS_90 128
// Bytes of 64 lines of 64 numbers, the least that is copied.
#define BOX_90 8192
// Columns that go through shared memory together, and numbers from a row there to the next.
#define PART_COLUMNS 32
#define PART_PITCH 40

struct Tiles {
    u64 across, down;

    // Blocks that follow each other make tiles of the same columns, eight rows of tiles at a time: both operands stay in the cache.
    __device__ void place(u64 number, u32 columns, u64* top, u64* left) const {
        u64 band = number / (across * 8), band_rows = down - band * 8 < 8 ? down - band * 8 : 8;
        u64 within = number - band * across * 8;
        *top = (band * 8 + within % band_rows) * ROWS_90;
        *left = within / band_rows * columns;
    }
};

// Where sums are: number (row, column) of a part is number at + row * pitch + column of the values.
struct Sums90 {
    View values;
    u64 pitch, at;

    __device__ u64 index(u64 row, u64 column) const { return at + row * pitch + column; }
};

// What a thread's sums begin with. Number 4 j + n is of row n / 2 * 8 and column 8 j + n % 2 from its first.
template <u32 COLUMNS>
__device__ inline void begin_sums(float* sums, const Sums90& from, View bias, u64 row, u64 column, u64 rows, u64 columns) {
#pragma unroll
    for (u32 i = 0; i < COLUMNS / 2; i++) sums[i] = 0.0f;
    if (from.values.at && from.values.type == F32 && columns % 2 == 0) {
#pragma unroll
        for (u32 i = 0; i < COLUMNS / 2; i += 2) {
            u64 at = row + i / 2 % 2 * 8, own = column + i / 4 * 8;
            if (at >= rows || own >= columns) continue;
            const float* values = (const float*)from.values.at + from.index(at, own);
            sums[i] = values[0];
            sums[i + 1] = values[1];
        }
    } else if (from.values.at) {
#pragma unroll
        for (u32 i = 0; i < COLUMNS / 2; i++) {
            u64 at = row + i / 2 % 2 * 8, own = column + i / 4 * 8 + i % 2;
            if (at < rows && own < columns) sums[i] = load_float(from.values, from.index(at, own));
        }
    }
    if (!bias.at) return;
#pragma unroll
    for (u32 i = 0; i < COLUMNS / 2; i++) {
        u64 own = column + i / 4 * 8 + i % 2;
        if (own < columns) sums[i] += load_float(bias, own);
    }
}

// Writes a warp's 16 rows: 32 columns at a time by way of shared memory, so that lines are written in a piece.
template <u32 COLUMNS>
__device__ inline void end_sums(const float* sums, float* part, const Sums90& to, u64 top, u64 left, u64 rows, u64 columns,
                                const Rounding& rounding) {
    u32 lane = threadIdx.x % WARP;
    View c = to.values;
    bool whole = columns % 8 == 0 && to.pitch % 8 == 0 && to.at % 8 == 0 && c.at % 16 == 0;
#pragma unroll
    for (u32 first = 0; first < COLUMNS; first += PART_COLUMNS) {
#pragma unroll
        for (u32 j = 0; j < PART_COLUMNS / 8; j++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float* to = part + (lane / 4 + half * 8) * PART_PITCH + 8 * j + lane % 4 * 2;
                to[0] = sums[first / 2 + 4 * j + 2 * half];
                to[1] = sums[first / 2 + 4 * j + 2 * half + 1];
            }
        warp_barrier();
        if (whole && c.type == F32) {
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                u64 row = top + lane / 8 + 4 * n, column = left + first + lane % 8 * 4;
                Words words = *(const Words*)(part + (lane / 8 + 4 * n) * PART_PITCH + lane % 8 * 4);
                if (row < rows && column < columns) *(Words*)(c.at + 4 * to.index(row, column)) = words;
            }
        } else if (whole && c.type == BF16 && !rounding.stochastic) {
#pragma unroll
            for (u32 n = 0; n < 2; n++) {
                u64 row = top + lane / 4 + 8 * n, column = left + first + lane % 4 * 8;
                const float* x = part + (lane / 4 + 8 * n) * PART_PITCH + lane % 4 * 8;
                Words words = {pair_of_16_bits<false>(x[0], x[1]), pair_of_16_bits<false>(x[2], x[3]),
                               pair_of_16_bits<false>(x[4], x[5]), pair_of_16_bits<false>(x[6], x[7])};
                if (row < rows && column < columns) *(Words*)(c.at + 2 * to.index(row, column)) = words;
            }
        } else {
#pragma unroll 1
            for (u32 n = 0; n < 16; n++) {
                u64 row = top + n, column = left + first + lane;
                if (row < rows && column < columns) store(c, to.index(row, column), part[n * PART_PITCH + lane], rounding);
            }
        }
        warp_barrier();
    }
}

// Puts sixteen numbers into a line of bf16.
struct ToBf16 {
    u16* to;

    __device__ void one(u32 i, float value) const { to[i] = to_bf16(value); }
    __device__ void all(const float* x) const {
#pragma unroll
        for (u32 part = 0; part < 2; part++) {
            const float* y = x + 8 * part;
            ((Words*)to)[part] = {narrow_pair(y[0], y[1]), narrow_pair(y[2], y[3]), narrow_pair(y[4], y[5]), narrow_pair(y[6], y[7])};
        }
    }
};

// to [lines, pitch] = part of a matrix of any storage, rounded to bf16: so many lines and columns from the first ones on, and zeros
// behind them. The matrix has lines of `width` numbers, the pitch is a multiple of 16.
KERNEL(round_part, const float* flag, View x, u64 width, u64 first_line, u64 lines, u64 first_column, u64 columns, u64 to, u64 pitch) {
    if (skipped(flag)) return;
    u64 across = pitch / UNIT, all = lines * across;
    EACH(unit, all) {
        u64 line = unit / across, place = unit % across * UNIT;
        ToBf16 put = {(u16*)to + line * pitch + place};
        load_unit<true>(x, (first_line + line) * width + first_column + place, unit_count(place, columns), put);
    }
}

template <u32 COLUMNS, u32 PLACES, bool A_ALONG, bool B_ALONG>
__device__ inline void product_of_tiles_90(u8* tiles, const TensorMap* of_a, const TensorMap* of_b, const Sums90& from,
                                           const Sums90& to, View bias, u64 rows, u64 inner, u64 columns, const Rounding& rounding) {
    const u32 a_bytes = ROWS_90 * STEP_90 * 2, b_bytes = COLUMNS * STEP_90 * 2, stage_bytes = a_bytes + b_bytes;
    float* parts = (float*)(tiles + PLACES * stage_bytes);
    u64 *full = (u64*)(parts + 8 * 16 * PART_PITCH), *empty = full + PLACES;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < PLACES; stage++) {
            barrier_begin(full + stage, 1);
            barrier_begin(empty + stage, 8);
        }
        barriers_begun();
    }
    __syncthreads();
    Tiles all = {(columns + COLUMNS - 1) / COLUMNS, (rows + ROWS_90 - 1) / ROWS_90};
    u64 count = all.across * all.down, steps = (inner + STEP_90 - 1) / STEP_90, top, left;
    u32 stage = 0, phase = 0, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (warp < 4) {
        registers_less<40>();
        if (threadIdx.x > 0) return;
        for (u64 number = blockIdx.x; number < count; number += gridDim.x) {
            all.place(number, COLUMNS, &top, &left);
            for (u64 step = 0; step < steps; step++) {
                u8 *tile_a = tiles + stage * stage_bytes, *tile_b = tile_a + a_bytes;
                u32 k = (u32)(step * STEP_90);
                barrier_wait(empty + stage, phase ^ 1);
                barrier_expect(full + stage, stage_bytes);
                if (A_ALONG) tile_begin(tile_a, of_a, k, (u32)top, full + stage);
                else
                    for (u32 box = 0; box < ROWS_90 / 64; box++)
                        tile_begin(tile_a + box * BOX_90, of_a, (u32)top + 64 * box, k, full + stage);
                if (B_ALONG) tile_begin(tile_b, of_b, k, (u32)left, full + stage);
                else
                    for (u32 box = 0; box < COLUMNS / 64; box++)
                        tile_begin(tile_b + box * BOX_90, of_b, (u32)left + 64 * box, k, full + stage);
                stage = stage + 1 == PLACES ? 0 : stage + 1;
                phase ^= stage == 0;
            }
        }
        return;
    }
    registers_more<232>();
    u32 group = warp / 4 - 1;
    float* part = parts + (warp - 4) * 16 * PART_PITCH;
    for (u64 number = blockIdx.x; number < count; number += gridDim.x) {
        all.place(number, COLUMNS, &top, &left);
        top += group * 64 + warp % 4 * 16;
        float sums[COLUMNS / 2];
        begin_sums<COLUMNS>(sums, from, bias, top + lane / 4, left + lane % 4 * 2, rows, columns);
        auto multiply = [&]() {
            const u8 *tile_a = tiles + stage * stage_bytes, *tile_b = tile_a + a_bytes;
            barrier_wait(full + stage, phase);
            u64 a = tile_descriptor(tile_a + group * BOX_90, A_ALONG ? 16 : BOX_90), b = tile_descriptor(tile_b, B_ALONG ? 16 : BOX_90);
            products_begin();
#pragma unroll
            for (u32 k = 0; k < STEP_90 / 16; k++)
                multiply_tiles<COLUMNS, !A_ALONG, !B_ALONG>(sums, a + k * (A_ALONG ? 2 : 128), b + k * (B_ALONG ? 2 : 128));
            products_group();
            stage = stage + 1 == PLACES ? 0 : stage + 1;
            phase ^= stage == 0;
        };
        u32 before = stage;
        multiply();
        for (u64 step = 1; step < steps; step++) {
            u32 own = stage;
            multiply();
            // The products before these are done, and with what they read.
            products_wait<1, COLUMNS / 2>(sums);
            if (lane == 0) barrier_arrive(empty + before);
            before = own;
        }
        products_wait<0, COLUMNS / 2>(sums);
        if (lane == 0) barrier_arrive(empty + before);
        end_sums<COLUMNS>(sums, part, to, top, left, rows, columns, rounding);
    }
}

// What sums begin with and where they go are of the same part.
#define PRODUCT_90(name, width, places, a_along, b_along)                                                                    \
    KERNEL_90(name, const float* flag, MAP_PARAMETER a, MAP_PARAMETER b, Sums90 from, Sums90 to, View bias, u64 rows,         \
              u64 inner, u64 columns, Rounding rounding) {                                                                   \
        SHARED_TILES(tiles);                                                                                                 \
        if (skipped(flag)) return;                                                                                           \
        product_of_tiles_90<width, places, a_along, b_along>(tiles, &a, &b, from, to, bias, rows, inner, columns, rounding); \
    }

PRODUCT_90(product_90_wide, 256, 4, true, true)
PRODUCT_90(product_90_wide_input, 256, 4, true, false)
PRODUCT_90(product_90_wide_weight, 256, 4, false, false)
PRODUCT_90(product_90, 128, 6, true, true)
PRODUCT_90(product_90_input, 128, 6, true, false)
PRODUCT_90(product_90_weight, 128, 6, false, false)

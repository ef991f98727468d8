// Sums over whole tensors: exact ones, whose bits depend on no order, and those in a given order.
//
// An exact sum is a long number in fixed point: DIGITS digits of 32 bits in words of 64, and a word that says whether it was
// spoiled. Adding to words is adding integers, which atomics may do: the result has one value whatever their order.

#define DIGITS 22
#define LOWEST (-384)
#define EXACT_WORDS (DIGITS + 1)
#define LANES 32
#define RUN_ELEMENTS 256

// Adds to a sum whose words lie `apart` and that nobody else adds to.
__device__ inline void exact_add(u64* sum, u32 apart, double value) {
    u64 bits = (u64)__double_as_longlong(value);
    int exponent = (int)(bits >> 52);
    u64 mantissa = (bits << 12 >> 12);
    if (exponent == 0 && mantissa == 0) return;
    mantissa |= 1ull << 52;
    int place = exponent - 1075 - LOWEST;
    while (place < 0 && !(mantissa & 1)) {
        mantissa >>= 1;
        place++;
    }
    if (place < 0 || place / 32 + 3 > DIGITS) {
        sum[DIGITS * apart] = 1;
        return;
    }
    u32 shift = (u32)place % 32;
    u64 low = mantissa << shift, high = shift ? mantissa >> (64 - shift) : 0;
    sum += place / 32 * apart;
    sum[0] += low & 0xffffffffull;
    sum[apart] += low >> 32;
    sum[2 * apart] += high;
}

// Leaves every digit below 2^32.
__device__ inline void exact_carry(u64* sum) {
    i64 carried = 0;
    for (u32 i = 0; i < DIGITS; i++) {
        i64 digit = (i64)sum[i] + carried;
        sum[i] = (u64)digit & 0xffffffffull;
        carried = digit >> 32;
    }
    if (carried) sum[DIGITS] = 1;
}

// The sum, whose digits are carried, rounded to nearest.
__device__ inline double exact_value(const u64* sum) {
    if (sum[DIGITS]) return (double)INFINITE;
    int highest = DIGITS - 1;
    while (highest >= 0 && sum[highest] == 0) highest--;
    if (highest < 0) return 0.0;
    // The highest 64 bits that count, the first of them 1; what is below decides ties.
    u64 digits[3];
    for (int i = 0; i < 3; i++) digits[i] = highest >= i ? sum[highest - i] : 0;
    int free_bits = __clzll((i64)(digits[0] << 32));
    u64 top = (digits[0] << 32 | digits[1]) << free_bits | (free_bits ? digits[2] << 32 >> (64 - free_bits) : 0);
    bool below = (u32)(digits[2] << free_bits) != 0;
    for (int i = highest - 3; i >= 0; i--) below |= sum[i] != 0;
    return ldexp(__ull2double_rn(top | below), LOWEST + 32 * (highest - 1) - free_bits);
}

KERNEL(clear_words, const float* flag, u64* words, u64 n, u64 value) {
    if (skipped(flag)) return;
    EACH(i, n) words[i] = value;
}

// Threads that have a run together, four of its lanes each; the runs of a block, and room for their lanes' sums.
#define LANE_THREADS (LANES / 4)
#define BLOCK_RUNS (THREADS / LANE_THREADS)
#define LANE_ROOM (LANES + 1)

// Adds the squares of x to an exact sum: runs of 256 in f64, in LANES sums that are added in order. A warp's threads have a run
// each when these are added, and exact sums of their own, which become one at the end.
KERNEL_FOUR(exact_squares, const float* flag, View x, u64 n, u64* sum) {
    SHARED(double, lanes);
    if (skipped(flag)) return;
    u64* own = (u64*)(lanes + BLOCK_RUNS * LANE_ROOM);
    EACH_OF_BLOCK(i, BLOCK_RUNS * EXACT_WORDS) own[i] = 0;
    bool fours = in_fours(x);
    u64 runs = (n + RUN_ELEMENTS - 1) / RUN_ELEMENTS;
    u32 own_run = threadIdx.x / LANE_THREADS, lane = threadIdx.x % LANE_THREADS * 4;
    for (u64 first = (u64)blockIdx.x * BLOCK_RUNS; first < runs; first += (u64)gridDim.x * BLOCK_RUNS) {
        u64 start = (first + own_run) * RUN_ELEMENTS, count = start >= n ? 0 : n - start < RUN_ELEMENTS ? n - start : RUN_ELEMENTS;
        double* to = lanes + own_run * LANE_ROOM + lane;
        if (fours && count == RUN_ELEMENTS) {
            Words words[RUN_ELEMENTS / LANES];
            double sums[4] = {0.0, 0.0, 0.0, 0.0};
#pragma unroll
            for (u32 part = 0; part < RUN_ELEMENTS / LANES; part++) words[part] = four_at(x, start + part * LANES + lane);
#pragma unroll
            for (u32 part = 0; part < RUN_ELEMENTS / LANES; part++) {
                float values[4];
                four_of(x.type, words[part], values);
                for (u32 k = 0; k < 4; k++) sums[k] = __dadd_rn(sums[k], __dmul_rn((double)values[k], (double)values[k]));
            }
            for (u32 k = 0; k < 4; k++) to[k] = sums[k];
        } else {
            u64 whole = count / LANES * LANES;
            for (u32 k = 0; k < 4; k++) {
                double of_lane = 0.0;
                if (whole + lane + k < count) {
                    double value = load(x, start + whole + lane + k);
                    of_lane = __dmul_rn(value, value);
                }
                for (u64 i = lane + k; i < whole; i += LANES) {
                    double value = load(x, start + i);
                    of_lane = __dadd_rn(of_lane, __dmul_rn(value, value));
                }
                to[k] = of_lane;
            }
        }
        __syncthreads();
        if (threadIdx.x < BLOCK_RUNS) {
            double all = 0.0;
#pragma unroll
            for (u32 i = 0; i < LANES; i++) all = __dadd_rn(all, lanes[threadIdx.x * LANE_ROOM + i]);
            exact_add(own + threadIdx.x, BLOCK_RUNS, all);
        }
        __syncthreads();
    }
    __syncthreads();
    if (threadIdx.x >= EXACT_WORDS) return;
    u64 all = 0;
    for (u32 i = 0; i < BLOCK_RUNS; i++) all += own[threadIdx.x * BLOCK_RUNS + i];
    if (all && threadIdx.x < DIGITS) atomicAdd(sum + threadIdx.x, all);
    else if (all) atomicMax(sum + DIGITS, 1ull);
}

KERNEL(round_exact, const float* flag, u64* sums, float* out, float* finite, u64 count) {
    if (skipped(flag)) return;
    EACH(i, count) {
        u64 own[EXACT_WORDS];
        for (u32 word = 0; word < EXACT_WORDS; word++) own[word] = sums[i * EXACT_WORDS + word];
        exact_carry(own);
        out[i] = (float)exact_value(own);
        if (finite && !(fabsf(out[i]) <= LARGEST)) *finite = 0.0f;
    }
}

KERNEL(carry_exact, const float* flag, u64* sum) {
    if (skipped(flag)) return;
    if (first_element() == 0) exact_carry(sum);
}

KERNEL(add_exact, const float* flag, const u64* x, u64* out, u64 count) {
    if (skipped(flag)) return;
    EACH(i, count) {
        u64* sum = out + i * EXACT_WORDS;
        for (u32 word = 0; word < DIGITS; word++) sum[word] += x[i * EXACT_WORDS + word];
        sum[DIGITS] |= x[i * EXACT_WORDS + DIGITS];
        exact_carry(sum);
    }
}

// out += the sum of x in the order of its elements.
KERNEL(add_sum, const float* flag, const float* x, u64 n, double* out, float* finite) {
    SHARED(float, values);
    if (skipped(flag)) return;
    double sum = 0.0;
    for (u64 start = 0; start < n; start += THREADS) {
        u64 count = n - start < THREADS ? n - start : THREADS;
        if (threadIdx.x < count) values[threadIdx.x] = x[start + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0)
            for (u64 i = 0; i < count; i++) sum += (double)values[i];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *out += sum;
        if (!(fabs(*out) <= 1.7976931348623157e308)) *finite = 0.0f;
    }
}

KERNEL(clip_factor, const float* flag, const float* squares, u64 n, double max_norm, double loss_scale, float* out) {
    if (skipped(flag) || first_element() != 0) return;
    double sum = 0.0;
    for (u64 i = 0; i < n; i++) sum += (double)squares[i];
    double clip = max_norm / (sqrt(sum) / loss_scale + 1e-6);
    // What is not a number gives way to 1.
    *out = (float)((clip < 1.0 ? clip : 1.0) / loss_scale);
}

// What is summed in f64 for optimizers: squares of a; of grad over the root of a divisor; of grad times ratios.
enum Squared { OF_VALUES, OF_DIVIDED, OF_SCALED };

// Where the factor of an element lies.
struct Factors {
    const float* rows;     // one for each row
    const float* columns;  // one for each column, or for each element where `whole`
    u64 width;
    u32 whole;
    u32 unused;
};

// partials[block] = a sum of squares; every block has a run of elements.
KERNEL(partial_squares, const float* flag, u32 what, View x, u64 n, u64 run, const float* grad_scale, Factors by,
       const double* mean, double* partials) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    float scale = grad_scale ? *grad_scale : 1.0f;
    u64 start = blockIdx.x * run, end = start + run < n ? start + run : n;
    double sum = 0.0;
    each_of_block(end - start, run % 4 == 0 && in_fours(x), [&](auto i) {
        auto places = i.behind(start);
        auto got = fetch(x, places);
        auto all = numbers(got);
        for (u32 k = 0; k < i.N; k++) {
            float value = all[k];
            if (what != OF_VALUES && places.has(k)) {
                u64 at = places.of(k), row = at / by.width, place = by.whole ? at : at % by.width;
                if (what == OF_DIVIDED) {
                    float factor = by.rows ? (float)sqrt(*mean / (double)by.rows[row]) : 1.0f;
                    value = value * (factor * scale) / sqrtf(by.columns[place]);
                } else if (by.rows) {
                    value = value * (scale * by.rows[row]);
                } else {
                    value = value * scale * by.columns[place];
                }
            }
            sum += (double)value * (double)value;
        }
    });
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// out = the sum of the partial sums.
KERNEL(sum_partials, const float* flag, const double* partials, u64 count, double* out) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    double sum = 0.0;
    EACH_OF_BLOCK(i, count) sum += partials[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) *out = sum;
}

// sums[c] = the sum of squares of a row or a column.
KERNEL(channel_squares, const float* flag, View x, u64 rows, u64 columns, u32 of_rows, double* sums) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    if (of_rows) {
        EACH_ROW(row, rows) {
            double sum = 0.0;
            EACH_OF_BLOCK(i, columns) {
                double value = load(x, row * columns + i);
                sum += value * value;
            }
            sum = block_sum(sum, scratch);
            if (threadIdx.x == 0) sums[row] = sum;
        }
        return;
    }
    EACH(column, columns) {
        double sum = 0.0;
        for (u64 row = 0; row < rows; row++) {
            double value = load(x, row * columns + column);
            sum += value * value;
        }
        sums[column] = sum;
    }
}

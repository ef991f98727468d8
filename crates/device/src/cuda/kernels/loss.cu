// Softmax cross-entropy and its gradient, of whole rows of logits or of pieces of them.
//
// A row is cut into runs of RUN columns. Each has its largest logit and its sum of exponentials, and the row's are made of them in
// order: pieces of whole runs give the bits of the row.

#define RUN 1024
#define IGNORED 0xffffffffu

__device__ inline float capped(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

// The derivative of a capped logit.
__device__ inline float slope_of(float x, float cap) { return cap > 0.0f ? 1.0f - (x / cap) * (x / cap) : 1.0f; }

// A warp has a run: fours of its threads side by side, and then the next ones.
#define OWN_LOGITS (RUN / WARP)
#define RUNS_AT_ONCE (THREADS / WARP)

// Place k of those that a thread has.
__device__ inline u32 own_place(u32 k) { return k / 4 * (4 * WARP) + threadIdx.x % WARP * 4 + k % 4; }

__device__ inline u32 run_length(u64 columns, u64 run) { return (u32)(columns - run * RUN < RUN ? columns - run * RUN : RUN); }

// Up to N logits of a thread, of which a warp has n; in the place of those that are not there, what adds nothing.
template <u32 N> __device__ inline void own_logits(const float* x, u32 n, bool fours, float cap, float* own) {
#pragma unroll
    for (u32 k = 0; k < N; k += 4) {
        u32 place = own_place(k);
        Words words = {0xff800000u, 0xff800000u, 0xff800000u, 0xff800000u};
        if (fours) {
            if (place < n) words = *(const Words*)(x + place);
        } else {
            if (place < n) words.x = __float_as_uint(x[place]);
            if (place + 1 < n) words.y = __float_as_uint(x[place + 1]);
            if (place + 2 < n) words.z = __float_as_uint(x[place + 2]);
            if (place + 3 < n) words.w = __float_as_uint(x[place + 3]);
        }
        four_of(F32, words, own + k);
    }
    if (cap > 0.0f) {
#pragma unroll
        for (u32 k = 0; k < N; k++)
            if (own_place(k) < n) own[k] = capped(own[k], cap);
    }
}

template <u32 N> __device__ inline void put_logits(float* x, u32 n, bool fours, const float* own) {
#pragma unroll
    for (u32 k = 0; k < N; k += 4) {
        u32 place = own_place(k);
        if (fours) {
            if (place < n) *(Words*)(x + place) = four_words(F32, own + k);
        } else {
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (place + i < n) x[place + i] = own[k + i];
        }
    }
}

// Largest logit and sum of e^(logit - largest) of a run of `n` logits.
__device__ inline void run_of(const float* x, u32 n, bool fours, float cap, float* run) {
    float largest = -LARGEST, sum = 0.0f, own[OWN_LOGITS];
    own_logits<OWN_LOGITS>(x, n, fours, cap, own);
#pragma unroll
    for (u32 k = 0; k < OWN_LOGITS; k++)
        if (own[k] > largest) largest = own[k];
    largest = warp_fold(largest, Larger());
#pragma unroll
    for (u32 k = 0; k < OWN_LOGITS; k++) sum += expf(own[k] - largest);
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) {
        run[0] = largest;
        run[1] = sum;
    }
}

// Largest logit and sum of a row, from its runs.
struct Total {
    float largest;
    double sum;
};

__device__ inline double share(float x, float largest) { return exp((double)x - (double)largest); }

// What a run adds to a row's sum.
__device__ inline double term_of(const float* run, float largest) { return __dmul_rn((double)run[1], share(run[0], largest)); }

__device__ inline Total total_of(const float* runs, u64 count) {
    Total total = {-LARGEST, 0.0};
    for (u64 r = 0; r < count; r++)
        if (runs[2 * r] > total.largest) total.largest = runs[2 * r];
    for (u64 r = 0; r < count; r++) total.sum = __dadd_rn(total.sum, term_of(runs + 2 * r, total.largest));
    return total;
}

// The same by the threads of a block.
__device__ inline Total total_of_block(const float* runs, u64 count, double* terms) {
    Total total = {-LARGEST, 0.0};
    EACH_OF_BLOCK(r, count)
        if (runs[2 * r] > total.largest) total.largest = runs[2 * r];
    total.largest = block_largest(total.largest, (float*)terms);
    for (u64 start = 0; start < count; start += THREADS) {
        u64 here = count - start < THREADS ? count - start : THREADS;
        if (threadIdx.x < here) terms[threadIdx.x] = term_of(runs + 2 * (start + threadIdx.x), total.largest);
        __syncthreads();
        for (u32 i = 0; i < here; i++) total.sum = __dadd_rn(total.sum, terms[i]);
        __syncthreads();
    }
    return total;
}

__device__ inline float loss_of(Total total, float logit) {
    return (float)(log(total.sum) - ((double)logit - (double)total.largest));
}

// The gradient of a run of `n` logits in their place, some at a time; `target` is that among them, or not below n.
__device__ inline void gradient_of(float* x, u32 n, bool fours, float cap, float largest, Total total, float scale, u64 target) {
    float factor = normal_or_zero((float)((double)scale / total.sum * share(largest, total.largest)));
    const u32 some = OWN_LOGITS / 2;
#pragma unroll 1
    for (u32 start = 0; start < n; start += some * WARP) {
        float own[some];
        own_logits<some>(x + start, n - start, fours, cap, own);
        // No place where the target is another run's.
        u32 place = target < n ? (u32)target - start : RUN;
#pragma unroll
        for (u32 k = 0; k < some; k++) {
            float slope = slope_of(own[k], cap), gradient = expf(own[k] - largest) * slope * factor;
            own[k] = own_place(k) == place ? gradient - scale * slope : gradient;
        }
        put_logits<some>(x + start, n - start, fours, own);
    }
}

// Whether fours of every row can be read and written.
__device__ inline bool rows_in_fours(const float* x, u64 columns) { return columns % 4 == 0 && in_fours(floats(x)); }

__device__ inline void clear_row(float* x, u64 columns, bool fours) {
    each_of_block(columns, fours, [&](auto i) {
        Numbers<i.N> none = {};
        put(floats(x), i, none);
    });
}

KERNEL_FOUR(cross_entropy, const float* flag, float* logits, const u32* targets, const float* weights, float* losses, float cap,
       float scale, u32 with_gradient, u64 rows, u64 columns) {
    SHARED(double, terms);
    if (skipped(flag)) return;
    float* runs = (float*)(terms + THREADS);
    bool fours = rows_in_fours(logits, columns);
    u64 count = (columns + RUN - 1) / RUN;
    u32 warp = threadIdx.x / WARP;
    EACH_ROW(row, rows) {
        float* x = logits + row * columns;
        u32 target = targets[row];
        // What is not in the vocabulary is found by `check_places`.
        if (target == IGNORED || target >= columns) {
            if (with_gradient) clear_row(x, columns, fours);
            if (threadIdx.x == 0) losses[row] = 0.0f;
            continue;
        }
        for (u64 r = warp; r < count; r += RUNS_AT_ONCE) run_of(x + r * RUN, run_length(columns, r), fours, cap, runs + 2 * r);
        __syncthreads();
        Total total = total_of_block(runs, count, terms);
        float weight = weights ? weights[row] : 1.0f;
        if (threadIdx.x == 0) losses[row] = loss_of(total, capped(x[target], cap)) * weight;
        __syncthreads();
        for (u64 r = warp; r < count; r += RUNS_AT_ONCE) {
            u32 n = run_length(columns, r);
            if (with_gradient) {
                gradient_of(x + r * RUN, n, fours, cap, runs[2 * r], total, scale * weight, target - r * RUN);
            } else if (cap > 0.0f) {
                float own[OWN_LOGITS];
                own_logits<OWN_LOGITS>(x + r * RUN, n, fours, cap, own);
                put_logits<OWN_LOGITS>(x + r * RUN, n, fours, own);
            }
        }
        __syncthreads();
    }
}

KERNEL_FOUR(logit_runs, const float* flag, const float* logits, u64 first_column, const u32* targets, float cap, float* runs,
       u64 runs_width, float* target_logits, u64 rows, u64 columns) {
    if (skipped(flag)) return;
    bool fours = rows_in_fours(logits, columns);
    u64 count = (columns + RUN - 1) / RUN;
    EACH_ROW(row, rows) {
        const float* x = logits + row * columns;
        float* own = runs + row * runs_width + first_column / RUN * 2;
        u32 target = targets[row];
        if (target == IGNORED) {
            EACH_OF_BLOCK(i, 2 * count) own[i] = 0.0f;
            continue;
        }
        for (u64 r = threadIdx.x / WARP; r < count; r += RUNS_AT_ONCE)
            run_of(x + r * RUN, run_length(columns, r), fours, cap, own + 2 * r);
        if (threadIdx.x == 0 && target >= first_column && target - first_column < columns)
            target_logits[row] = capped(x[target - first_column], cap);
    }
}

KERNEL(loss_of_runs, const float* flag, const float* runs, u64 runs_width, const float* target_logits, const u32* targets,
       const float* weights, float* losses, u64 rows) {
    if (skipped(flag)) return;
    EACH(row, rows) {
        if (targets[row] == IGNORED) {
            losses[row] = 0.0f;
            continue;
        }
        Total total = total_of(runs + row * runs_width, runs_width / 2);
        losses[row] = loss_of(total, target_logits[row]) * (weights ? weights[row] : 1.0f);
    }
}

KERNEL_FOUR(gradient_of_runs, const float* flag, float* logits, u64 first_column, const u32* targets, const float* weights,
       const float* runs, u64 runs_width, float cap, float scale, u64 rows, u64 columns) {
    SHARED(double, terms);
    if (skipped(flag)) return;
    bool fours = rows_in_fours(logits, columns);
    u64 count = (columns + RUN - 1) / RUN;
    EACH_ROW(row, rows) {
        float* x = logits + row * columns;
        u32 target = targets[row];
        if (target == IGNORED) {
            clear_row(x, columns, fours);
            continue;
        }
        const float* all = runs + row * runs_width;
        Total total = total_of_block(all, runs_width / 2, terms);
        float weight = weights ? weights[row] : 1.0f;
        for (u64 r = threadIdx.x / WARP; r < count; r += RUNS_AT_ONCE) {
            float largest = all[2 * (first_column / RUN + r)];
            u64 place = (u64)target - first_column - r * RUN;
            gradient_of(x + r * RUN, run_length(columns, r), fours, cap, largest, total, scale * weight, place);
        }
    }
}

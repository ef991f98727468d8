// Softmax cross-entropy and its gradient, of whole rows of logits or of pieces of them.
//
// A row is cut into runs of RUN columns. Each has its largest logit and its sum of exponentials, and the row's are made of them in
// order: pieces of whole runs give the bits of the row.

#define RUN 1024
#define IGNORED 0xffffffffu

__device__ inline float capped(float x, float cap) { return cap > 0.0f ? cap * tanhf(x / cap) : x; }

// The derivative of a capped logit.
__device__ inline float slope_of(float x, float cap) { return cap > 0.0f ? 1.0f - (x / cap) * (x / cap) : 1.0f; }

// Largest logit and sum of e^(logit - largest) of a run of `n` logits.
__device__ inline void run_of(const float* x, u64 n, float cap, float* run, float* scratch) {
    float largest = -LARGEST, sum = 0.0f;
    EACH_OF_BLOCK(i, n) {
        float value = capped(x[i], cap);
        if (value > largest) largest = value;
    }
    largest = block_largest(largest, scratch);
    EACH_OF_BLOCK(i, n) sum += expf(capped(x[i], cap) - largest);
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) {
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

__device__ inline Total total_of(const float* runs, u64 count) {
    Total total = {-LARGEST, 0.0};
    for (u64 r = 0; r < count; r++)
        if (runs[2 * r] > total.largest) total.largest = runs[2 * r];
    for (u64 r = 0; r < count; r++) total.sum += (double)runs[2 * r + 1] * share(runs[2 * r], total.largest);
    return total;
}

__device__ inline float loss_of(Total total, float logit) {
    return (float)(log(total.sum) - ((double)logit - (double)total.largest));
}

// The gradient of a run of `n` logits in their place; `target` is that among them, or not below n.
__device__ inline void gradient_of(float* x, u64 n, float cap, float largest, Total total, float scale, u64 target) {
    float factor = normal_or_zero((float)((double)scale / total.sum * share(largest, total.largest)));
    EACH_OF_BLOCK(i, n) {
        float value = capped(x[i], cap);
        float slope = slope_of(value, cap);
        float gradient = expf(value - largest) * slope * factor;
        x[i] = i == target ? gradient - scale * slope : gradient;
    }
}

KERNEL(cross_entropy, const float* flag, float* logits, const u32* targets, const float* weights, float* losses, float cap,
       float scale, u32 with_gradient, u64 rows, u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    float* runs = scratch + THREADS;
    u64 count = (columns + RUN - 1) / RUN;
    EACH_ROW(row, rows) {
        float* x = logits + row * columns;
        u32 target = targets[row];
        // What is not in the vocabulary is found by `check_places`.
        if (target == IGNORED || target >= columns) {
            if (with_gradient)
                EACH_OF_BLOCK(i, columns) x[i] = 0.0f;
            if (threadIdx.x == 0) losses[row] = 0.0f;
            continue;
        }
        for (u64 r = 0; r < count; r++)
            run_of(x + r * RUN, columns - r * RUN < RUN ? columns - r * RUN : RUN, cap, runs + 2 * r, scratch);
        __syncthreads();
        Total total = total_of(runs, count);
        float weight = weights ? weights[row] : 1.0f;
        if (threadIdx.x == 0) losses[row] = loss_of(total, capped(x[target], cap)) * weight;
        __syncthreads();
        for (u64 r = 0; r < count; r++) {
            u64 n = columns - r * RUN < RUN ? columns - r * RUN : RUN;
            if (with_gradient)
                gradient_of(x + r * RUN, n, cap, runs[2 * r], total, scale * weight, target - r * RUN);
            else if (cap > 0.0f)
                EACH_OF_BLOCK(i, n) x[r * RUN + i] = capped(x[r * RUN + i], cap);
        }
        __syncthreads();
    }
}

KERNEL(logit_runs, const float* flag, const float* logits, u64 first_column, const u32* targets, float cap, float* runs,
       u64 runs_width, float* target_logits, u64 rows, u64 columns) {
    SHARED(float, scratch);
    if (skipped(flag)) return;
    u64 count = (columns + RUN - 1) / RUN;
    EACH_ROW(row, rows) {
        const float* x = logits + row * columns;
        float* own = runs + row * runs_width + first_column / RUN * 2;
        u32 target = targets[row];
        if (target == IGNORED) {
            EACH_OF_BLOCK(i, 2 * count) own[i] = 0.0f;
            continue;
        }
        for (u64 r = 0; r < count; r++)
            run_of(x + r * RUN, columns - r * RUN < RUN ? columns - r * RUN : RUN, cap, own + 2 * r, scratch);
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

KERNEL(gradient_of_runs, const float* flag, float* logits, u64 first_column, const u32* targets, const float* weights,
       const float* runs, u64 runs_width, float cap, float scale, u64 rows, u64 columns) {
    if (skipped(flag)) return;
    u64 count = (columns + RUN - 1) / RUN;
    EACH_ROW(row, rows) {
        float* x = logits + row * columns;
        u32 target = targets[row];
        if (target == IGNORED) {
            EACH_OF_BLOCK(i, columns) x[i] = 0.0f;
            continue;
        }
        const float* all = runs + row * runs_width;
        Total total = total_of(all, runs_width / 2);
        float weight = weights ? weights[row] : 1.0f;
        for (u64 r = 0; r < count; r++) {
            u64 n = columns - r * RUN < RUN ? columns - r * RUN : RUN;
            float largest = all[2 * (first_column / RUN + r)];
            gradient_of(x + r * RUN, n, cap, largest, total, scale * weight, (u64)target - first_column - r * RUN);
        }
    }
}

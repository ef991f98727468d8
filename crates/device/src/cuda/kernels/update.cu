// Steps of optimizers. The numbers of a step are worked out by the host.

// The weights of a parameter: without a master `param` itself is updated.
struct Weights {
    View param;
    View grad;
    float* master;
    const float* grad_scale;
    u64 n;
    Rounding rounding;
};

__device__ inline float scale_of(const Weights& w) { return w.grad_scale ? *w.grad_scale : 1.0f; }
__device__ inline float weight_at(const Weights& w, u64 i) { return w.master ? w.master[i] : load(w.param, i); }

__device__ inline void set_weight(const Weights& w, u64 i, float value) {
    if (!w.master) return store(w.param, i, value, w.rounding);
    w.master[i] = value;
    store(w.param, i, value);
}

// The tensor that a weight is read from.
__device__ inline View weights_of(const Weights& w) { return w.master ? floats(w.master) : w.param; }

__device__ inline bool in_fours(const Weights& w) {
    return in_fours(w.param, w.rounding) && in_fours(w.grad) && in_fours(weights_of(w));
}

// Writes elements of a parameter: beside its master it is that, to nearest.
template <class Places, class All> __device__ inline void set_weights(const Weights& w, Places i, const All& x, Rounder& by) {
    if (!w.master) return put(w.param, i, x, by);
    put(floats(w.master), i, x);
    put(w.param, i, x);
}

// The same rounding with random numbers of its own, for a state of the parameter.
__device__ inline Rounding stream_of(Rounding rounding, u64 stream) {
    rounding.seed += stream * 0xd1b54a32d192ed03ull;
    return rounding;
}

struct AdamNumbers {
    float decay, less1, beta2, less2, root_of_correction2, epsilon, step_size;
    u32 unused;
};

// In PyTorch's order of operations, fused only where PyTorch fuses.
KERNEL_FOUR(adamw, const float* flag, Weights w, View m, View v, AdamNumbers h) {
    if (skipped(flag)) return;
    float scale = scale_of(w);
    Rounding rounding_m = stream_of(w.rounding, 1), rounding_v = stream_of(w.rounding, 2);
    Rounder of_weights(w.rounding), of_m(rounding_m), of_v(rounding_v);
    each(w.n, in_fours(w) && in_fours(m, rounding_m) && in_fours(v, rounding_v), [&](auto i) {
        auto got_grad = fetch(w.grad, i);
        auto got_m = fetch(m, i);
        auto got_v = fetch(v, i);
        auto got_weight = fetch(weights_of(w), i);
        auto grads = numbers(got_grad), firsts = numbers(got_m), seconds = numbers(got_v), weights = numbers(got_weight);
        for (u32 k = 0; k < i.N; k++) {
            float grad = __fmul_rn(grads[k], scale), first = firsts[k], second = seconds[k];
            first = normal_or_zero(fmaf(h.less1, __fadd_rn(grad, -first), first));
            second = normal_or_zero(__fadd_rn(__fmul_rn(second, h.beta2), __fmul_rn(__fmul_rn(h.less2, grad), grad)));
            float denominator = __fadd_rn(sqrtf(second) / h.root_of_correction2, h.epsilon);
            float step = __fmul_rn(h.step_size, first) / denominator;
            weights[k] = __fadd_rn(__fmul_rn(weights[k], h.decay), -step);
            firsts[k] = first;
            seconds[k] = second;
        }
        set_weights(w, i, weights, of_weights);
        put(m, i, firsts, of_m);
        put(v, i, seconds, of_v);
    });
}

struct LionNumbers {
    float lr, decay, beta1, less1, beta2, less2;
};

__device__ inline float lion_step(float between, float lr) {
    return between == 0.0f ? 0.0f : between < 0.0f ? -lr : between > 0.0f ? lr : copysignf(lr, between);
}

KERNEL_FOUR(lion, const float* flag, Weights w, View m, LionNumbers h) {
    if (skipped(flag)) return;
    float scale = scale_of(w);
    Rounding rounding_m = stream_of(w.rounding, 1);
    Rounder of_weights(w.rounding), of_m(rounding_m);
    each(w.n, in_fours(w) && in_fours(m, rounding_m), [&](auto i) {
        auto got_grad = fetch(w.grad, i);
        auto got_m = fetch(m, i);
        auto got_weight = fetch(weights_of(w), i);
        auto grads = numbers(got_grad), firsts = numbers(got_m), weights = numbers(got_weight);
        for (u32 k = 0; k < i.N; k++) {
            float grad = grads[k] * scale, first = firsts[k];
            weights[k] = weights[k] * h.decay - lion_step(first * h.beta1 + grad * h.less1, h.lr);
            firsts[k] = normal_or_zero(first * h.beta2 + grad * h.less2);
        }
        set_weights(w, i, weights, of_weights);
        put(m, i, firsts, of_m);
    });
}

struct SgdNumbers {
    float lr, weight_decay, momentum, share, ahead;
    u32 nesterov;
};

KERNEL(sgd, const float* flag, Weights w, float* m, SgdNumbers h) {
    if (skipped(flag)) return;
    float scale = scale_of(w);
    Rounder of_weights(w.rounding);
    each(w.n, in_fours(w) && in_fours(floats(m)), [&](auto i) {
        auto got_grad = fetch(w.grad, i);
        auto got_weight = fetch(weights_of(w), i);
        auto got_m = got_grad;
        if (m) got_m = fetch(floats(m), i);
        auto grads = numbers(got_grad), weights = numbers(got_weight), firsts = numbers(got_m);
        for (u32 k = 0; k < i.N; k++) {
            float grad = grads[k] * scale + weights[k] * h.weight_decay, by = grad;
            if (m) {
                firsts[k] = normal_or_zero(firsts[k] * h.momentum + grad * h.share);
                by = h.nesterov ? grad + firsts[k] * h.ahead : firsts[k];
            }
            weights[k] -= h.lr * by;
        }
        if (m) put(floats(m), i, firsts);
        set_weights(w, i, weights, of_weights);
    });
}

// ---- 8-bit states: a warp has a block of elements, a thread eight of them ----

#define BLOCK_ELEMENTS 256

// Magnitudes up to 1 by their exponent and five bits behind it; what is below 2^-24 is in the first group.
#define GROUP_BITS 18
#define FIRST_GROUP ((127u - 24) << 5)
#define GROUPS (24 * 32 + 1)

// What is looked up, in shared memory: places differ from thread to thread.
struct States {
    float states[2][256];
    float limits[2][257];       // an infinite one is the last
    u32 steps[2];               // limits that lie within a group, at most
    u8 starts[2][GROUPS + 3];   // limits below a group
};

__device__ inline u32 limits_of(u32 map) { return map == 0 ? 128 : 255; }

__device__ inline void copy_states(States* to) {
    EACH_OF_BLOCK(i, 512) to->states[i / 256][i % 256] = tables.states[i / 256][i % 256];
    EACH_OF_BLOCK(i, 514) to->limits[i / 257][i % 257] = i % 257 < limits_of(i / 257) ? tables.limits[i / 257][i % 257] : INFINITE;
    if (threadIdx.x < 2) to->steps[threadIdx.x] = 0;
    __syncthreads();
    for (u32 map = 0; map < 2; map++) {
        const float* limits = to->limits[map];
        EACH_OF_BLOCK(group, GROUPS) {
            float least = group == 0 ? 0.0f : __uint_as_float((u32)(FIRST_GROUP + group) << GROUP_BITS);
            u32 low = 0, high = limits_of(map);
            while (low < high) {
                u32 middle = (low + high) / 2;
                if (least > limits[middle]) low = middle + 1;
                else high = middle;
            }
            to->starts[map][group] = (u8)low;
        }
    }
    __syncthreads();
    for (u32 map = 0; map < 2; map++) {
        u32 steps = 0;
        EACH_OF_BLOCK(group, GROUPS) {
            u32 end = group + 1 < GROUPS ? to->starts[map][group + 1] : limits_of(map);
            if (end - to->starts[map][group] > steps) steps = end - to->starts[map][group];
        }
        atomicMax(&to->steps[map], warp_fold(steps, Larger()));
    }
    __syncthreads();
}

// Codes of the values of a map nearest to x over the largest magnitude, in a word for each four.
template <u32 MAP> __device__ inline void state_codes(const States& by, const Numbers<8>& x, float most, u32* words) {
    const u32 zero = MAP == 0 ? 127 : 0;
    float magnitudes[8];
    // The number of limits that it exceeds.
    u32 above[8];
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        magnitudes[k] = fabsf(x[k] / most);
        u32 group = __float_as_uint(magnitudes[k]) >> GROUP_BITS;
        group = group < FIRST_GROUP ? 0 : group - FIRST_GROUP < GROUPS ? group - FIRST_GROUP : GROUPS - 1;
        above[k] = magnitudes[k] == magnitudes[k] ? by.starts[MAP][group] : 0;
    }
#pragma unroll 1
    for (u32 step = by.steps[MAP]; step > 0; step--) {
#pragma unroll
        for (u32 k = 0; k < 8; k++) above[k] += magnitudes[k] > by.limits[MAP][above[k]];
    }
    words[0] = words[1] = 0;
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        u32 code = zero + above[k];
        if (MAP == 0 && __float_as_uint(x[k] / most) >> 31) code = zero - (above[k] < 1 ? 1 : above[k] > zero ? zero : above[k]);
        words[k / 4] |= (most == 0.0f ? (MAP == 0 ? 255 : 0) : code & 255) << k % 4 * 8;
    }
}

// Places of the eight elements of a thread in its warp's block.
struct Own {
    u64 start;   // of the block
    u64 n;
    bool fours;

    __device__ u64 of(u32 k) const { return start + k / 4 * (4 * WARP) + threadIdx.x % WARP * 4 + k % 4; }
    __device__ bool has(u32 k) const { return of(k) < n; }
    __device__ bool whole() const { return fours && start + BLOCK_ELEMENTS <= n; }
};

__device__ inline Fetched fetch(View x, const Own& own) {
    return {x.type, {four_at(x, own.of(0)), four_at(x, own.of(4))}};
}

// A tensor's elements; of what is not there, 0.
__device__ inline void own_elements(View x, const Own& own, Numbers<8>& all) {
#pragma unroll
    for (u32 k = 0; k < 8; k++) all[k] = own.has(k) ? load_float(x, own.of(k)) : 0.0f;
}

__device__ inline void put(View out, const Own& own, const Numbers<8>& x, Rounder& by) {
    bool near = out.type == F32 || !by.rounding.stochastic;
    if (own.whole()) {
        for (u32 k = 0; k < 8; k += 4) {
            u64 i = own.of(k);
            put_words(out, i, near ? four_words(out.type, x.of + k) : by.four(i, x.of + k));
        }
        return;
    }
#pragma unroll
    for (u32 k = 0; k < 8; k++)
        if (own.has(k)) store(out, own.of(k), x[k], by.rounding);
}

__device__ inline void put(View out, const Own& own, const Numbers<8>& x) {
    Rounder nearest({0, 0, 0, 0});
    put(out, own, x, nearest);
}

// Codes of a thread, in a word for each four.
__device__ inline TwoWords own_codes(const u8* codes, const Own& own) {
    if (own.whole()) return {*(const u32*)(codes + own.of(0)), *(const u32*)(codes + own.of(4))};
    u32 words[2] = {0, 0};
#pragma unroll
    for (u32 k = 0; k < 8; k++)
        if (own.has(k)) words[k / 4] |= (u32)codes[own.of(k)] << k % 4 * 8;
    return {words[0], words[1]};
}

__device__ inline u32 code_of(TwoWords codes, u32 k) { return (k < 4 ? codes.x : codes.y) >> k % 4 * 8 & 255; }

// Writes a state's codes and its largest magnitude.
template <u32 MAP>
__device__ inline void store_codes(const States& by, u8* codes, float* absmax, const Own& own, const Numbers<8>& x) {
    u32 bits = 0, words[2];
#pragma unroll
    for (u32 k = 0; k < 8; k++) {
        u32 size = __float_as_uint(x[k]) & 0x7fffffffu;
        if (own.has(k) && size > bits) bits = size;
    }
    float most = __uint_as_float(warp_fold(bits, Larger()));
    state_codes<MAP>(by, x, most, words);
    if (own.whole()) {
        *(u32*)(codes + own.of(0)) = words[0];
        *(u32*)(codes + own.of(4)) = words[1];
    } else {
#pragma unroll
        for (u32 k = 0; k < 8; k++)
            if (own.has(k)) codes[own.of(k)] = (u8)(words[k / 4] >> k % 4 * 8);
    }
    if (threadIdx.x % WARP == 0) absmax[own.start / BLOCK_ELEMENTS] = most;
}

// Gives `body` each block of a warp, its gradients and its weights.
template <class Body> __device__ inline void each_block(const Weights& w, bool fours, const Body& body) {
    const u64 warps = THREADS / WARP;
    fours = fours && in_fours(w);
    u64 blocks = (w.n + BLOCK_ELEMENTS - 1) / BLOCK_ELEMENTS;
    for (u64 block = blockIdx.x * warps + threadIdx.x / WARP; block < blocks; block += gridDim.x * warps) {
        Own own = {block * BLOCK_ELEMENTS, w.n, fours};
        Numbers<8> grads, weights;
        if (own.whole()) {
            Fetched got_grad = fetch(w.grad, own), got_weight = fetch(weights_of(w), own);
            grads = numbers(got_grad);
            weights = numbers(got_weight);
        } else {
            own_elements(w.grad, own, grads);
            own_elements(weights_of(w), own, weights);
        }
        body(own, block, grads, weights);
    }
}

struct Adam8Numbers {
    float beta1, less1, beta2, less2, epsilon, step_size, decay;
    u32 unused;
};

__device__ inline bool is_finite(float x) { return fabsf(x) <= LARGEST; }

KERNEL_FOUR(adamw_8bit, const float* flag, Weights w, u8* m, float* m_max, u8* v, float* v_max, Adam8Numbers h) {
    SHARED(States, by);
    if (skipped(flag)) return;
    copy_states(by);
    float scale = scale_of(w);
    Rounder rounder(w.rounding);
    each_block(w, (u64)m % 4 == 0 && (u64)v % 4 == 0, [&](const Own& own, u64 block, const Numbers<8>& grads, Numbers<8>& weights) {
        TwoWords codes_m = own_codes(m, own), codes_v = own_codes(v, own);
        float max_m = m_max[block], max_v = v_max[block];
        Numbers<8> firsts, seconds;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            float raw = grads[k], grad = __fmul_rn(raw, scale);
            float second = __fmul_rn(by->states[1][code_of(codes_v, k)], max_v);
            float first = __fmul_rn(by->states[0][code_of(codes_m, k)], max_m);
            second = __fadd_rn(__fmul_rn(second, h.beta2), __fmul_rn(__fmul_rn(h.less2, grad), grad));
            first = __fadd_rn(__fmul_rn(first, h.beta1), __fmul_rn(h.less1, grad));
            float step = __fmul_rn(h.step_size, first / __fadd_rn(sqrtf(second), h.epsilon));
            float stepped = __fmul_rn(__fadd_rn(weights[k], step), h.decay);
            // A gradient that is not finite leaves the weight and empties the states.
            firsts[k] = is_finite(raw) ? first : 0.0f;
            seconds[k] = is_finite(raw) ? second : 0.0f;
            weights[k] = is_finite(raw) ? stepped : weights[k];
        }
        set_weights(w, own, weights, rounder);
        store_codes<0>(*by, m, m_max, own, firsts);
        store_codes<1>(*by, v, v_max, own, seconds);
    });
}

KERNEL_FOUR(lion_8bit, const float* flag, Weights w, u8* m, float* m_max, LionNumbers h) {
    SHARED(States, by);
    if (skipped(flag)) return;
    copy_states(by);
    float scale = scale_of(w);
    Rounder rounder(w.rounding);
    each_block(w, (u64)m % 4 == 0, [&](const Own& own, u64 block, const Numbers<8>& grads, Numbers<8>& weights) {
        TwoWords codes = own_codes(m, own);
        float max = m_max[block];
        Numbers<8> firsts;
#pragma unroll
        for (u32 k = 0; k < 8; k++) {
            float raw = grads[k], grad = __fmul_rn(raw, scale), first = __fmul_rn(by->states[0][code_of(codes, k)], max);
            float step = lion_step(__fadd_rn(__fmul_rn(first, h.beta1), __fmul_rn(h.less1, grad)), h.lr);
            weights[k] = is_finite(raw) ? __fadd_rn(__fmul_rn(weights[k], h.decay), -step) : weights[k];
            firsts[k] = is_finite(raw) ? __fadd_rn(__fmul_rn(first, h.beta2), __fmul_rn(h.less2, grad)) : 0.0f;
        }
        set_weights(w, own, weights, rounder);
        store_codes<0>(*by, m, m_max, own, firsts);
    });
}

// ---- rules that need a sum before the update ----

// v moves towards the mean square of each run of `run` elements.
KERNEL(adam_mini_moments, const float* flag, View grad, const float* grad_scale, float* v, u64 runs, u64 run, double beta2) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    double scale = grad_scale ? *grad_scale : 1.0f;
    EACH_ROW(row, runs) {
        double sum = 0.0;
        EACH_OF_BLOCK(i, run) {
            double value = load(grad, row * run + i);
            sum += value * value;
        }
        sum = block_sum(sum, scratch);
        double mean = sum * scale * scale / (double)run;
        if (threadIdx.x == 0) v[row] = (float)((double)v[row] * beta2 + (1.0 - beta2) * mean);
    }
}

KERNEL(adam_mini, const float* flag, Weights w, float* m, const float* v, u64 run, float decay, float less1, double rate,
       double root_of_correction2, double epsilon) {
    if (skipped(flag)) return;
    float scale = scale_of(w);
    EACH(i, w.n) {
        float step_size = (float)(rate / (sqrt((double)v[i / run]) / root_of_correction2 + epsilon));
        m[i] = normal_or_zero(fmaf(less1, load(w.grad, i) * scale - m[i], m[i]));
        set_weight(w, i, weight_at(w, i) * decay - step_size * m[i]);
    }
}

// Adafactor's means of rows or of columns move towards those of the gradient, of whose squares there are the sums.
KERNEL(adafactor_means, const float* flag, const double* sums, const float* grad_scale, float* means, u64 n, u64 each,
       double beta2, double epsilon) {
    if (skipped(flag)) return;
    double scale = grad_scale ? *grad_scale : 1.0f;
    EACH(i, n) {
        double mean = sums[i] * (scale * scale) / (double)each + epsilon;
        means[i] = (float)((double)means[i] * beta2 + (1.0 - beta2) * mean);
    }
}

KERNEL(adafactor_full, const float* flag, View grad, const float* grad_scale, float* v, u64 n, float beta2, float less,
       float epsilon) {
    if (skipped(flag)) return;
    float scale = grad_scale ? *grad_scale : 1.0f;
    EACH(i, n) {
        float g = load(grad, i) * scale;
        v[i] = v[i] * beta2 + less * (g * g + epsilon);
    }
}

// out = the mean of x.
KERNEL(mean_of, const float* flag, const float* x, u64 n, double* out) {
    SHARED(double, scratch);
    if (skipped(flag)) return;
    double sum = 0.0;
    EACH_OF_BLOCK(i, n) sum += (double)x[i];
    sum = block_sum(sum, scratch);
    if (threadIdx.x == 0) *out = sum / (double)(n ? n : 1);
}

struct AdafactorNumbers {
    double lr, clip_threshold, weight_decay, least_scale;
    float beta1, less1;
    u32 by_parameter;
    u32 unused;
};

__device__ inline double root_mean(double squares, u64 n) { return sqrt(squares / (double)(n ? n : 1)); }

// `squares` are those of the update and of the parameter.
KERNEL(adafactor, const float* flag, Weights w, Factors by, const double* mean, const double* squares, float* m,
       AdafactorNumbers h) {
    if (skipped(flag)) return;
    double clip = root_mean(squares[0], w.n) / h.clip_threshold, size = root_mean(squares[1], w.n);
    clip = clip > 1.0 ? clip : 1.0;
    double lr = h.by_parameter ? h.lr * (size > h.least_scale ? size : h.least_scale) : h.lr;
    double rate = lr / clip * (double)scale_of(w);
    float decay = (float)(1.0 - lr * h.weight_decay);
    EACH(i, w.n) {
        float row = by.rows ? (float)sqrt(*mean / (double)by.rows[i / by.width]) : 1.0f;
        float factor = (float)((double)row * rate);
        float divisor = by.columns[by.whole ? i : i % by.width];
        float step = load(w.grad, i) * factor / sqrtf(divisor);
        if (m) {
            m[i] = m[i] * h.beta1 + h.less1 * step;
            step = m[i];
        }
        set_weight(w, i, weight_at(w, i) * decay - step);
    }
}

// The scaled gradient's norm is held: `limited` = what it is shortened by.
KERNEL(apollo_norm, const float* flag, const double* squares, float* norm, double growth_limit, double* shorter) {
    if (skipped(flag) || first_element() != 0) return;
    double now = sqrt(*squares), by = 1.0;
    if (*norm > 0.0f) {
        double growth = now / ((double)*norm + 1e-8);
        by = (growth > growth_limit ? growth : growth_limit) / growth_limit;
    }
    *norm = (float)(now / by);
    *shorter = by;
}

KERNEL(apollo, const float* flag, Weights w, Factors by, const double* shorter, double lr, float decay) {
    if (skipped(flag)) return;
    float rate = (float)(lr / *shorter * (double)scale_of(w));
    EACH(i, w.n) {
        float ratio = by.rows ? by.rows[i / by.width] : by.columns[i % by.width];
        set_weight(w, i, (weight_at(w, i) - rate * ratio * load(w.grad, i)) * decay);
    }
}

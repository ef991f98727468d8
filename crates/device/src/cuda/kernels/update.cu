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
    if (w.master) w.master[i] = value;
    store(w.param, i, value, w.rounding);
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
KERNEL(adamw, const float* flag, Weights w, View m, View v, AdamNumbers h) {
    if (skipped(flag)) return;
    float scale = scale_of(w);
    EACH(i, w.n) {
        float grad = __fmul_rn(load(w.grad, i), scale), first = load(m, i), second = load(v, i);
        first = normal_or_zero(fmaf(h.less1, __fadd_rn(grad, -first), first));
        second = normal_or_zero(__fadd_rn(__fmul_rn(second, h.beta2), __fmul_rn(__fmul_rn(h.less2, grad), grad)));
        float denominator = __fadd_rn(sqrtf(second) / h.root_of_correction2, h.epsilon);
        float step = __fmul_rn(h.step_size, first) / denominator;
        set_weight(w, i, __fadd_rn(__fmul_rn(weight_at(w, i), h.decay), -step));
        store(m, i, first, stream_of(w.rounding, 1));
        store(v, i, second, stream_of(w.rounding, 2));
    }
}

struct LionNumbers {
    float lr, decay, beta1, less1, beta2, less2;
};

__device__ inline float lion_step(float between, float lr) {
    return between == 0.0f ? 0.0f : between < 0.0f ? -lr : between > 0.0f ? lr : copysignf(lr, between);
}

KERNEL(lion, const float* flag, Weights w, View m, LionNumbers h) {
    if (skipped(flag)) return;
    float scale = scale_of(w);
    EACH(i, w.n) {
        float grad = load(w.grad, i) * scale, first = load(m, i);
        float by = lion_step(first * h.beta1 + grad * h.less1, h.lr);
        set_weight(w, i, weight_at(w, i) * h.decay - by);
        store(m, i, normal_or_zero(first * h.beta2 + grad * h.less2), stream_of(w.rounding, 1));
    }
}

struct SgdNumbers {
    float lr, weight_decay, momentum, share, ahead;
    u32 nesterov;
};

KERNEL(sgd, const float* flag, Weights w, float* m, SgdNumbers h) {
    if (skipped(flag)) return;
    float scale = scale_of(w);
    EACH(i, w.n) {
        float weight = weight_at(w, i), grad = load(w.grad, i) * scale + weight * h.weight_decay, by = grad;
        if (m) {
            m[i] = normal_or_zero(m[i] * h.momentum + grad * h.share);
            by = h.nesterov ? grad + m[i] * h.ahead : m[i];
        }
        set_weight(w, i, weight - h.lr * by);
    }
}

// ---- 8-bit states: a block of threads has a block of elements ----

// The code of the value of a map nearest to x, which is -1 to 1.
__device__ inline u8 state_code(u32 map, float x) {
    u32 zero = map == 0 ? 127 : 0, low = 0, high = 255 - zero;
    float magnitude = fabsf(x);
    // The number of limits that it exceeds.
    while (low < high) {
        u32 middle = (low + high) / 2;
        if (magnitude > tables.limits[map][middle]) low = middle + 1;
        else high = middle;
    }
    if (magnitude != magnitude) low = 0;
    if (map == 0 && __float_as_uint(x) >> 31) return (u8)(zero - (low < 1 ? 1 : low > zero ? zero : low));
    return (u8)(zero + low);
}

// Writes a state's codes and its largest magnitude.
__device__ inline void store_codes(u32 map, u8* codes, float* absmax, u64 block, u64 i, bool inside, float x, u32* scratch) {
    float most = __uint_as_float(block_magnitude(inside ? __float_as_uint(x) : 0, scratch));
    if (inside) codes[i] = most == 0.0f ? (map == 0 ? 255 : 0) : state_code(map, x / most);
    if (threadIdx.x == 0) absmax[block] = most;
}

struct Adam8Numbers {
    float beta1, less1, beta2, less2, epsilon, step_size, decay;
    u32 unused;
};

__device__ inline bool is_finite(float x) { return fabsf(x) <= LARGEST; }

KERNEL(adamw_8bit, const float* flag, Weights w, u8* m, float* m_max, u8* v, float* v_max, Adam8Numbers h) {
    SHARED(u32, scratch);
    if (skipped(flag)) return;
    float scale = scale_of(w);
    EACH_ROW(block, (w.n + THREADS - 1) / THREADS) {
        u64 i = block * THREADS + threadIdx.x;
        bool inside = i < w.n;
        float first = 0.0f, second = 0.0f;
        if (inside) {
            float raw = load(w.grad, i), grad = __fmul_rn(raw, scale);
            second = __fmul_rn(tables.states[1][v[i]], v_max[block]);
            first = __fmul_rn(tables.states[0][m[i]], m_max[block]);
            second = __fadd_rn(__fmul_rn(second, h.beta2), __fmul_rn(__fmul_rn(h.less2, grad), grad));
            first = __fadd_rn(__fmul_rn(first, h.beta1), __fmul_rn(h.less1, grad));
            float step = __fmul_rn(h.step_size, first / __fadd_rn(sqrtf(second), h.epsilon));
            float weight = weight_at(w, i), stepped = __fmul_rn(__fadd_rn(weight, step), h.decay);
            // A gradient that is not finite leaves the weight and empties the states.
            if (!is_finite(raw)) first = second = 0.0f;
            set_weight(w, i, is_finite(raw) ? stepped : weight);
        }
        __syncthreads();
        store_codes(0, m, m_max, block, i, inside, first, scratch);
        store_codes(1, v, v_max, block, i, inside, second, scratch);
    }
}

KERNEL(lion_8bit, const float* flag, Weights w, u8* m, float* m_max, LionNumbers h) {
    SHARED(u32, scratch);
    if (skipped(flag)) return;
    float scale = scale_of(w);
    EACH_ROW(block, (w.n + THREADS - 1) / THREADS) {
        u64 i = block * THREADS + threadIdx.x;
        bool inside = i < w.n;
        float first = 0.0f;
        if (inside) {
            float raw = load(w.grad, i), grad = __fmul_rn(raw, scale), weight = weight_at(w, i);
            first = __fmul_rn(tables.states[0][m[i]], m_max[block]);
            float by = lion_step(__fadd_rn(__fmul_rn(first, h.beta1), __fmul_rn(h.less1, grad)), h.lr);
            set_weight(w, i, is_finite(raw) ? __fadd_rn(__fmul_rn(weight, h.decay), -by) : weight);
            first = is_finite(raw) ? __fadd_rn(__fmul_rn(first, h.beta2), __fmul_rn(h.less2, grad)) : 0.0f;
        }
        __syncthreads();
        store_codes(0, m, m_max, block, i, inside, first, scratch);
    }
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

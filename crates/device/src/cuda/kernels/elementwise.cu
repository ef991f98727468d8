// Every element by itself: fill, cast, add, scale, dropout, activations; and checks of numbers that are places in tables.

KERNEL(fill, const float* flag, View out, u64 n, float value) {
    if (skipped(flag)) return;
    EACH(i, n) store(out, i, value);
}

KERNEL(cast, const float* flag, View x, View out, u64 n, Rounding rounding) {
    if (skipped(flag)) return;
    EACH(i, n) {
        if (x.type == U32) ((u32*)out.at)[i] = ((const u32*)x.at)[i];
        else if (x.type == U8) ((u8*)out.at)[i] = ((const u8*)x.at)[i];
        else if (x.type == out.type && x.type != F32) ((u16*)out.at)[i] = ((const u16*)x.at)[i];
        else store(out, i, load(x, i), rounding);
    }
}

KERNEL(add, const float* flag, View a, View b, View out, u64 n) {
    if (skipped(flag)) return;
    EACH(i, n) store(out, i, load(a, i) + load(b, i));
}

KERNEL(accumulate_all, const float* flag, View terms, View out, u64 n, u64 count, u64 seed, u64 number, u64 first) {
    if (skipped(flag)) return;
    EACH(i, n) {
        for (u64 term = 0; term < count; term++) {
            Rounding rounding = {splitmix64(seed, number + term), first, 1, 0};
            store(out, i, load(out, i) + load(terms, term * n + i), rounding);
        }
    }
}

// x *= factor, which is on the device where `by` is given.
KERNEL(scale, const float* flag, View x, u64 n, float factor, const float* by) {
    if (skipped(flag)) return;
    if (by) factor = *by;
    EACH(i, n) store(x, i, load(x, i) * factor);
}

KERNEL(dropout, const float* flag, View x, View out, u64 n, float probability, u64 seed, u64 first, u32 accumulate) {
    if (skipped(flag)) return;
    u32 dropped = (u32)(probability * 16777216.0f);
    float factor = 1.0f / (1.0f - probability);
    EACH(i, n) {
        bool kept = random_word(seed, first + i) >> 8 >= dropped;
        float value = kept ? load(x, i) * factor : 0.0f;
        store(out, i, accumulate ? load(out, i) + value : value);
    }
}

// The non-linearities, in the order of `Glu`: their value and their derivative.
__device__ inline void activation_of(u32 kind, float x, float* value, float* slope) {
    if (kind == 1) {
        float below = 0.5f * erfcf(-x * 0.70710678f);
        float density = 0.39894228f * expf(-0.5f * x * x);
        *value = below == 0.0f ? 0.0f : x * below;
        *slope = density == 0.0f ? below : below + x * density;
        return;
    }
    const float twice_root = 1.5957692f, cubic = 0.044715f;
    float inner = kind == 0 ? x : twice_root * x * (1.0f + cubic * x * x);
    float by = kind == 0 ? 1.0f : twice_root * (1.0f + 3.0f * cubic * x * x);
    float s = 1.0f / (1.0f + expf(-inner)), rest = 1.0f / (1.0f + expf(inner));
    *value = s == 0.0f ? 0.0f : x * s;
    *slope = s == 0.0f ? 0.0f : rest == 0.0f ? s : s * (1.0f + x * rest * by);
}

KERNEL(activate, const float* flag, View x, View out, u64 n, u32 kind) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float value, slope;
        activation_of(kind, load(x, i), &value, &slope);
        store(out, i, value);
    }
}

KERNEL(activate_backward, const float* flag, View x, View dout, View dx, u64 n, u32 kind) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float value, slope;
        activation_of(kind, load(x, i), &value, &slope);
        store(dx, i, load(dout, i) * slope);
    }
}

KERNEL(gated, const float* flag, View gate, View up, View out, u64 n, u32 kind) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float value, slope;
        activation_of(kind, load(gate, i), &value, &slope);
        store(out, i, value * load(up, i));
    }
}

KERNEL(gated_backward, const float* flag, View gate, View up, View dout, View dgate, View dup, u64 n, u32 kind) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float value, slope, u = load(up, i), d = load(dout, i);
        activation_of(kind, load(gate, i), &value, &slope);
        store(dgate, i, d * u * slope);
        store(dup, i, d * value);
    }
}

// Leaves `key` and the place of the first number that is not below the limit, where there is one. The largest u32 may be let pass.
KERNEL(check_places, const float* flag, const u32* numbers, u64 n, u64 limit, u32 passes, u64* fault, u64 key) {
    if (skipped(flag)) return;
    EACH(i, n) {
        if (numbers[i] >= limit && !(passes && numbers[i] == 0xffffffffu)) atomicMin(fault, key | i);
    }
}

// Comparisons, so that what is no number stays none.
__device__ inline void clamp_both(float* gate, float* up, float limit) {
    if (*gate > limit) *gate = limit;
    if (*up > limit) *up = limit;
    if (*up < -limit) *up = -limit;
}

KERNEL(clamped_swiglu, const float* flag, View gate, View up, View out, u64 n, float alpha, float limit) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float g = load(gate, i), u = load(up, i);
        clamp_both(&g, &u, limit);
        store(out, i, (u + 1.0f) * (g / (1.0f + expf(-alpha * g))));
    }
}

KERNEL(clamped_swiglu_backward, const float* flag, View gate, View up, View dout, View dgate, View dup, u64 n, float alpha,
       float limit) {
    if (skipped(flag)) return;
    EACH(i, n) {
        float own_gate = load(gate, i), own_up = load(up, i), g = own_gate, u = own_up, d = load(dout, i);
        clamp_both(&g, &u, limit);
        float s = 1.0f / (1.0f + expf(-alpha * g)), rest = 1.0f / (1.0f + expf(alpha * g));
        store(dgate, i, own_gate > limit ? 0.0f : d * (u + 1.0f) * (s * (1.0f + alpha * g * rest)));
        store(dup, i, own_up > limit || own_up < -limit ? 0.0f : d * (g * s));
    }
}

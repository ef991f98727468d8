// Every element by itself: fill, cast, add, scale, dropout, activations; and checks of numbers that are places in tables.

KERNEL(fill, const float* flag, View out, u64 n, float value) {
    if (skipped(flag)) return;
    each(n, in_fours(out), [&](auto i) {
        Numbers<i.N> all;
        for (u32 k = 0; k < i.N; k++) all[k] = value;
        put(out, i, all);
    });
}

// The bits of elements of f32, bf16 or f16.
__device__ inline void copy(View x, View out, Eight i) {
    Fetched got = fetch(x, i);
    put_words(out, i.at, got.fours[0]);
    if (i.both) put_words(out, i.at + GAP, got.fours[1]);
}
__device__ inline void copy(View x, View out, One i) {
    if (x.type == F32) ((u32*)out.at)[i.at] = ((const u32*)x.at)[i.at];
    else ((u16*)out.at)[i.at] = ((const u16*)x.at)[i.at];
}

KERNEL(cast, const float* flag, View x, View out, u64 n, Rounding rounding) {
    if (skipped(flag)) return;
    if (x.type == U8) {
        EACH(i, n) ((u8*)out.at)[i] = ((const u8*)x.at)[i];
        return;
    }
    // As words that stay what they are.
    if (x.type == U32) x.type = out.type = F32;
    if (x.type == out.type) return each(n, in_fours(x) && in_fours(out), [&](auto i) { copy(x, out, i); });
    Rounder by(rounding);
    each(n, in_fours(x) && in_fours(out, rounding), [&](auto i) {
        auto got = fetch(x, i);
        put(out, i, numbers(got), by);
    });
}

KERNEL(add, const float* flag, View a, View b, View out, u64 n) {
    if (skipped(flag)) return;
    each(n, in_fours(a) && in_fours(b) && in_fours(out), [&](auto i) {
        auto of_a = fetch(a, i);
        auto of_b = fetch(b, i);
        auto x = numbers(of_a), y = numbers(of_b);
        for (u32 k = 0; k < i.N; k++) x[k] += y[k];
        put(out, i, x);
    });
}

KERNEL(accumulate_all, const float* flag, View terms, View out, u64 n, u64 count, u64 seed, u64 number, u64 first) {
    if (skipped(flag)) return;
    bool fours = n % 4 == 0 && in_fours(terms) && in_fours(out, {0, 0, 1, 0});
    for (u64 term = 0; term < count; term++) {
        Rounder by({splitmix64(seed, number + term), first, 1, 0});
        each(n, fours, [&](auto i) {
            auto of_term = fetch(terms, i.behind(term * n));
            auto of_out = fetch(out, i);
            auto x = numbers(of_out), y = numbers(of_term);
            for (u32 k = 0; k < i.N; k++) x[k] += y[k];
            put(out, i, x, by);
        });
    }
}

// x *= factor, which is on the device where `by` is given.
KERNEL(scale, const float* flag, View x, u64 n, float factor, const float* by) {
    if (skipped(flag)) return;
    if (by) factor = *by;
    each(n, in_fours(x), [&](auto i) {
        auto got = fetch(x, i);
        auto all = numbers(got);
        for (u32 k = 0; k < i.N; k++) all[k] *= factor;
        put(x, i, all);
    });
}

KERNEL(dropout, const float* flag, View x, View out, u64 n, float probability, u64 seed, u64 first, u32 accumulate) {
    if (skipped(flag)) return;
    u32 dropped = (u32)(probability * 16777216.0f);
    float factor = 1.0f / (1.0f - probability);
    each(n, in_fours(x) && in_fours(out), [&](auto i) {
        auto of_x = fetch(x, i);
        auto of_out = of_x;
        if (accumulate) of_out = fetch(out, i);
        auto all = numbers(of_x), before = numbers(of_out);
        for (u32 k = 0; k < i.N; k++) {
            bool kept = random_word(seed, first + i.of(k)) >> 8 >= dropped;
            float value = kept ? all[k] * factor : 0.0f;
            all[k] = accumulate ? before[k] + value : value;
        }
        put(out, i, all);
    });
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

template <u32 NUMBER> struct Kind {
    static constexpr u32 kind = NUMBER;
};

// Gives `body` the kind as a constant.
template <class Body> __device__ inline void of_kind(u32 kind, const Body& body) {
    if (kind == 0) body(Kind<0>());
    else if (kind == 1) body(Kind<1>());
    else body(Kind<2>());
}

KERNEL_FOUR(activate, const float* flag, View x, View out, u64 n, u32 number) {
    if (skipped(flag)) return;
    of_kind(number, [&](auto known) {
        each(n, in_fours(x) && in_fours(out), [&](auto i) {
            auto got = fetch(x, i);
            auto all = numbers(got);
            for (u32 k = 0; k < i.N; k++) {
                float slope;
                activation_of(known.kind, all[k], &all[k], &slope);
            }
            put(out, i, all);
        });
    });
}

KERNEL_FOUR(activate_backward, const float* flag, View x, View dout, View dx, u64 n, u32 number) {
    if (skipped(flag)) return;
    of_kind(number, [&](auto known) {
        each(n, in_fours(x) && in_fours(dout) && in_fours(dx), [&](auto i) {
            auto of_x = fetch(x, i);
            auto of_dout = fetch(dout, i);
            auto all = numbers(of_x), d = numbers(of_dout);
            for (u32 k = 0; k < i.N; k++) {
                float value, slope;
                activation_of(known.kind, all[k], &value, &slope);
                all[k] = d[k] * slope;
            }
            put(dx, i, all);
        });
    });
}

KERNEL_FOUR(gated, const float* flag, View gate, View up, View out, u64 n, u32 number) {
    if (skipped(flag)) return;
    of_kind(number, [&](auto known) {
        each(n, in_fours(gate) && in_fours(up) && in_fours(out), [&](auto i) {
            auto of_gate = fetch(gate, i);
            auto of_up = fetch(up, i);
            auto all = numbers(of_gate), u = numbers(of_up);
            for (u32 k = 0; k < i.N; k++) {
                float value, slope;
                activation_of(known.kind, all[k], &value, &slope);
                all[k] = value * u[k];
            }
            put(out, i, all);
        });
    });
}

KERNEL_FOUR(gated_backward, const float* flag, View gate, View up, View dout, View dgate, View dup, u64 n, u32 number) {
    if (skipped(flag)) return;
    bool fours = in_fours(gate) && in_fours(up) && in_fours(dout) && in_fours(dgate) && in_fours(dup);
    of_kind(number, [&](auto known) {
        each(n, fours, [&](auto i) {
            auto of_gate = fetch(gate, i);
            auto of_up = fetch(up, i);
            auto of_dout = fetch(dout, i);
            auto g = numbers(of_gate), u = numbers(of_up), d = numbers(of_dout);
            for (u32 k = 0; k < i.N; k++) {
                float value, slope;
                activation_of(known.kind, g[k], &value, &slope);
                g[k] = d[k] * u[k] * slope;
                u[k] = d[k] * value;
            }
            put(dgate, i, g);
            put(dup, i, u);
        });
    });
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
    each(n, in_fours(gate) && in_fours(up) && in_fours(out), [&](auto i) {
        auto of_gate = fetch(gate, i);
        auto of_up = fetch(up, i);
        auto all = numbers(of_gate), up_of = numbers(of_up);
        for (u32 k = 0; k < i.N; k++) {
            float g = all[k], u = up_of[k];
            clamp_both(&g, &u, limit);
            all[k] = (u + 1.0f) * (g / (1.0f + expf(-alpha * g)));
        }
        put(out, i, all);
    });
}

KERNEL(clamped_swiglu_backward, const float* flag, View gate, View up, View dout, View dgate, View dup, u64 n, float alpha,
       float limit) {
    if (skipped(flag)) return;
    bool fours = in_fours(gate) && in_fours(up) && in_fours(dout) && in_fours(dgate) && in_fours(dup);
    each(n, fours, [&](auto i) {
        auto of_gate = fetch(gate, i);
        auto of_up = fetch(up, i);
        auto of_dout = fetch(dout, i);
        auto all_gate = numbers(of_gate), all_up = numbers(of_up), all_d = numbers(of_dout);
        for (u32 k = 0; k < i.N; k++) {
            float own_gate = all_gate[k], own_up = all_up[k], g = own_gate, u = own_up, d = all_d[k];
            clamp_both(&g, &u, limit);
            float s = 1.0f / (1.0f + expf(-alpha * g)), rest = 1.0f / (1.0f + expf(alpha * g));
            all_gate[k] = own_gate > limit ? 0.0f : d * (u + 1.0f) * (s * (1.0f + alpha * g * rest));
            all_up[k] = own_up > limit || own_up < -limit ? 0.0f : d * (g * s);
        }
        put(dgate, i, all_gate);
        put(dup, i, all_up);
    });
}

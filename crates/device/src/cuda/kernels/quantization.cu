// Activations to codes of 8 bits and back.

KERNEL(int8_scales, const float* flag, View x, float* scales, u64 n, u64 block, u64 runs) {
    SHARED(u32, scratch);
    if (skipped(flag)) return;
    bool fours = block % 4 == 0 && in_fours(x);
    EACH_ROW(run, runs) {
        u64 start = run * block, count = n - start < block ? n - start : block;
        u32 most = 0;
        each_of_block(count, fours, [&](auto i) {
            auto got = fetch(x, i.behind(start));
            auto all = numbers(got);
            for (u32 k = 0; k < i.N; k++) {
                u32 bits = __float_as_uint(all[k]) & 0x7fffffffu;
                if (bits > most) most = bits;
            }
        });
        most = block_magnitude(most, scratch);
        if (threadIdx.x == 0) scales[run] = __uint_as_float(most) / 127.0f;
    }
}

__device__ inline u32 int8_code(float x, float inverse) {
    float value = __fmul_rn(x, inverse);
    float held = value < -127.0f ? -127.0f : value > 127.0f ? 127.0f : value;
    // Adding 1.5 * 2^23 leaves the nearest integer in the low bits.
    return __float_as_uint(__fadd_rn(held, 12582912.0f)) & 255;
}

// The scale of a block, and what its elements are multiplied by.
__device__ inline float inverse_of(float scale) { return scale >= SMALLEST_NORMAL ? 1.0f / scale : 0.0f; }

// Codes lie in fours, none of which is of two blocks.
__device__ inline bool codes_in_fours(const void* codes, u64 block) { return (u64)codes % 4 == 0 && block % 4 == 0; }

KERNEL(quantize_int8, const float* flag, View x, i8* codes, const float* scales, u64 n, u64 block) {
    if (skipped(flag)) return;
    u64 whole = codes_in_fours(codes, block) && in_fours(x) ? n / 4 : 0;
    EACH(i, whole) {
        float values[4], inverse = inverse_of(scales[4 * i / block]);
        u32 word = 0;
        four_of(x.type, four_at(x, 4 * i), values);
        for (u32 k = 0; k < 4; k++) word |= int8_code(values[k], inverse) << 8 * k;
        ((u32*)codes)[i] = word;
    }
    EACH(i, n - 4 * whole) codes[4 * whole + i] = (i8)int8_code(load(x, 4 * whole + i), inverse_of(scales[(4 * whole + i) / block]));
}

KERNEL(dequantize_int8, const float* flag, const i8* codes, const float* scales, View out, u64 n, u64 block) {
    if (skipped(flag)) return;
    u64 whole = codes_in_fours(codes, block) && in_fours(out) ? n / 4 : 0;
    EACH(i, whole) {
        float values[4], scale = scales[4 * i / block];
        u32 word = ((const u32*)codes)[i];
        for (u32 k = 0; k < 4; k++) values[k] = (float)(i8)(word >> 8 * k) * scale;
        put_words(out, 4 * i, four_words(out.type, values));
    }
    EACH(i, n - 4 * whole) store(out, 4 * whole + i, (float)codes[4 * whole + i] * scales[(4 * whole + i) / block]);
}

// most = the largest magnitude, as bits: a maximum has no order.
KERNEL(largest_magnitude, const float* flag, View x, u64 n, u32* most) {
    SHARED(u32, scratch);
    if (skipped(flag)) return;
    u32 own = 0;
    each(n, in_fours(x), [&](auto i) {
        auto got = fetch(x, i);
        auto all = numbers(got);
        for (u32 k = 0; k < i.N; k++) {
            u32 bits = __float_as_uint(all[k]) & 0x7fffffffu;
            if (bits > own) own = bits;
        }
    });
    own = block_magnitude(own, scratch);
    if (threadIdx.x == 0) atomicMax(most, own);
}

// The code nearest to x, ties to even; of what is too large, the largest number's.
__device__ inline u8 fp8_code(float x, u32 mantissa, u32 bias, u32 largest_exponent) {
    u32 cut = 23 - mantissa, bits = __float_as_uint(x), size = bits & 0x7fffffffu;
    u32 largest = (127 + largest_exponent) << 23 | 0x600000u;
    if (size > largest) size = largest;
    u32 rounded = size + ((1u << (cut - 1)) - 1) + (size >> cut & 1);
    u32 code = (rounded - ((127 - bias) << 23)) >> cut;
    if (size < (127 + 1 - bias) << 23) {
        u32 unit = (127 + 1 - bias + cut) << 23;
        code = __float_as_uint(__fadd_rn(__uint_as_float(size), __uint_as_float(unit))) - unit;
    }
    return (u8)(code | (bits >> 24 & 0x80));
}

// The factor before the codes is the smallest power of two that lets the largest magnitude fit.
KERNEL(quantize_fp8, const float* flag, View x, View out, u64 n, const u32* most) {
    if (skipped(flag)) return;
    bool e4m3 = out.type == E4M3, finite = *most < 0x7f800000u;
    int exponent = 0;
    if (finite && *most) {
        exponent = (e4m3 ? 8 : 15) - ((int)(*most >> 23) - 127) - ((*most & 0x7fffffu) > 0x600000u ? 1 : 0);
        exponent = exponent < -119 ? -119 : exponent > 100 ? 100 : exponent;
    }
    float scale = __uint_as_float((u32)(127 + exponent) << 23);
    u8* bytes = (u8*)out.at;
    if (first_element() == 0) {
        u32 factor = finite ? (u32)(127 - exponent) << 23 : 0x7fc00000u;
        for (u32 i = 0; i < 4; i++) bytes[i] = (u8)(factor >> 8 * i);
    }
    EACH(i, n) {
        float value = load(x, i) * scale;
        bytes[4 + i] = e4m3 ? fp8_code(value, 3, 7, 8) : fp8_code(value, 2, 15, 15);
    }
}

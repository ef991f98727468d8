// Elements of any storage sixteen at a time: what a block of codes has in common is read once for all of them.
//
// A unit is sixteen elements of a tensor that follow each other. Where it lies within a block, and whole, codes come by words;
// else its elements are read one by one.

#define UNIT 16

// 16 bytes from anywhere: whole words around them, shifted. A word never reaches beyond what is allocated.
__device__ inline Words bytes16(const u8* p) {
    const u32* words = (const u32*)((u64)p & ~(u64)3);
    u32 shift = (u32)((u64)p & 3) * 8;
    u64 a = words[0], b = words[1], c = words[2], d = words[3], e = shift ? words[4] : 0;
    Words all = {(u32)((b << 32 | a) >> shift), (u32)((c << 32 | b) >> shift), (u32)((d << 32 | c) >> shift),
                 (u32)((e << 32 | d) >> shift)};
    return all;
}

__device__ inline u32 byte_of(const Words& words, u32 i) {
    u32 word = i < 4 ? words.x : i < 8 ? words.y : i < 12 ? words.z : words.w;
    return word >> (i % 4 * 8) & 255;
}

extern "C" {
// What codes of IQ4_NL and of MXFP4 stand for.
__constant__ float code_values[2][16] = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};
}

// Sixteen codes: (value of the code - zero) * factor + add.
struct Codes {
    Words low, high;
    u32 low_shift, low_mask;
    // Bits of `high` that go above the low ones, and where.
    u32 high_shift, high_mask, high_place;
    // A fifth bit for each code.
    u32 fifth;
    bool with_sign;
    const float* values;
    float factor, zero, add;
};

__device__ inline void four_bits(Codes& codes, const u8* p, bool upper) {
    codes.low = bytes16(p);
    codes.low_shift = upper ? 4 : 0;
    codes.low_mask = 15;
}

__device__ inline void eight_bits(Codes& codes, const u8* p) {
    codes.low = bytes16(p);
    codes.low_mask = 255;
    codes.with_sign = true;
}

// The codes of element `i` of a block of 256 and of the fifteen behind it.
__device__ inline void codes_of_256(Codes& codes, const u8* p, u32 type, u32 i) {
    float scale, minimum;
    u32 bit = i / 32, pair = i % 128 / 32 * 2, j = i / 16;
    switch (type) {
    case Q2K:
        codes.low = bytes16(p + 16 + i / 128 * 32 + i % 32);
        codes.low_shift = pair;
        codes.low_mask = 3;
        codes.factor = f16_at(p + 80) * (float)(p[j] & 15);
        codes.add = -(f16_at(p + 82) * (float)(p[j] >> 4));
        break;
    case Q3K: {
        codes.low = bytes16(p + 32 + i / 128 * 32 + i % 32);
        codes.low_shift = pair;
        codes.low_mask = 3;
        codes.high = bytes16(p + i % 32);
        codes.high_shift = bit;
        codes.high_mask = 1;
        codes.high_place = 2;
        u32 low = j >= 8 ? p[96 + j % 8] >> 4 : p[96 + j % 8] & 15;
        codes.factor = f16_at(p + 108) * ((float)(low | (p[104 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32.0f);
        codes.zero = 4.0f;
        break;
    }
    case Q4K:
    case Q5K:
        four_bits(codes, p + (type == Q4K ? 16 : 48) + i / 64 * 32 + i % 32, i % 64 >= 32);
        if (type == Q5K) {
            codes.high = bytes16(p + 16 + i % 32);
            codes.high_shift = bit;
            codes.high_mask = 1;
            codes.high_place = 4;
        }
        six_bits(p + 4, bit, &scale, &minimum);
        codes.factor = f16_at(p) * scale;
        codes.add = -(f16_at(p + 2) * minimum);
        break;
    case Q6K:
        four_bits(codes, p + i / 128 * 64 + i % 64, i % 128 >= 64);
        codes.high = bytes16(p + 128 + i / 128 * 32 + i % 32);
        codes.high_shift = pair;
        codes.high_mask = 3;
        codes.high_place = 4;
        codes.factor = f16_at(p + 208) * (float)(i8)p[192 + j];
        codes.zero = 32.0f;
        break;
    default: // Q8_K
        eight_bits(codes, p + 4 + i);
        codes.factor = f32_at(p);
    }
}

__device__ inline void codes_of(Codes& codes, const u8* p, u32 type, u64 index) {
    if (type >= Q2K && type <= Q8K) {
        u32 bytes = type == Q2K ? 84 : type == Q3K ? 110 : type == Q4K ? 144 : type == Q5K ? 176 : type == Q6K ? 210 : 292;
        return codes_of_256(codes, p + index / 256 * bytes, type, (u32)(index % 256));
    }
    u32 i = (u32)(index % 32), j = (u32)(index % 64);
    switch (type) {
    case Q8_0:
        p += index / 32 * 34;
        codes.factor = f16_at(p);
        return eight_bits(codes, p + 2 + i);
    case Q4_0:
    case IQ4_NL:
        p += index / 32 * 18;
        codes.factor = f16_at(p);
        codes.zero = type == Q4_0 ? 8.0f : 0.0f;
        codes.values = type == Q4_0 ? 0 : code_values[0];
        return four_bits(codes, p + 2, i != 0);
    case Q4_1:
        p += index / 32 * 20;
        codes.factor = f16_at(p);
        codes.add = f16_at(p + 2);
        return four_bits(codes, p + 4, i != 0);
    case Q5_0:
        p += index / 32 * 22;
        codes.factor = f16_at(p);
        codes.zero = 16.0f;
        codes.fifth = u32_at(p + 2) >> i;
        return four_bits(codes, p + 6, i != 0);
    case Q5_1:
        p += index / 32 * 24;
        codes.factor = f16_at(p);
        codes.add = f16_at(p + 2);
        codes.fifth = u32_at(p + 4) >> i;
        return four_bits(codes, p + 8, i != 0);
    case MXFP4:
        p += index / 32 * 17;
        codes.factor = half_e8m0(p[0]);
        codes.values = code_values[1];
        return four_bits(codes, p + 1, i != 0);
    case NF4_F32:
    case FP4_F32:
        p += index / 64 * 36;
        codes.factor = f32_at(p);
        codes.values = type == NF4_F32 ? tables.normal_float : tables.four_bit_float;
        return four_bits(codes, p + 4 + j % 32, j >= 32);
    case INT8:
        p += index / 64 * 68;
        codes.factor = f32_at(p);
        return eight_bits(codes, p + 4 + j);
    default: { // NF4 and FP4, doubly quantised
        u64 block = index / 64;
        const u8* factor = p + block / 256 * (8 + 256 * 33);
        p = factor + 8 + block % 256 * 33;
        // Product and sum are rounded by themselves.
        codes.factor = __fadd_rn(__fmul_rn(tables.magnitudes[p[0]], f32_at(factor)), f32_at(factor + 4));
        codes.values = type == NF4 ? tables.normal_float : tables.four_bit_float;
        four_bits(codes, p + 1 + j % 32, j >= 32);
    }
    }
}

__device__ inline void decode_codes(View x, u64 index, float* out) {
    Codes codes = {};
    codes.factor = 1.0f;
    codes_of(codes, (const u8*)x.at, x.type, index);
#pragma unroll
    for (u32 i = 0; i < UNIT; i++) {
        u32 code = byte_of(codes.low, i) >> codes.low_shift & codes.low_mask;
        code |= (byte_of(codes.high, i) >> codes.high_shift & codes.high_mask) << codes.high_place;
        code |= (codes.fifth >> i & 1) << 4;
        float value = codes.with_sign ? (float)(i8)code : codes.values ? codes.values[code & 15] : (float)code;
        out[i] = (value - codes.zero) * codes.factor + codes.add;
    }
}

__device__ inline void put_pair(float* out, u32 pair, bool half) {
    out[0] = half ? f16_value((u16)pair) : bf16_value((u16)pair);
    out[1] = half ? f16_value((u16)(pair >> 16)) : bf16_value((u16)(pair >> 16));
}

// The same, where it may begin at a multiple of 16 bytes and mostly does.
__device__ inline Words words_at(const u8* p) { return (u64)p % 16 == 0 ? *(const Words*)p : bytes16(p); }

// A whole unit of a type that is no block of codes; whether it is of such a type.
__device__ inline bool decode_plain(View x, u64 index, float* out) {
    const u8* p = (const u8*)x.at;
    if (x.type == F32) {
#pragma unroll
        for (u32 part = 0; part < 4; part++) {
            Words words = words_at(p + 4 * index + 16 * part);
            out[4 * part] = __uint_as_float(words.x);
            out[4 * part + 1] = __uint_as_float(words.y);
            out[4 * part + 2] = __uint_as_float(words.z);
            out[4 * part + 3] = __uint_as_float(words.w);
        }
        return true;
    }
    if (x.type == BF16 || x.type == F16) {
        bool half = x.type == F16;
#pragma unroll
        for (u32 part = 0; part < 2; part++) {
            Words words = words_at(p + 2 * index + 16 * part);
            put_pair(out + 8 * part, words.x, half);
            put_pair(out + 8 * part + 2, words.y, half);
            put_pair(out + 8 * part + 4, words.z, half);
            put_pair(out + 8 * part + 6, words.w, half);
        }
        return true;
    }
    if (x.type != E4M3 && x.type != E5M2) return false;
    Words words = bytes16(p + 4 + index);
    float factor = f32_at(p);
#pragma unroll
    for (u32 i = 0; i < UNIT; i++) {
        u8 code = (u8)byte_of(words, i);
        out[i] = (x.type == E4M3 ? e4m3_value(code) : e5m2_value(code)) * factor;
    }
    return true;
}

// Gives `put` the elements from `index` on, of which `count` are there and the rest is 0: all at once by `all`, or each by `one`.
// Without CODES the type is no block of codes.
template <bool CODES, class Put> __device__ inline void load_unit(View x, u64 index, u32 count, const Put& put) {
    float values[UNIT];
    bool done = count == UNIT && decode_plain(x, index, values);
    if (count == 0) {
#pragma unroll
        for (u32 i = 0; i < UNIT; i++) values[i] = 0.0f;
        done = true;
    }
    if (CODES && count == UNIT && x.type >= Q8_0 && index % UNIT == 0) {
        decode_codes(x, index, values);
        done = true;
    }
    if (done) return put.all(values);
#pragma unroll 1
    for (u32 i = 0; i < UNIT; i++) {
        float value = 0.0f;
        if (i < count) value = CODES ? load_inline(x, index + i) : plain_element(x, index + i);
        put.one(i, value);
    }
}

// Elements of a unit that are there: those from `first` up to `end`.
__device__ inline u32 unit_count(u64 first, u64 end) {
    return first >= end ? 0 : end - first < UNIT ? (u32)(end - first) : UNIT;
}

// Puts a unit into registers.
struct ToRegisters {
    float* out;

    __device__ void all(const float* values) const {
#pragma unroll
        for (u32 i = 0; i < UNIT; i++) out[i] = values[i];
    }
    __device__ void one(u32 place, float value) const {
#pragma unroll
        for (u32 i = 0; i < UNIT; i++) out[i] = i == place ? value : out[i];
    }
};

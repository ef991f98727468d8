// What cards of compute capability 8.0 have: tensor cores for bf16 and f16, and copies to shared memory that nobody waits for.
//
// Each instruction is a function; its body for a C++ compiler is in `tests/cuda/on_cpu.h`, where the layouts are written down.

#ifndef ON_CPU
__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Begins a copy of 16, 8 or 4 bytes of which `bytes` are there; the rest becomes 0.
template <u32 WIDTH> __device__ inline void copy_begin(void* to, const void* from, u32 bytes) {
    if (WIDTH == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)), "l"(from), "n"(WIDTH), "r"(bytes)
                     : "memory");
}

// What was begun since the last time is one group.
__device__ inline void copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until no more than so many groups are on their way.
template <u32 LEFT> __device__ inline void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }

// Four matrices of 8 x 8 numbers of 16 bits; each thread names a row of 16 bytes.
__device__ inline void load_matrices(u32* out, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ inline void load_transposed(u32* out, const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// sums += a b: 16 x 16 times 16 x 8.
template <bool HALF> __device__ inline void multiply_add(float* sums, const u32* a, const u32* b) {
    if (HALF)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

template <bool HALF> __device__ inline u16 to_16_bits(float x) { return HALF ? to_f16(x) : to_bf16(x); }

// Two numbers as the halves of a word, the first one low.
template <bool HALF> __device__ inline u32 pair_of_16_bits(float low, float high) {
    return two(to_16_bits<HALF>(low), to_16_bits<HALF>(high));
}

// ---- lines of numbers of 16 bits in shared memory ----
//
// A line is LENGTH numbers; its runs of eight are placed by turns, so that those that threads read together lie in different banks.

__device__ inline u32 place_in_lines(u32 length, u32 line, u32 run) {
    u32 turned = length >= 64 ? run ^ (line & 7) : run ^ (line / 2 & 3);
    return line * length + turned * 8;
}

// ---- fragments of tiles of such lines ----
//
// `a` is 16 rows from `row` on and 16 of the inner length from `k` on, `b` two fragments of 8 columns each. Lines of a tile lie along the
// inner length, or across it.

__device__ inline void a_along(u32* out, const u16* tile, u32 length, u32 row, u32 k) {
    u32 lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8;
    load_matrices(out, tile + place_in_lines(length, row + matrix % 2 * 8 + line, k / 8 + matrix / 2));
}
__device__ inline void a_across(u32* out, const u16* tile, u32 length, u32 row, u32 k) {
    u32 lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8;
    load_transposed(out, tile + place_in_lines(length, k + matrix / 2 * 8 + line, row / 8 + matrix % 2));
}
__device__ inline void b_along(u32* out, const u16* tile, u32 length, u32 column, u32 k) {
    u32 lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8;
    load_matrices(out, tile + place_in_lines(length, column + matrix / 2 * 8 + line, k / 8 + matrix % 2));
}
__device__ inline void b_across(u32* out, const u16* tile, u32 length, u32 column, u32 k) {
    u32 lane = threadIdx.x % WARP, matrix = lane / 8, line = lane % 8;
    load_transposed(out, tile + place_in_lines(length, k + matrix % 2 * 8 + line, column / 8 + matrix / 2));
}

// ---- filling them ----

// Puts a unit into a line of `length` numbers, from a run on.
template <bool HALF> struct ToLine {
    u16* lines;
    u32 length, line, run;

    __device__ void one(u32 i, float value) const {
        lines[place_in_lines(length, line, run + i / 8) + i % 8] = to_16_bits<HALF>(value);
    }
    __device__ void all(const float* x) const {
#pragma unroll
        for (u32 part = 0; part < 2; part++) {
            const float* y = x + 8 * part;
            Words words = {pair_of_16_bits<HALF>(y[0], y[1]), pair_of_16_bits<HALF>(y[2], y[3]),
                           pair_of_16_bits<HALF>(y[4], y[5]), pair_of_16_bits<HALF>(y[6], y[7])};
            *(Words*)(lines + place_in_lines(length, line, run + part)) = words;
        }
    }
};

template <u32 WIDTH> __device__ inline void copy_run(u16* to, const u16* from, u32 count) {
#pragma unroll
    for (u32 at = 0; at < 8; at += WIDTH / 2) {
        u32 left = count > at ? count - at : 0;
        copy_begin<WIDTH>(to + at, left ? from + at : from, left < WIDTH / 2 ? 2 * left : WIDTH);
    }
}

// Bytes that can be copied at a time where lines begin `stride` numbers of 16 bits apart; 2 where none can.
__device__ inline u32 copy_width(u64 at, u64 stride) {
    u64 all = at | 2 * stride;
    return all % 16 == 0 ? 16 : all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 2;
}

// The unit that begins at element `index`, of which `count` are there, into a line: a copy begins where the type is the line's and
// `width` lets it, else it is widened or narrowed on the way. Without CODES the type is no block of codes.
template <bool HALF, bool CODES>
__device__ inline void fill_line(View x, u32 width, u64 index, u32 count, const ToLine<HALF>& put) {
    if (x.type == (HALF ? F16 : BF16) && width > 2) {
        // Nothing is read where nothing is there.
        const u16* from = (const u16*)x.at + (count ? index : 0);
#pragma unroll
        for (u32 part = 0; part < 2; part++) {
            u16* to = put.lines + place_in_lines(put.length, put.line, put.run + part);
            u32 left = count > 8 * part ? count - 8 * part : 0;
            const u16* own = left ? from + 8 * part : from;
            if (width == 16) copy_run<16>(to, own, left < 8 ? left : 8);
            else if (width == 8) copy_run<8>(to, own, left < 8 ? left : 8);
            else copy_run<4>(to, own, left < 8 ? left : 8);
        }
        return;
    }
    load_unit<CODES>(x, index, count, put);
}

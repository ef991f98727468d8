// What cards of compute capability 9.0 have beside that: products of whole tiles by four warps together, of operands in shared memory,
// and copies of tiles that one thread begins and a barrier in shared memory counts.
//
// PTX ISA, "Asynchronous warpgroup level matrix instructions", "Data movement: tensor copy", "mbarrier". Each instruction is a function;
// its body for a C++ compiler is in `tests/cuda/on_cpu.h`.

// How a matrix lies, as the driver encodes it.
struct alignas(64) TensorMap {
    u64 words[16];
};

#ifndef ON_CPU
// Threads of a block: one warpgroup begins copies, two multiply.
#define KERNEL_90(name, ...) extern "C" __global__ void __launch_bounds__(384, 1) name(__VA_ARGS__)
// Tiles of operands begin at multiples of 1024 bytes.
#define SHARED_TILES(name)                                       \
    extern __shared__ __align__(1024) unsigned char all_tiles[]; \
    u8* name = all_tiles + ((1024u - (shared_address(all_tiles) & 1023u)) & 1023u)
#define MAP_PARAMETER const __grid_constant__ TensorMap

// A barrier that so many arrivals and all bytes that were announced complete.
__device__ inline void barrier_begin(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// Barriers are there for copies too.
__device__ inline void barriers_begun() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Arrives, and announces bytes that copies will bring.
__device__ inline void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Waits until the phase of that parity is complete.
__device__ inline void barrier_wait(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
}

// Begins to copy a box of a matrix, from element x of line y on. What lies outside the matrix becomes 0.
__device__ inline void tile_begin(void* to, const TensorMap* map, u32 x, u32 y, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
                     shared_address(to)),
                 "l"((u64)map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}

// The same of lines of one head: from number x of head `head` of line `line` of sequence `batch` on.
__device__ inline void lines_begin(void* to, const TensorMap* map, u32 x, u32 head, u32 line, u32 batch, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                     shared_address(to)),
                 "l"((u64)map), "r"(x), "r"(head), "r"(line), "r"(batch), "r"(shared_address(barrier))
                 : "memory");
}

template <u32 COUNT> __device__ inline void registers_less() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <u32 COUNT> __device__ inline void registers_more() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
__device__ inline void warp_barrier() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

// A tile in shared memory whose lines of 128 bytes are placed by turns. Groups of eight lines follow each other; `leading` bytes lie between
// runs of 64 numbers across the inner length.
__device__ inline u64 tile_descriptor(const void* tile, u32 leading) {
    return (u64)((shared_address(tile) & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

// Two numbers as bf16 in a word, the first one low.
__device__ inline u32 narrow_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ inline float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Sums are in their registers here.
template <u32 COUNT> __device__ inline void settle(float* sums) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Products from here on find registers and shared memory as they are now.
__device__ inline void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void products_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until no more than so many groups are on their way.
template <u32 LEFT, u32 COUNT> __device__ inline void products_wait(float* sums) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    // Nobody reads the sums before the last group is done.
    if (LEFT == 0) settle<COUNT>(sums);
}

#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 4), FOUR(x, i + 8), FOUR(x, i + 12)
#define THIRTY_TWO(x, i) SIXTEEN(x, i), SIXTEEN(x, i + 16)
#define SIXTY_FOUR(x, i) THIRTY_TWO(x, i), THIRTY_TWO(x, i + 32)

// sums += a b of 64 rows, 16 of the inner length and 64, 128 or 256 columns. ACROSS: lines of the tile lie across the inner length.
template <u32 COLUMNS, bool A_ACROSS, bool B_ACROSS> __device__ inline void multiply_tiles(float* sums, u64 a, u64 b) {
    if constexpr (COLUMNS == 256)
        asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                     "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                     "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                     "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                     "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                     "%128, %129, 1, 1, 1, %130, %131;"
                     : SIXTY_FOUR(sums, 0), SIXTY_FOUR(sums, 64)
                     : "l"(a), "l"(b), "n"((int)A_ACROSS), "n"((int)B_ACROSS));
    else if constexpr (COLUMNS == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                     "%64, %65, 1, 1, 1, %66, %67;"
                     : SIXTY_FOUR(sums, 0)
                     : "l"(a), "l"(b), "n"((int)A_ACROSS), "n"((int)B_ACROSS));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                     "%32, %33, 1, 1, 1, %34, %35;"
                     : THIRTY_TWO(sums, 0)
                     : "l"(a), "l"(b), "n"((int)A_ACROSS), "n"((int)B_ACROSS));
}

// The same of rows in registers, as sums of 16 columns lie there, rounded to bf16; b's lines lie across the inner length.
template <u32 COLUMNS> __device__ inline void multiply_rows(float* sums, const u32* a, u64 b) {
    if constexpr (COLUMNS == 128)
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                     "{%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                     : SIXTY_FOUR(sums, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
                     "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
                     "{%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                     : THIRTY_TWO(sums, 0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#endif

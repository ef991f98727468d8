/* The most that the cores could do: products and sums a second with everything in registers.
 *
 * Prints one JSON document with GFLOP/s in f32 and in bf16 (0 where the processor has no bf16 dot product), and the
 * instructions. Every thread runs the same loop of independent accumulators; the best of several rounds counts.
 *
 * build: gcc -O2 -pthread matmul_peak.c -o matmul_peak        usage: matmul_peak THREADS
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { ITERATIONS = 2000000, ROUNDS = 100 };
static volatile float sink;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define COUNT 12
#define EACH(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define DECLARE(i) acc##i = x,
/* The empty asm hides a value from the optimiser, and keeps it in a register. */
#define HIDE256(i) __asm__ volatile("" : "+x"(acc##i));
#define HIDE512(i) __asm__ volatile("" : "+v"(acc##i));
#define LOOP(TYPE, SET, HIDE, OPERATION)                                                                           \
    TYPE x = SET, EACH(DECLARE) acc_x = x;                                                                         \
    EACH(HIDE)                                                                                                     \
    for (int i = 0; i < ITERATIONS; i++) {                                                                         \
        HIDE(_x)                                                                                                   \
        EACH(OPERATION)                                                                                            \
    }                                                                                                              \
    EACH(HIDE)
#define FMA256(i) acc##i = _mm256_fmadd_ps(acc_x, acc_x, acc##i);
#define FMA512(i) acc##i = _mm512_fmadd_ps(acc_x, acc_x, acc##i);
#define DOT512(i) acc##i = _mm512_dpbf16_ps(acc##i, (__m512bh)acc_x, (__m512bh)acc_x);

__attribute__((target("avx2,fma"))) static void fma256(void) { LOOP(__m256, _mm256_set1_ps(1e-9f), HIDE256, FMA256) }
__attribute__((target("avx512f"))) static void fma512(void) { LOOP(__m512, _mm512_set1_ps(1e-9f), HIDE512, FMA512) }
__attribute__((target("avx512f,avx512bf16"))) static void dot512(void) {
    LOOP(__m512, _mm512_set1_ps(1e-9f), HIDE512, DOT512)
}

/* Four products of tiles of 16 x 32 and 32 x 16 bf16 an iteration, where the system lets this process have the tiles. */
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILE_FLOPS (4 * 16 * 16 * 32 * 2)
static int may_use_tiles(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 5) != 5) return 0;
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
static void tiles(void) {
    uint8_t all[64] __attribute__((aligned(64))) = {1};
    for (int i = 0; i < 8; i++) all[16 + 2 * i] = 64, all[48 + i] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(all));
    for (int i = 0; i < ITERATIONS / 16; i++)
        __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n"
                         "tdpbf16ps %tmm6, %tmm5, %tmm2\n tdpbf16ps %tmm7, %tmm5, %tmm3");
    __asm__ volatile("tilerelease");
}
#endif
#endif

/* A loop of plain C, where nothing better is known: the compiler's vectors. */
static void plain(void) {
    float acc[64] = {0};
    for (int i = 0; i < ITERATIONS; i++)
        for (int j = 0; j < 64; j++) acc[j] = acc[j] * 0.5f + 1e-9f;
    sink = acc[0];
}

struct kernel {
    const char *name;
    void (*run)(void);
    double flops; /* of one iteration */
};

static void *repeat(void *argument) {
    ((struct kernel *)argument)->run();
    return NULL;
}

static double gflops(struct kernel kernel, int threads) {
    double best = 0;
    pthread_t *others = calloc((size_t)threads, sizeof *others);
    if (!others) return 0;
    for (int round = 0; round < ROUNDS; round++) {
        double begun = now();
        int started = 1;
        while (started < threads && !pthread_create(&others[started], NULL, repeat, &kernel)) started++;
        kernel.run();
        for (int i = 1; i < started; i++) pthread_join(others[i], NULL);
        double rate = kernel.flops * ITERATIONS * started / (now() - begun) / 1e9;
        if (rate > best) best = rate;
    }
    free(others);
    return best;
}

int main(int count, char **arguments) {
    int threads = count == 2 ? atoi(arguments[1]) : 0;
    if (threads < 1 || threads > 4096) {
        fprintf(stderr, "usage: matmul_peak THREADS\n");
        return 2;
    }
    struct kernel f32 = {"plain", plain, 128}, bf16 = {"none", NULL, 0};
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) f32 = (struct kernel){"avx512", fma512, COUNT * 16 * 2};
    else if (__builtin_cpu_supports("fma")) f32 = (struct kernel){"avx2", fma256, COUNT * 8 * 2};
    if (__builtin_cpu_supports("avx512bf16")) bf16 = (struct kernel){"avx512bf16", dot512, COUNT * 32 * 2};
#if defined(__linux__)
    if (may_use_tiles()) bf16 = (struct kernel){"amx", tiles, TILE_FLOPS / 16.0};
#endif
#endif
    printf("{\"threads\": %d, \"f32\": {\"kernel\": \"%s\", \"gflops\": %.1f}, ", threads, f32.name,
           gflops(f32, threads));
    printf("\"bf16\": {\"kernel\": \"%s\", \"gflops\": %.1f}}\n", bf16.name, bf16.run ? gflops(bf16, threads) : 0.0);
    return 0;
}

/* The sum of clipped gradients of a linear model in one pass over the rows: logits, residual, clip, outer product.
 *
 * A tile is TILE rows. Up to the outer product the lanes of a vector are rows, so every row goes through the same
 * operations wherever it stands; a short tile is filled with zero rows. Then each row of the tile in turn adds its
 * outer product to float64 accumulators, with features in the lanes. A row that is not usable (a logit, its length or
 * its factor is not finite, its factor is below the normal float32 range, its label is no class) is replaced by zeros
 * by selection. Each (group, slice) of rows has its own accumulator, so threads do not change the result. */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, WIDE = 10, REGISTERS = 20 }; /* WIDE: outputs per block; REGISTERS: accumulators held in registers */
#define WIDEN(v) ((vd)_mm512_cvtps_pd((__m256)(v)))
#elif defined(__AVX__)
#include <immintrin.h>
enum { LANES = 8, WIDE = 5, REGISTERS = 10 };
#define WIDEN(v) ((vd)_mm256_cvtps_pd((__m128)(v)))
#else
enum { LANES = 4, WIDE = 5, REGISTERS = 20 };
#define WIDEN(v) __builtin_convertvector(v, vd)
#endif
enum { TILE = 16, PARTS = TILE / LANES, HALF = LANES / 2, MOST_THREADS = 64 };
#define FAR 1e300 /* a bound of this or more is none */
enum { SOFTMAX, LOGISTIC, SQUARES, POISSON };

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef float vh __attribute__((vector_size(4 * HALF)));
typedef int32_t vhi __attribute__((vector_size(4 * HALF)));
typedef double vd __attribute__((vector_size(8 * HALF)));
typedef vf vf_any __attribute__((aligned(4), may_alias)); /* at any address */
typedef vh vh_any __attribute__((aligned(4), may_alias));
/* __builtin_prefetch counts as a write to memory in GCC, and would keep sums out of registers. */
#if defined(__x86_64__)
#define PREFETCH(address) __asm__ volatile("prefetcht0 (%0)" ::"r"(address))
#elif defined(__aarch64__)
#define PREFETCH(address) __asm__ volatile("prfm pldl1keep, [%0]" ::"r"(address))
#else
#define PREFETCH(address)
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef struct {
    const float *x, *theta, *mask, *length, *weights;
    const void *y;
    double *out;                                                          /* groups x slices x parameters */
    int64_t x_group, x_row, theta_group, y_group, mask_group, length_group; /* strides */
    int64_t groups, rows, slices, features, outputs, classes, kind, bias, integer_labels;
    double bound, radius, residual, cap;
    int64_t next, failed;
} Job;

typedef struct { /* of one thread */
    int64_t width; /* features, rounded up to whole tiles */
    float *zero, *spare, *across, *z;
    double *r, *sum, *bias;
} Scratch;

INLINE vf choose(vi where, vf a, vf b) { return (vf)(((vi)a & where) | ((vi)b & ~where)); }

INLINE vf exponential(vf v) { /* of -86 to 88, to 1.5 ulp */
    v = choose(v > -86.0f, v, v * 0.0f - 86.0f);
    vf m = v * 0x1.715476p+0f + 12582912.0f, n = m - 12582912.0f; /* the sum rounds to a whole number */
    vf g = v - n * 0.693359375f + n * 0x1.bd0106p-13f, q = g * 0x1.6a1a22p-10f + 0x1.123fdp-7f;
    q = ((q * g + 0x1.555916p-5f) * g + 0x1.55548ap-3f) * g + 0x1.fffffcp-2f;
    return (vf)((vi)(q * (g * g) + g + 1.0f) + ((vi)m << 23));
}

#define LOW(i) ((i) / 2 + ((i) % 2) * LANES)
#define HIGH(i) (LOW(i) + LANES / 2)
#if defined(__AVX512F__)
#define INDICES(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
#elif defined(__AVX__)
#define INDICES(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)
#else
#define INDICES(F) F(0), F(1), F(2), F(3)
#endif

INLINE void transpose(const float *const *rows, int64_t k, float *to) { /* to: features x TILE */
    vf a[LANES], b[LANES];
    UNROLL for (int i = 0; i < LANES; i++) a[i] = *(const vf_any *)(rows[i] + k);
    UNROLL for (int step = 1; step < LANES; step *= 2) {
        UNROLL for (int i = 0; i < LANES / 2; i++) {
            b[2 * i] = __builtin_shufflevector(a[i], a[i + LANES / 2], INDICES(LOW));
            b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + LANES / 2], INDICES(HIGH));
        }
        UNROLL for (int i = 0; i < LANES; i++) a[i] = b[i];
    }
    UNROLL for (int i = 0; i < LANES; i++) *(vf *)(to + i * TILE) = a[i];
}

/* Logits of `n` outputs. Few of them are summed in several chains, because one would wait for itself. */
INLINE void logits(const int n, const Job *job, const float *across, const float *W, const float *bias, float *z) {
    const int chains = n * PARTS <= 2 ? 4 : n * PARTS <= 5 ? 2 : 1;
    vf a[4][n][PARTS];
    UNROLL for (int c = 0; c < chains; c++) UNROLL for (int i = 0; i < n; i++) UNROLL for (int p = 0; p < PARTS; p++)
        a[c][i][p] = (vf){0} + (c == 0 && bias ? bias[i] : 0.0f);
    int64_t k = 0;
    for (; k + chains <= job->features; k += chains)
        UNROLL for (int c = 0; c < chains; c++) UNROLL for (int i = 0; i < n; i++) UNROLL for (int p = 0; p < PARTS; p++)
            a[c][i][p] += *(const vf *)(across + (k + c) * TILE + p * LANES) * W[(k + c) * job->outputs + i];
    for (; k < job->features; k++)
        UNROLL for (int i = 0; i < n; i++) UNROLL for (int p = 0; p < PARTS; p++)
            a[0][i][p] += *(const vf *)(across + k * TILE + p * LANES) * W[k * job->outputs + i];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int p = 0; p < PARTS; p++) {
        UNROLL for (int c = 1; c < chains; c++) a[0][i][p] += a[c][i][p];
        *(vf *)(z + i * TILE + p * LANES) = a[0][i][p];
    }
}

INLINE void block(const int n, const int vectors, const float *const *rows, int count, const int32_t *keep,
                  const double *r, double *sum, int64_t k, int64_t width, int64_t ahead) {
    vd a[n][vectors], x[vectors];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < vectors; v++)
        a[i][v] = *(vd *)(sum + i * width + k + v * HALF);
    for (int j = 0; j < count; j++) {
        UNROLL for (int v = 0; v < vectors * HALF; v += 16) PREFETCH(rows[j] + k + v + ahead);
        UNROLL for (int v = 0; v < vectors; v++)
            x[v] = WIDEN((vh)((vhi)*(const vh_any *)(rows[j] + k + v * HALF) & keep[j]));
        UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < vectors; v++) a[i][v] += x[v] * r[i * TILE + j];
    }
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int v = 0; v < vectors; v++)
        *(vd *)(sum + i * width + k + v * HALF) = a[i][v];
}

INLINE void outer(const int n, const float *const *rows, int count, const int32_t *keep, const double *r, double *sum,
                  int64_t width, int64_t ahead) {
    const int vectors = REGISTERS / n >= 8 ? 8 : REGISTERS / n >= 4 ? 4 : 2;
    int64_t k = 0;
    for (; k + vectors * HALF <= width; k += vectors * HALF)
        block(n, vectors, rows, count, keep, r, sum, k, width, ahead);
    for (; k < width; k += 2 * HALF) block(n, 2, rows, count, keep, r, sum, k, width, ahead);
}

/* Residuals in place of logits, for LANES rows; -1 in `fine` where they are usable. */
INLINE void residuals(const Job *job, float *z, const float *labels, int32_t *fine) {
    vf y = *(const vf *)labels, top = *(vf *)z, total = {0};
    vi ok = (vi){0} - 1, hit = ok;
    for (int64_t i = 0; i < job->outputs; i++) {
        vf v = *(vf *)(z + i * TILE);
        ok &= (v <= FLT_MAX) & (v >= -FLT_MAX); /* an x that is not finite leaves no logit finite */
        top = choose(v > top, v, top);
    }
    if (job->kind == SOFTMAX) {
        hit = (vi){0};
        for (int64_t i = 0; i < job->outputs; i++) {
            vf e = exponential(*(vf *)(z + i * TILE) - top);
            *(vf *)(z + i * TILE) = e;
            total += e;
        }
        total = 1.0f / total;
    }
    for (int64_t i = 0; i < job->outputs; i++) {
        vf v = *(vf *)(z + i * TILE), is = (vf){0} + (float)i;
        if (job->kind == SOFTMAX) {
            hit |= y == is;
            v = v * total - choose(y == is, (vf){0} + 1.0f, (vf){0});
        } else if (job->kind == LOGISTIC) {
            vf e = exponential(choose(v < 0.0f, v, -v));
            v = choose(v < 0.0f, e, (vf){0} + 1.0f) / (1.0f + e) - y;
        } else if (job->kind == POISSON) {
            v = exponential(choose(v < (float)job->cap, v, (vf){0} + (float)job->cap)) - y;
        } else {
            v = v - y;
        }
        *(vf *)(z + i * TILE) = choose((v > 1e-30f) | (v < -1e-30f) | (v != v), v, (vf){0}); /* nothing subnormal */
    }
    *(vi *)fine = ok & hit;
}

#if defined(__AVX512F__)
#define EACH(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
#else
#define EACH(CASE) CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
#endif

static void add_tile(const Job *job, const Scratch *s, int64_t group, int64_t first, int count) {
    const int64_t o = job->outputs, f = job->features;
    const float *rows[TILE], *theta = job->theta + group * job->theta_group;
    const float *end = job->x + (job->groups - 1) * job->x_group + (job->rows - 1) * job->x_row + f;
    _Alignas(64) float y[TILE] = {0}, weight[TILE];
    _Alignas(64) double mask[TILE] = {0}, length[TILE] = {0}, norm[TILE], factor[TILE];
    _Alignas(64) int32_t keep[TILE];
    for (int j = 0; j < TILE; j++) {
        rows[j] = j < count ? job->x + group * job->x_group + (first + j) * job->x_row : s->zero;
        if (j < count && rows[j] + s->width > end) /* no whole vectors there to read */
            rows[j] = memcpy(s->spare + j * s->width, rows[j], f * sizeof(float));
    }
    for (int j = 0; j < count; j++) {
        int64_t at = group * job->y_group + first + j;
        y[j] = job->integer_labels ? (float)((const int64_t *)job->y)[at] : ((const float *)job->y)[at];
        mask[j] = job->mask[group * job->mask_group + first + j];
        length[j] = job->length[group * job->length_group + first + j];
    }
    for (int j = 0; j < TILE; j++)
        weight[j] = !job->classes ? 1 : y[j] > -1 && y[j] < job->classes ? job->weights[(int)y[j]] : NAN;
    for (int64_t k = 0; k < s->width; k += LANES)
        for (int p = 0; p < PARTS; p++) transpose(rows + p * LANES, k, s->across + k * TILE + p * LANES);
    const int64_t blocks = (o + WIDE - 1) / WIDE;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t i = b * o / blocks;
        const float *bias = job->bias ? theta + f * o + i : s->zero;
#define CASE(n) case n: logits(n, job, s->across, theta + i, bias, s->z + i * TILE); break;
        switch ((b + 1) * o / blocks - i) { EACH(CASE) }
#undef CASE
    }
    for (int p = 0; p < PARTS; p++) residuals(job, s->z + p * LANES, y + p * LANES, keep + p * LANES);

    for (int j = 0; j < TILE; j++) norm[j] = 0;
    for (int64_t i = 0; i < o; i++)
        for (int j = 0; j < TILE; j++) norm[j] += (double)s->z[i * TILE + j] * s->z[i * TILE + j];
    for (int j = 0; j < TILE; j++) {
        factor[j] = weight[j];
        norm[j] = sqrt(norm[j]) * weight[j];
    }
    if (job->residual < FAR)
        for (int j = 0; j < TILE; j++) {
            double ratio = job->residual / (norm[j] > job->residual ? norm[j] : job->residual);
            factor[j] *= ratio;
            norm[j] *= ratio;
        }
    if (job->radius < FAR) /* Mallows */
        for (int j = 0; j < TILE; j++) {
            double ratio = job->radius / (length[j] > job->radius ? length[j] : job->radius);
            factor[j] *= ratio * ratio;
            norm[j] *= ratio * ratio;
        }
    for (int j = 0; j < TILE; j++) {
        double size = norm[j] * length[j], cut = mask[j] * (job->bound / (size > job->bound ? size : job->bound));
        keep[j] &= -((size <= FAR) & (length[j] <= FLT_MAX) & (cut >= FLT_MIN) & (cut <= FLT_MAX));
        factor[j] *= cut;
    }
    for (int64_t i = 0; i < o; i++)
        for (int j = 0; j < TILE; j++) {
            double r = keep[j] ? s->z[i * TILE + j] * factor[j] : 0;
            s->r[i * TILE + j] = r;
            s->bias[i * TILE + j] += r;
        }
    for (int64_t b = 0; b < blocks; b++) {
        int64_t i = b * o / blocks;
#define CASE(n) case n: outer(n, rows, count, keep, s->r + i * TILE, s->sum + i * s->width, s->width, TILE * job->x_row); break;
        switch ((b + 1) * o / blocks - i) { EACH(CASE) }
#undef CASE
    }
}

static __attribute__((noinline)) void work(Job *job, const Scratch *s) {
    const int64_t o = job->outputs, f = job->features, size = (f + job->bias) * o, items = job->groups * job->slices;
    const int64_t step = (job->rows + job->slices * TILE - 1) / (job->slices * TILE) * TILE, claim = 1 + items / 256;
    for (;;) {
        int64_t from = __atomic_fetch_add(&job->next, claim, __ATOMIC_RELAXED);
        if (from >= items) return;
        for (int64_t item = from; item < items && item < from + claim; item++) {
            int64_t group = item / job->slices, first = item % job->slices * step;
            int64_t last = first + step < job->rows ? first + step : job->rows;
            memset(s->sum, 0, s->width * o * sizeof(double));
            memset(s->bias, 0, TILE * o * sizeof(double));
            for (int64_t j = first; j < last; j += TILE)
                add_tile(job, s, group, j, last - j < TILE ? (int)(last - j) : TILE);
            double *out = job->out + item * size;
            for (int64_t k = 0; k < f; k++)
                for (int64_t i = 0; i < o; i++) out[k * o + i] = s->sum[i * s->width + k];
            for (int64_t i = 0; i < (job->bias ? o : 0); i++) {
                double total = 0;
                for (int j = 0; j < TILE; j++) total += s->bias[i * TILE + j];
                out[f * o + i] = total;
            }
        }
    }
}

static void *thread(void *given) { /* inputs and results below the normal range count as zero, in here only */
    Job *job = given;
    int64_t o = job->outputs, width = (job->features + 15) / 16 * 16, most = width > o ? width : o;
    int64_t floats = most + 2 * TILE * width + TILE * o, doubles = 2 * TILE * o + o * width;
    size_t bytes = (4 * floats + 8 * doubles + 63) / 64 * 64;
    double *memory = aligned_alloc(64, bytes + 64);
    if (!memory) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return NULL;
    }
    memset(memory, 0, bytes);
    float *after = (float *)(memory + doubles);
    Scratch s = {width, after + 2 * TILE * width + TILE * o, after + TILE * width, after, after + 2 * TILE * width,
                 memory, memory + TILE * o, memory + TILE * o + o * width};
#if defined(__x86_64__)
    unsigned before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040);
    work(job, &s);
    __builtin_ia32_ldmxcsr(before);
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" ::"r"(before | 1 << 24) : "memory");
    work(job, &s);
    __asm__ volatile("msr fpcr, %0" ::"r"(before) : "memory");
#else
    work(job, &s);
#endif
    free(memory);
    return NULL;
}

int64_t clipped_sum(Job *job, int64_t threads) {
#if defined(__linux__)
    const uintptr_t huge = 1 << 21, from = ((uintptr_t)job->out + huge - 1) / huge * huge;
    const uintptr_t to = (uintptr_t)(job->out + job->groups * job->slices * (job->features + job->bias) * job->outputs);
    if (from + huge <= to) madvise((void *)from, (to - from) / huge * huge, MADV_HUGEPAGE); /* fewer page faults */
#endif
    pthread_t others[MOST_THREADS];
    int64_t begun = 0;
    while (begun + 1 < threads && begun < MOST_THREADS && !pthread_create(&others[begun], NULL, thread, job)) begun++;
    thread(job);
    for (int64_t i = 0; i < begun; i++) pthread_join(others[i], NULL);
    return job->failed;
}

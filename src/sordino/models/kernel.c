/* The sum of clipped gradients of a linear model in one pass over the rows: logits, residual, clip, outer product.
 * A tile is 16 rows. Up to the outer product the lanes of a vector are rows, so that every row goes through the same
 * operations wherever it stands; masked rows fill a short tile. Then each row in turn adds its outer product to float64
 * accumulators, with features in the lanes. A row that is not usable (a logit, its residual, length or factor is not
 * finite, its factor is below the normal range of float32, its label is not a class) is set to zero by selection.
 * Each (group, slice) of rows has its own accumulator, so the number of threads does not change the result. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#define PREFETCH(address) __asm__ volatile("prefetcht0 (%0)" ::"r"(address)) /* GCC's built-in counts as a write */
#define SAVE_CONTROL(c) uint64_t c = _mm_getcsr()
#define WRITE_CONTROL(c) _mm_setcsr(c)
#define WIDEN_2(v) ((vd)_mm_cvtps_pd((__m128)_mm_cvtsi64_si128((int64_t)(v))))
enum { FLUSH = 0x8040 };
#elif defined(__aarch64__)
#include <arm_neon.h>
#define PREFETCH(address) __asm__ volatile("prfm pldl1keep, [%0]" ::"r"(address))
#define SAVE_CONTROL(c) uint64_t c; __asm__ volatile("mrs %0, fpcr" : "=r"(c))
#define WRITE_CONTROL(c) __asm__ volatile("msr fpcr, %0" ::"r"(c) : "memory")
#define WIDEN_2(v) ((vd)vcvt_f64_f32((float32x2_t)(v)))
enum { FLUSH = 1 << 24 };
#endif
#if defined(__AVX512F__) && !defined(LANES_8) && !defined(LANES_4) /* tests define these, for shorter vectors */
enum { LANES = 16, VECTORS = 4 }; /* vectors of features in a block of the outer product */
#define WIDEN(v) ((vd)_mm512_cvtps_pd((__m256)(v)))
#define LIST(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
#elif defined(__AVX__) && !defined(LANES_4)
enum { LANES = 8, VECTORS = 2 };
#define WIDEN(v) ((vd)_mm256_cvtps_pd((__m128)(v)))
#define LIST(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)
#else
enum { LANES = 4, VECTORS = 4 };
#define WIDEN(v) WIDEN_2(v)
#define LIST(F) F(0), F(1), F(2), F(3)
#endif
#define INLINE static inline __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#define FAR 1e300 /* a bound of this or more is none */
enum { TILE = 16, MOST = 64, WIDE = 5, PARTS = TILE / LANES, HALF = LANES / 2 }; /* most outputs, in all, in a block */
enum { SOFTMAX, LOGISTIC, SQUARES, POISSON };
enum { LABEL, MASK, LENGTH, AFTER, FIELDS }; /* AFTER: factor of the residual, after its own bound */
typedef float vf __attribute__((vector_size(4 * LANES), may_alias, aligned(4))); /* at any address, as vhi */
typedef int32_t vi __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vhi __attribute__((vector_size(4 * HALF), may_alias, aligned(4)));
typedef double vd __attribute__((vector_size(8 * HALF), may_alias));
typedef int64_t vl __attribute__((vector_size(8 * HALF), may_alias));
typedef struct {
    const float *x, *theta, *per_row[FIELDS];
    double *out, *scratch; /* groups x slices x parameters; threads x scratch_size */
    int64_t x_group, x_row, theta_group, groups, rows, slices, features, outputs, kind, bias, scratch_size;
    double bound, residual, cap;
    int64_t next_item, next_thread;
} Job;

INLINE vf choose(vi where, vf a, vf b) { return (vf)(((vi)a & where) | ((vi)b & ~where)); }
INLINE vf all(float value) { return (vf){0} + value; }
INLINE vd share(vd size, double bound) { /* what cuts a size to the bound: 1 where it is not larger */
    if (bound >= FAR) return (vd){0} + 1;
    return bound / (vd)(((vl)size & (size > bound)) | ((vl)((vd){0} + bound) & ~(size > bound)));
}

INLINE vf exponential(vf v) { /* of numbers up to 88, to 1.5 ulp; below -86 it is that of -86 */
    v = choose(v > -86.0f, v, all(-86.0f));
    vf m = v * 0x1.715476p+0f + 12582912.0f, n = m - 12582912.0f; /* the first sum rounds to a whole number */
    vf g = v - n * 0.693359375f + n * 0x1.bd0106p-13f, q = g * 0x1.6a1a22p-10f + 0x1.123fdp-7f;
    q = ((q * g + 0x1.555916p-5f) * g + 0x1.55548ap-3f) * g + 0x1.fffffcp-2f;
    return (vf)((vi)(q * (g * g) + g + 1.0f) + ((vi)m << 23));
}

#define LOW(i) ((i) / 2 + ((i) % 2) * LANES)
#define HIGH(i) (LOW(i) + HALF)
INLINE void transpose(const float *const *rows, int64_t k, float *to) {
    vf a[LANES], b[LANES];
    EACH(i, LANES) a[i] = *(const vf *)(rows[i] + k);
    _Pragma("GCC unroll 4") for (int step = 1; step < LANES; step *= 2) {
        EACH(i, HALF) b[2 * i] = __builtin_shufflevector(a[i], a[i + HALF], LIST(LOW));
        EACH(i, HALF) b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + HALF], LIST(HIGH));
        EACH(i, LANES) a[i] = b[i];
    }
    EACH(i, LANES) *(vf *)(to + i * TILE) = a[i];
}

/* The logits of n outputs. Few of them are summed in several chains, because one addition waits for the last. */
INLINE void logits(const int n, const Job *job, const float *across, const float *W, float *z) {
    const int chains = n * PARTS <= 2 ? 4 : n * PARTS <= 5 ? 2 : 1;
    const int64_t o = job->outputs, f = job->features;
    vf a[4][WIDE][PARTS];
    EACH(c, chains) EACH(i, n) EACH(p, PARTS) a[c][i][p] = all(c || !job->bias ? 0 : W[f * o + i]);
    for (int64_t k = 0; k < f; k += chains)
        EACH(c, chains) if (k + c < f) EACH(i, n) EACH(p, PARTS)
            a[c][i][p] += *(const vf *)(across + (k + c) * TILE + p * LANES) * W[(k + c) * o + i];
    EACH(c, chains - 1) EACH(i, n) EACH(p, PARTS) a[0][i][p] += a[c + 1][i][p];
    EACH(i, n) EACH(p, PARTS) *(vf *)(z + i * TILE + p * LANES) = a[0][i][p];
}

/* Residuals in place of the logits of LANES rows; the first is NaN where a logit or the label is unusable. */
INLINE void residuals(const Job *job, float *z, const float *labels) {
#define Z(i) (*(vf *)(z + (i) * TILE))
    const int64_t o = job->outputs, softmax = job->kind == SOFTMAX;
    vf y = *(const vf *)labels, top = Z(0), total = {0};
    vi ok = ~(vi)all(0), hit = softmax ? (vi)all(0) : ok;
    for (int64_t i = 0; i < o; i++) ok &= (Z(i) <= FLT_MAX) & (Z(i) >= -FLT_MAX), top = choose(Z(i) > top, Z(i), top);
    for (int64_t i = 0; i < o && softmax; i++) total += Z(i) = exponential(Z(i) - top);
    for (int64_t i = 0; i < o; i++) {
        vf v = Z(i), e = choose(v < 0.0f, v, -v), target = choose(y == all(i), all(1), all(0));
        hit |= y == all(i);
        if (softmax) v *= 1.0f / total;
        else if (job->kind == LOGISTIC) e = exponential(e), v = choose(v < 0.0f, e, all(1)) / (1.0f + e);
        else if (job->kind == POISSON) v = exponential(choose(v < all(job->cap), v, all(job->cap)));
        v -= softmax ? target : y;
        Z(i) = choose((v < 1e-30f) & (v > -1e-30f), all(0), v); /* squares are far from subnormal */
    }
    Z(0) = choose(ok & hit, Z(0), all(NAN));
}

/* Adds x (x) r of `count` rows to the sums of n outputs. */
INLINE void outer(const int n, const float *const *rows, int count, int64_t ahead, const int32_t *keep, const double *r,
                  double *sum, const int64_t width) {
    const int vectors = n <= 2 ? 2 * VECTORS : VECTORS;
    for (int64_t k = 0; k < width; k += vectors * HALF) {
        vd a[WIDE][2 * VECTORS], x[2 * VECTORS];
        EACH(i, n) EACH(v, vectors) a[i][v] = *(vd *)(sum + i * width + k + v * HALF);
        for (int j = 0; j < count; j++) {
            const float *row = rows[j] + k, *next = row + ahead;
            __asm__("" : "+r"(row), "+r"(next)); /* or GCC would hold every offset in a register of its own */
            EACH(v, (vectors * HALF + 15) / 16) PREFETCH(next + v * 16);
            EACH(v, vectors) x[v] = WIDEN(*(const vhi *)(row + v * HALF) & keep[j]);
            EACH(i, n) EACH(v, vectors) a[i][v] += x[v] * r[i * TILE + j];
        }
        EACH(i, n) EACH(v, vectors) *(vd *)(sum + i * width + k + v * HALF) = a[i][v];
    }
}

/* `memory` of one thread: sums of r (outputs x TILE) and x (x) r (outputs x width), then rows, transposed or not. */
static void add_tile(const Job *job, double *memory, int64_t width, int64_t group, int64_t start, int count) {
    const int64_t o = job->outputs, f = job->features, at = group * job->rows + start, blocks = (o + WIDE - 1) / WIDE;
    const float *rows[TILE], *theta = job->theta + group * job->theta_group;
    const float *end = job->x + (job->groups - 1) * job->x_group + (job->rows - 1) * job->x_row + f; /* of x */
    double *sum = memory + TILE * o;
    float *across = (float *)(sum + width * o), *spare = across + TILE * width;
    _Alignas(64) float given[FIELDS][TILE], z[MOST * TILE];
    _Alignas(64) double r[MOST * TILE];
    _Alignas(64) int32_t keep[TILE];
    for (int j = 0; j < TILE; j++) {
        const float *row = job->x + group * job->x_group + (start + (j < count ? j : 0)) * job->x_row;
        rows[j] = row + width <= end ? row : memcpy(spare + j * width, row, f * sizeof(float));
    }
    for (int a = 0; a < FIELDS; a++)
        for (int j = 0; j < TILE; j++) given[a][j] = !job->per_row[a] ? 1 : j < count ? job->per_row[a][at + j] : 0;
    for (int64_t k = 0; k < f; k += LANES)
        for (int p = 0; p < TILE; p += LANES) transpose(rows + p, k, across + k * TILE + p);
#define BLOCKS(CASE) /* of outputs i, i + 1 and so on: the same code for each number of outputs in a block */ \
    for (int64_t b = 0, i; i = b * o / blocks, b < blocks; b++) \
        switch ((b + 1) * o / blocks - i) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) }
#define LOGITS(n) case n: logits(n, job, across, theta + i, z + i * TILE); break;
    BLOCKS(LOGITS)
    for (int p = 0; p < TILE; p += LANES) residuals(job, z + p, given[LABEL] + p);
    for (int j = 0; j < TILE; j += HALF) {
#define DOUBLES(from) WIDEN(*(vhi *)((from) + j))
        vd size = {0}, length = DOUBLES(given[LENGTH]);
        for (int64_t i = 0; i < o; i++) size += DOUBLES(z + i * TILE) * DOUBLES(z + i * TILE);
        EACH(v, HALF) size[v] = sqrt(size[v]);
        vd factor = share(size, job->residual) * DOUBLES(given[AFTER]);
        size *= factor * length; /* of the gradient; not finite where a residual or the length is not */
        vd cut = DOUBLES(given[MASK]) * share(size, job->bound);
        vl ok = (size <= FAR) & (length >= 0) & (cut >= FLT_MIN) & (cut <= FLT_MAX);
        *(vhi *)(keep + j) = __builtin_convertvector(ok, vhi);
        for (int64_t i = 0; i < o; i++) {
            vd clipped = (vd)((vl)(DOUBLES(z + i * TILE) * (factor * cut)) & ok);
            *(vd *)(r + i * TILE + j) = clipped;
            *(vd *)(memory + i * TILE + j) += clipped;
        }
    }
#define OUTER(n) case n: outer(n, rows, count, TILE * job->x_row, keep, r + i * TILE, sum + i * width, width); break;
    BLOCKS(OUTER)
}

/* What each thread does. The caller may run it in several at once: they share the job's counters. */
void clipped_sum(Job *job) {
    const int64_t o = job->outputs, f = job->features, unit = VECTORS * HALF * (o <= 2 ? 2 : 1);
    const int64_t width = (f + unit - 1) / unit * unit, step = (job->rows - 1) / (job->slices * TILE) * TILE + TILE;
    double *memory = job->scratch + __atomic_fetch_add(&job->next_thread, 1, __ATOMIC_RELAXED) * job->scratch_size;
    SAVE_CONTROL(control);
    WRITE_CONTROL(control | FLUSH); /* subnormal numbers, which are slow, count as zero in this thread until the end */
    for (int64_t item; (item = __atomic_fetch_add(&job->next_item, 1, __ATOMIC_RELAXED)) < job->groups * job->slices;) {
        int64_t start = item % job->slices * step, stop = start + step < job->rows ? start + step : job->rows;
        double *out = job->out + item * (f + job->bias) * o, *sum = memory + TILE * o;
        memset(memory, 0, (TILE + width) * o * sizeof(double));
        for (; start < stop; start += TILE)
            add_tile(job, memory, width, item / job->slices, start, stop - start < TILE ? (int)(stop - start) : TILE);
        for (int64_t k = 0; k < f; k++)
            for (int64_t i = 0; i < o; i++) out[k * o + i] = sum[i * width + k];
        for (int64_t i = 0; i < o * job->bias; i++)
            for (int j = 0; j < TILE; j++) out[f * o + i] = (j > 0 ? out[f * o + i] : 0) + memory[i * TILE + j];
    }
    WRITE_CONTROL(control);
}

/* The sum of clipped gradients of a linear model in one pass over the rows: logits, residual, clip, outer product.
 *
 * A tile is 16 rows. Up to the outer product the lanes of a vector are rows, so that every row goes through the same
 * operations wherever it stands; zero rows fill a short tile. Then each row in turn adds its outer product to float64
 * accumulators, with features in the lanes. A row that is not usable (a logit, its residual, length or factor is not
 * finite, its factor is below the normal range of float32, its label is not a class) is set to zero by selection.
 * Each (group, slice) of rows has its own accumulator, so the number of threads does not change the result. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && !defined(LANES_8) && !defined(LANES_4) /* tests define these, for shorter vectors */
#include <immintrin.h>
enum { LANES = 16, WIDE = 10, VECTORS = 2, FEW = 8 }; /* outputs per block; vectors of features, many or few outputs */
#define WIDEN(v) ((vd)_mm512_cvtps_pd((__m256)(v)))
#define LIST(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)
#define CASES(F) F(1) F(2) F(3) F(4) F(5) F(6) F(7) F(8) F(9) F(10)
#elif defined(__AVX__) && !defined(LANES_4)
#include <immintrin.h>
enum { LANES = 8, WIDE = 5, VECTORS = 2, FEW = 4 };
#define WIDEN(v) ((vd)_mm256_cvtps_pd((__m128)(v)))
#define LIST(F) F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)
#define CASES(F) F(1) F(2) F(3) F(4) F(5)
#else
enum { LANES = 4, WIDE = 5, VECTORS = 4, FEW = 8 };
#if defined(__aarch64__)
#include <arm_neon.h>
#define WIDEN(v) ((vd)vcvt_f64_f32((float32x2_t)(v)))
#else
#define WIDEN(v) __builtin_convertvector(v, vd)
#endif
#define LIST(F) F(0), F(1), F(2), F(3)
#define CASES(F) F(1) F(2) F(3) F(4) F(5)
#endif
#if defined(__x86_64__)
/* GCC takes __builtin_prefetch for a write, and would keep sums out of registers. */
#define PREFETCH(address) __asm__ volatile("prefetcht0 (%0)" ::"r"(address))
#define READ_CONTROL(c) c = __builtin_ia32_stmxcsr()
#define WRITE_CONTROL(c) __builtin_ia32_ldmxcsr(c)
#define FLUSH 0x8040
#elif defined(__aarch64__)
#define PREFETCH(address) __asm__ volatile("prfm pldl1keep, [%0]" ::"r"(address))
#define READ_CONTROL(c) __asm__ volatile("mrs %0, fpcr" : "=r"(c))
#define WRITE_CONTROL(c) __asm__ volatile("msr fpcr, %0" ::"r"(c) : "memory")
#define FLUSH (1 << 24)
#endif
#define INLINE static inline __attribute__((always_inline))
#define EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); i++)
#define FAR 1e300 /* a bound of this or more is none */
enum { TILE = 16, PARTS = TILE / LANES, HALF = LANES / 2 };
enum { SOFTMAX, LOGISTIC, SQUARES, POISSON };
typedef float vf __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), may_alias));
typedef float vh __attribute__((vector_size(4 * HALF), may_alias));
typedef int32_t vhi __attribute__((vector_size(4 * HALF), may_alias));
typedef double vd __attribute__((vector_size(8 * HALF), may_alias));
typedef vf vf_anywhere __attribute__((aligned(4)));
typedef vhi vhi_anywhere __attribute__((aligned(4)));

typedef struct { /* per row: y, mask, length and what multiplies the residual before and after its own bound */
    const float *x, *theta, *y, *mask, *length, *before, *after;
    double *out, *scratch; /* groups x slices x parameters; threads x scratch_size */
    int64_t x_group, x_row, theta_group, groups, rows, slices, features, outputs, kind, bias, scratch_size;
    double bound, residual, cap;
    int64_t next_item, next_thread;
} Job;
typedef struct { /* memory of one thread. outputs x TILE: r, bias, z; outputs x width: sum; width x TILE: across */
    int64_t width; /* features, in whole vectors */
    double *r, *bias, *sum;
    float *z, *across, *spare, *zero;
} Scratch;

INLINE vf choose(vi where, vf a, vf b) { return (vf)(((vi)a & where) | ((vi)b & ~where)); }
INLINE vf all(float value) { return (vf){0} + value; }

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
    EACH(i, LANES) a[i] = *(const vf_anywhere *)(rows[i] + k);
    _Pragma("GCC unroll 4") for (int step = 1; step < LANES; step *= 2) {
        EACH(i, HALF) b[2 * i] = __builtin_shufflevector(a[i], a[i + HALF], LIST(LOW));
        EACH(i, HALF) b[2 * i + 1] = __builtin_shufflevector(a[i], a[i + HALF], LIST(HIGH));
        EACH(i, LANES) a[i] = b[i];
    }
    EACH(i, LANES) *(vf *)(to + i * TILE) = a[i];
}

/* The logits of n outputs. Few of them are summed in several chains, because one addition waits for the last. */
INLINE void logits(const int n, const Job *job, const float *across, const float *W, const float *bias, float *z) {
    const int chains = n * PARTS <= 2 ? 4 : n * PARTS <= 5 ? 2 : 1;
    vf a[4][WIDE][PARTS];
    EACH(c, chains) EACH(i, n) EACH(p, PARTS) a[c][i][p] = all(c ? 0 : bias[i]);
    int64_t k = 0;
    for (; k + chains <= job->features; k += chains)
        EACH(c, chains) EACH(i, n) EACH(p, PARTS)
            a[c][i][p] += *(const vf *)(across + (k + c) * TILE + p * LANES) * W[(k + c) * job->outputs + i];
    for (; k < job->features; k++)
        EACH(i, n) EACH(p, PARTS) a[0][i][p] += *(const vf *)(across + k * TILE + p * LANES) * W[k * job->outputs + i];
    EACH(c, chains - 1) EACH(i, n) EACH(p, PARTS) a[0][i][p] += a[c + 1][i][p];
    EACH(i, n) EACH(p, PARTS) *(vf *)(z + i * TILE + p * LANES) = a[0][i][p];
}

/* Residuals in place of the logits of LANES rows; -1 in `keep` where they are usable. */
INLINE void residuals(const Job *job, float *z, const float *labels, int32_t *keep) {
#define Z(i) (*(vf *)(z + (i) * TILE))
    const int64_t o = job->outputs, softmax = job->kind == SOFTMAX;
    vf y = *(const vf *)labels, top = Z(0), total = {0};
    vi ok = (vi)all(0) - 1, hit = softmax ? (vi)all(0) : ok;
    for (int64_t i = 0; i < o; i++) top = choose(Z(i) > top, Z(i), top);
    for (int64_t i = 0; i < o; i++) ok &= (Z(i) <= FLT_MAX) & (Z(i) >= -FLT_MAX); /* where one is not, x may be NaN */
    for (int64_t i = 0; i < o && softmax; i++) total += Z(i) = exponential(Z(i) - top);
    total = 1.0f / total;
    for (int64_t i = 0; i < o; i++) {
        vf v = Z(i), e;
        if (softmax) {
            hit |= y == all(i);
            v = v * total - choose(y == all(i), all(1), all(0));
        } else if (job->kind == LOGISTIC) {
            e = exponential(choose(v < 0.0f, v, -v));
            v = choose(v < 0.0f, e, all(1)) / (1.0f + e) - y;
        } else {
            v = (job->kind == POISSON ? exponential(choose(v < all(job->cap), v, all(job->cap))) : v) - y;
        }
        Z(i) = choose((v < 1e-30f) & (v > -1e-30f), all(0), v); /* squares are far from subnormal */
    }
    *(vi *)keep = ok & hit;
}

/* Adds x (x) r of `count` rows to the sums of n outputs. */
INLINE void outer(const int n, const float *const *rows, int count, int64_t ahead, const int32_t *keep, const double *r,
                  double *sum, const int64_t width) {
    const int vectors = n <= 2 ? FEW : VECTORS;
    for (int64_t k = 0; k < width; k += vectors * HALF) {
        vd a[WIDE][FEW], x[FEW];
        EACH(i, n) EACH(v, vectors) a[i][v] = *(vd *)(sum + i * width + k + v * HALF);
        for (int j = 0; j < count; j++) {
            const float *row = rows[j] + k, *next = row + ahead;
            __asm__("" : "+r"(row), "+r"(next)); /* or GCC would hold every offset in a register of its own */
            EACH(v, (vectors * HALF + 15) / 16) PREFETCH(next + v * 16);
            EACH(v, vectors) x[v] = WIDEN((vh)(*(const vhi_anywhere *)(row + v * HALF) & keep[j]));
            EACH(i, n) EACH(v, vectors) a[i][v] += x[v] * r[i * TILE + j];
        }
        EACH(i, n) EACH(v, vectors) *(vd *)(sum + i * width + k + v * HALF) = a[i][v];
    }
}

INLINE void fetch(float *to, const float *from, int64_t at, int count) { /* ones where there is nothing to fetch */
    if (from && count == TILE) memcpy(to, from + at, TILE * sizeof(float));
    else for (int j = 0; j < TILE; j++) to[j] = !from ? 1 : j < count ? from[at + j] : 0;
}

static void add_tile(const Job *job, const Scratch *s, int64_t group, int64_t start, int count) {
    const int64_t o = job->outputs, f = job->features, at = group * job->rows + start, blocks = (o + WIDE - 1) / WIDE;
    const float *rows[TILE], *theta = job->theta + group * job->theta_group;
    const float *end = job->x + (job->groups - 1) * job->x_group + (job->rows - 1) * job->x_row + f;
    _Alignas(64) float y[TILE], mask[TILE], length[TILE], before[TILE], after[TILE];
    _Alignas(64) double norm[TILE] = {0}, factor[TILE];
    _Alignas(64) int32_t keep[TILE];
    for (int j = 0; j < TILE; j++) {
        rows[j] = j < count ? job->x + group * job->x_group + (start + j) * job->x_row : s->zero;
        if (j < count && rows[j] + s->width > end) /* whole vectors would be read from beyond the end */
            rows[j] = memcpy(s->spare + j * s->width, rows[j], f * sizeof(float));
    }
    fetch(y, job->y, at, count), fetch(mask, job->mask, at, count), fetch(length, job->length, at, count);
    fetch(before, job->before, at, count), fetch(after, job->after, at, count);
    for (int64_t k = 0; k < f; k += LANES)
        for (int p = 0; p < TILE; p += LANES) transpose(rows + p, k, s->across + k * TILE + p);
    for (int64_t b = 0, i; i = b * o / blocks, b < blocks; b++) {
        const float *bias = job->bias ? theta + f * o + i : s->zero;
#define LOGITS(n) case n: logits(n, job, s->across, theta + i, bias, s->z + i * TILE); break;
        switch ((b + 1) * o / blocks - i) { CASES(LOGITS) }
    }
    for (int p = 0; p < TILE; p += LANES) residuals(job, s->z + p, y + p, keep + p);
    for (int64_t i = 0; i < o; i++)
        for (int j = 0; j < TILE; j += HALF) {
            vd z = WIDEN(*(vh *)(s->z + i * TILE + j));
            *(vd *)(norm + j) += z * z;
        }
    EACH(j, TILE) norm[j] = sqrt(norm[j]);
    for (int j = 0; j < TILE; j++) norm[j] *= factor[j] = before[j];
    if (job->residual < FAR)
        for (int j = 0; j < TILE; j++) {
            double ratio = job->residual / (norm[j] > job->residual ? norm[j] : job->residual);
            factor[j] *= ratio, norm[j] *= ratio;
        }
    for (int j = 0; j < TILE; j++) {
        double size = norm[j] * after[j] * length[j];
        double cut = mask[j] * (job->bound / (size > job->bound ? size : job->bound));
        keep[j] &= -((size <= FAR) & (length[j] >= 0) & (length[j] <= FLT_MAX) & (cut >= FLT_MIN) & (cut <= FLT_MAX));
        factor[j] = keep[j] ? factor[j] * (cut * after[j]) : 0;
    }
    for (int64_t i = 0; i < o; i++)
        for (int j = 0; j < TILE; j += HALF) {
            vd r = WIDEN((vh)(*(vhi *)(s->z + i * TILE + j) & *(vhi *)(keep + j))) * *(vd *)(factor + j);
            *(vd *)(s->r + i * TILE + j) = r;
            *(vd *)(s->bias + i * TILE + j) += r;
        }
    for (int64_t b = 0, i; i = b * o / blocks, b < blocks; b++) {
        double *r = s->r + i * TILE, *sum = s->sum + i * s->width;
#define OUTER(n) case n: outer(n, rows, count, TILE * job->x_row, keep, r, sum, s->width); break;
        switch ((b + 1) * o / blocks - i) { CASES(OUTER) }
    }
}

static __attribute__((noinline)) void add_slice(const Job *job, const Scratch *s, int64_t item) {
    const int64_t o = job->outputs, f = job->features, step = (job->rows - 1) / (job->slices * TILE) * TILE + TILE;
    int64_t start = item % job->slices * step, stop = start + step < job->rows ? start + step : job->rows;
    double *out = job->out + item * (f + job->bias) * o;
    memset(s->bias, 0, (TILE + s->width) * o * sizeof(double)); /* and the sums, which come next */
    for (; start < stop; start += TILE)
        add_tile(job, s, item / job->slices, start, stop - start < TILE ? (int)(stop - start) : TILE);
    for (int64_t k = 0; k < f; k++)
        for (int64_t i = 0; i < o; i++) out[k * o + i] = s->sum[i * s->width + k];
    for (int64_t i = 0; i < o * job->bias; i++) {
        out[f * o + i] = 0;
        for (int j = 0; j < TILE; j++) out[f * o + i] += s->bias[i * TILE + j];
    }
}

/* What each thread does. The caller may run it in several at once: they share the job's counters. */
void clipped_sum(Job *job) {
    const int64_t o = job->outputs, unit = o <= 2 && FEW * HALF > 16 ? FEW * HALF : 16;
    const int64_t width = (job->features + unit - 1) / unit * unit, items = job->groups * job->slices;
    double *memory = job->scratch + __atomic_fetch_add(&job->next_thread, 1, __ATOMIC_RELAXED) * job->scratch_size;
    float *z = (float *)(memory + (2 * TILE + width) * o), *across = z + TILE * o, *spare = across + TILE * width;
    Scratch s = {width, memory, memory + TILE * o, memory + 2 * TILE * o, z, across, spare, spare + TILE * width};
    uint64_t control;
    READ_CONTROL(control);
    WRITE_CONTROL(control | FLUSH); /* subnormal numbers, which are slow, count as zero in this thread until the end */
    for (int64_t i; (i = __atomic_fetch_add(&job->next_item, 1, __ATOMIC_RELAXED)) < items;) add_slice(job, &s, i);
    WRITE_CONTROL(control);
}

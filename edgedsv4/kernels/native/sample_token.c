/* The next token from a row of logits, without sorting the row.
 *
 * The definition, down to the order of every sum, is kernels/sample.py. Here the row is cut into segments of
 * 64 tokens whose largest scores say which segments matter at all. What top-k and top-p keep are the best
 * tokens by rank (larger score, then lower id), so each filter ends in one token, the last one kept; a bounded
 * heap finds it for top-k, a heap that is emptied from the best on for top-p. */

#include "wide.h"

enum { SEGMENT = 64, LANES = 4, BROAD = 8, CHAINS = 8 };

typedef double lanes_t __attribute__((vector_size(32)));
typedef int64_t lanes_int __attribute__((vector_size(32)));
typedef double lanes_at __attribute__((vector_size(32), aligned(8), may_alias));
/* Without comparisons, which compilers take apart at this width. */
typedef double broad_t __attribute__((vector_size(64)));
typedef int64_t broad_int __attribute__((vector_size(64)));
typedef double broad_at __attribute__((vector_size(64), aligned(8), may_alias));
typedef float narrow_at __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    double score;
    int64_t id;
} entry_t;

typedef struct {
    const dk_sampling *rules;
    int64_t segments;
    double *scores;    /* [segments, SEGMENT], -inf behind the last token */
    double *weights;   /* the same, of open segments */
    double *largest;   /* [segments] score */
    double *sums;      /* [open_count] of the weights of each open segment */
    int64_t *open;     /* [open_count] segments with a token that is kept, ascending */
    int64_t open_count;
    entry_t *entries;  /* [segments, SEGMENT] tokens in a heap */
    double best;       /* the largest score */
    entry_t last;      /* of the tokens kept, the last by rank */
} job_t;

/* ---- vectors ---- */

DK_INLINE lanes_t lanes_of(double value)
{
    return (lanes_t){value, value, value, value};
}

DK_INLINE lanes_t lanes_select(lanes_int mask, lanes_t a, lanes_t b)
{
    return (lanes_t)((mask & (lanes_int)a) | (~mask & (lanes_int)b));
}

DK_INLINE double lanes_largest(lanes_t v)
{
    double largest = v[0];
    for (int lane = 1; lane < LANES; lane++)
        largest = v[lane] > largest ? v[lane] : largest;
    return largest;
}

DK_INLINE float wide_largest(dk_wide v)
{
    dk_wide other = DK_SWAP_4(v);
    v = dk_wide_select(other > v, other, v);
    other = DK_SWAP_2(v);
    v = dk_wide_select(other > v, other, v);
    other = DK_SWAP_1(v);
    v = dk_wide_select(other > v, other, v);
    return v[0];
}

DK_INLINE broad_t broad_of(double value)
{
    return (broad_t){value, value, value, value, value, value, value, value};
}

/* e^x for x <= 0, and 0 below -700: x = n ln 2 + r, the series of e^r up to r^13, times 2^n. */
DK_INLINE broad_t exponential(broad_t x)
{
    const broad_t magic = broad_of(0x1.8p52); /* its last place is 1: adding it rounds to an integer */
    broad_int is_low = (broad_int)(x + broad_of(700.0)) >> 63; /* all ones where the sign is set */
    x = (broad_t)((~is_low & (broad_int)x) | (is_low & (broad_int)broad_of(-700.0)));
    broad_t shifted = x * broad_of(0x1.71547652b82fep0) + magic;
    broad_t n = shifted - magic;
    broad_t r = x - n * broad_of(0x1.62e42feep-1); /* exact: the constant has 31 bits */
    r = r - n * broad_of(0x1.a39ef35793c76p-33);
    /* Two sums, since one long chain of products would wait for each. */
    broad_t square = r * r;
    broad_t even = broad_of(1.0 / 479001600.0) * square + broad_of(1.0 / 3628800.0);
    broad_t odd = broad_of(1.0 / 6227020800.0) * square + broad_of(1.0 / 39916800.0);
    even = even * square + broad_of(1.0 / 40320.0);
    odd = odd * square + broad_of(1.0 / 362880.0);
    even = even * square + broad_of(1.0 / 720.0);
    odd = odd * square + broad_of(1.0 / 5040.0);
    even = even * square + broad_of(1.0 / 24.0);
    odd = odd * square + broad_of(1.0 / 120.0);
    even = even * square + broad_of(0.5);
    odd = odd * square + broad_of(1.0 / 6.0);
    broad_t value = ((odd * r + even) * square + r) + broad_of(1.0);
    broad_int power = ((broad_int)shifted - (broad_int)magic + 1023) << 52;
    return (broad_t)((broad_int)(value * (broad_t)power) & ~is_low);
}

/* ---- scores ---- */

/* Logits as scores, and the largest of each segment; is_bad when one is NaN or +inf. */
DK_INLINE void read_body(double *scores, double *largest, int *is_bad, const float *logits, int64_t n)
{
    dk_wide_int bad = {0};
    float padded[SEGMENT];
    for (int64_t at = 0; at < n; at += SEGMENT) {
        const float *x = logits + at;
        if (n - at < SEGMENT) {
            for (int64_t i = 0; i < SEGMENT; i++)
                padded[i] = i < n - at ? x[i] : -INFINITY;
            x = padded;
        }
        dk_wide best = dk_wide_of(-INFINITY);
        for (int i = 0; i < SEGMENT; i += DK_WIDE) {
            dk_wide v = dk_wide_load(x + i, DK_WIDE);
            bad |= dk_not_below_infinity(v);
            best = dk_wide_select(v > best, v, best);
        }
        for (int i = 0; i < SEGMENT; i += LANES)
            *(lanes_at *)(scores + at + i) = __builtin_convertvector(*(const narrow_at *)(x + i), lanes_t);
        largest[at / SEGMENT] = (double)wide_largest(best);
    }
    for (int lane = 0; lane < DK_WIDE; lane++)
        *is_bad |= bad[lane] != 0;
}

DK_VARIANTS(read_scores, read_body,
            (double *scores, double *largest, int *is_bad, const float *logits, int64_t n),
            (scores, largest, is_bad, logits, n))

DK_INLINE void find_largest_body(double *largest, const double *scores)
{
    lanes_t best = *(const lanes_at *)scores;
    for (int i = LANES; i < SEGMENT; i += LANES) {
        lanes_t v = *(const lanes_at *)(scores + i);
        best = lanes_select(v > best, v, best);
    }
    *largest = lanes_largest(best);
}

DK_VARIANTS(find_largest, find_largest_body, (double *largest, const double *scores), (largest, scores))

DK_INLINE double clipped(double score)
{
    const double limit = 1e300; /* differences of two stay finite */
    if (score == -INFINITY)
        return score;
    return score > limit ? limit : score < -limit ? -limit : score;
}

static double penalised(const dk_sampling *rules, double score, int64_t generated)
{
    if (score == -INFINITY)
        return score;
    double divided = score / rules->repetition, multiplied = score * rules->repetition;
    score = score > 0 ? divided : multiplied;
    if (generated > 0)
        score = score - rules->presence - rules->frequency * (double)generated;
    /* Far beyond the range a product is infinite; the token is pushed down, not banned. */
    return score == -INFINITY ? -1e300 : clipped(score);
}

/* Flags of 8 tokens, the first in the lowest byte. */
static uint64_t seen_of(const dk_sampling *rules, int64_t first, int64_t end)
{
    if (first + 8 <= end && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)
        return dk_load64(rules->seen + first);
    uint64_t seen = 0;
    for (int64_t id = first; id < dk_min(first + 8, end); id++)
        seen |= (uint64_t)rules->seen[id] << 8 * (id - first);
    return seen;
}

/* Apply the penalties to tokens of one segment; is_changed unless its largest score is still right. */
static int penalise_segment(const job_t *job, int64_t at, int64_t end)
{
    const dk_sampling *rules = job->rules;
    double largest = job->largest[at / SEGMENT];
    int is_changed = 0;
    for (int64_t first = at; first < end; first += 8) {
        for (uint64_t seen = seen_of(rules, first, end); seen != 0; seen &= seen - 1) {
            int64_t id = first + __builtin_ctzll(seen) / 8;
            double before = job->scores[id], after = penalised(rules, before, rules->generated[id]);
            job->scores[id] = after;
            is_changed |= (before == largest) | (after > largest);
        }
    }
    return is_changed;
}

static void adjust(const job_t *job, int64_t n)
{
    const dk_sampling *rules = job->rules;
    for (int64_t i = 0; i < rules->bias_count; i++) {
        int64_t id = rules->bias_ids[i], segment = id / SEGMENT;
        job->scores[id] += rules->bias[i];
        find_largest(job->largest + segment, job->scores + segment * SEGMENT);
    }
    if (rules->repetition != 1.0 || rules->presence != 0.0 || rules->frequency != 0.0)
        for (int64_t at = 0; at < n; at += SEGMENT)
            if (penalise_segment(job, at, dk_min(at + SEGMENT, n)))
                find_largest(job->largest + at / SEGMENT, job->scores + at);
    for (int64_t i = 0; i < rules->bias_count; i++) {
        int64_t id = rules->bias_ids[i], segment = id / SEGMENT;
        job->scores[id] = clipped(job->scores[id]);
        find_largest(job->largest + segment, job->scores + segment * SEGMENT);
    }
}

/* ---- ranks ---- */

DK_INLINE int is_before(entry_t a, entry_t b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

/* Let the entry at `at` sink; the root is the best or, with is_worst_first, the worst. */
DK_INLINE void sink(entry_t *heap, int64_t count, int64_t at, int is_worst_first)
{
    entry_t moving = heap[at];
    for (int64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && is_before(heap[child + 1], heap[child]) != is_worst_first)
            child++;
        if (is_before(heap[child], moving) == is_worst_first)
            break;
        heap[at] = heap[child];
    }
    heap[at] = moving;
}

DK_INLINE void make_heap(entry_t *heap, int64_t count, int is_worst_first)
{
    for (int64_t at = count / 2 - 1; at >= 0; at--)
        sink(heap, count, at, is_worst_first);
}

/* Entries of all tokens with at least this score that are not banned. */
static int64_t collect(const job_t *job, double least)
{
    int64_t count = 0;
    for (int64_t segment = 0; segment < job->segments; segment++) {
        if (!(job->largest[segment] >= least))
            continue;
        for (int64_t id = segment * SEGMENT; id < (segment + 1) * SEGMENT; id++) {
            job->entries[count] = (entry_t){job->scores[id], id};
            count += job->scores[id] >= least;
        }
    }
    return count;
}

/* The k best as entries; returns how many there are, and sets `last` when some are left out. */
static int64_t keep_top_k(job_t *job, int64_t k)
{
    entry_t *heap = job->entries;
    int64_t count = 0;
    for (int64_t segment = 0; segment < job->segments; segment++) {
        /* A later token of equal score ranks behind. */
        if (count == k && job->largest[segment] <= heap[0].score)
            continue;
        for (int64_t id = segment * SEGMENT; id < (segment + 1) * SEGMENT; id++) {
            double score = job->scores[id];
            if (count < k && score > -INFINITY) {
                heap[count++] = (entry_t){score, id};
                if (count == k)
                    make_heap(heap, k, 1);
            } else if (count == k && score > heap[0].score) {
                heap[0] = (entry_t){score, id};
                sink(heap, k, 0, 1);
            }
        }
    }
    if (count == k)
        job->last = heap[0];
    return count;
}

/* ---- weights ---- */

static void open_segments(job_t *job)
{
    job->open_count = 0;
    for (int64_t segment = 0; segment < job->segments; segment++) {
        job->open[job->open_count] = segment;
        job->open_count += job->largest[segment] >= job->last.score && job->largest[segment] > -INFINITY;
    }
}

DK_INLINE void weigh_body(const job_t *job)
{
    broad_t best = broad_of(job->best), scale = broad_of(job->rules->scale);
    for (int64_t place = 0; place < job->open_count; place++) {
        int64_t at = job->open[place] * SEGMENT;
        for (int i = 0; i < SEGMENT; i += BROAD) {
            broad_t x = (*(const broad_at *)(job->scores + at + i) - best) * scale;
            *(broad_at *)(job->weights + at + i) = exponential(x);
        }
    }
}

DK_VARIANTS(weigh, weigh_body, (const job_t *job), (job))

/* Nothing stays of tokens behind `last` and of weights below `least`. */
DK_INLINE void trim_body(const job_t *job, double least)
{
    lanes_t last = lanes_of(job->last.score), limit = lanes_of(least);
    for (int64_t place = 0; place < job->open_count; place++) {
        int64_t at = job->open[place] * SEGMENT, id = job->last.id - at;
        lanes_int ids = {0, 1, 2, 3};
        for (int i = 0; i < SEGMENT; i += LANES, ids += LANES) {
            lanes_t score = *(const lanes_at *)(job->scores + at + i);
            lanes_t weight = *(const lanes_at *)(job->weights + at + i);
            lanes_int is_kept = (score > last) | ((score == last) & (ids <= id));
            is_kept &= weight >= limit;
            *(lanes_at *)(job->weights + at + i) = (lanes_t)((lanes_int)weight & is_kept);
        }
    }
}

DK_VARIANTS(trim, trim_body, (const job_t *job, double least), (job, least))

/* The sum of all weights: in token order within a segment, then of the segments in order. */
static double sum_weights(const job_t *job)
{
    int64_t place = 0;
    for (; place + CHAINS <= job->open_count; place += CHAINS) {
        double sums[CHAINS] = {0};
        const double *weights[CHAINS];
        for (int chain = 0; chain < CHAINS; chain++)
            weights[chain] = job->weights + job->open[place + chain] * SEGMENT;
        for (int i = 0; i < SEGMENT; i++)
            for (int chain = 0; chain < CHAINS; chain++)
                sums[chain] += weights[chain][i];
        memcpy(job->sums + place, sums, sizeof sums);
    }
    for (; place < job->open_count; place++) {
        const double *weights = job->weights + job->open[place] * SEGMENT;
        double sum = 0;
        for (int i = 0; i < SEGMENT; i++)
            sum += weights[i];
        job->sums[place] = sum;
    }
    double total = 0;
    for (place = 0; place < job->open_count; place++)
        total += job->sums[place];
    return total;
}

/* Take entries from the best on until their weights reach `goal`; the one that does becomes `last`. */
static int take_until(job_t *job, int64_t count, double goal)
{
    entry_t *heap = job->entries;
    double sum = 0;
    make_heap(heap, count, 0);
    for (; count > 0; count--) {
        sum += job->weights[heap[0].id];
        if (sum >= goal) {
            job->last = heap[0];
            return 1;
        }
        heap[0] = heap[count - 1];
        sink(heap, count - 1, 0, 0);
    }
    return 0;
}

/* Keep the best tokens that reach top_p; `count` entries are what top-k left, 0 without it. */
static void keep_top_p(job_t *job, int64_t count)
{
    double goal = job->rules->top_p * sum_weights(job);
    if (count > 0) {
        take_until(job, count, goal);
        return;
    }
    /* Few tokens are needed as a rule: try those within e^2 of the best, then of e^4, ... */
    enum { STEP = 2, FURTHEST = 40 };
    for (int reach = STEP; reach <= FURTHEST; reach += STEP) {
        double sum = 0;
        count = collect(job, job->best - reach / job->rules->scale);
        for (int64_t i = 0; i < count; i++)
            sum += job->weights[job->entries[i].id];
        if (sum >= goal && take_until(job, count, goal))
            return;
    }
    take_until(job, collect(job, -1e300), goal);
}

/* ---- the choice ---- */

static int64_t first_largest(const job_t *job)
{
    int64_t segment = 0;
    while (job->largest[segment] != job->best)
        segment++;
    int64_t id = segment * SEGMENT;
    while (job->scores[id] != job->best)
        id++;
    return id;
}

/* The first token where the running sum of the weights exceeds u times the total, or is the total. */
static int64_t draw(const job_t *job, double u)
{
    double total = sum_weights(job), target = u * total, before = 0;
    int64_t place = 0;
    for (; place + 1 < job->open_count; place++) {
        double next = before + job->sums[place];
        if (next > target || next >= total)
            break;
        before = next;
    }
    int64_t id = job->open[place] * SEGMENT, end = id + SEGMENT - 1;
    double sum = 0;
    for (; id < end; id++) {
        sum += job->weights[id];
        if (before + sum > target || before + sum >= total)
            break;
    }
    return id;
}

static void write_weights(double *weights, const job_t *job, int64_t n)
{
    memset(weights, 0, (size_t)n * sizeof *weights);
    for (int64_t place = 0; place < job->open_count; place++) {
        int64_t at = job->open[place] * SEGMENT;
        memcpy(weights + at, job->weights + at, (size_t)dk_min(SEGMENT, n - at) * sizeof *weights);
    }
}

static int64_t align(int64_t bytes) { return (bytes + 63) / 64 * 64; }

int64_t dk_sample_scratch_bytes(int64_t n)
{
    int64_t segments = dk_parts(n, SEGMENT);
    int64_t per_token = 2 * (int64_t)sizeof(double) + (int64_t)sizeof(entry_t);
    return 64 + segments * SEGMENT * per_token + 3 * align(8 * segments);
}

static void lay_out(job_t *job, void *scratch)
{
    int64_t row = job->segments * SEGMENT, part = align(8 * job->segments);
    uint8_t *at = (uint8_t *)(((uintptr_t)scratch + 63) / 64 * 64);
    job->scores = (double *)(void *)at;
    job->weights = job->scores + row;
    job->entries = (entry_t *)(void *)(job->weights + row);
    at = (uint8_t *)(job->entries + row);
    job->largest = (double *)(void *)at;
    job->sums = (double *)(void *)(at + part);
    job->open = (int64_t *)(void *)(at + 2 * part);
}

int64_t dk_sample(double *weights, const float *logits, int64_t n, const dk_sampling *rules, double u,
                  void *scratch)
{
    job_t job = {.rules = rules, .segments = dk_parts(n, SEGMENT), .best = -INFINITY};
    int is_bad = 0;
    lay_out(&job, scratch);
    read_scores(job.scores, job.largest, &is_bad, logits, n);
    if (is_bad)
        return -1;
    adjust(&job, n);
    for (int64_t segment = 0; segment < job.segments; segment++)
        job.best = job.largest[segment] > job.best ? job.largest[segment] : job.best;
    if (job.best == -INFINITY)
        return -1;
    if (rules->scale == 0)
        return first_largest(&job);
    job.last = (entry_t){-INFINITY, n};
    int64_t count = 0;
    if (rules->top_k > 0 && rules->top_k < n)
        count = keep_top_k(&job, rules->top_k);
    open_segments(&job);
    weigh(&job);
    if (count > 0)
        trim(&job, 0);
    if (rules->top_p < 1)
        keep_top_p(&job, count);
    if (rules->top_p < 1 || rules->min_p > 0)
        trim(&job, rules->min_p);
    if (weights != NULL)
        write_weights(weights, &job, n);
    return draw(&job, u);
}

/* Attention of all heads over shared key/value rows, with a sink per head.
 *
 * A task takes some queries and some heads. Rows are decoded tile by tile to float32, once for all of the
 * task's heads and, where they share rows, queries; each (query, head) goes through them by an online
 * softmax that starts with the sink. Window tiles are cut at absolute positions and compressed tiles at
 * absolute rows (or places in the selection), so the order of all sums depends on the query's position
 * alone. */

#include "attend_tile.h"
#include "rows.h"

enum { TILE_FLOATS = 16384, PADDING = 16, QUERIES = 4, HEADS = 64 };

typedef struct {
    float *out;
    const float *q;
    const dk_attention *rows;
    const dk_tile_kernels *kernels;
    int64_t start;
    int64_t tokens;
    int64_t heads;
    int64_t dim;
    int64_t tile_rows;
    int64_t row_stride;
    int64_t queries_per_task;
    int64_t heads_per_task;
    int64_t head_tasks;
} job_t;

typedef struct {
    const job_t *job;
    int64_t token;  /* first query */
    int64_t count;  /* queries */
    int64_t head;
    int64_t heads;
    int is_first[QUERIES]; /* nothing attended yet */
    float top[QUERIES][HEADS];
    float sum[QUERIES][HEADS];
    float scores[HEADS * DK_TILE_ROWS] DK_ALIGNED;
    float tile[TILE_FLOATS + (PADDING + 16) * DK_TILE_ROWS] DK_ALIGNED;
} task_t;

static int64_t offset_of(const task_t *task, int64_t query)
{
    const job_t *job = task->job;
    return ((task->token + query) * job->heads + task->head) * job->dim;
}

/* Attend with one query to rows [from, to) of the tile. */
static void attend_tile(task_t *task, int64_t query, int64_t from, int64_t to)
{
    if (from >= to)
        return;
    const job_t *job = task->job;
    const float *rows = task->tile + from * job->row_stride;
    float *out = job->out + offset_of(task, query), factor[HEADS];
    float scale = (float)(1.0 / sqrt((double)job->dim));
    job->kernels->dots(task->scores, job->q + offset_of(task, query), job->dim, rows, job->row_stride,
                       to - from, task->heads);
    job->kernels->soften(task->scores, task->top[query], task->sum[query], factor, to - from, task->heads,
                         scale);
    job->kernels->mix(out, task->scores, factor, job->dim, rows, job->row_stride, to - from, task->heads,
                      task->is_first[query]);
    task->is_first[query] = 0;
}

/* Decode window rows of positions [from, to) to the places that follow each other in the tile. */
static void load_window(const job_t *job, float *tile, int64_t from, int64_t to)
{
    for (int64_t p = from; p < to; p++, tile += job->row_stride) {
        if (p < job->start)
            dk_rows_read(tile, job->row_stride, job->rows->ring, p % job->rows->slots, 1);
        else
            dk_rows_read(tile, job->row_stride, job->rows->staged, p - job->start, 1);
    }
}

static void attend_window(task_t *task)
{
    const job_t *job = task->job;
    int64_t size = job->tile_rows, window = job->rows->window;
    int64_t first_position = job->start + task->token;
    int64_t first = dk_max(0, first_position - window + 1), stop = first_position + task->count;
    for (int64_t base = first / size * size; base < stop; base += size) {
        int64_t from = dk_max(base, first), to = dk_min(base + size, stop);
        load_window(job, task->tile + (from - base) * job->row_stride, from, to);
        for (int64_t query = 0; query < task->count; query++) {
            int64_t position = first_position + query;
            int64_t oldest = dk_max(base, position - window + 1);
            attend_tile(task, query, oldest - base, dk_min(to, position + 1) - base);
        }
    }
}

static int64_t visible_rows(const task_t *task, int64_t query)
{
    return (task->job->start + task->token + query + 1) / task->job->rows->ratio;
}

static void attend_all_compressed(task_t *task)
{
    const job_t *job = task->job;
    int64_t count = visible_rows(task, task->count - 1);
    for (int64_t base = 0; base < count; base += job->tile_rows) {
        int64_t stop = dk_min(base + job->tile_rows, count);
        dk_rows_read(task->tile, job->row_stride, job->rows->compressed, base, stop - base);
        for (int64_t query = 0; query < task->count; query++)
            attend_tile(task, query, 0, dk_min(stop, visible_rows(task, query)) - base);
    }
}

static void attend_selected(task_t *task, int64_t query)
{
    const job_t *job = task->job;
    const int32_t *ids = job->rows->selected + (task->token + query) * job->rows->top;
    int64_t count = 0;
    while (count < job->rows->top && ids[count] >= 0)
        count++;
    for (int64_t base = 0; base < count; base += job->tile_rows) {
        int64_t size = dk_min(job->tile_rows, count - base);
        for (int64_t i = 0; i < size; i++)
            dk_rows_read(task->tile + i * job->row_stride, job->row_stride, job->rows->compressed,
                         ids[base + i], 1);
        attend_tile(task, query, 0, size);
    }
}

static void start_task(task_t *task)
{
    const float *sink = task->job->rows->sink + task->head;
    for (int64_t query = 0; query < task->count; query++) {
        task->is_first[query] = 1;
        for (int64_t h = 0; h < task->heads; h++) {
            task->top[query][h] = sink[h];
            task->sum[query][h] = sink[h] == DK_MINUS_INFINITY ? 0.0f : 1.0f;
        }
    }
}

static void finish_task(task_t *task)
{
    int64_t dim = task->job->dim;
    for (int64_t query = 0; query < task->count; query++)
        for (int64_t h = 0; h < task->heads; h++) {
            float *out = task->job->out + offset_of(task, query) + h * dim, sum = task->sum[query][h];
            for (int64_t k = 0; k < dim; k++)
                out[k] = task->is_first[query] ? 0.0f : out[k] / sum;
        }
}

static void attend_task(void *arg, int64_t index)
{
    const job_t *job = arg;
    task_t task;
    task.job = job;
    task.token = index / job->head_tasks * job->queries_per_task;
    task.count = dk_min(job->queries_per_task, job->tokens - task.token);
    task.head = index % job->head_tasks * job->heads_per_task;
    task.heads = dk_min(job->heads_per_task, job->heads - task.head);
    start_task(&task);
    if (job->rows->window > 0)
        attend_window(&task);
    if (job->rows->compressed != NULL && job->rows->selected == NULL)
        attend_all_compressed(&task);
    if (job->rows->compressed != NULL && job->rows->selected != NULL)
        for (int64_t query = 0; query < task.count; query++)
            attend_selected(&task, query);
    finish_task(&task);
}

/* All heads in one task where there are queries enough for the threads, else fours of them. */
static void share_out(job_t *job, int64_t threads)
{
    job->queries_per_task = dk_max(1, dk_min(QUERIES, job->tokens / (2 * threads)));
    int64_t groups = (job->tokens + job->queries_per_task - 1) / job->queries_per_task;
    int64_t wanted = dk_max(1, threads / groups);
    int64_t heads = (job->heads + wanted - 1) / wanted;
    job->heads_per_task = dk_min(HEADS, wanted == 1 ? heads : (heads + 3) / 4 * 4);
    job->head_tasks = (job->heads + job->heads_per_task - 1) / job->heads_per_task;
}

int dk_attend(dk_run *run, float *out, const float *q, const dk_attention *rows, int64_t start,
              int64_t tokens, int64_t heads, int64_t dim)
{
    job_t job = {.out = out, .q = q, .rows = rows, .start = start, .tokens = tokens};
    job.heads = heads;
    job.dim = dim;
    job.kernels = dk_choose_tile_kernels(dim);
    job.row_stride = (dim + 15) / 16 * 16 + PADDING;
    for (job.tile_rows = DK_TILE_ROWS; job.tile_rows > 1 && job.tile_rows * dim > TILE_FLOATS;)
        job.tile_rows /= 2;
    share_out(&job, run->threads);
    int64_t groups = (tokens + job.queries_per_task - 1) / job.queries_per_task;
    return dk_parallel(run, groups * job.head_tasks, attend_task, &job);
}

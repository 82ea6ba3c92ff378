/* dsv4.h - DeepSeek-V4 on one machine, for C and C++ programs. Apache-2.0.
 *
 * Link with libdsv4 (`pkg-config --cflags --libs dsv4`, or `find_package(dsv4)` and `dsv4::dsv4`).
 *
 *     dsv4_engine *engine = NULL;
 *     dsv4_session *session = NULL;
 *     if (dsv4_engine_open("model.gguf", NULL, NULL, &engine) || dsv4_session_new(engine, 0, &session))
 *         return fprintf(stderr, "%s\n", dsv4_last_error()), 1;
 *
 * Rules that hold for every function unless its comment says otherwise:
 *
 * Results. A function returns DSV4_OK (0) or a negative status; then dsv4_last_error() explains it and the
 *   outputs are untouched (handles NULL), unless a comment says what is left. Any pointer that is not called
 *   optional must not be NULL: DSV4_ERR_INVALID_ARGUMENT names it.
 * Threads. Any function may be called from any thread. An engine may be used by many threads at once. A
 *   session, parser or sampler has one user at a time: a second one is told DSV4_ERR_BUSY at once, never made
 *   to wait. Calls compute without holding the lock of the interpreter inside the library, so two sessions
 *   run side by side.
 *   A call needs 192 KiB of stack and refuses less (OUT_OF_MEMORY): give a thread 256 KiB. It computes with the
 *   default rounding and without traps, also in callbacks, and gives back what the thread had set; and
 *   pthread_cancel waits until it has returned.
 * Ownership. What a function takes is only read, and only during the call. What it hands out (`dsv4_x **`)
 *   is freed by the function named there. Text in events and results belongs to the library, and lives as
 *   long as its comment says.
 * Handles. Freeing NULL does nothing. A handle that was freed, or that never was one, is refused with
 *   DSV4_ERR_INVALID_ARGUMENT: handles are checked, never dereferenced.
 * Structs. The caller sets struct_size to sizeof of the struct it compiled (the `_init` functions do it). A
 *   smaller one comes from an older header: members it lacks take their defaults, or are not written. A
 *   larger one must be zero behind what this library knows. Otherwise DSV4_ERR_ABI.
 * Text is UTF-8 with a length, never cut inside a character. Paths are NUL-terminated bytes. No text and no
 *   array may have more than 2^31-1 bytes or elements.
 * Arrays and text of unknown length use two calls: with a NULL buffer and capacity 0 the needed length is
 *   stored and nothing else; with a buffer that is too small, DSV4_ERR_BUFFER and the needed length.
 * Callbacks run on the thread that made the call, and only during it. They may call the library, but not
 *   with the session or parser they report on (BUSY; of a session, facts and tokens can be asked for). They
 *   must return: no longjmp, exception or pthread_exit.
 *
 * The library keeps a Python interpreter of its own. Its first function starts it (dsv4_init); it stays until
 * the process ends, so the library cannot be unloaded, and a child made by fork() must not use it. It reads no
 * environment variable, installs no signal handler and prints nothing. At exit nothing has to be closed; functions
 * then give DSV4_ERR_INIT. A program that already runs Python imports the package `edgedsv4` instead.
 */
#ifndef DSV4_H
#define DSV4_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Version of this interface. Grows with every change; a library serves programs compiled for its own
 * version and for older ones of the same thousand. */
#define DSV4_ABI_VERSION 1000

/* A length that says: up to the terminating NUL. */
#define DSV4_ZSTR ((size_t)-1)

/* Of the library's functions these alone are seen from outside. */
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* [interface: everything from here to its end is also read by the build of the library] */

/* ---- Status ---- */

enum {
    DSV4_OK = 0,
    DSV4_ERR_INVALID_ARGUMENT = -1, /* an argument or option out of its range, NULL, a dead handle */
    DSV4_ERR_ABI = -2,              /* a struct_size or version that this library cannot serve */
    DSV4_ERR_IO = -3,               /* reading or writing failed */
    DSV4_ERR_NOT_FOUND = -4,        /* no such file, or no such model */
    DSV4_ERR_FORMAT = -5,           /* a file or document is not what its format promises */
    DSV4_ERR_TRUNCATED = -6,        /* a file ends too early */
    DSV4_ERR_CHECKSUM = -7,         /* a part of a file does not have its checksum */
    DSV4_ERR_UNSUPPORTED = -8,      /* well formed, but this build or machine cannot run it */
    DSV4_ERR_MISMATCH = -9,         /* a saved state of another model, layout or version */
    DSV4_ERR_OUT_OF_MEMORY = -10,   /* the memory budget, the host's memory, a thread's stack */
    DSV4_ERR_DEVICE_MEMORY = -11,   /* the device's memory */
    DSV4_ERR_NO_SPACE = -12,        /* the disk is full */
    DSV4_ERR_CONTEXT_FULL = -13,    /* more tokens than the session holds */
    DSV4_ERR_CANCELLED = -14,       /* a cancel object or a callback said so */
    DSV4_ERR_BUSY = -15,            /* in use by another call, or still owned by live sessions */
    DSV4_ERR_DEVICE_LOST = -16,     /* the device stopped answering; open the engine again */
    DSV4_ERR_NUMERIC = -17,         /* the model produced NaN or infinity */
    DSV4_ERR_INIT = -18,            /* the interpreter inside the library did not start */
    DSV4_ERR_INTERNAL = -19,        /* a defect of the library; please report the text */
    DSV4_ERR_BUFFER = -20           /* the buffer is too small; the needed length is stored */
};

/* What the last failed call of a thread knows beside its text. */
typedef struct dsv4_error_info {
    uint32_t struct_size;
    int32_t status;       /* DSV4_OK: no call of this thread has failed */
    const char *text;     /* as dsv4_last_error() */
    const char *function; /* the function that failed; "" when unknown */
    const char *path;     /* the file concerned; "" without one */
    const char *name;     /* the argument, option or tensor concerned; "" without one */
    int64_t offset;       /* place in the file, bytes; -1 without one */
    int64_t needed;       /* bytes or tokens asked for; -1 where it means nothing */
    int64_t available;    /* bytes or tokens there are; -1 where it means nothing */
} dsv4_error_info;

/* A run of UTF-8. size may be DSV4_ZSTR in what a caller hands in. {NULL, 0} is the empty text. */
typedef struct dsv4_text {
    const char *data;
    size_t size;
} dsv4_text;

/* Opaque. A cancel object, an opened model, one timeline of tokens, a reply parser, a sampler. */
typedef struct dsv4_cancel dsv4_cancel;
typedef struct dsv4_engine dsv4_engine;
typedef struct dsv4_session dsv4_session;
typedef struct dsv4_parser dsv4_parser;
typedef struct dsv4_sampler dsv4_sampler;

/* ---- Callbacks ---- */

/* What is being done, how far it is and what `total` counts (steps, tokens or bytes; 0: not known yet).
 * Nonzero cancels: the call returns DSV4_ERR_CANCELLED. `what` lives during the callback. */
typedef int (*dsv4_progress_fn)(void *user, const char *what, uint64_t done, uint64_t total);

/* One generated token, in order. `piece` is the text that became certain with it, which may be empty (the
 * first bytes of a character) and lives during the callback. Nonzero stops: the token stays. */
typedef int (*dsv4_token_fn)(void *user, int32_t token, dsv4_text piece);

/* A line for the log: level 10 debug, 20 information, 30 warning, 40 error. */
typedef void (*dsv4_log_fn)(void *user, int32_t level, const char *text);

/* How a long call may be watched and stopped. NULL for neither. */
typedef struct dsv4_call {
    uint32_t struct_size;
    uint32_t reserved; /* 0 */
    dsv4_cancel *cancel;       /* optional */
    dsv4_progress_fn progress; /* optional */
    void *user;                /* handed to progress */
} dsv4_call;

/* ---- Version and start; plain C, these start nothing and never fail but for dsv4_init ---- */

/* [plain C] */

/* DSV4_ABI_VERSION of the library. */
uint32_t dsv4_abi_version(void);

/* Version of the package, such as "0.1.0"; lives for ever. */
const char *dsv4_version(void);

/* Name of a status, such as "DSV4_ERR_BUSY"; lives for ever. "DSV4_ERR_UNKNOWN" for a number that is none. */
const char *dsv4_status_name(int32_t status);

/* Text of the last call that failed on this thread: what, expected, found, what to do. "" before any. Lives
 * until the next failure on this thread. Calls that succeed do not clear it. */
const char *dsv4_last_error(void);

/* The same with its details. Example:
 *     dsv4_error_info error = {.struct_size = sizeof error};
 *     if (dsv4_last_error_info(&error) == DSV4_OK && error.offset >= 0)
 *         fprintf(stderr, "%s at byte %lld\n", error.path, (long long)error.offset);
 * Errors: INVALID_ARGUMENT, ABI (they do not replace the stored error). */
int32_t dsv4_last_error_info(dsv4_error_info *out);

/* Start the interpreter, which every function below does by itself when it is the first; 1 to 2 seconds.
 *   abi_version: DSV4_ABI_VERSION of the caller.
 *   python: path of the Python that has the package `edgedsv4`; NULL or "" takes the one that the library was
 *     built with. A virtual environment's python finds that environment. Means nothing once started.
 * Errors: ABI; INIT with the reason (and again on every later call: the process has to be started anew). */
int32_t dsv4_init(uint32_t abi_version, const char *python);

/* ---- Cancel objects; plain C ---- */

/* Make a cancel object for use in dsv4_call. Free it with dsv4_cancel_free. One object may stop several calls
 * at once. A call that is told stops within 250 ms, with DSV4_ERR_CANCELLED, and its session stands at its
 * last complete token. Example:
 *     static dsv4_cancel *stop;
 *     static void on_sigint(int number) { (void)number; dsv4_cancel_trigger(stop); }
 * Errors: OUT_OF_MEMORY (4,096 exist). */
int32_t dsv4_cancel_new(dsv4_cancel **out);

/* Stop every call that uses the object, now and until dsv4_cancel_reset. Async-signal-safe.
 * Errors: INVALID_ARGUMENT (the stored error text is left alone). */
int32_t dsv4_cancel_trigger(dsv4_cancel *cancel);

/* Let calls run again. Async-signal-safe. Errors: as dsv4_cancel_trigger. */
int32_t dsv4_cancel_reset(dsv4_cancel *cancel);

/* 1 when triggered, 0 when not, INVALID_ARGUMENT. Async-signal-safe. */
int32_t dsv4_cancel_is_set(dsv4_cancel *cancel);

/* Free the object. Calls that still use it run on without it. Errors: INVALID_ARGUMENT. */
int32_t dsv4_cancel_free(dsv4_cancel *cancel);

/* [end of plain C] */

/* ---- Log and devices ---- */

/* Send log lines of at least `level` (0: all) to `log`, one at a time, from whatever thread they come; NULL ends
 * it. There are warnings and errors; prompts and replies are never logged. The function waits for a line that
 * another thread is handing out, and the callback set before is never called again once it has returned.
 * Errors: INVALID_ARGUMENT (a negative level). */
int32_t dsv4_set_log(dsv4_log_fn log, void *user, int32_t level);

/* The devices that dsv4_engine_options.device can name here, as a JSON array of objects with "name", "kind",
 * "memory_bytes" and "is_default", for the CPU "instruction_set" and "threads", for a GPU "family" ("sm_90") and
 * "obstacle" (why the kernels for GPUs cannot run there, or null).
 * Example: size_t size = 0; dsv4_devices_json(NULL, 0, &size); */
int32_t dsv4_devices_json(char *buffer, size_t capacity, size_t *size);

/* ---- Inspect and plan: the header of a file alone, no weights ---- */

/* What a model file holds, as JSON: architecture, shapes, block types by role, tokenizer, identity, and in
 * "problems" why it cannot run (empty when it can).
 *   path: a GGUF file (any part of a split one), a checkpoint directory, or the name of a shipped model.
 * Errors: NOT_FOUND, IO, FORMAT, TRUNCATED, UNSUPPORTED, BUFFER. */
int32_t dsv4_inspect_json(const char *path, char *buffer, size_t capacity, size_t *size);

typedef struct dsv4_engine_options {
    uint32_t struct_size;
    int32_t context;          /* tokens of a session; 0: the least of the model's limit, 32,768 and memory */
    int32_t threads;          /* 1..1024; 0: the physical cores, or one for a tiny model */
    int32_t pin_threads;      /* nonzero: each thread keeps to one CPU */
    int32_t prefill_chunk;    /* tokens evaluated at once, 1..65,536; 0: 256, on a GPU up to 4,096 */
    int32_t draft;            /* tokens the MTP block drafts ahead, 0 (the default)..8; the text stays the same */
    int32_t verify;           /* nonzero: read every tensor and refuse NaN or infinite scales */
    int32_t sigbus_guard;     /* nonzero: a file that shrinks while open is an error, not a crash; installs a
                                 SIGBUS handler */
    const char *device;       /* "auto" (the default), "cpu", "cuda:0" */
    const char *profile;      /* "default" or "exact" */
    const char *backend;      /* "auto" (the default), "native", "reference", "triton" */
    const char *dtype;        /* "f32" (the default), "f64", "bf16" */
    const char *draft_model;  /* file with the MTP block; NULL: inside the model, or beside a shipped one */
    int64_t ram_bytes;        /* budget; 0: what the machine has */
    int64_t vram_bytes;       /* budget on the device; 0: what is free */
    int64_t checkpoint_bytes; /* for turn checkpoints of a session, 0..2^50, by default 2^30 */
    const char *dense_model;  /* beside an expert pack, the file with the rest; NULL: what the pack names */
    const char *cpu_experts;  /* routed experts of a model on a GPU that the CPU computes: "auto" (the default)
                                 those that do not fit there, "on" all, "off" none */
    int64_t expert_ram_bytes; /* for stored experts, part of the budget; 0: what is left beside the rest */
    const char *expert_place; /* routed experts: "mapped" in the file, "stored" in memory as far as they fit and
                                 else read from it; "auto" (the default): stored where not all fit */
    const char *expert_freq;  /* frequency file of `edgedsv4 profile`: experts to expect at first; NULL for none */
    const char *io;           /* how stored experts are read: "auto" (the default), "direct", "buffered" */
    const char *prefetch;     /* stored experts that are read before they are asked for: "hash" (the default) what is
                                 sure, "gate" also what the next layer's router will probably choose, "pairs" what
                                 expert_freq says of it, "off" nothing; the text is the same */
    int32_t io_depth;         /* reads of 1 MiB under way at a time, 1..1024, by default 32 */
    int32_t expert_threads;   /* CPU threads of cpu_experts, 1..1024; 0: the physical cores */
    const char *expert_verify; /* stored experts that are compared with their pack's checksums: "off" (the default),
                                  "sampled" one in a hundred, "full" all */
} dsv4_engine_options;

/* Fill in the defaults. struct_size: sizeof(dsv4_engine_options). The texts live for ever. Example:
 *     dsv4_engine_options options;
 *     dsv4_engine_options_init(&options, sizeof options);
 *     options.context = 8192;
 * Errors: ABI. */
int32_t dsv4_engine_options_init(dsv4_engine_options *options, uint32_t struct_size);

/* Bytes by item that a model and a session of options->context tokens take, whether they fit, what limits
 * them and the largest context that fits, as JSON. options is optional. Errors: as dsv4_inspect_json, and
 * INVALID_ARGUMENT for an option. */
int32_t dsv4_plan_json(const char *path, const dsv4_engine_options *options, char *buffer, size_t capacity,
                       size_t *size);

/* ---- Engine: an opened model ---- */

/* Open a model. Free it with dsv4_engine_close. Weights stay in the file and are mapped.
 *   path: as for dsv4_inspect_json.   options, call: optional.
 * Progress counts steps, and bytes when options->verify. Example: at the top of this file.
 * Errors: NOT_FOUND, IO, FORMAT, TRUNCATED, UNSUPPORTED (also a backend or device that cannot run here),
 * INVALID_ARGUMENT (an option), OUT_OF_MEMORY, DEVICE_MEMORY, CANCELLED. */
int32_t dsv4_engine_open(const char *path, const dsv4_engine_options *options, const dsv4_call *call,
                         dsv4_engine **out);

/* Give files and memory back. Errors: BUSY while sessions of the engine are open; it stays open then. */
int32_t dsv4_engine_close(dsv4_engine *engine);

typedef struct dsv4_engine_info {
    uint32_t struct_size;
    int32_t vocab_size;
    int32_t context;        /* tokens of a session when nothing else is asked for */
    int32_t max_context;    /* tokens the model was made for */
    int32_t num_layers;
    int32_t threads;
    int32_t bos_id;         /* -1: the vocabulary has none; so for the next two */
    int32_t eos_id;
    int32_t pad_id;
    int32_t has_tokenizer;  /* 0: only token ids can be used */
    char identity[72];      /* SHA-256 of the model's header, hexadecimal, NUL-terminated */
    char variant[24];       /* prompt encoding, such as "v4" */
    int64_t weight_bytes;   /* of the mapped files */
    int64_t budget_bytes;   /* memory that weights and sessions share */
} dsv4_engine_info;

/* Facts of an opened model. Errors: ABI. */
int32_t dsv4_engine_get_info(dsv4_engine *engine, dsv4_engine_info *out);

/* What was opened and how it runs (device, profile, kernels by operation, notes), as JSON. Errors: BUFFER. */
int32_t dsv4_engine_describe_json(dsv4_engine *engine, char *buffer, size_t capacity, size_t *size);

/* Bytes by item at this moment, as JSON. Errors: BUFFER. */
int32_t dsv4_engine_memory_json(dsv4_engine *engine, char *buffer, size_t capacity, size_t *size);

/* ---- Vocabulary ---- */

/* Token ids of plain text. Text that spells a special token stays text unless match_special is nonzero: do
 * not set that for what a user typed.
 * Errors: INVALID_ARGUMENT (not UTF-8; no tokenizer), BUFFER. */
int32_t dsv4_tokenize(dsv4_engine *engine, dsv4_text text, int32_t match_special, int32_t *tokens,
                      size_t capacity, size_t *count);

/* Text of tokens; bytes that are no UTF-8 become U+FFFD. Special tokens are left out unless show_special.
 * Errors: INVALID_ARGUMENT (an id beyond the vocabulary), BUFFER. */
int32_t dsv4_detokenize(dsv4_engine *engine, const int32_t *tokens, size_t count, int32_t show_special,
                        char *buffer, size_t capacity, size_t *size);

/* The exact bytes of one token, which may be part of a character. Errors: as dsv4_detokenize. */
int32_t dsv4_token_bytes(dsv4_engine *engine, int32_t token, char *buffer, size_t capacity, size_t *size);

/* Id of a special token by its text, such as "<think>"; -1 in *token when there is none. */
int32_t dsv4_special_token(dsv4_engine *engine, dsv4_text text, int32_t *token);

/* ---- Chat: conversations to prompts, replies to events ---- */

typedef struct dsv4_tool_call {
    dsv4_text id;        /* ties the result to its call */
    dsv4_text name;
    dsv4_text arguments; /* a JSON object */
} dsv4_tool_call;

/* One message. An array of them is read with the stride struct_size of its first element. */
typedef struct dsv4_message {
    uint32_t struct_size;
    int32_t is_prefix;                /* nonzero: the reply continues this (last, assistant) message */
    dsv4_text role;                   /* "system", "developer", "user", "assistant", "tool",
                                         "latest_reminder" */
    dsv4_text content;
    dsv4_text reasoning;              /* the thinking of an assistant turn */
    const dsv4_tool_call *tool_calls; /* of an assistant turn; optional */
    size_t tool_call_count;
    dsv4_text tool_call_id;           /* the call that a tool message answers */
} dsv4_message;

typedef struct dsv4_prompt_options {
    uint32_t struct_size;
    int32_t keep_thinking;           /* nonzero: keep the reasoning before the last question */
    const char *thinking;            /* "none", "low", "high" (the default), "max", "1".."100"; which ones a model
                                        has depends on its variant */
    dsv4_text tools_json;            /* array of function schemas, bare or as OpenAI wraps them; empty: none */
    dsv4_text tool_choice_json;      /* "\"auto\"", "\"none\"", "\"required\"" or OpenAI's object; empty: auto */
    dsv4_text response_format_json;  /* JSON schema of the reply; empty: free text */
} dsv4_prompt_options;

/* Fill in the defaults. struct_size: sizeof(dsv4_prompt_options). Errors: ABI. */
int32_t dsv4_prompt_options_init(dsv4_prompt_options *options, uint32_t struct_size);

/* The exact prompt of a conversation as text. options is optional. Example:
 *     dsv4_message message = {sizeof message, 0, dsv4_str("user"), dsv4_str("Hi"), {0}, NULL, 0, {0}};
 *     size_t size = 0;
 *     dsv4_chat_render(engine, &message, 1, NULL, NULL, 0, &size);
 * Errors: INVALID_ARGUMENT (what the encoding cannot express; JSON that is none), BUFFER. */
int32_t dsv4_chat_render(dsv4_engine *engine, const dsv4_message *messages, size_t count,
                         const dsv4_prompt_options *options, char *buffer, size_t capacity, size_t *size);

/* The same as token ids, where control tokens are tokens. Errors: the same. */
int32_t dsv4_chat_encode(dsv4_engine *engine, const dsv4_message *messages, size_t count,
                         const dsv4_prompt_options *options, int32_t *tokens, size_t capacity, size_t *size);

enum {
    DSV4_EVENT_TEXT = 1,     /* more of the answer */
    DSV4_EVENT_THINKING = 2, /* more of the thinking */
    DSV4_EVENT_TOOL_CALL = 3 /* a tool call, complete; it comes as soon as it is closed */
};

/* A part of a reply. Everything in it lives during the callback. */
typedef struct dsv4_event {
    uint32_t struct_size;
    int32_t kind;
    dsv4_text text;      /* TEXT, THINKING */
    dsv4_text id;        /* TOOL_CALL: for the tool message that answers it */
    dsv4_text name;      /* TOOL_CALL */
    dsv4_text arguments; /* TOOL_CALL: a JSON object */
    int32_t index;       /* TOOL_CALL: position among the calls of the reply */
    int32_t tokens;      /* tokens generated so far; 0 from a parser */
} dsv4_event;

/* Nonzero stops the reply: what was said so far stays. */
typedef int (*dsv4_event_fn)(void *user, const dsv4_event *event);

/* A parser for replies that a program generates itself (dsv4_session_generate): text in, events out.
 * Free it with dsv4_parser_free.
 *   messages, count, options: the conversation that was rendered, which decides where the reply starts.
 * Errors: as dsv4_chat_render. */
int32_t dsv4_parser_new(dsv4_engine *engine, const dsv4_message *messages, size_t count,
                        const dsv4_prompt_options *options, dsv4_parser **out);

/* Take in the text of more tokens. event is optional. *is_complete (optional) is 1 once nothing that follows
 * means anything.
 * A callback that stops ends this call's events, with DSV4_ERR_CANCELLED.
 * Errors: INVALID_ARGUMENT (an id; after dsv4_parser_finish), BUSY, CANCELLED. */
int32_t dsv4_parser_push(dsv4_parser *parser, const int32_t *tokens, size_t count, dsv4_event_fn event,
                         void *user, int32_t *is_complete);

/* The reply has ended: what was held back comes out. event is optional. Errors: as dsv4_parser_push. */
int32_t dsv4_parser_finish(dsv4_parser *parser, dsv4_event_fn event, void *user);

/* Free a parser. Errors: BUSY. */
int32_t dsv4_parser_free(dsv4_parser *parser);

/* ---- Sampling ---- */

typedef struct dsv4_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY bans the token */
} dsv4_bias;

typedef struct dsv4_sampling_options {
    uint32_t struct_size;
    int32_t top_k;             /* the k likeliest; 0, the default: all */
    double temperature;        /* 0..100, by default 1; 0: the likeliest, of equals the lowest id */
    double top_p;              /* above 0, at most 1, the default */
    double min_p;              /* share of the likeliest's probability, 0..1; by default 0 */
    double repetition_penalty; /* above 0, at most 100; 1, the default: none */
    double presence_penalty;   /* -100..100, by default 0 */
    double frequency_penalty;  /* -100..100, by default 0 */
    int64_t seed;              /* 0..2^63-1; -1, the default: a new one each time */
    int32_t max_tokens;        /* to generate at most; 0, the default: until the context is full */
    int32_t reserved;          /* 0 */
    const dsv4_bias *bias;     /* optional */
    size_t bias_count;
} dsv4_sampling_options;

/* Fill in the defaults. struct_size: sizeof(dsv4_sampling_options). Errors: ABI. */
int32_t dsv4_sampling_options_init(dsv4_sampling_options *options, uint32_t struct_size);

/* A sampler for programs that choose tokens themselves: a pure function of logits and its state (options,
 * seed, counts of earlier tokens). Free it with dsv4_sampler_free. options is optional.
 *     dsv4_session_logits(session, logits, vocab_size, &size);
 *     dsv4_sampler_sample(sampler, logits, size, &token);
 *     dsv4_sampler_accept(sampler, &token, 1);
 * Errors: INVALID_ARGUMENT (options; a vocabulary below 1), ABI. */
int32_t dsv4_sampler_new(const dsv4_sampling_options *options, int32_t vocab_size, dsv4_sampler **out);

/* The token to take. The state does not change: asking again gives the same one.
 * Errors: NUMERIC (NaN, +infinity or nothing left), INVALID_ARGUMENT (count is not the vocabulary), BUSY. */
int32_t dsv4_sampler_sample(dsv4_sampler *sampler, const float *logits, size_t count, int32_t *token);

/* Count tokens that were generated. Errors: INVALID_ARGUMENT (an id), BUSY. */
int32_t dsv4_sampler_accept(dsv4_sampler *sampler, const int32_t *tokens, size_t count);

/* Count tokens of the prompt, for the repetition penalty. Errors: as dsv4_sampler_accept. */
int32_t dsv4_sampler_observe(dsv4_sampler *sampler, const int32_t *tokens, size_t count);

/* The state as bytes, for dsv4_sampler_restore. Errors: BUFFER, BUSY. */
int32_t dsv4_sampler_save(dsv4_sampler *sampler, void *buffer, size_t capacity, size_t *size);

/* A sampler with a saved state, which goes on with the same tokens. Free it with dsv4_sampler_free.
 * Errors: FORMAT, TRUNCATED, CHECKSUM. */
int32_t dsv4_sampler_restore(const void *state, size_t size, dsv4_sampler **out);

/* Free a sampler. Errors: BUSY. */
int32_t dsv4_sampler_free(dsv4_sampler *sampler);

/* ---- Session: one timeline of tokens ---- */

/* Where the tokens of a timeline came from; the first three add up to its length. */
typedef struct dsv4_sync_report {
    uint32_t struct_size;
    int32_t reused;    /* kept as they were */
    int32_t evaluated; /* new */
    int32_t rebuilt;   /* kept, but evaluated again because going back ended at a checkpoint */
} dsv4_sync_report;

/* Make a session of `context` tokens; 0 takes the engine's. Free it with dsv4_session_free.
 * Errors: INVALID_ARGUMENT (beyond the model), OUT_OF_MEMORY, DEVICE_MEMORY; nothing was allocated. */
int32_t dsv4_session_new(dsv4_engine *engine, int32_t context, dsv4_session **out);

/* Give its memory back. Errors: BUSY while a call works with it, which may be the one whose callback this is;
 * the session stays. */
int32_t dsv4_session_free(dsv4_session *session);

/* Make the timeline equal to a whole token list: the common prefix is kept and the rest evaluated, so that a
 * program never handles places in a cache. An empty list resets. report and call are optional; progress counts
 * the tokens to evaluate. Example:
 *     dsv4_sync_report report = {.struct_size = sizeof report};
 *     dsv4_session_sync(session, tokens, count, NULL, &report);
 * Errors: INVALID_ARGUMENT (an id), CONTEXT_FULL: nothing changed; CANCELLED, NUMERIC, FORMAT (the file was
 * changed), DEVICE_LOST: the timeline is the part of `tokens` up to the last finished chunk; BUSY. */
int32_t dsv4_session_sync(dsv4_session *session, const int32_t *tokens, size_t count, const dsv4_call *call,
                          dsv4_sync_report *report);

/* Append tokens. Errors: as dsv4_session_sync; the tokens of finished chunks stay appended. */
int32_t dsv4_session_eval(dsv4_session *session, const int32_t *tokens, size_t count, const dsv4_call *call);

/* Drop the last `count` tokens. report and call are optional. Errors: INVALID_ARGUMENT (fewer tokens), BUSY;
 * CANCELLED, NUMERIC, FORMAT: the timeline is shorter than asked for. */
int32_t dsv4_session_rewind(dsv4_session *session, size_t count, const dsv4_call *call,
                            dsv4_sync_report *report);

/* Keep a checkpoint here that a later sync or rewind reaches without evaluating; replies do it themselves.
 * Errors: BUSY. */
int32_t dsv4_session_mark_turn(dsv4_session *session);

typedef struct dsv4_session_info {
    uint32_t struct_size;
    int32_t length;            /* tokens of the timeline */
    int32_t capacity;          /* tokens it can hold */
    int32_t reserved;
    int64_t bytes;             /* memory: KV cache, checkpoints, kept logits */
    int64_t tokens_evaluated;  /* since the session was made; so for the rest */
    int64_t tokens_rebuilt;
    int64_t tokens_generated;
    int64_t tokens_drafted;
    int64_t drafts_accepted;
} dsv4_session_info;

/* Facts of a session, also while another thread works with it. Errors: ABI. */
int32_t dsv4_session_get_info(dsv4_session *session, dsv4_session_info *out);

/* Token ids of the timeline, also while another thread works with it. Errors: BUFFER. */
int32_t dsv4_session_tokens(dsv4_session *session, int32_t *tokens, size_t capacity, size_t *count);

/* Logits after the last token, a copy, vocab_size floats. Errors: INVALID_ARGUMENT (an empty timeline), BUFFER,
 * BUSY; after a rewind one token may be evaluated: as dsv4_session_sync, the last token is then gone. */
int32_t dsv4_session_logits(dsv4_session *session, float *logits, size_t capacity, size_t *count);

/* The `count` likeliest next tokens, best first, of equals the lowest id, with their log probabilities (nats).
 * Errors: INVALID_ARGUMENT (count is 0 or beyond the vocabulary), and as dsv4_session_logits. */
int32_t dsv4_session_top_logprobs(dsv4_session *session, size_t count, int32_t *tokens, double *logprobs);

/* Append tokens and say how likely they were: nll[i] = -ln p(tokens[i] | everything before), in nats; NaN for
 * the first token of an empty timeline. Memory is bounded by the chunk. call is optional.
 * Errors: as dsv4_session_eval. */
int32_t dsv4_session_score(dsv4_session *session, const int32_t *tokens, size_t count, const dsv4_call *call,
                           double *nll);

/* The token that `sampler` takes after the last one; neither changes. Errors: as dsv4_session_logits and
 * dsv4_sampler_sample. */
int32_t dsv4_session_sample(dsv4_session *session, dsv4_sampler *sampler, int32_t *token);

enum {
    DSV4_FINISH_STOP = 1,       /* the model ended its turn, or a stop token came */
    DSV4_FINISH_TOOL_CALLS = 2, /* it ended with tool calls */
    DSV4_FINISH_LENGTH = 3,     /* max_tokens, or the context is full */
    DSV4_FINISH_CANCELLED = 4   /* a callback or a cancel object */
};

/* How a reply or a generation went. */
typedef struct dsv4_result {
    uint32_t struct_size;
    int32_t finish_reason;
    int32_t prompt_tokens;
    int32_t reused_tokens;    /* of the prompt, not evaluated again */
    int32_t generated_tokens;
    int32_t drafted_tokens;
    int32_t accepted_drafts;
    int32_t tool_calls;       /* complete ones */
    double prefill_seconds;
    double decode_seconds;
    /* Routed experts that the engine reads from a drive itself; 0 where all are in memory. */
    int64_t expert_hits;         /* found in memory, a card's or main */
    int64_t expert_misses;       /* read ahead for this, or waited for */
    int64_t expert_bytes_read;
    double expert_stall_seconds; /* in which nothing could be computed for want of an expert */
    int64_t expert_prefetched;   /* read ahead; */
    int64_t expert_prefetch_hits;   /* misses that were read ahead, or were on their way, */
    int64_t expert_prefetch_late;   /* of them those on their way, */
    int64_t expert_prefetch_wasted; /* and what was read ahead in vain, wholly or in part */
    int64_t expert_guess_misses; /* misses of layers whose experts had been guessed, */
    int64_t expert_guess_hits;   /* and those of them that a guess named */
} dsv4_result;

/* Continue the timeline token by token, each handed out once it is part of it.
 *   options: optional.   stop_tokens: token ids that end it (they join the timeline, and are not handed out);
 *   the model's end token is not among them unless it is named.   token, result: optional.
 * Errors: INVALID_ARGUMENT (an empty timeline, an id, an option), BUSY; CANCELLED by a cancel object, NUMERIC,
 * FORMAT: the tokens handed out stay, and result is filled. A callback that stops is no error. */
int32_t dsv4_session_generate(dsv4_session *session, const dsv4_sampling_options *options,
                              const int32_t *stop_tokens, size_t stop_count, const dsv4_call *call,
                              dsv4_token_fn token, void *user, dsv4_result *result);

/* Answer a conversation: messages in, events out. The whole conversation is handed over each time; the session
 * finds what it knows, and its own earlier replies keep the tokens they were sampled with.
 *   prompt, options, call, event, result: optional.
 * Example: examples/chat.c of the distribution.
 * Errors: INVALID_ARGUMENT (a conversation the encoding cannot express or that needs no reply), CONTEXT_FULL:
 * nothing changed; BUSY; CANCELLED, NUMERIC, FORMAT, DEVICE_LOST: the tokens so far stay, and result is
 * filled. A callback that stops is no error. */
int32_t dsv4_session_reply(dsv4_session *session, const dsv4_message *messages, size_t count,
                           const dsv4_prompt_options *prompt, const dsv4_sampling_options *options,
                           const dsv4_call *call, dsv4_event_fn event, void *user, dsv4_result *result);

/* The same for a conversation as JSON, in the shape of OpenAI's chat completions: a list of messages, or an
 * object with "messages", "tools", "tool_choice", "response_format" (prompt then must not name these).
 * Errors: as dsv4_session_reply, and FORMAT for text that is no JSON. */
int32_t dsv4_session_reply_json(dsv4_session *session, dsv4_text chat, const dsv4_prompt_options *prompt,
                                const dsv4_sampling_options *options, const dsv4_call *call,
                                dsv4_event_fn event, void *user, dsv4_result *result);

/* ---- State of a session ----
 * A saved session goes on bit for bit. It fits the same model file, profile, dtype and library layout only.
 * Example:  dsv4_session_save(session, "talk.dsv4s", NULL);  ...  dsv4_session_load(other, "talk.dsv4s", NULL); */

/* Save to a file: written beside it, synced and then renamed, so that the old file or the new one is there
 * whatever happens; a program that is killed leaves its unfinished `.NAME.*.partial` behind. Progress counts bytes.
 * Errors: INVALID_ARGUMENT (the path of a folder, device or pipe), NOT_FOUND (its folder), IO, NO_SPACE,
 * CANCELLED: the old file is intact; BUSY. */
int32_t dsv4_session_save(dsv4_session *session, const char *path, const dsv4_call *call);

/* Replace the timeline by a saved one. Everything is verified before anything changes; on any error the
 * session is as it was. The file is never changed. Errors: NOT_FOUND, IO, FORMAT, TRUNCATED, CHECKSUM, MISMATCH
 * (another model or layout), CONTEXT_FULL (a smaller session), CANCELLED, OUT_OF_MEMORY, BUSY. */
int32_t dsv4_session_load(dsv4_session *session, const char *path, const dsv4_call *call);

/* The same to memory, in two calls: the session must not change between them. Errors: BUFFER, CANCELLED, BUSY. */
int32_t dsv4_session_save_memory(dsv4_session *session, const dsv4_call *call, void *buffer, size_t capacity,
                                 size_t *size);

/* The same from memory. Errors: as dsv4_session_load. */
int32_t dsv4_session_load_memory(dsv4_session *session, const void *state, size_t size, const dsv4_call *call);

/* What a saved session holds (model, tokens, sections), from its header alone, as JSON; no model is needed.
 * Errors: NOT_FOUND, IO, FORMAT, TRUNCATED, CHECKSUM, BUFFER. */
int32_t dsv4_snapshot_inspect_json(const char *path, char *buffer, size_t capacity, size_t *size);

/* ---- Self test ---- */

/* One check: its name, 1 when it passed, and what was measured against which limit. Nonzero cancels. The texts
 * live during the callback. */
typedef int (*dsv4_check_fn)(void *user, const char *name, int32_t has_passed, const char *detail);

/* Run every kernel of this machine against its reference, and the shipped model against its stored tokens; a
 * few seconds. Each result is handed to `check` (optional). The other checks still run when one fails.
 *   device: as dsv4_engine_options.device, or NULL for "auto".   call: optional.
 * Errors: NUMERIC when a check failed, CANCELLED, UNSUPPORTED (a device that is not here). */
int32_t dsv4_selftest(const char *device, const dsv4_call *call, dsv4_check_fn check, void *user);

/* [end of the interface] */

#ifdef __cplusplus
}
#endif

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif

/* A NUL-terminated string as dsv4_text; it must outlive the call. */
static inline dsv4_text dsv4_str(const char *text)
{
    dsv4_text run;
    run.data = text;
    run.size = text ? strlen(text) : 0;
    return run;
}

#endif

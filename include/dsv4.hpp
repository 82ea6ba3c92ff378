/* dsv4.hpp - dsv4.h for C++17: objects that free themselves, exceptions, standard containers. Apache-2.0.
 *
 *     dsv4::Engine engine("pocket-v4");
 *     dsv4::Session session(engine);
 *     session.reply({{"user", "Who are you?"}}, [](const dsv4::Event &event) {
 *         if (event.kind == DSV4_EVENT_TEXT)
 *             std::cout << event.text;
 *     });
 *
 * Objects can be moved and not copied. A session keeps its engine open, in whatever order they are destroyed. One
 * that was moved from is refused by the library (INVALID_ARGUMENT), like any dead handle.
 * A failure is thrown as dsv4::Error. A callback may throw as well: the call stops, and what was thrown comes out
 * of it. A callback stops the call by returning true; one that returns nothing never stops it.
 * What each function does, and which errors it has, stands in dsv4.h at the function it calls.
 *
 * house-rule: long file, because one header is what a program carries along. */
#ifndef DSV4_HPP
#define DSV4_HPP

#include "dsv4.h"

#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace dsv4 {

using Tokens = std::vector<int32_t>;
using Result = dsv4_result;
using SyncReport = dsv4_sync_report;
using EngineInfo = dsv4_engine_info;
using SessionInfo = dsv4_session_info;

/* A call that failed; what() is the text of dsv4_last_error(). */
class Error : public std::runtime_error {
public:
    explicit Error(const dsv4_error_info &info)
        : std::runtime_error(info.text), status(info.status), function(info.function), path(info.path),
          name(info.name), offset(info.offset), needed(info.needed), available(info.available)
    {
    }

    int32_t status;       /* such as DSV4_ERR_BUSY */
    std::string function; /* the rest as in dsv4_error_info */
    std::string path;
    std::string name;
    int64_t offset;
    int64_t needed;
    int64_t available;
};

/* Throw when a function of dsv4.h failed, for those that have no wrapper here. */
inline void check(int32_t status)
{
    if (status == DSV4_OK)
        return;
    dsv4_error_info info = {};
    info.struct_size = sizeof info;
    dsv4_last_error_info(&info);
    /* Functions for signal handlers store nothing. */
    if (info.status != status)
        info.text = dsv4_status_name(status), info.function = info.path = info.name = "", info.status = status;
    throw Error(info);
}

/* Text for a member of one of the C structs; it must outlive the call. */
inline dsv4_text text(std::string_view view) { return {view.data(), view.size()}; }

/* ---- Callbacks ---- */

/* Anything callable with these arguments; see above for what it returns. */
template <class... Arguments> class Callback {
public:
    Callback() = default;

    template <class F, class = std::enable_if_t<std::is_invocable_v<F &, Arguments...>>>
    Callback(F function)
    {
        if constexpr (std::is_void_v<std::invoke_result_t<F &, Arguments...>>)
            call_ = [function = std::move(function)](Arguments... arguments) mutable {
                function(arguments...);
                return false;
            };
        else
            call_ = std::move(function);
    }

    explicit operator bool() const { return static_cast<bool>(call_); }
    bool operator()(Arguments... arguments) const { return call_(arguments...); }

private:
    std::function<bool(Arguments...)> call_;
};

/* A part of a reply; its texts live during the callback. */
struct Event {
    int32_t kind; /* DSV4_EVENT_TEXT, DSV4_EVENT_THINKING, DSV4_EVENT_TOOL_CALL */
    std::string_view text;
    std::string_view id, name, arguments; /* of a tool call */
    int32_t index;
    int32_t tokens;
};

using OnEvent = Callback<const Event &>;
using OnToken = Callback<int32_t /* token */, std::string_view /* piece */>;
using OnProgress = Callback<std::string_view /* what */, uint64_t /* done */, uint64_t /* total */>;
using OnCheck = Callback<std::string_view /* name */, bool /* has_passed */, std::string_view /* detail */>;

namespace detail {

inline std::string_view view(dsv4_text text) { return {text.data ? text.data : "", text.size}; }

/* A callback on its way through C, which no exception may cross: it is kept, and thrown behind the call. */
template <class... Arguments> class Carrier {
public:
    explicit Carrier(const Callback<Arguments...> &callback) : callback_(callback) {}

    template <class... Values> static int run(void *user, Values... values) noexcept
    {
        auto *self = static_cast<Carrier *>(user);
        try {
            return self->callback_(values...);
        } catch (...) {
            self->thrown_ = std::current_exception();
            return 1;
        }
    }

    void rethrow() const
    {
        if (thrown_)
            std::rethrow_exception(thrown_);
    }

    /* The C function, or NULL for no callback. */
    template <class Function> Function when_set(Function function) const { return callback_ ? function : nullptr; }

private:
    const Callback<Arguments...> &callback_;
    std::exception_ptr thrown_;
};

using EventCarrier = Carrier<const Event &>;
using TokenCarrier = Carrier<int32_t, std::string_view>;
using ProgressCarrier = Carrier<std::string_view, uint64_t, uint64_t>;
using CheckCarrier = Carrier<std::string_view, bool, std::string_view>;

inline int on_event(void *user, const dsv4_event *event) noexcept
{
    Event made = {event->kind,       view(event->text),      view(event->id), view(event->name),
                  view(event->arguments), event->index, event->tokens};
    return EventCarrier::run<const Event &>(user, made);
}

inline int on_token(void *user, int32_t token, dsv4_text piece) noexcept
{
    return TokenCarrier::run(user, token, view(piece));
}

inline int on_progress(void *user, const char *what, uint64_t done, uint64_t total) noexcept
{
    return ProgressCarrier::run(user, std::string_view(what), done, total);
}

inline int on_check(void *user, const char *name, int32_t has_passed, const char *detail) noexcept
{
    return CheckCarrier::run(user, std::string_view(name), has_passed != 0, std::string_view(detail));
}

/* Ask for the length, then for the content, again if it has grown in between. */
template <class Container, class F> Container fetch(F call)
{
    Container found;
    size_t size = 0;
    check(call(nullptr, 0, &size));
    int32_t status = DSV4_OK;
    do {
        found.resize(size);
        status = size ? call(found.data(), found.size(), &size) : DSV4_OK;
    } while (status == DSV4_ERR_BUFFER);
    check(status);
    found.resize(size);
    return found;
}

/* A C handle that is freed with its object. */
template <class T, int32_t (*Free)(T *)> struct Freeing {
    void operator()(T *handle) const noexcept { Free(handle); }
};
template <class T, int32_t (*Free)(T *)> using Handle = std::unique_ptr<T, Freeing<T, Free>>;

} // namespace detail

/* ---- What calls are given ---- */

/* Stops calls, also from a signal handler or another thread. */
class Cancel {
public:
    Cancel()
    {
        dsv4_cancel *made = nullptr;
        check(dsv4_cancel_new(&made));
        handle_.reset(made);
    }

    void trigger() const noexcept { dsv4_cancel_trigger(handle_.get()); }
    void reset() const noexcept { dsv4_cancel_reset(handle_.get()); }
    bool is_set() const noexcept { return dsv4_cancel_is_set(handle_.get()) == 1; }
    dsv4_cancel *get() const noexcept { return handle_.get(); }

private:
    detail::Handle<dsv4_cancel, dsv4_cancel_free> handle_;
};

/* How a long call is watched and stopped. The cancel object must outlive the call. */
struct Call {
    const Cancel *cancel = nullptr;
    OnProgress progress = {};
};

/* The option structs of dsv4.h, with the defaults in them. */
struct EngineOptions : dsv4_engine_options {
    EngineOptions() : dsv4_engine_options() { check(dsv4_engine_options_init(this, sizeof(dsv4_engine_options))); }
};

struct PromptOptions : dsv4_prompt_options {
    PromptOptions() : dsv4_prompt_options() { check(dsv4_prompt_options_init(this, sizeof(dsv4_prompt_options))); }
};

struct SamplingOptions : dsv4_sampling_options {
    SamplingOptions() : dsv4_sampling_options()
    {
        check(dsv4_sampling_options_init(this, sizeof(dsv4_sampling_options)));
    }
};

/* How to answer. */
struct ReplyOptions {
    PromptOptions prompt = {};
    SamplingOptions sampling = {};
    Call call = {};
    Result *result = nullptr; /* optional: filled also when the call throws */
};

struct ToolCall {
    std::string id, name, arguments;
};

/* One message of a conversation. */
struct Message {
    Message(std::string_view who, std::string_view what) : role(who), content(what) {}

    std::string role, content;
    std::string reasoning = {};
    std::vector<ToolCall> tool_calls = {};
    std::string tool_call_id = {};
    bool is_prefix = false;
};

namespace detail {

/* Messages as C wants them; the texts stay where they are. */
class MessageArray {
public:
    explicit MessageArray(const std::vector<Message> &messages) : calls_(messages.size())
    {
        for (size_t i = 0; i < messages.size(); i++) {
            const Message &from = messages[i];
            for (const ToolCall &call : from.tool_calls)
                calls_[i].push_back({text(call.id), text(call.name), text(call.arguments)});
            messages_.push_back({sizeof(dsv4_message), from.is_prefix, text(from.role), text(from.content),
                                 text(from.reasoning), calls_[i].data(), calls_[i].size(),
                                 text(from.tool_call_id)});
        }
    }

    const dsv4_message *data() const { return messages_.data(); }
    size_t size() const { return messages_.size(); }

private:
    std::vector<std::vector<dsv4_tool_call>> calls_;
    std::vector<dsv4_message> messages_;
};

/* `dsv4_call` of a Call, for one call of the library. */
class WatchedCall {
public:
    explicit WatchedCall(const Call &call) : progress_(call.progress)
    {
        record_.struct_size = sizeof record_;
        record_.cancel = call.cancel ? call.cancel->get() : nullptr;
        record_.progress = progress_.when_set(on_progress);
        record_.user = &progress_;
    }

    const dsv4_call *get() const { return &record_; }

    /* Throw what the callback threw, or the failure of the call. */
    void finish(int32_t status) const
    {
        progress_.rethrow();
        check(status);
    }

private:
    ProgressCarrier progress_;
    dsv4_call record_ = {};
};

} // namespace detail

/* ---- Engine ---- */

class Engine {
public:
    explicit Engine(const std::string &path, const EngineOptions &options = {}, const Call &call = {})
    {
        detail::WatchedCall watched(call);
        dsv4_engine *made = nullptr;
        int32_t status = dsv4_engine_open(path.c_str(), &options, watched.get(), &made);
        handle_.reset(made, dsv4_engine_close);
        watched.finish(status);
    }

    Engine(Engine &&) noexcept = default;
    Engine &operator=(Engine &&) noexcept = default;
    Engine(const Engine &) = delete;
    Engine &operator=(const Engine &) = delete;

    EngineInfo info() const
    {
        EngineInfo found = {};
        found.struct_size = sizeof found;
        check(dsv4_engine_get_info(get(), &found));
        return found;
    }

    std::string describe_json() const
    {
        return detail::fetch<std::string>(
            [&](char *to, size_t room, size_t *size) { return dsv4_engine_describe_json(get(), to, room, size); });
    }

    std::string memory_json() const
    {
        return detail::fetch<std::string>(
            [&](char *to, size_t room, size_t *size) { return dsv4_engine_memory_json(get(), to, room, size); });
    }

    Tokens tokenize(std::string_view plain, bool match_special = false) const
    {
        return detail::fetch<Tokens>([&](int32_t *to, size_t room, size_t *count) {
            return dsv4_tokenize(get(), text(plain), match_special, to, room, count);
        });
    }

    std::string detokenize(const Tokens &tokens, bool show_special = false) const
    {
        return detail::fetch<std::string>([&](char *to, size_t room, size_t *size) {
            return dsv4_detokenize(get(), tokens.data(), tokens.size(), show_special, to, room, size);
        });
    }

    std::string token_bytes(int32_t token) const
    {
        return detail::fetch<std::string>(
            [&](char *to, size_t room, size_t *size) { return dsv4_token_bytes(get(), token, to, room, size); });
    }

    /* -1 when there is none. */
    int32_t special_token(std::string_view spelled) const
    {
        int32_t token = -1;
        check(dsv4_special_token(get(), text(spelled), &token));
        return token;
    }

    std::string render(const std::vector<Message> &messages, const PromptOptions &options = {}) const
    {
        detail::MessageArray array(messages);
        return detail::fetch<std::string>([&](char *to, size_t room, size_t *size) {
            return dsv4_chat_render(get(), array.data(), array.size(), &options, to, room, size);
        });
    }

    Tokens encode(const std::vector<Message> &messages, const PromptOptions &options = {}) const
    {
        detail::MessageArray array(messages);
        return detail::fetch<Tokens>([&](int32_t *to, size_t room, size_t *count) {
            return dsv4_chat_encode(get(), array.data(), array.size(), &options, to, room, count);
        });
    }

    dsv4_engine *get() const noexcept { return handle_.get(); }

private:
    friend class Session;
    friend class Parser;
    std::shared_ptr<dsv4_engine> handle_;
};

/* ---- Parser and sampler ---- */

class Parser {
public:
    Parser(const Engine &engine, const std::vector<Message> &messages, const PromptOptions &options = {})
        : engine_(engine.handle_)
    {
        detail::MessageArray array(messages);
        dsv4_parser *made = nullptr;
        check(dsv4_parser_new(engine.get(), array.data(), array.size(), &options, &made));
        handle_.reset(made);
    }

    /* True once nothing that follows means anything. */
    bool push(const Tokens &tokens, const OnEvent &event)
    {
        detail::EventCarrier carrier(event);
        int32_t is_complete = 0;
        int32_t status = dsv4_parser_push(get(), tokens.data(), tokens.size(), carrier.when_set(detail::on_event),
                                          &carrier, &is_complete);
        carrier.rethrow();
        check(status);
        return is_complete != 0;
    }

    void finish(const OnEvent &event)
    {
        detail::EventCarrier carrier(event);
        int32_t status = dsv4_parser_finish(get(), carrier.when_set(detail::on_event), &carrier);
        carrier.rethrow();
        check(status);
    }

    dsv4_parser *get() const noexcept { return handle_.get(); }

private:
    std::shared_ptr<dsv4_engine> engine_;
    detail::Handle<dsv4_parser, dsv4_parser_free> handle_;
};

class Sampler {
public:
    Sampler(const SamplingOptions &options, int32_t vocab_size)
    {
        dsv4_sampler *made = nullptr;
        check(dsv4_sampler_new(&options, vocab_size, &made));
        handle_.reset(made);
    }

    /* One that goes on from saved bytes. */
    explicit Sampler(const std::vector<unsigned char> &state)
    {
        dsv4_sampler *made = nullptr;
        check(dsv4_sampler_restore(state.data(), state.size(), &made));
        handle_.reset(made);
    }

    int32_t sample(const std::vector<float> &logits) const
    {
        int32_t token = -1;
        check(dsv4_sampler_sample(get(), logits.data(), logits.size(), &token));
        return token;
    }

    void accept(const Tokens &tokens) { check(dsv4_sampler_accept(get(), tokens.data(), tokens.size())); }
    void observe(const Tokens &tokens) { check(dsv4_sampler_observe(get(), tokens.data(), tokens.size())); }

    std::vector<unsigned char> save() const
    {
        return detail::fetch<std::vector<unsigned char>>(
            [&](void *to, size_t room, size_t *size) { return dsv4_sampler_save(get(), to, room, size); });
    }

    dsv4_sampler *get() const noexcept { return handle_.get(); }

private:
    detail::Handle<dsv4_sampler, dsv4_sampler_free> handle_;
};

/* ---- Session ---- */

/* A token and its log probability, in nats. */
struct TokenLogprob {
    int32_t token;
    double logprob;
};

class Session {
public:
    explicit Session(const Engine &engine, int32_t context = 0) : engine_(engine.handle_)
    {
        dsv4_session *made = nullptr;
        check(dsv4_session_new(engine.get(), context, &made));
        handle_.reset(made);
    }

    SyncReport sync(const Tokens &tokens, const Call &call = {})
    {
        detail::WatchedCall watched(call);
        SyncReport report = {};
        report.struct_size = sizeof report;
        watched.finish(dsv4_session_sync(get(), tokens.data(), tokens.size(), watched.get(), &report));
        return report;
    }

    void eval(const Tokens &tokens, const Call &call = {})
    {
        detail::WatchedCall watched(call);
        watched.finish(dsv4_session_eval(get(), tokens.data(), tokens.size(), watched.get()));
    }

    SyncReport rewind(size_t count, const Call &call = {})
    {
        detail::WatchedCall watched(call);
        SyncReport report = {};
        report.struct_size = sizeof report;
        watched.finish(dsv4_session_rewind(get(), count, watched.get(), &report));
        return report;
    }

    void mark_turn() { check(dsv4_session_mark_turn(get())); }

    SessionInfo info() const
    {
        SessionInfo found = {};
        found.struct_size = sizeof found;
        check(dsv4_session_get_info(get(), &found));
        return found;
    }

    Tokens tokens() const
    {
        return detail::fetch<Tokens>(
            [&](int32_t *to, size_t room, size_t *count) { return dsv4_session_tokens(get(), to, room, count); });
    }

    std::vector<float> logits()
    {
        return detail::fetch<std::vector<float>>(
            [&](float *to, size_t room, size_t *count) { return dsv4_session_logits(get(), to, room, count); });
    }

    std::vector<TokenLogprob> top_logprobs(size_t count)
    {
        Tokens tokens(count);
        std::vector<double> logprobs(count);
        check(dsv4_session_top_logprobs(get(), count, tokens.data(), logprobs.data()));
        std::vector<TokenLogprob> found;
        for (size_t i = 0; i < count; i++)
            found.push_back({tokens[i], logprobs[i]});
        return found;
    }

    /* Negative log likelihoods, in nats. */
    std::vector<double> score(const Tokens &tokens, const Call &call = {})
    {
        detail::WatchedCall watched(call);
        std::vector<double> nll(tokens.size());
        watched.finish(dsv4_session_score(get(), tokens.data(), tokens.size(), watched.get(), nll.data()));
        return nll;
    }

    int32_t sample(const Sampler &sampler)
    {
        int32_t token = -1;
        check(dsv4_session_sample(get(), sampler.get(), &token));
        return token;
    }

    Result generate(const SamplingOptions &options, const Tokens &stop_tokens, const OnToken &token,
                    const Call &call = {})
    {
        detail::WatchedCall watched(call);
        detail::TokenCarrier carrier(token);
        Result result = {};
        result.struct_size = sizeof result;
        int32_t status =
            dsv4_session_generate(get(), &options, stop_tokens.data(), stop_tokens.size(), watched.get(),
                                  carrier.when_set(detail::on_token), &carrier, &result);
        carrier.rethrow();
        watched.finish(status);
        return result;
    }

    Result reply(const std::vector<Message> &messages, const OnEvent &event, const ReplyOptions &options = {})
    {
        detail::MessageArray array(messages);
        return answer(event, options, [&](auto... rest) {
            return dsv4_session_reply(get(), array.data(), array.size(), rest...);
        });
    }

    Result reply_json(std::string_view chat, const OnEvent &event, const ReplyOptions &options = {})
    {
        return answer(event, options,
                      [&](auto... rest) { return dsv4_session_reply_json(get(), text(chat), rest...); });
    }

    void save(const std::string &path, const Call &call = {})
    {
        detail::WatchedCall watched(call);
        watched.finish(dsv4_session_save(get(), path.c_str(), watched.get()));
    }

    void load(const std::string &path, const Call &call = {})
    {
        detail::WatchedCall watched(call);
        watched.finish(dsv4_session_load(get(), path.c_str(), watched.get()));
    }

    std::vector<unsigned char> save_memory() const
    {
        return detail::fetch<std::vector<unsigned char>>([&](void *to, size_t room, size_t *size) {
            return dsv4_session_save_memory(get(), nullptr, to, room, size);
        });
    }

    void load_memory(const std::vector<unsigned char> &state)
    {
        check(dsv4_session_load_memory(get(), state.data(), state.size(), nullptr));
    }

    dsv4_session *get() const noexcept { return handle_.get(); }

private:
    template <class F> Result answer(const OnEvent &event, const ReplyOptions &options, F reply)
    {
        detail::WatchedCall watched(options.call);
        detail::EventCarrier carrier(event);
        Result result = {};
        result.struct_size = sizeof result;
        int32_t status = reply(&options.prompt, &options.sampling, watched.get(),
                               carrier.when_set(detail::on_event), &carrier, &result);
        if (options.result)
            *options.result = result;
        carrier.rethrow();
        watched.finish(status);
        return result;
    }

    std::shared_ptr<dsv4_engine> engine_; /* closed behind the session */
    detail::Handle<dsv4_session, dsv4_session_free> handle_;
};

/* ---- Without an engine ---- */

/* Start the library; see dsv4_init. */
inline void init(const std::string &python = "") { check(dsv4_init(DSV4_ABI_VERSION, python.c_str())); }

inline std::string devices_json() { return detail::fetch<std::string>(dsv4_devices_json); }

inline std::string inspect_json(const std::string &path)
{
    return detail::fetch<std::string>(
        [&](char *to, size_t room, size_t *size) { return dsv4_inspect_json(path.c_str(), to, room, size); });
}

inline std::string plan_json(const std::string &path, const EngineOptions &options = {})
{
    return detail::fetch<std::string>(
        [&](char *to, size_t room, size_t *size) { return dsv4_plan_json(path.c_str(), &options, to, room, size); });
}

inline std::string snapshot_inspect_json(const std::string &path)
{
    return detail::fetch<std::string>([&](char *to, size_t room, size_t *size) {
        return dsv4_snapshot_inspect_json(path.c_str(), to, room, size);
    });
}

inline void selftest(const OnCheck &on_check = {}, const std::string &device = "auto", const Call &call = {})
{
    detail::WatchedCall watched(call);
    detail::CheckCarrier carrier(on_check);
    int32_t status =
        dsv4_selftest(device.c_str(), watched.get(), carrier.when_set(detail::on_check), &carrier);
    carrier.rethrow();
    watched.finish(status);
}

} // namespace dsv4

#endif

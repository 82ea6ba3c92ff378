/* Every part of dsv4.hpp, and what must not go wrong in it: exceptions through C, leaks, the order of death.
 *     wrapper MODEL FOLDER */
#include "dsv4.hpp"

#include "check.h"

#include <csignal>
#include <filesystem>
#include <optional>
#include <thread>

namespace {

using dsv4::Cancel;
using dsv4::Engine;
using dsv4::Error;
using dsv4::Event;
using dsv4::Message;
using dsv4::ReplyOptions;
using dsv4::Session;

const std::vector<Message> question = {{"user", "What is the capital of Peru?"}};

/* Status that a function throws; DSV4_OK when it throws nothing. */
template <class F> int32_t status_of(F function)
{
    try {
        function();
    } catch (const Error &error) {
        return error.status;
    }
    return DSV4_OK;
}

ReplyOptions plain()
{
    ReplyOptions options;
    options.prompt.thinking = "none";
    options.sampling.temperature = 0;
    return options;
}

std::string answer(Session &session)
{
    std::string said;
    session.reply(question, [&](const Event &event) { said += event.text; }, plain());
    return said;
}

void check_errors()
{
    try {
        Engine engine("/no/such/file.gguf");
        CHECK("a failure is thrown", false);
    } catch (const Error &error) {
        CHECK("a failure is thrown", error.status == DSV4_ERR_NOT_FOUND);
        CHECK("an error has its text", std::string(error.what()).find("/no/such/file.gguf") != std::string::npos);
        CHECK("an error has its path", error.path == "/no/such/file.gguf");
        CHECK("an error has its function", error.function == "dsv4_engine_open");
        CHECK("an error without a place says so", error.offset == -1 && error.needed == -1);
    }
    CHECK("a status that stored nothing is thrown by its name", status_of([] {
              dsv4::check(dsv4_cancel_trigger(nullptr));
          }) == DSV4_ERR_INVALID_ARGUMENT);
}

void check_vocabulary(const Engine &engine)
{
    std::string_view part = std::string_view("Who are you? And more").substr(0, 12);
    dsv4::Tokens tokens = engine.tokenize(part);
    CHECK("a view that ends early is respected", engine.detokenize(tokens) == "Who are you?");
    CHECK("no text makes no tokens", engine.tokenize({}).empty() && engine.detokenize({}).empty());
    std::string bytes;
    for (int32_t token : tokens)
        bytes += engine.token_bytes(token);
    CHECK("bytes of tokens join to the text", bytes == part);
    CHECK("a special token is found", engine.special_token("<think>") >= 0);
    CHECK("no special token is -1", engine.special_token("nothing") == -1);
    CHECK("a conversation renders", engine.render(question).find("capital of Peru") != std::string::npos);
    CHECK("the prompt as tokens is the prompt", engine.detokenize(engine.encode(question), true) ==
                                                    engine.render(question));
    CHECK("facts of an engine", engine.info().vocab_size > 1000);
    CHECK("JSON of an engine", engine.describe_json()[0] == '{' && engine.memory_json()[0] == '{');
}

void check_exceptions(Session &session)
{
    struct Mine {
        int number;
    };
    auto caught = [](auto function) {
        try {
            function();
        } catch (const Mine &mine) {
            return mine.number;
        }
        return 0;
    };
    CHECK("what an event callback throws comes out", caught([&] {
              session.reply(question, [](const Event &) { throw Mine{7}; }, plain());
          }) == 7);
    CHECK("what a token callback throws comes out", caught([&] {
              session.generate(plain().sampling, {}, [](int32_t, std::string_view) { throw Mine{8}; });
          }) == 8);
    CHECK("what a progress callback throws comes out", caught([&] {
              dsv4::Call call;
              call.progress = [](std::string_view, uint64_t, uint64_t) { throw Mine{9}; };
              session.sync({}), session.eval({1, 2, 3}, call);
          }) == 9);
    CHECK("the session works after that", answer(session) == "The capital of Peru is Lima.");
}

void check_stopping(Session &session)
{
    int events = 0;
    dsv4::Result result = session.reply(question, [&](const Event &) { return ++events == 2; }, plain());
    CHECK("a callback that returns true stops", events == 2 && result.finish_reason == DSV4_FINISH_CANCELLED);
    static Cancel *stop;
    Cancel cancel;
    stop = &cancel;
    std::signal(SIGUSR1, [](int) { stop->trigger(); });
    ReplyOptions options = plain();
    options.call.cancel = &cancel;
    options.result = &result;
    int32_t status = status_of([&] {
        session.sync({});
        session.reply(question, [](const Event &) { std::raise(SIGUSR1); }, options);
    });
    CHECK("a signal handler stops a reply", status == DSV4_ERR_CANCELLED && cancel.is_set());
    CHECK("the result is filled although the call throws", result.generated_tokens >= 1);
    cancel.reset();
    CHECK("a cancel object can be used again", !cancel.is_set());
}

void check_timeline(const Engine &engine, Session &session)
{
    dsv4::Tokens prompt = engine.encode(question, plain().prompt);
    session.sync({});
    CHECK("sync reports", session.sync(prompt).evaluated == static_cast<int32_t>(prompt.size()));
    CHECK("the timeline is what was synced", session.tokens() == prompt);
    std::vector<float> logits = session.logits();
    std::vector<dsv4::TokenLogprob> best = session.top_logprobs(3);
    dsv4::Sampler sampler(plain().sampling, static_cast<int32_t>(logits.size()));
    CHECK("a sampler takes the likeliest", sampler.sample(logits) == best[0].token);
    CHECK("a session samples the same", session.sample(sampler) == best[0].token);
    sampler.observe(prompt), sampler.accept({best[0].token});
    dsv4::Sampler again(sampler.save());
    CHECK("a sampler saves and restores", again.sample(logits) == sampler.sample(logits));
    session.mark_turn();
    std::vector<double> nll = session.score({best[0].token});
    CHECK("score is the log probability", nll.size() == 1 && std::abs(nll[0] + best[0].logprob) < 1e-6);
    CHECK("rewind reports", session.rewind(1).reused > 0 && session.info().length == session.sync(prompt).reused);

    dsv4::Parser parser(engine, question, plain().prompt);
    std::string text;
    auto keep = [&](const Event &event) { text += event.text; };
    dsv4::SamplingOptions sampling = plain().sampling;
    sampling.max_tokens = 50;
    session.generate(sampling, {engine.info().eos_id},
                     [&](int32_t token, std::string_view) { return parser.push({token}, keep); });
    parser.finish(keep);
    CHECK("a parser reads what was generated", text == "The capital of Peru is Lima.");
}

void check_state(const Engine &engine, Session &session, const std::string &folder)
{
    const std::string path = folder + "/talk.dsv4s";
    answer(session);
    session.save(path);
    Session loaded(engine), copied(engine);
    loaded.load(path);
    copied.load_memory(session.save_memory());
    CHECK("a session loads from a file", loaded.tokens() == session.tokens());
    CHECK("a session loads from memory", copied.logits() == session.logits());
    CHECK("a saved session can be inspected", dsv4::snapshot_inspect_json(path)[0] == '{');
}

void check_lives(const std::string &model)
{
    std::optional<Engine> engine(model);
    Session first(*engine), second(std::move(first));
    engine.reset();
    CHECK("a session outlives the engine object", answer(second) == "The capital of Peru is Lima.");
    CHECK("one that was moved from is refused", status_of([&] { first.mark_turn(); }) ==
                                                    DSV4_ERR_INVALID_ARGUMENT);
    static_assert(!std::is_copy_constructible_v<Session> && !std::is_copy_constructible_v<Engine>);
    static_assert(std::is_nothrow_move_constructible_v<Session> && std::is_nothrow_move_assignable_v<Engine>);
    for (int i = 0; i < 5000; i++) /* more than there are at once */
        Cancel();
    CHECK("cancel objects are freed", Cancel().get() != nullptr);
}

void check_tools(Session &session)
{
    ReplyOptions options = plain();
    options.prompt.tools_json = dsv4::text(
        R"([{"name": "get_weather", "description": "Weather of a city",
             "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}])");
    Message call("assistant", "");
    std::vector<Message> talk = {{"user", "What is the weather in Lima?"}};
    dsv4::Result result = session.reply(talk, [&](const Event &event) {
        if (event.kind == DSV4_EVENT_TOOL_CALL)
            call.tool_calls.push_back({std::string(event.id), std::string(event.name), std::string(event.arguments)});
    }, options);
    CHECK("a tool call comes as an event", call.tool_calls.size() == 1 && call.tool_calls[0].name == "get_weather");
    CHECK("tool calls are counted", result.tool_calls == 1 && result.finish_reason == DSV4_FINISH_TOOL_CALLS);
    talk.push_back(call);
    talk.emplace_back("tool", R"({"sky": "sunny", "degrees": 21})");
    talk.back().tool_call_id = call.tool_calls.empty() ? "" : call.tool_calls[0].id;
    std::string said;
    session.reply(talk, [&](const Event &event) { said += event.text; }, options);
    CHECK("the result of a tool is answered", said.find("sunny") != std::string::npos);
    said.clear();
    session.reply_json(R"([{"role": "user", "content": "What is the capital of Peru?"}])",
                       [&](const Event &event) { said += event.text; }, plain());
    CHECK("a conversation as JSON is answered", said == "The capital of Peru is Lima.");
}

} // namespace

int main(int count, char **arguments)
{
    const std::string model = count > 1 ? arguments[1] : "", folder = count > 2 ? arguments[2] : ".";
    dsv4::init();
    check_errors();
    dsv4::EngineOptions options;
    options.context = 4096;
    Engine engine(model, options);
    Session session(engine);
    check_vocabulary(engine);
    check_exceptions(session);
    check_stopping(session);
    check_timeline(engine, session);
    check_state(engine, session, folder);
    check_tools(session);
    check_lives(model);
    CHECK("devices, inspect and plan give JSON", dsv4::devices_json()[0] == '[' &&
                                                     dsv4::inspect_json(model)[0] == '{' &&
                                                     dsv4::plan_json(model, options)[0] == '{');
    int checks = 0;
    CHECK("the self test can be stopped", status_of([&] {
              dsv4::selftest([&](std::string_view, bool, std::string_view) { return ++checks == 1; });
          }) == DSV4_ERR_CANCELLED && checks == 1);
    return 0;
}

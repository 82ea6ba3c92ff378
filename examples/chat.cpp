/* One question with a tool the model may call, in C++17:
 *     ./chat_cpp pocket-v4 "What is the weather in Lima?" */
#include <dsv4.hpp>

#include <iostream>

namespace {

const char *const tools = R"([{
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}])";

/* Print events, and keep the message they make. */
class Printer {
public:
    void operator()(const dsv4::Event &event)
    {
        if (event.kind == DSV4_EVENT_TOOL_CALL) {
            std::cout << "[" << event.name << " " << event.arguments << "]\n";
            message.tool_calls.push_back(
                {std::string(event.id), std::string(event.name), std::string(event.arguments)});
        } else if (event.kind == DSV4_EVENT_TEXT) {
            std::cout << event.text << std::flush;
            message.content += event.text;
        } else {
            message.reasoning += event.text;
        }
    }

    dsv4::Message message{"assistant", ""};
};

} // namespace

int main(int count, char **arguments)
try {
    dsv4::Engine engine(count > 1 ? arguments[1] : "pocket-v4");
    dsv4::Session session(engine);
    dsv4::ReplyOptions options;
    options.prompt.tools_json = dsv4::text(tools);
    options.sampling.temperature = 0; /* a call with the likeliest arguments, the same each time */

    std::vector<dsv4::Message> talk = {{"user", count > 2 ? arguments[2] : "What is the weather in Lima?"}};
    while (talk.back().role != "assistant") {
        Printer printer;
        session.reply(talk, std::ref(printer), options);
        talk.push_back(printer.message);
        for (const dsv4::ToolCall &call : printer.message.tool_calls) {
            dsv4::Message result("tool", R"({"sky": "sunny", "degrees": 21})");
            result.tool_call_id = call.id;
            talk.push_back(result);
        }
    }
    std::cout << "\n";
} catch (const dsv4::Error &error) {
    std::cerr << dsv4_status_name(error.status) << ": " << error.what() << "\n";
    return 1;
}

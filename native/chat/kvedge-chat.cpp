#include "kvedge-chat.h"

#include "chat.h"
#include "json.h"

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>

using json = common_json;

struct kvedge_chat_template {
    common_chat_templates_ptr templates;
};

struct kvedge_chat_reader {
    common_chat_parser_params params;
};

namespace {

// The error message when no memory is left for a message. kvedge_chat_free does not free it.
char no_memory[] = "out of memory";

char * copied(const std::string & text) {
    char * out = static_cast<char *>(std::malloc(text.size() + 1));
    if (out == nullptr) {
        return no_memory;
    }
    std::memcpy(out, text.c_str(), text.size() + 1);
    return out;
}

template <typename F> int guarded(char ** out, const F & run) {
    try {
        run();
        return 0;
    } catch (const std::bad_alloc &) {
        *out = no_memory;
    } catch (const std::exception & error) {
        *out = copied(error.what());
    } catch (...) {
        *out = copied("unknown error");
    }
    return 1;
}

const char * name_of(common_grammar_trigger_type type) {
    switch (type) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN: return "token";
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD: return "word";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN: return "pattern";
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: return "pattern_full";
    }
    return "";
}

common_chat_templates_inputs inputs_of(const json & request) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(request.at("messages"));
    if (request.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(request.at("tools"));
    }
    inputs.tool_choice = common_chat_tool_choice_parse_oaicompat(request.value("tool_choice", "auto"));
    inputs.parallel_tool_calls = request.value("parallel_tool_calls", false);
    inputs.reasoning_format = common_reasoning_format_from_name(request.value("reasoning_format", "auto"));
    inputs.enable_thinking = request.value("enable_thinking", true);
    inputs.add_generation_prompt = request.value("add_generation_prompt", true);
    if (request.contains("values")) {
        for (const auto & [name, value] : request.at("values").items()) {
            inputs.chat_template_kwargs[name] = value.dump();
        }
    }
    return inputs;
}

json described(const common_chat_params & params) {
    json triggers = json::array();
    for (const auto & trigger : params.grammar_triggers) {
        triggers.push_back({ { "type", name_of(trigger.type) }, { "value", trigger.value } });
    }
    return json{
        { "format", static_cast<int>(params.format) },
        { "parser", params.parser },
        { "begin", params.generation_prompt },
        { "grammar", params.grammar },
        { "lazy", params.grammar_lazy },
        { "triggers", triggers },
        { "preserved", params.preserved_tokens },
        { "stops", params.additional_stops },
        { "thinks", params.supports_thinking },
        { "thought_begin", params.thinking_start_tag },
        { "thought_end", params.thinking_end_tags.empty() ? "" : params.thinking_end_tags.front() },
    };
}

// Throws if brackets are nested more than 200 deep. The parser recurses for each level of a nested argument, and 5,000 to 10,000
// levels overflow the stack; a model can write more than that.
void check_nesting(const std::string & text) {
    const int most = 200;
    int depth = 0;
    for (const char c : text) {
        depth += (c == '[' || c == '{') - (depth > 0 && (c == ']' || c == '}'));
        if (depth > most) {
            throw std::invalid_argument("the text is nested too deeply");
        }
    }
}

json told(const common_chat_msg & message) {
    json calls = json::array();
    for (const auto & call : message.tool_calls) {
        calls.push_back({ { "id", call.id }, { "name", call.name }, { "arguments", call.arguments } });
    }
    return json{
        { "content", message.render_content() },
        { "reasoning_content", message.reasoning_content },
        { "tool_calls", calls },
    };
}

// Restores the end of a complete answer, which llama.cpp holds back if it may begin a mark. To get the end as text, the function
// parses the answer again with a character behind it that is in no mark.
void complete(common_chat_msg & message, const std::string & text, const common_chat_parser_params & params) {
    if (!message.tool_calls.empty()) {
        return;
    }
    const std::string stop = "\x01";
    const common_chat_msg longer = common_chat_parse(text + stop, true, params);
    if (!longer.tool_calls.empty()) {
        return;
    }
    const auto extend = [&](std::string & part, const std::string & with) {
        const size_t n = with.size();
        if (n > part.size() && with.compare(n - 1, 1, stop) == 0 && with.compare(0, part.size(), part) == 0) {
            part = with.substr(0, n - 1);
        }
    };
    if (longer.reasoning_content == message.reasoning_content) {
        extend(message.content, longer.content);
    } else if (longer.content == message.content) {
        extend(message.reasoning_content, longer.reasoning_content);
    }
}

}  // namespace

int kvedge_chat_read_template(const char * text, kvedge_chat_template ** made, char ** why) {
    return guarded(why, [&] {
        const json given = json::parse(text);
        const auto source = given.at("template").get<std::string>();
        const std::string bos = given.value("bos", ""), eos = given.value("eos", "");
        auto out = std::make_unique<kvedge_chat_template>();
        try {
            out->templates = common_chat_templates_init(nullptr, source, bos, eos);
        } catch (const std::exception &) {
            common_chat_template(source, bos, eos);  // throws a better message: common_chat_templates_init slices its exception
            throw;
        }
        *made = out.release();
    });
}

int kvedge_chat_write(const kvedge_chat_template * chat, const char * request, char ** answer) {
    return guarded(answer, [&] {
        const auto inputs = inputs_of(json::parse(request));
        *answer = copied(json(common_chat_templates_apply(chat->templates.get(), inputs).prompt).dump_safe());
    });
}

int kvedge_chat_describe(const kvedge_chat_template * chat, const char * request, char ** answer) {
    return guarded(answer, [&] {
        const auto inputs = inputs_of(json::parse(request));
        *answer = copied(described(common_chat_templates_apply(chat->templates.get(), inputs)).dump_safe());
    });
}

void kvedge_chat_close_template(kvedge_chat_template * chat) {
    delete chat;
}

int kvedge_chat_open(const char * text, kvedge_chat_reader ** reader, char ** why) {
    return guarded(why, [&] {
        const json given = json::parse(text);
        const int format = given.at("format").get<int>();
        if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT) {
            throw std::invalid_argument("there is no such format");
        }
        auto made = std::make_unique<kvedge_chat_reader>();
        made->params.format = static_cast<common_chat_format>(format);
        made->params.generation_prompt = given.at("begin").get<std::string>();
        const auto parser = given.at("parser").get<std::string>();
        if (!parser.empty()) {
            made->params.parser.load(parser);
        }
        *reader = made.release();
    });
}

int kvedge_chat_read(const kvedge_chat_reader * reader, const char * text, size_t n, int partial, char ** answer) {
    return guarded(answer, [&] {
        const std::string given(text, n);
        check_nesting(given);
        auto message = common_chat_parse(given, partial != 0, reader->params);
        if (partial == 0) {
            complete(message, given, reader->params);
        }
        *answer = copied(told(message).dump_safe());
    });
}

void kvedge_chat_close(kvedge_chat_reader * reader) {
    delete reader;
}

void kvedge_chat_free(char * answer) {
    if (answer != no_memory) {
        std::free(answer);
    }
}

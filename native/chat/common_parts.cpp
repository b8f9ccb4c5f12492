// The functions of llama.cpp that its chat code calls. llama.cpp's common library would link all of llama.cpp, an HTTP library and
// a log thread, but the chat code needs only a few string functions.

#include "common.h"
#include "ggml.h"
#include "log.h"

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

std::string string_join(const std::vector<std::string> & values, const std::string & separator) {
    std::string out;
    for (size_t i = 0; i < values.size(); ++i) {
        out += (i > 0 ? separator : "") + values[i];
    }
    return out;
}

std::vector<std::string> string_split(const std::string & text, const std::string & delimiter) {
    std::vector<std::string> out;
    size_t start = 0;
    for (size_t end; (end = text.find(delimiter, start)) != std::string::npos; start = end + delimiter.size()) {
        out.push_back(text.substr(start, end - start));
    }
    out.push_back(text.substr(start));
    return out;
}

std::string string_repeat(const std::string & text, size_t n) {
    std::string out;
    for (size_t i = 0; i < n; ++i) {
        out += text;
    }
    return out;
}

void string_replace_all(std::string & text, const std::string & search, const std::string & replace) {
    if (search.empty()) {
        return;
    }
    std::string out;
    size_t start = 0;
    for (size_t at; (at = text.find(search, start)) != std::string::npos; start = at + search.size()) {
        out.append(text, start, at - start).append(replace);
    }
    text = out.append(text, start, std::string::npos);
}

// Throws, so that a failed assertion in ggml fails one call and does not end the process.
void ggml_abort(const char *, int, const char * form, ...) {
    char text[256];
    va_list given;
    va_start(given, form);
    std::vsnprintf(text, sizeof(text), form, given);
    va_end(given);
    throw std::logic_error(text);
}

// These functions log nothing.
int common_log_get_verbosity_thold(void) {
    return -1;
}
struct common_log * common_log_main() {
    return nullptr;
}
void common_log_add(struct common_log *, enum ggml_log_level, const char *, ...) {}

// The chat code gets strings only. The next functions would need a model: they throw, or return "none".
static void no_model() {
    throw std::logic_error("there is no model");
}
std::string common_token_to_piece(const struct llama_vocab *, llama_token, bool) {
    no_model();
    return "";
}
std::vector<llama_token> common_tokenize(const struct llama_vocab *, const std::string &, bool, bool) {
    no_model();
    return {};
}
int32_t llama_chat_apply_template(
    const char *, const struct llama_chat_message *, size_t, bool, char *, int32_t) {
    return -1;
}
const char * llama_model_chat_template(const struct llama_model *, const char *) {
    return nullptr;
}
const struct llama_vocab * llama_model_get_vocab(const struct llama_model *) {
    return nullptr;
}
llama_token llama_vocab_bos(const struct llama_vocab *) {
    return LLAMA_TOKEN_NULL;
}
llama_token llama_vocab_eos(const struct llama_vocab *) {
    return LLAMA_TOKEN_NULL;
}
bool llama_vocab_get_add_bos(const struct llama_vocab *) {
    return false;
}
bool llama_vocab_get_add_eos(const struct llama_vocab *) {
    return false;
}

// libkvedge-chat: runs a model's chat template by llama.cpp's common chat code. It writes prompts, describes the dialect in which
// the model writes tool calls and reasoning, and reads answers in this dialect into messages. kvedge's Python package uses it.
//
// All texts are UTF-8. A function returns 0 on success. On failure it returns 1 and sets *answer (or *why) to an error message of one
// line. The caller frees *answer and *why with kvedge_chat_free. No function prints, keeps a pointer of the caller, or ends the
// process. Several threads may use different readers at the same time.
#pragma once

#include <stddef.h>

#if defined(_WIN32)
#    define KVEDGE_CHAT_API __declspec(dllexport)
#else
#    define KVEDGE_CHAT_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvedge_chat_template kvedge_chat_template;
typedef struct kvedge_chat_reader kvedge_chat_reader;

// A template is a program that may use any time and memory. Call the next three functions in a process with limits on both.
//
// Reads a template and makes *made. Runs the template several times to find what it can write. text: a JSON object with the strings
// `template`, `bos` and `eos`.
KVEDGE_CHAT_API int kvedge_chat_read_template(const char * text, kvedge_chat_template ** made, char ** why);

// Writes a prompt. *answer: the prompt as a JSON string. request: a JSON object with
//   messages                  as in OpenAI's chat completions
//   add_generation_prompt     whether the prompt ends with the beginning of an answer; default true
//   tools                     as in OpenAI's chat completions; optional
//   tool_choice               "auto" (default), "required" or "none"
//   parallel_tool_calls       default false
//   reasoning_format          "none", "auto" (default), "deepseek" or "deepseek-legacy"
//   enable_thinking           default true
//   values                    an object: variables for the template; optional
KVEDGE_CHAT_API int kvedge_chat_write(const kvedge_chat_template * chat, const char * request, char ** answer);

// Describes the dialect of answers to a request (as for kvedge_chat_write). *answer: a JSON object with
//   format, parser, begin     a number and two strings for kvedge_chat_open; begin: the beginning of the answer in the prompt
//   grammar                   GBNF of `begin` and the whole answer, or of a tool call; may be empty
//   lazy                      whether the grammar applies only after a trigger
//   triggers                  objects with type ("word", "pattern", "pattern_full" or "token") and value
//   preserved                 special tokens whose text must stay in the answer's text
//   stops                     strings that end an answer
//   thinks                    whether the template lets the model reason before it answers
//   thought_begin, _end       the marks before and after reasoning; may be empty
KVEDGE_CHAT_API int kvedge_chat_describe(const kvedge_chat_template * chat, const char * request, char ** answer);

// Makes a reader of answers. described: the JSON object that kvedge_chat_describe returned.
KVEDGE_CHAT_API int kvedge_chat_open(const char * described, kvedge_chat_reader ** reader, char ** why);

// Parses the n bytes of an answer. partial: 1 if the answer is not complete yet. *answer: a JSON object with content,
// reasoning_content and tool_calls, a list of objects with id, name and arguments. All of these are strings and may be empty.
KVEDGE_CHAT_API int kvedge_chat_read(
    const kvedge_chat_reader * reader, const char * text, size_t n, int partial, char ** answer);

// These three functions free an object. NULL is allowed.
KVEDGE_CHAT_API void kvedge_chat_close_template(kvedge_chat_template * chat);
KVEDGE_CHAT_API void kvedge_chat_close(kvedge_chat_reader * reader);
KVEDGE_CHAT_API void kvedge_chat_free(char * answer);

#ifdef __cplusplus
}
#endif

// A model's chat template, run by llama.cpp's common chat code: it writes prompts, it tells the dialect in which the model
// writes calls of tools and reasoning, and answers in that dialect are read into messages. A library of its own,
// libkvedge-chat, for kvedge's Python package.
//
// All texts are UTF-8. A function returns 0 and sets *answer, or returns 1 and sets *answer to one line that says why.
// The caller frees *answer with kvedge_chat_free. No function prints, keeps a pointer it was given, or ends the process;
// different readers may be used in different threads.
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

// Templates are programs without a bound on time and memory: call the next three functions in a process that has them.
//
// Reads a template, and runs it some times to learn what it can write. text: a JSON object with the texts `template`, `bos`
// and `eos`.
KVEDGE_CHAT_API int kvedge_chat_read_template(const char * text, kvedge_chat_template ** made, char ** why);

// Writes a prompt. *answer: the prompt as a JSON string. request: a JSON object with
//   messages                  as in OpenAI's chat completions
//   add_generation_prompt     whether the prompt ends where the answer begins; default true
//   tools                     as there; optional
//   tool_choice               "auto" (default), "required" or "none"
//   parallel_tool_calls       default false
//   reasoning_format          "none", "auto" (default), "deepseek" or "deepseek-legacy"
//   enable_thinking           default true
//   values                    an object: variables for the template; optional
KVEDGE_CHAT_API int kvedge_chat_write(const kvedge_chat_template * chat, const char * request, char ** answer);

// Finds the dialect of answers to such a request; its messages decide how the template begins an answer.
// *answer: a JSON object with
//   format, parser, begin     what kvedge_chat_open needs: a number and texts; begin is what the prompt ends with
//   grammar                   GBNF of the whole answer with `begin` before it, or of a tool call; may be empty
//   lazy                      whether the grammar holds only from a trigger on
//   triggers                  objects with type ("word", "pattern", "pattern_full" or "token") and value
//   preserved                 texts of special tokens that the answer's text has to keep
//   stops                     texts that end an answer
//   thinks                    whether the template lets the model reason before it answers
//   thought_begin, _end       the marks around reasoning; may be empty
KVEDGE_CHAT_API int kvedge_chat_describe(const kvedge_chat_template * chat, const char * request, char ** answer);

// Makes a reader of answers. described: an answer of kvedge_chat_describe.
KVEDGE_CHAT_API int kvedge_chat_open(const char * described, kvedge_chat_reader ** reader, char ** why);

// Reads the n bytes of an answer. partial: more may come. *answer: a JSON object with content, reasoning_content and
// tool_calls, a list of objects with id, name and arguments, all of them texts that may be empty.
KVEDGE_CHAT_API int kvedge_chat_read(
    const kvedge_chat_reader * reader, const char * text, size_t n, int partial, char ** answer);

// The next three take NULL.
KVEDGE_CHAT_API void kvedge_chat_close_template(kvedge_chat_template * chat);
KVEDGE_CHAT_API void kvedge_chat_close(kvedge_chat_reader * reader);
KVEDGE_CHAT_API void kvedge_chat_free(char * answer);

#ifdef __cplusplus
}
#endif

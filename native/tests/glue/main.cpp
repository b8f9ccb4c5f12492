// Tests the public C ABI through llama.cpp with tiny models, with and without sanitizers.
//
//   kvedge-glue-tests FOLDER MODEL.gguf...
//
// FOLDER: for files. kvedge must take over all layers of the first model; llama.cpp may keep some layers of the other models.

#include "world.h"

#include <functional>

namespace {

void host_scenarios(llama_model * model, const std::string & folder, bool first, const std::function<void(const char *)> & step) {
    if (first) {
        step("plans");
        every_member(model);
        step("the critical rule");
        critical_rule(model);
        step("storage types, stages of its own");
        storage_types(model);
        own_stages(model);
        step("sequences, streams");
        sequences(model);
        streams(model);
        step("parts of sequences");
        parts_and_files(model, folder);
    }
    step("against llama.cpp's cache");
    as_without_a_cache(model);
    step("turns, files, bounded prompts");
    turns_and_files(model, folder);
    whole_files(model, folder);
    bounded_prompts(model);
    second_passes(model);
    passes_in_parts(model);
    passes_alone(model);
    scores_of_a_stream(model);
    step("drafts");
    drafts(model, folder);
}

// Runs all scenarios with one model. graph: with rows that ggml attends to. first: kvedge takes over all layers of the model.
void run(llama_model * model, const std::string & folder, bool first, bool graph, const std::function<void(const char *)> & step) {
    World::usual_devices = graph ? KVEDGE_DEVICES_ALL : KVEDGE_DEVICES_NONE;
    if (graph) {
        step("as on the host");
        devices(model, folder);
    }
    if (!graph || !FEWER) {
        host_scenarios(model, folder, first, step);
    }
    if (first) {
        step("several threads");
        several_threads(model);
    }
    if (first && !FEWER) {
        step("no memory");
        graph ? no_memory_on_devices(model) : no_memory(model, folder);
    }
    step("requests given up, ends");
    given_up(model);
    gone_on(model);
    answers_gone_on(model);
    ends(model);
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "kvedge-glue-tests FOLDER MODEL.gguf...\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);  // hides errors that the scenarios provoke
    for (int i = 2; i < argc; i++) {
        for (const bool graph : { false, true }) {
            llama_model * model = llama_model_load_from_file(argv[i], llama_model_default_params());
            if (!model) {
                return 1;
            }
            run(model, argv[1], i == 2, graph, [&](const char * name) {
                std::fprintf(stderr, "%s%s: %s\n", argv[i], graph ? ", on devices" : "", name);
            });
            llama_model_free(model);
        }
    }
    return failures() == 0 ? 0 : 1;
}

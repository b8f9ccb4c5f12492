// The public C ABI through llama.cpp with tiny models: what the sanitizers watch, and a test of its own.
//
//   kvedge-glue-tests FOLDER MODEL.gguf...
//
// FOLDER is for files. Models may keep some of their layers with llama.cpp; the first one keeps none.

#include "world.h"

int main(int argc, char ** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "kvedge-glue-tests FOLDER MODEL.gguf...\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);  // failures are part of the scenarios
    for (int run = 0; run < 2 * (argc - 2); run++) {
        const int     i     = 2 + run / 2;
        llama_model * model = llama_model_load_from_file(argv[i], llama_model_default_params());
        if (!model) {
            return 1;
        }
        const bool graph     = run % 2 == 1;
        World::usual_devices = graph ? KVEDGE_DEVICES_ALL : KVEDGE_DEVICES_NONE;
        const auto step = [&](const char * name) { std::fprintf(stderr, "%s%s: %s\n", argv[i], graph ? ", on devices" : "", name); };
        if (graph) {
            step("as on the host");
            devices(model, argv[1]);
        }
        if (i == 2) {
            step("plans");
            every_member(model);
            step("storage types, stages of its own");
            storage_types(model);
            own_stages(model);
            step("sequences, streams");
            sequences(model);
            streams(model);
            step("several threads");
            several_threads(model);
        }
        step("against llama.cpp's cache");
        as_without_a_cache(model);
        step("turns, files, bounded prompts");
        turns_and_files(model, argv[1]);
        bounded_prompts(model);
        step("requests given up, ends");
        given_up(model);
        ends(model);
        llama_model_free(model);
    }
    return failures() == 0 ? 0 : 1;
}

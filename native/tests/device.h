// Finds the device that a test runs on.

#pragma once

#include "ggml-backend.h"

#include <cstdio>
#include <string>

// Returns the device of a name that `kvedge doctor` lists, or of HOST:PORT, an RPC server. NULL: no device has this name.
inline ggml_backend_dev_t device_named(const std::string & name) {
    ggml_backend_load_all();
    if (name.find(':') != std::string::npos) {
        using Add                    = ggml_backend_reg_t (*)(const char *);
        const ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
        const auto add = rpc ? (Add) ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server") : nullptr;
        const auto reg = add ? add(name.c_str()) : nullptr;
        return reg && ggml_backend_reg_dev_count(reg) > 0 ? ggml_backend_reg_dev_get(reg, 0) : nullptr;
    }
    const auto device = ggml_backend_dev_by_name(name.c_str());
    if (!device) {
        std::fprintf(stderr, "there is no device %s\n", name.c_str());
    }
    return device;
}

// Makes a CPU backend use one thread: in small graphs more threads only wait for each other.
inline void one_thread(ggml_backend_t backend, ggml_backend_dev_t device) {
    const auto set = (ggml_backend_set_n_threads_t) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads");
    if (set) {
        set(backend, 1);
    }
}

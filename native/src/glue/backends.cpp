// Loads ggml's backends from the folder of this library.

#include "system/error.h"
#include "ggml-backend.h"
#include "kvedge.h"

#include <mutex>
#include <new>
#include <string>

#if defined(_WIN32)
#    define WIN32_LEAN_AND_MEAN
#    include <windows.h>
#else
#    include <dlfcn.h>
#endif

using namespace kvedge;

namespace {

bool has_cpu() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) != nullptr; }

#if defined(_WIN32)
// Returns the path of the module that holds this function, in UTF-8; empty if Windows does not know it.
std::string own_path() {
    HMODULE module = nullptr;
    if (!GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                            reinterpret_cast<LPCWSTR>(&has_cpu), &module)) {
        return {};
    }
    std::wstring wide(1 << 15, L'\0');  // the longest path that Windows has
    const DWORD  n = GetModuleFileNameW(module, wide.data(), (DWORD) wide.size());
    if (n == 0 || n == wide.size()) {
        return {};
    }
    const int   bytes = WideCharToMultiByte(CP_UTF8, 0, wide.data(), (int) n, nullptr, 0, nullptr, nullptr);
    std::string path((size_t) bytes, '\0');
    WideCharToMultiByte(CP_UTF8, 0, wide.data(), (int) n, path.data(), bytes, nullptr, nullptr);
    return path;
}
#else
// Returns the path of the library that holds this function; empty if the loader does not know it.
std::string own_path() {
    Dl_info info{};
    return dladdr(reinterpret_cast<const void *>(&has_cpu), &info) != 0 && info.dli_fname ? info.dli_fname : "";
}
#endif

std::string own_folder() {
    const std::string path = own_path();
    const size_t      end  = path.find_last_of("/\\");
    return end == std::string::npos ? "." : path.substr(0, end);
}

// Silences ggml's log, since ggml reports every backend that it loads, on stderr by default.
class Silence {
  public:
    Silence() {
        ggml_log_get(&callback_, &data_);
        ggml_log_set([](enum ggml_log_level, const char *, void *) {}, nullptr);
    }
    ~Silence() { ggml_log_set(callback_, data_); }
    Silence(const Silence &)             = delete;
    Silence & operator=(const Silence &) = delete;

  private:
    ggml_log_callback callback_ = nullptr;
    void *            data_     = nullptr;
};

}  // namespace

extern "C" kvedge_status kvedge_load_backends(kvedge_error * err) try {
    static std::mutex lock;  // ggml's list of backends has no lock
    const std::lock_guard<std::mutex> hold(lock);
    if (has_cpu()) {
        return ok(err);
    }
    const std::string folder = own_folder();
    {
        const Silence silence;
        ggml_backend_load_all_from_path(folder.c_str());
    }
    if (has_cpu()) {
        return ok(err);
    }
    return fail(err, KVEDGE_E_FILE, "%s holds no CPU backend of ggml (ggml-cpu-*) that runs on this processor; reinstall kvedge",
                folder.c_str());
} catch (const std::bad_alloc &) {
    return fail(err, KVEDGE_E_MEMORY, "no memory to load ggml's backends");
} catch (...) {
    // ggml walks the folder with std::filesystem
    return fail(err, KVEDGE_E_FILE, "the folder of libkvedge cannot be read; allow reading, or reinstall kvedge");
}

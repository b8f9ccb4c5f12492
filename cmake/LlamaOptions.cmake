# Options of llama.cpp's own build, for ours and for the stock library that it is measured against.

# Plain variables go before cache entries here (policy CMP0077), and leave none behind that would outlive them.
set(BUILD_SHARED_LIBS ON)
set(LLAMA_BUILD_MTMD ON)
foreach(part COMMON TESTS TOOLS EXAMPLES SERVER APP)
    set(LLAMA_BUILD_${part} OFF)
endforeach()
set(LLAMA_ALL_WARNINGS OFF)
# layers on other machines; costs a small library of its own
set(GGML_RPC ON)
# OpenMP's threads burn the processors that they wait for; a patch makes ggml's own sleep instead. And a wheel that
# travels may depend on nothing but the C and C++ run time.
set(GGML_OPENMP OFF)
if(NOT DEFINED GGML_CCACHE)
    set(GGML_CCACHE OFF)
endif()

if(KVEDGE_PORTABLE)
    # The CPU backend becomes plugins, libggml-cpu-<variant>, next to the libraries. Nothing loads them by itself:
    # the program calls ggml_backend_load_all_from_path(<that folder>) of libggml once, before it loads a model.
    # In a native build that call finds no plugin and does no harm.
    set(GGML_NATIVE OFF)
    set(GGML_BACKEND_DL ON)
    set(GGML_CPU_ALL_VARIANTS ON)
endif()

# llama.cpp asks git for its commit; here it would find ours, and every commit of ours would rebuild parts of it.
set(LLAMA_BUILD_NUMBER 0)
set(LLAMA_BUILD_COMMIT "kvedge")
get_filename_component(ceiling "${KVEDGE_LLAMA_DIR}" DIRECTORY)
set(ENV{GIT_CEILING_DIRECTORIES} "${ceiling}")

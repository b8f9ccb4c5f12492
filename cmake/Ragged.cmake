# Attention over KV heads of different lengths, compiled into ggml's libraries for processors and for CUDA, which call it
# (patches/0012). To be included where llama.cpp's folder is added, or by its own project (CMAKE_PROJECT_llama.cpp_INCLUDE).

set(kvedge_ragged_sources ${CMAKE_CURRENT_LIST_DIR}/../native/src/device)

function(kvedge_add_ragged)
    foreach(backend IN LISTS GGML_AVAILABLE_BACKENDS)
        if(TARGET ${backend} AND backend MATCHES "^ggml-cpu")
            target_sources(${backend} PRIVATE ${kvedge_ragged_sources}/ragged_cpu.cpp)
        elseif(TARGET ${backend} AND backend STREQUAL "ggml-cuda")
            target_sources(${backend} PRIVATE ${kvedge_ragged_sources}/cuda/ragged.cu)
        endif()
    endforeach()
endfunction()

# when the targets are there
cmake_language(DEFER CALL kvedge_add_ragged)

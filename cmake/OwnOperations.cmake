# Operations of kvedge (native/src/device/own.h), compiled into ggml's libraries for processors and for CUDA, which call them
# (patches/0012). To be included where llama.cpp's folder is added, or by its own project (CMAKE_PROJECT_llama.cpp_INCLUDE).

set(kvedge_own_sources ${CMAKE_CURRENT_LIST_DIR}/../native/src/device)

function(kvedge_add_own)
    file(GLOB cpu CONFIGURE_DEPENDS ${kvedge_own_sources}/cpu/*.cpp)
    file(GLOB cuda CONFIGURE_DEPENDS ${kvedge_own_sources}/cuda/*.cu)
    foreach(backend IN LISTS GGML_AVAILABLE_BACKENDS)
        if(TARGET ${backend} AND backend MATCHES "^ggml-cpu")
            target_sources(${backend} PRIVATE ${cpu})
        elseif(TARGET ${backend} AND backend STREQUAL "ggml-cuda")
            target_sources(${backend} PRIVATE ${cuda})
        endif()
    endforeach()
endfunction()

# when the targets are there
cmake_language(DEFER CALL kvedge_add_own)

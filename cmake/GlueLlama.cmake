# llama.cpp for a build of native/ by itself: libllama and ggml for the CPU, from KVEDGE_LLAMA_LIBS or compiled.

if(KVEDGE_LLAMA_LIBS)
    foreach(name llama ggml ggml-base)
        add_library(${name} SHARED IMPORTED)
        set_target_properties(${name} PROPERTIES
            IMPORTED_LOCATION ${KVEDGE_LLAMA_LIBS}/${CMAKE_SHARED_LIBRARY_PREFIX}${name}${CMAKE_SHARED_LIBRARY_SUFFIX}
            INTERFACE_INCLUDE_DIRECTORIES "${KVEDGE_LLAMA_DIR}/include;${KVEDGE_LLAMA_DIR}/ggml/include")
    endforeach()
    return()
endif()

enable_language(C)
include(${CMAKE_CURRENT_LIST_DIR}/LlamaOptions.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/OwnOperations.cmake)
set(LLAMA_BUILD_MTMD OFF)
set(GGML_NATIVE OFF)  # fewer instructions, less to compile
set(GGML_LLAMAFILE OFF)
add_subdirectory(${KVEDGE_LLAMA_DIR} ${PROJECT_BINARY_DIR}/llama EXCLUDE_FROM_ALL)

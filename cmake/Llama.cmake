# Adds llama.cpp's libraries: ggml-base, ggml, the backends, llama, mtmd. Sets KVEDGE_LLAMA_TARGETS.

include(${CMAKE_CURRENT_LIST_DIR}/LlamaOptions.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/Amx.cmake)
kvedge_amx(${KVEDGE_LLAMA_DIR})
include(${CMAKE_CURRENT_LIST_DIR}/OwnOperations.cmake)
# EXCLUDE_FROM_ALL keeps its headers, packages and unused targets out of the build and of the wheel
add_subdirectory(${KVEDGE_LLAMA_DIR} ${PROJECT_BINARY_DIR}/llama EXCLUDE_FROM_ALL)

if(KVEDGE_PORTABLE)
    if(NOT KVEDGE_AMX_USED AND cooperlake IN_LIST KVEDGE_CPU_VARIANTS)
        # without AMX its code is that of cooperlake
        list(REMOVE_ITEM KVEDGE_CPU_VARIANTS sapphirerapids)
    endif()
    # llama.cpp has no list of variants to build: the others become empty, and are not installed; nor do they ask the
    # compiler for processors that it may not know
    foreach(backend IN LISTS GGML_AVAILABLE_BACKENDS)
        string(REGEX REPLACE "^ggml-cpu-" "" variant "${backend}")
        if(TARGET ${backend} AND NOT variant STREQUAL backend AND NOT variant IN_LIST KVEDGE_CPU_VARIANTS)
            set_target_properties(${backend} PROPERTIES SOURCES ${CMAKE_CURRENT_LIST_DIR}/empty.c LINK_LIBRARIES ""
                COMPILE_OPTIONS "" COMPILE_DEFINITIONS "")
            list(REMOVE_ITEM GGML_AVAILABLE_BACKENDS ${backend})
        endif()
    endforeach()
endif()

set(KVEDGE_LLAMA_TARGETS ggml-base ggml llama mtmd)
foreach(backend IN LISTS GGML_AVAILABLE_BACKENDS)
    # the list is a cache entry and remembers backends of earlier configurations
    if(TARGET ${backend})
        list(APPEND KVEDGE_LLAMA_TARGETS ${backend})
    endif()
endforeach()

foreach(target IN LISTS KVEDGE_LLAMA_TARGETS)
    # wheels store symbolic links as copies: without a version each library is there once
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
    # what is not to be installed would only draw warnings
    set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
    set_property(TARGET ${target} PROPERTY PRIVATE_HEADER)
    # llama.cpp's own folders are for this build: where it is installed the headers lie elsewhere (InstallC.cmake)
    get_target_property(folders ${target} INTERFACE_INCLUDE_DIRECTORIES)
    if(folders)
        set_property(TARGET ${target} PROPERTY INTERFACE_INCLUDE_DIRECTORIES "$<BUILD_INTERFACE:${folders}>")
    endif()
    set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL FALSE)
endforeach()
foreach(target IN ITEMS ggml-base ggml llama mtmd)
    # as in a program that finds an installed kvedge
    add_library(kvedge::${target} ALIAS ${target})
endforeach()
kvedge_amx_leave_out(${KVEDGE_LLAMA_TARGETS})

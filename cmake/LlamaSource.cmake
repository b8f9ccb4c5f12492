# Sets KVEDGE_LLAMA_DIR: the pinned llama.cpp with patches/ applied, in the build folder, or a developer's own tree, and
# KVEDGE_BINDINGS_DIR: the Python bindings that belong to it.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
set(source_script ${PROJECT_SOURCE_DIR}/scripts/llama_source.py)
file(GLOB patches CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/patches/*.patch ${PROJECT_SOURCE_DIR}/patches/bindings/*.patch)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${patches} ${source_script})

function(kvedge_unpack what folder)
    execute_process(
        COMMAND ${Python_EXECUTABLE} -B ${source_script} ${what} ${folder}
        RESULT_VARIABLE result ERROR_VARIABLE why ERROR_STRIP_TRAILING_WHITESPACE)
    if(result)
        # a message that begins with a space is not wrapped
        message(FATAL_ERROR " ${why}")
    elseif(why)
        message(STATUS "${why}")
    endif()
endfunction()

if(LLAMA_CPP_SOURCE_DIR)
    get_filename_component(KVEDGE_LLAMA_DIR "${LLAMA_CPP_SOURCE_DIR}" ABSOLUTE)
    if(NOT EXISTS "${KVEDGE_LLAMA_DIR}/src/llama-graph.cpp")
        message(FATAL_ERROR "LLAMA_CPP_SOURCE_DIR is no llama.cpp tree: ${KVEDGE_LLAMA_DIR}")
    endif()
    execute_process(
        COMMAND ${Python_EXECUTABLE} -B ${source_script} --check ${KVEDGE_LLAMA_DIR}
        RESULT_VARIABLE result ERROR_VARIABLE why ERROR_STRIP_TRAILING_WHITESPACE)
    if(result)
        # a tree in which the patches are being worked on differs, and may still be right
        message(WARNING " LLAMA_CPP_SOURCE_DIR: ${why}")
    endif()
else()
    set(KVEDGE_LLAMA_DIR ${PROJECT_BINARY_DIR}/llama.cpp)
    kvedge_unpack(--out ${KVEDGE_LLAMA_DIR})
endif()

# Says beside the libraries which backends of other builds fit them: those of the same pin (pykvedge/native/backends.py).
file(GLOB own CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/native/src/device/own.h ${PROJECT_SOURCE_DIR}/native/src/device/c*/*.c*)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${own})
set(KVEDGE_PIN ${PROJECT_BINARY_DIR}/bin/llama-pin.txt)
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
execute_process(COMMAND ${Python_EXECUTABLE} -B ${source_script} --pin OUTPUT_FILE ${KVEDGE_PIN} COMMAND_ERROR_IS_FATAL ANY)

set(KVEDGE_BINDINGS_DIR ${PROJECT_BINARY_DIR}/bindings)
kvedge_unpack(--bindings ${KVEDGE_BINDINGS_DIR})

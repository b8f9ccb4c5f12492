# Is AMX (Intel's tiles, on servers) part of the build? Only if this build proves that it works: llama.cpp's own set-up of
# the tiles is compiled with the build's compiler and run. A compiler can break it (GCC 12 did), and then the first prompt
# ends in an illegal instruction.
#
# kvedge_amx(TREE)            decides, once a configuration: KVEDGE_AMX_USED, and KVEDGE_AMX_WHY for people
# kvedge_amx_leave_out(T...)  compiles targets without AMX if it is not used

include(CheckCXXCompilerFlag)
include(${CMAKE_CURRENT_LIST_DIR}/TargetArch.cmake)

set(KVEDGE_AMX AUTO CACHE STRING "AMX in ggml's CPU backend: AUTO (if a test run at configuration proves it), ON, OFF")
set_property(CACHE KVEDGE_AMX PROPERTY STRINGS AUTO ON OFF)

function(kvedge_amx tree)
    set(why "")
    if(KVEDGE_AMX STREQUAL "AUTO")
        kvedge_amx_prove("${tree}" why)
        if(why STREQUAL "")
            set(used ON)
            set(why "a product of tiles is right")
        else()
            set(used OFF)
        endif()
    else()
        set(used ${KVEDGE_AMX})
        set(why "KVEDGE_AMX=${KVEDGE_AMX}")
    endif()
    if(NOT "${used} ${why}" STREQUAL "${KVEDGE_AMX_USED} ${KVEDGE_AMX_WHY}")
        message(STATUS "AMX: ${used} (${why})")
    endif()
    set(KVEDGE_AMX_USED ${used} CACHE INTERNAL "AMX is part of the build")
    set(KVEDGE_AMX_WHY "${why}" CACHE INTERNAL "why it is, or is not")
endfunction()

# why: empty if it is proven, else what stands against it.
function(kvedge_amx_prove tree why)
    kvedge_target_arch(arch)
    if(NOT arch STREQUAL "x86_64" OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
        set(${why} "not a processor and system that have it" PARENT_SCOPE)
        return()
    elseif(CMAKE_CROSSCOMPILING)
        set(${why} "cannot be tried on the machine that builds" PARENT_SCOPE)
        return()
    endif()
    set(source "${tree}/ggml/src/ggml-cpu/amx/mmq.cpp")
    file(READ "${source}" text)
    string(FIND "${text}" "struct tile_config_t" first)
    string(FIND "${text}" "// we need an extra 16" last)
    if(first LESS 0 OR last LESS first)
        set(${why} "its set-up was not found in ${source}" PARENT_SCOPE)
        return()
    endif()
    math(EXPR length "${last} - ${first}")
    string(SUBSTRING "${text}" ${first} ${length} KVEDGE_AMX_SETUP)
    # inside main the compiler sees more than in a function that is called, and GCC 12 then happens to keep the stores
    string(REPLACE "inline void" "__attribute__((noinline)) void" KVEDGE_AMX_SETUP "${KVEDGE_AMX_SETUP}")
    set(probe ${PROJECT_BINARY_DIR}/amx_probe.cpp)
    configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/amx_probe.cpp.in ${probe} @ONLY)
    # the optimiser that translates ggml, and the instructions of its AMX code
    separate_arguments(release UNIX_COMMAND "${CMAKE_CXX_FLAGS_RELEASE}")
    try_run(status compiled ${PROJECT_BINARY_DIR}/amx_probe ${probe}
        COMPILE_DEFINITIONS ${release} -mamx-tile -mamx-int8 -mavx512f
        COMPILE_OUTPUT_VARIABLE messages
        RUN_OUTPUT_VARIABLE output)
    if(NOT compiled)
        set(${why} "the compiler cannot translate it" PARENT_SCOPE)
    elseif(status STREQUAL "2")
        set(${why} "this machine has none to try it on" PARENT_SCOPE)
    elseif(NOT status STREQUAL "0")
        string(STRIP "${output}" output)
        set(${why} "the test run ended with ${status} ${output}: this compiler breaks it" PARENT_SCOPE)
    endif()
    unset(status CACHE)
    unset(compiled CACHE)
endfunction()

function(kvedge_amx_leave_out)
    if(KVEDGE_AMX_USED)
        return()
    endif()
    # compilers that do not know the option know no AMX either
    check_cxx_compiler_flag(-mno-amx-tile KVEDGE_HAVE_NO_AMX_FLAG)
    if(NOT KVEDGE_HAVE_NO_AMX_FLAG)
        return()
    endif()
    foreach(target IN LISTS ARGN)
        if(TARGET ${target})
            target_compile_options(${target} PRIVATE -mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
        endif()
    endforeach()
endfunction()

# A portable build travels. What it says of its source files (assertions, log lines) names no folder of the builder; it
# holds nothing that nobody calls; and on Linux it runs with an older C library than the builder's (scripts/old_glibc.py).

if(NOT KVEDGE_PORTABLE)
    return()
endif()

# ggml's code for processors, of more than twice as many in llama.cpp: each that is much faster than the one before
set(KVEDGE_CPU_VARIANTS sse42 haswell alderlake cascadelake cooperlake sapphirerapids
    armv8.0_1 armv8.2_2 armv8.6_1 apple_m1 apple_m2_m3 apple_m4
    CACHE STRING "CPU variants of ggml that a portable build holds")

if(MSVC)
    return() # has other options
endif()

# the last option that matches wins, and llama.cpp's tree lies below the build folder, which lies below the source
foreach(folder IN ITEMS ${PROJECT_SOURCE_DIR}=kvedge ${PROJECT_BINARY_DIR}=build ${KVEDGE_LLAMA_DIR}=llama.cpp)
    add_compile_options(-ffile-prefix-map=${folder})
endforeach()
add_compile_options(-ffunction-sections -fdata-sections)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
if(NOT APPLE)
    add_link_options(LINKER:--gc-sections -s)
endif()

if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(stubs ${PROJECT_BINARY_DIR}/old-glibc)
    execute_process(
        COMMAND ${Python_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/scripts/old_glibc.py ${stubs} ${CMAKE_CXX_COMPILER}
        RESULT_VARIABLE result ERROR_VARIABLE why ERROR_STRIP_TRAILING_WHITESPACE)
    if(result)
        message(FATAL_ERROR " ${why}")
    endif()
    # the compiler finds these libraries before the system's
    add_link_options(-L${stubs} LINKER:--exclude-libs,ALL LINKER:--no-undefined)
endif()

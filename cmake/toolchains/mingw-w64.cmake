# Windows programs for x86_64, built on Linux with mingw-w64: cmake -DCMAKE_TOOLCHAIN_FILE=cmake/toolchains/mingw-w64.cmake
# The posix thread model, for std::thread and std::mutex.

set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)

set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
set(CMAKE_RC_COMPILER x86_64-w64-mingw32-windres)

# programs are this machine's, libraries and headers are not
set(CMAKE_FIND_ROOT_PATH /usr/x86_64-w64-mingw32)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# ggml for x86 CPUs since 2013; its own default for another machine is without AVX
foreach(feature SSE42 AVX AVX2 FMA F16C BMI2)
    set(GGML_${feature} ON CACHE BOOL "ggml may use ${feature}")
endforeach()

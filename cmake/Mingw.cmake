# What mingw-w64 asks for, of llama.cpp as of libkvedge. Nothing happens with other compilers.

if(NOT MINGW)
    return()
endif()

# GCC does not align the stack for AVX on Windows, and yet moves vectors there as if it did (its bug 54412), but for
# Debian's, which is mended: the assembler writes moves that need no alignment.
include(CheckCXXCompilerFlag)
check_cxx_compiler_flag(-Wa,-muse-unaligned-vector-move KVEDGE_UNALIGNED_VECTOR_MOVES)
if(KVEDGE_UNALIGNED_VECTOR_MOVES)
    add_compile_options(-Wa,-muse-unaligned-vector-move)
endif()

# ggml tells Windows 11 not to park its threads, with a type that older headers lack (Debian 12's): there it is built for
# Windows 7 and newer, where it does without.
include(CheckCXXSourceCompiles)
check_cxx_source_compiles(
    "#include <windows.h>\nint main() { THREAD_POWER_THROTTLING_STATE t; return sizeof(t) == 0; }"
    KVEDGE_HAVE_POWER_THROTTLING)
if(NOT KVEDGE_HAVE_POWER_THROTTLING)
    add_compile_definitions(_WIN32_WINNT=0x0601)
endif()

# llama.dll, as the bindings and pykvedge call it, and ggml names its libraries
set(CMAKE_SHARED_LIBRARY_PREFIX "")

# The compiler's own libraries lie beside the programs. One copy of each for all: exceptions pass between our libraries.
# Debian's hold what a debugger wants, which is ten times their code.
foreach(name libstdc++-6.dll libgcc_s_seh-1.dll libwinpthread-1.dll)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name}
        OUTPUT_VARIABLE dll OUTPUT_STRIP_TRAILING_WHITESPACE)
    # on Windows itself they lie beside the compiler, which answers with the bare name
    if(IS_ABSOLUTE "${dll}" AND EXISTS "${dll}")
        file(MAKE_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY})
        set(stripped ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name})
        execute_process(COMMAND ${CMAKE_STRIP} -p --strip-unneeded -o ${stripped} ${dll}
            COMMAND_ERROR_IS_FATAL ANY)
        list(APPEND KVEDGE_RUNTIME ${stripped})
    endif()
endforeach()

# two builds are equal: no library holds the time when it was linked
add_link_options(LINKER:--no-insert-timestamp)

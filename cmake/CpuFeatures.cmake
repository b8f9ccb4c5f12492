# Records beside the libraries, in cpu-features.txt, which instruction sets the compiler was allowed to use for them: the
# architecture, then names as in Linux' /proc/cpuinfo. The Python package compares them with the processor that it meets,
# because an instruction that is missing there kills the process. Builds with CPU variants need the baseline only.

add_library(kvedge-cpu-features OBJECT ${CMAKE_CURRENT_LIST_DIR}/cpu-features.c)
if(TARGET ggml-cpu)
    target_compile_options(kvedge-cpu-features PRIVATE $<TARGET_PROPERTY:ggml-cpu,COMPILE_OPTIONS>)
endif()
set(KVEDGE_CPU_FEATURES ${PROJECT_BINARY_DIR}/bin/cpu-features.txt)
add_custom_command(
    OUTPUT ${KVEDGE_CPU_FEATURES}
    COMMAND ${CMAKE_COMMAND} -DOBJECT=$<TARGET_OBJECTS:kvedge-cpu-features> -DOUT=${KVEDGE_CPU_FEATURES}
            -P ${CMAKE_CURRENT_LIST_DIR}/write-cpu-features.cmake
    DEPENDS kvedge-cpu-features $<TARGET_OBJECTS:kvedge-cpu-features> ${CMAKE_CURRENT_LIST_DIR}/write-cpu-features.cmake
    VERBATIM)
add_custom_target(kvedge-cpu-features-file ALL DEPENDS ${KVEDGE_CPU_FEATURES})

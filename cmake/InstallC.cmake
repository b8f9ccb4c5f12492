# Installs the libraries and what a compiler needs of them. Nothing of it names a folder of this machine: kvedge.pc and
# kvedge-config.cmake go by where they lie themselves.

include(CMakePackageConfigHelpers)

# kvedge_install_c(NAME ROOT FOLDER RUNTIME DEVELOPMENT): headers into ROOTinclude + FOLDER, libraries into ROOTlib + FOLDER.
# NAME tells what is generated from that of other calls. RUNTIME and DEVELOPMENT are the components of what a program needs
# to run and to be built; where the two are one, it is installed only when it is named.
function(kvedge_install_c name root folder runtime development)
    set(include ${root}include${folder})
    set(lib ${root}lib${folder})
    set(links NAMELINK_COMPONENT ${development})
    set(unasked "")
    if(runtime STREQUAL development)
        # a wheel stores a link as a copy
        set(links NAMELINK_SKIP)
        set(unasked EXCLUDE_FROM_ALL)
    endif()
    foreach(target IN LISTS KVEDGE_LLAMA_TARGETS ITEMS kvedge)
        get_target_property(kind ${target} TYPE)
        if(kind STREQUAL "MODULE_LIBRARY")
            # a CPU variant, loaded at run time and never linked
            install(TARGETS ${target} LIBRARY DESTINATION ${lib} COMPONENT ${runtime} ${unasked})
            continue()
        endif()
        install(
            TARGETS ${target} EXPORT kvedge-${name}
            LIBRARY DESTINATION ${lib} COMPONENT ${runtime} ${unasked} ${links}
            RUNTIME DESTINATION ${lib} COMPONENT ${runtime} ${unasked}
            ARCHIVE DESTINATION ${lib} COMPONENT ${development} ${unasked}
            INCLUDES DESTINATION ${include})
    endforeach()
    install(FILES ${KVEDGE_RUNTIME} ${KVEDGE_CPU_FEATURES} ${KVEDGE_PIN} DESTINATION ${lib} COMPONENT ${runtime} ${unasked})

    # the libraries carry llama.cpp's code and that of others, whose licences ask to be carried along
    file(GLOB licenses ${PROJECT_SOURCE_DIR}/licenses/LICENSE-*)
    install(FILES ${licenses} DESTINATION ${lib}/licenses COMPONENT ${runtime} ${unasked})
    install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${lib}/licenses RENAME LICENSE-kvedge
        COMPONENT ${runtime} ${unasked})

    install(
        DIRECTORY ${PROJECT_SOURCE_DIR}/native/include/ ${KVEDGE_LLAMA_DIR}/include/ ${KVEDGE_LLAMA_DIR}/ggml/include/
        DESTINATION ${include} COMPONENT ${development} ${unasked} FILES_MATCHING PATTERN "*.h")
    install(FILES ${KVEDGE_LLAMA_DIR}/tools/mtmd/mtmd.h ${KVEDGE_LLAMA_DIR}/tools/mtmd/mtmd-helper.h
        DESTINATION ${include} COMPONENT ${development} ${unasked})

    set(made ${PROJECT_BINARY_DIR}/${name})
    kvedge_package_files("${made}" "${folder}" ${root}lib/cmake/kvedge)
    install(FILES ${made}/kvedge.pc DESTINATION ${root}lib/pkgconfig COMPONENT ${development} ${unasked})
    install(FILES ${made}/kvedge-config.cmake ${made}/kvedge-config-version.cmake
        DESTINATION ${root}lib/cmake/kvedge COMPONENT ${development} ${unasked})
    install(EXPORT kvedge-${name} NAMESPACE kvedge:: FILE kvedge-targets.cmake
        DESTINATION ${root}lib/cmake/kvedge COMPONENT ${development} ${unasked})
endfunction()

# Writes kvedge.pc and kvedge-config.cmake with its version file into `made`; `cmake` is where the latter are installed.
function(kvedge_package_files made folder cmake)
    # by their paths: -lllama might find another llama.cpp's in a folder that comes before ours
    set(libraries "")
    foreach(target IN ITEMS kvedge mtmd llama ggml ggml-base)
        if(WIN32)
            set(file $<TARGET_LINKER_FILE_NAME:${target}>)
        else()
            set(file $<TARGET_SONAME_FILE_NAME:${target}>)
        endif()
        string(APPEND libraries " \${libdir}/${file}")
    endforeach()
    set(definitions "")
    set(options "")
    if(WIN32)
        set(definitions " -DGGML_SHARED -DLLAMA_SHARED")
    else()
        set(options " -Wl,-rpath,\${libdir}")
    endif()
    if(CMAKE_EXECUTABLE_FORMAT STREQUAL "ELF")
        string(APPEND options " -Wl,--disable-new-dtags")
    endif()
    configure_file(${PROJECT_SOURCE_DIR}/cmake/kvedge.pc.in ${made}/kvedge.pc.in @ONLY)
    file(GENERATE OUTPUT ${made}/kvedge.pc INPUT ${made}/kvedge.pc.in)
    configure_package_config_file(
        ${PROJECT_SOURCE_DIR}/cmake/kvedge-config.cmake.in ${made}/kvedge-config.cmake
        INSTALL_DESTINATION ${cmake} NO_SET_AND_CHECK_MACRO)
    write_basic_package_version_file(${made}/kvedge-config-version.cmake COMPATIBILITY SameMinorVersion)
endfunction()

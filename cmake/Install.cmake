# What is installed: component "kvedge" is the wheel, all of it below pykvedge/. Components "kvedge-runtime" and
# "kvedge-dev" are the package for programs in C, and what `cmake --install` takes where no component is named.

include(${CMAKE_CURRENT_LIST_DIR}/InstallC.cmake)
kvedge_install_c(wheel pykvedge/ "" kvedge kvedge)
# a folder of their own, for a system may have a llama.cpp of its own
kvedge_install_c(package "" /kvedge kvedge-runtime kvedge-dev)

# for the Python package alone
install(TARGETS kvedge-chat LIBRARY DESTINATION pykvedge/lib COMPONENT kvedge EXCLUDE_FROM_ALL
    RUNTIME DESTINATION pykvedge/lib COMPONENT kvedge EXCLUDE_FROM_ALL)

# The bindings are Python alone. They lie in a folder of their own, so that they neither replace a llama_cpp of the user's
# nor are replaced; the .pth file names that folder, and Python looks there last.
install(
    DIRECTORY ${KVEDGE_BINDINGS_DIR}/llama_cpp DESTINATION pykvedge/bindings COMPONENT kvedge EXCLUDE_FROM_ALL
    FILES_MATCHING PATTERN "*.py" PATTERN "py.typed")
install(FILES ${PROJECT_SOURCE_DIR}/cmake/kvedge-bindings.pth DESTINATION . COMPONENT kvedge EXCLUDE_FROM_ALL)

# what travels, for those who must know (PEP 770)
if(SKBUILD_METADATA_DIR)
    set(windows "")
    if(MINGW)
        set(windows --mingw)
    endif()
    set(sbom ${PROJECT_BINARY_DIR}/kvedge.cdx.json)
    execute_process(
        COMMAND ${Python_EXECUTABLE} -B ${PROJECT_SOURCE_DIR}/scripts/sbom.py --llama ${KVEDGE_LLAMA_DIR} --out ${sbom}
            ${windows}
        RESULT_VARIABLE result ERROR_VARIABLE why ERROR_STRIP_TRAILING_WHITESPACE)
    if(result)
        message(FATAL_ERROR " ${why}")
    endif()
    install(FILES ${sbom} DESTINATION ${SKBUILD_METADATA_DIR}/sboms COMPONENT kvedge EXCLUDE_FROM_ALL)
endif()

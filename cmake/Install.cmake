# What goes into the wheel: component "kvedge", all of it below pykvedge/.

install(
    TARGETS ${KVEDGE_LLAMA_TARGETS} kvedge
    LIBRARY DESTINATION pykvedge/lib COMPONENT kvedge
    RUNTIME DESTINATION pykvedge/lib COMPONENT kvedge
    ARCHIVE DESTINATION pykvedge/lib COMPONENT kvedge)
if(KVEDGE_RUNTIME)
    install(FILES ${KVEDGE_RUNTIME} DESTINATION pykvedge/lib COMPONENT kvedge)
endif()
install(
    FILES native/include/kvedge.h native/include/kvedge-arrays.h native/include/kvedge-encoder.h
        native/include/kvedge-inspect.h native/include/kvedge-queries.h native/include/kvedge-sessions.h
        native/include/kvedge-stages.h
    DESTINATION pykvedge/include COMPONENT kvedge)

# programs in C include llama.cpp's interface, too
install(
    DIRECTORY ${KVEDGE_LLAMA_DIR}/include/ ${KVEDGE_LLAMA_DIR}/ggml/include/
    DESTINATION pykvedge/include COMPONENT kvedge FILES_MATCHING PATTERN "*.h")
install(FILES ${KVEDGE_LLAMA_DIR}/tools/mtmd/mtmd.h ${KVEDGE_LLAMA_DIR}/tools/mtmd/mtmd-helper.h
    DESTINATION pykvedge/include COMPONENT kvedge)

# the libraries carry this code, and its licences ask to be carried along
file(GLOB licenses ${KVEDGE_LLAMA_DIR}/licenses/*)
install(FILES ${licenses} DESTINATION pykvedge/lib/licenses COMPONENT kvedge)
install(FILES ${KVEDGE_LLAMA_DIR}/LICENSE DESTINATION pykvedge/lib/licenses RENAME LICENSE-llama.cpp COMPONENT kvedge)

# The bindings are Python alone. They lie in a folder of their own, so that they neither replace a llama_cpp of the user's
# nor are replaced; the .pth file names that folder, and Python looks there last.
install(
    DIRECTORY ${KVEDGE_BINDINGS_DIR}/llama_cpp DESTINATION pykvedge/bindings COMPONENT kvedge
    FILES_MATCHING PATTERN "*.py" PATTERN "py.typed")
install(FILES ${KVEDGE_BINDINGS_DIR}/LICENSE.md DESTINATION pykvedge/lib/licenses RENAME LICENSE-llama-cpp-python
    COMPONENT kvedge)
install(FILES ${PROJECT_SOURCE_DIR}/cmake/kvedge-bindings.pth DESTINATION . COMPONENT kvedge)

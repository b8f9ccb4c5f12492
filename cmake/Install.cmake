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
    FILES native/include/kvedge.h native/include/kvedge-arrays.h native/include/kvedge-encoder.h native/include/kvedge-stages.h
    DESTINATION pykvedge/include COMPONENT kvedge)

# the libraries carry this code, and its licences ask to be carried along
file(GLOB licenses ${KVEDGE_LLAMA_DIR}/licenses/*)
install(FILES ${licenses} DESTINATION pykvedge/lib/licenses COMPONENT kvedge)
install(FILES ${KVEDGE_LLAMA_DIR}/LICENSE DESTINATION pykvedge/lib/licenses RENAME LICENSE-llama.cpp COMPONENT kvedge)
